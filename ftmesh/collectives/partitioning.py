"""Pieces: collectives where other axes of the mesh are left to the compiler.

Inside ``shard_map(axis_names={"data"})`` an array may still be cut along "model". Each device then
has a piece of it. Packed as it is, the array would be gathered over "model" first, and all of it
summed everywhere; here each device sums its own piece, and nothing is gathered.

Meshes: where a loss runs in jit, and what JAX does there with other axes than the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ftmesh.errors import ArgumentError, CollectiveError
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


if TYPE_CHECKING:
    from ftmesh.planning.plan import Plan


@dataclass(frozen=True)
class Site:
    """A mesh, the axis of the plan on it, and the axes beside that."""

    mesh: Any  # with devices where they are known
    axis_name: Any
    others: tuple[Any, ...]  # of more than one device
    is_explicit: bool

    @staticmethod
    def of(plan: Plan, axis_name: Any, args: Any, mesh: Any) -> Site:
        """The mesh that is given; or that of `jax.set_mesh`, of the arguments, or of the plan."""
        around = jax.sharding.get_abstract_mesh()
        if mesh is not None and not around.empty and mesh.abstract_mesh != around:
            raise ArgumentError(
                f"the mesh given, {mesh.shape}, is not that of jax.set_mesh, {around.shape}: leave "
                "one of them out"
            )
        mesh = mesh or _mesh_around(axis_name, args)
        if mesh is None and plan.topology.num_positions > 1:
            raise ArgumentError(
                "the plan is for tiles of several devices, and nothing says which axes they lie "
                f"along: give mesh=plan.jax_mesh(({axis_name!r}, 'model')), or set it with "
                "jax.set_mesh"
            )
        mesh = mesh or plan.jax_mesh(axis_name)
        if axis_name not in mesh.axis_names:
            raise ArgumentError(f"the mesh has axes {mesh.axis_names} and not {axis_name!r}")
        if mesh.shape[axis_name] != plan.program.num_ranks:
            raise CollectiveError(
                f"axis {axis_name!r} has {mesh.shape[axis_name]} devices, but the plan for "
                f"{plan.topology} has {plan.program.num_ranks}: make the mesh with "
                f"plan.jax_mesh({axis_name!r})"
            )
        types = {
            name: kind
            for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if mesh.shape[name] > 1
        }
        if len(set(types.values())) > 1 or AxisType.Manual in types.values():
            raise CollectiveError(
                f"the axes of the mesh are of different kinds, {types}: where some are left to the "
                "compiler and some are not, JAX sums gradients by itself. Make all of them Auto or "
                "all Explicit, or call this inside a shard_map over the axis of the plan"
            )
        others = tuple(name for name in types if name != axis_name)
        if others and not _compat.NESTS_SHARD_MAPS:
            raise CollectiveError(
                f"the mesh has axes {others} beside {axis_name!r}, which takes JAX 0.10 or newer"
            )
        is_explicit = types.get(axis_name) == AxisType.Explicit
        return Site(_with_devices(mesh, plan, axis_name), axis_name, others, is_explicit)

    def specs_of(self, weights: Any, specs: Any) -> Any:
        """How weights lie: as their types say, or else as given."""
        if self.is_explicit:
            return jax.tree.map(typed_spec, weights)
        if specs is None and self.others:
            raise ArgumentError(
                f"the mesh has axes {self.others} beside {self.axis_name!r}, and nothing says how "
                "weights lie along them: give specs=jax.tree.map(lambda w: w.sharding, params), "
                "taken outside jit, or specs=PartitionSpec() for whole weights"
            )
        lie = spread(WHOLE if specs is None else specs, weights)
        named = {name for spec in jax.tree.leaves(lie) for part in spec for name in names_in(part)}
        if unknown := named - set(self.mesh.axis_names):
            raise ArgumentError(
                f"specs name {sorted(unknown)}, and the mesh has axes {self.mesh.axis_names}"
            )
        return lie

    def shard_map(
        self, run: Callable[..., Any], in_specs: Any, out_specs: Any, out_types: Any
    ) -> Callable[..., Any]:
        """`run` for every rank, the other axes left to the compiler.

        `out_types` are the specs of results with those axes, for a mesh that has them Explicit.
        JAX 0.10 gathers Explicit arrays over axes that a shard_map leaves; so they are Auto here.
        """

        def mapped(*args: Any) -> Any:
            around = jax.sharding.get_abstract_mesh()  # knows its devices where it was set
            return jax.shard_map(
                run,
                mesh=None if self.axis_name in around.axis_names else self.mesh,
                axis_names={self.axis_name},
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )(*args)

        if not self.is_explicit:
            return mapped
        mesh = self.mesh.abstract_mesh
        shardings = spread_shardings(mesh, out_types)
        auto: Callable[..., Any] = jax.sharding.auto_axes(
            mapped, axes=tuple(mesh.axis_names), out_sharding=shardings
        )
        return auto

    def explicit(self, run: Callable[..., Any], types: Any) -> Callable[..., Any]:
        """`run` with arguments of these types along the other axes, where those were Explicit."""
        if not (self.is_explicit and self.others):
            return run
        kept = jax.tree.map(lambda spec: only(spec, self.others), types, is_leaf=is_spec)
        typed: Callable[..., Any] = jax.sharding.explicit_axes(
            run, axes=self.others, in_sharding=kept
        )
        return typed


def spread_shardings(mesh: Any, specs: Any) -> Any:
    """Shardings on a mesh in place of specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)


def _mesh_around(axis_name: Any, args: Any) -> Any:
    """The mesh of `jax.set_mesh` or of the arguments, if it has the axis."""
    meshes = [jax.sharding.get_abstract_mesh()]
    meshes += [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(args)]
    return next((mesh for mesh in meshes if axis_name in mesh.axis_names), None)


def _with_devices(mesh: Any, plan: Plan, axis_name: Any) -> Any:
    """A mesh with the plan's devices, if it has no other axis: JAX then refuses any others."""
    if isinstance(mesh, jax.sharding.Mesh) or mesh.size > mesh.shape[axis_name]:
        return mesh
    if not plan.topology.devices:
        return mesh
    devices = plan.jax_mesh(axis_name).devices.reshape(tuple(mesh.shape.values()))
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
