"""Pieces: collectives where other axes of the mesh are left to the compiler.

Inside ``shard_map(axis_names={"data"})`` an array may still be cut along "model". Each device then
has a piece of it. Packed as it is, the array would be gathered over "model" first, and all of it
summed everywhere; here each device sums its own piece, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat

Change = Callable[[PartitionSpec], tuple[PartitionSpec, PartitionSpec]]

WHOLE = PartitionSpec()


def on_pieces(
    run: Callable[[Any], Any], x: Any, specs: Any = None, *, change: Change | None = None
) -> Any:
    """`run` of a pytree, by each device on its own pieces where axes of the mesh are left over.

    `specs` say how arrays are cut along those: a spec, or a pytree of them of which `x` may be a
    part. Where it is not given the types tell, for Explicit axes; they do not for Auto ones, and
    arrays are gathered over these. `change` makes of an array's spec those of what goes into `run`
    and of what comes out of it; both are the same unless given.
    """
    left = axes_left() if _compat.NESTS_SHARD_MAPS else {}
    if not left or (specs is None and AxisType.Explicit not in left.values()):
        return run(x)
    leaves, tree = jax.tree.flatten(x)
    given = [None] * len(leaves) if specs is None else jax.tree.leaves(spread(specs, x))
    found = list(leaves)
    places: dict[bool, list[int]] = {True: [], False: []}
    for i, leaf in enumerate(leaves):
        places[isinstance(leaf, jax.core.Tracer)].append(i)
    for is_traced, some in places.items():
        if not some:
            continue
        each = [leaves[i] for i in some]
        if is_traced:
            results = _mapped(run, each, [given[i] for i in some], left, change)
        else:
            results = run(each)
        for i, result in zip(some, results, strict=True):
            found[i] = result
    return tree.unflatten(found)


def _mapped(
    run: Callable[[Any], Any],
    arrays: list[Any],
    given: list[Any],
    left: dict[str, AxisType],
    change: Change | None,
) -> Any:
    """`run` inside a shard_map over the axes that are left."""
    before, after = [], []
    for i, array in enumerate(arrays):
        typed = padded(only(typed_spec(array), left), array.ndim)
        spec = typed if given[i] is None else padded(only(given[i], left), array.ndim)
        into, out = (spec, spec) if change is None else change(spec)
        if into != typed and AxisType.Explicit in left.values():
            arrays[i] = jax.sharding.reshard(array, into)
        before.append(into)
        after.append(out)
    return jax.shard_map(
        run,
        axis_names=set(left),
        in_specs=(before,),
        out_specs=after,
        check_vma=_compat.checks_varying(),
    )(arrays)


def scattered(dimension: int, *, tiled: bool) -> Change:
    """How specs change where a dimension is scattered over ranks: it must be whole before."""

    def change(spec: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        before, rest = list(spec), list(spec)
        if 0 <= dimension < len(before):
            before[dimension] = None
            rest = before if tiled else before[:dimension] + before[dimension + 1 :]
        return PartitionSpec(*before), PartitionSpec(*rest)

    return change


def gathered(axis: int, *, tiled: bool) -> Change:
    """How specs change where what ranks have is put together: `scattered`, backwards."""

    def change(spec: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        before = list(spec)
        size = len(before) if tiled else len(before) + 1
        if not -size <= axis < size:
            return spec, spec
        place = axis % size
        if tiled:
            before[place] = None
        rest = before if tiled else [*before[:place], None, *before[place:]]
        return PartitionSpec(*before), PartitionSpec(*rest)

    return change


def axes_left() -> dict[str, AxisType]:
    """The axes of more than one device that a shard_map has left, and how they are typed."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Manual not in types.values():
        return {}
    return {
        name: kind
        for name, kind in types.items()
        if kind != AxisType.Manual and mesh.shape[name] > 1
    }


def spread(specs: Any, x: Any) -> Any:
    """`specs`, of which `x` may be a part, as a pytree with a spec for each leaf of `x`."""

    def one(spec: Any, part: Any) -> Any:
        if isinstance(spec, NamedSharding):
            spec = spec.spec
        if not isinstance(spec, PartitionSpec):
            raise ArgumentError(
                f"specs must be PartitionSpecs or NamedShardings, one for each array or for a "
                f"whole part of the pytree; among them is {spec!r}"
            )
        return jax.tree.map(lambda _: spec, part)

    def is_leaf(spec: Any) -> bool:
        return isinstance(spec, (PartitionSpec, jax.sharding.Sharding))

    return jax.tree.map(one, specs, x, is_leaf=is_leaf)


def is_spec(x: Any) -> bool:
    """Whether something is a spec, and not a pytree of them."""
    return isinstance(x, PartitionSpec)


def typed_spec(x: Any) -> PartitionSpec:
    """How the type of an array says that it is cut; not at all along axes that are not Explicit."""
    return jax.typeof(x).sharding.spec


def names_in(entry: Any) -> tuple[Any, ...]:
    """The axes that one dimension of a spec is cut along."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def only(spec: PartitionSpec, axes: Iterable[Any]) -> PartitionSpec:
    """The spec with other axes than these left out.

    >>> tuple(only(PartitionSpec("data", ("data", "model")), {"model"}))
    (None, 'model')
    """
    kept = [tuple(name for name in names_in(entry) if name in axes) for entry in spec]
    return PartitionSpec(*((names[0] if len(names) == 1 else names or None) for names in kept))


def padded(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """The spec with an entry for each of `ndim` dimensions."""
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)))
