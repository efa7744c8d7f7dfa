"""Mesh axes other than the plan's: arrays stay sharded along them.

Inside ``shard_map(axis_names={"data"})`` an array may still be sharded along "model". Packing it
into a buffer would gather it over "model". With `map_local_shards` each device sums its own shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ftmesh.errors import ArgumentError, CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.context import check_mesh_devices
from ftmesh.execute.types import AxisName, PlanLike, PyTree, Specs

REPLICATED = PartitionSpec()

# Maps the spec of an array to the specs of what goes into a function and of what comes out.
SpecChange = Callable[[PartitionSpec], tuple[PartitionSpec, PartitionSpec]]


def map_local_shards(
    run: Callable[[PyTree], Any], x: PyTree, specs: Specs = None, change: SpecChange | None = None
) -> PyTree:
    """Run a function of leaves on each device's shards along the axes left to the compiler.

    `specs` are a prefix of `x`. If None, types tell how arrays are sharded along Explicit axes,
    and arrays are gathered over Auto ones. `change` is how `run` changes the spec of an array.
    """
    unmapped = unmapped_axes() if _compat.SUPPORTS_NESTED_SHARD_MAP else {}
    if not unmapped or (specs is None and AxisType.Explicit not in unmapped.values()):
        return run(x)
    leaves, tree = jax.tree.flatten(x)
    given = [None] * len(leaves) if specs is None else jax.tree.leaves(broadcast_specs(specs, x))
    traced = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)}
    constants = {i: leaf for i, leaf in enumerate(leaves) if i not in traced}
    results = run(constants) if constants else {}
    if traced:
        results |= _run_in_shard_map(run, traced, given, unmapped, change)
    return tree.unflatten(results[i] for i in range(len(leaves)))


def _run_in_shard_map(
    run: Callable[[PyTree], PyTree],
    arrays: dict[int, Any],
    given: list[PartitionSpec | None],
    axes: dict[str, AxisType],
    change: SpecChange | None,
) -> PyTree:
    arrays, in_specs, out_specs = dict(arrays), {}, {}
    for i, array in arrays.items():
        typed = pad_spec(restrict_spec(typed_spec(array), axes), array.ndim)
        wanted = given[i]
        spec = typed if wanted is None else pad_spec(restrict_spec(wanted, axes), array.ndim)
        in_specs[i], out_specs[i] = (spec, spec) if change is None else change(spec)
        if in_specs[i] != typed and AxisType.Explicit in axes.values():
            arrays[i] = jax.sharding.reshard(array, in_specs[i])
    return jax.shard_map(
        run,
        axis_names=set(axes),
        in_specs=(in_specs,),
        out_specs=out_specs,
        check_vma=_compat.checks_vma(),
    )(arrays)


def scatter_spec(dimension: int, *, tiled: bool) -> SpecChange:
    """How `psum_scatter` changes specs: the scattered dimension must not be sharded."""

    def change(spec: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        before, after = list(spec), list(spec)
        if 0 <= dimension < len(before):
            before[dimension] = None
            after = before if tiled else before[:dimension] + before[dimension + 1 :]
        return PartitionSpec(*before), PartitionSpec(*after)

    return change


def gather_spec(axis: int, *, tiled: bool) -> SpecChange:
    """How `all_gather` changes specs: the inverse of `scatter_spec`."""

    def change(spec: PartitionSpec) -> tuple[PartitionSpec, PartitionSpec]:
        before = list(spec)
        ndim = len(before) if tiled else len(before) + 1
        if not -ndim <= axis < ndim:
            return spec, spec
        index = axis % ndim
        if tiled:
            before[index] = None
        after = before if tiled else [*before[:index], None, *before[index:]]
        return PartitionSpec(*before), PartitionSpec(*after)

    return change


def unmapped_axes() -> dict[str, AxisType]:
    """The axes of more than one device that the surrounding shard_map leaves to the compiler."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Manual not in mesh.axis_types:
        return {}
    return {name: kind for name, kind in _axis_types(mesh).items() if kind != AxisType.Manual}


def _axis_types(mesh: Any) -> dict[Any, AxisType]:
    """The types of the axes of more than one device."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: kind for name, kind in types if mesh.shape[name] > 1}


def broadcast_specs(specs: Specs, x: PyTree) -> PyTree:
    """Return a spec for each leaf of `x`, from `specs` that are a prefix of it."""

    def to_leaves(spec: Any, part: PyTree) -> PyTree:
        spec = spec.spec if isinstance(spec, NamedSharding) else spec
        if not isinstance(spec, PartitionSpec):
            raise ArgumentError(
                "specs must be PartitionSpecs or NamedShardings, one for each array or for a "
                f"subtree of the pytree; one of them is {spec!r}"
            )
        return jax.tree.map(lambda _: spec, part)

    kinds = (PartitionSpec, jax.sharding.Sharding)
    return jax.tree.map(to_leaves, specs, x, is_leaf=lambda spec: isinstance(spec, kinds))


def is_spec(x: Any) -> bool:
    """Whether `x` is a spec, not a pytree of specs."""
    return isinstance(x, PartitionSpec)


def typed_spec(x: Any) -> PartitionSpec:
    """The spec in the type of an array. It names Explicit axes only."""
    return jax.typeof(x).sharding.spec


def entry_axes(entry: Any) -> tuple[Any, ...]:
    """The mesh axes in the entry of a spec for one dimension."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(entry) if isinstance(entry, (tuple, list)) else (entry,)


def restrict_spec(spec: PartitionSpec, axes: Iterable[Any]) -> PartitionSpec:
    """Drop all mesh axes but these from a spec."""
    kept = [tuple(name for name in entry_axes(entry) if name in axes) for entry in spec]
    return PartitionSpec(*((names[0] if len(names) == 1 else names or None) for names in kept))


def pad_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Give a spec an entry for each of `ndim` dimensions."""
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)))


@dataclass(frozen=True)
class MeshContext:
    """The mesh that a loss in jit runs on, the plan's axis, and the other axes."""

    mesh: Any  # with devices where they are known
    axis_name: AxisName
    other_axes: tuple[Any, ...]  # of more than one device
    is_explicit: bool

    def check_devices(self, plan: PlanLike) -> None:
        """Raise CollectiveError for a mesh of other devices than the plan's, or another order."""
        if isinstance(self.mesh, jax.sharding.Mesh):
            lines = plan.program.device_lines
            check_mesh_devices(self.mesh.devices, self.mesh.axis_names, self.axis_name, *lines)

    @staticmethod
    def find(plan: PlanLike, axis_name: AxisName, args: PyTree, mesh: Any) -> MeshContext:
        """Use `mesh` if given; or that of `jax.set_mesh`, of the arguments, or of the plan."""
        current = jax.sharding.get_abstract_mesh()
        if mesh is not None and not current.empty and mesh.abstract_mesh != current:
            raise ArgumentError(
                f"the mesh given, {mesh.shape}, is not that of jax.set_mesh, {current.shape}: "
                "leave out one of them"
            )
        known = [current, *map(_mesh_of, jax.tree.leaves(args))]
        mesh = mesh or next((mesh for mesh in known if axis_name in mesh.axis_names), None)
        if mesh is None and plan.topology.num_positions > 1:
            raise ArgumentError(
                "the plan is for tiles of several devices, and their axes are not known here: "
                f"give mesh=plan.jax_mesh(({axis_name!r}, 'model')), or set it with jax.set_mesh"
            )
        mesh = mesh or plan.jax_mesh(cast(str, axis_name))
        if axis_name not in mesh.axis_names:
            raise ArgumentError(f"the mesh has axes {mesh.axis_names} and not {axis_name!r}")
        if mesh.shape[axis_name] != plan.program.num_ranks:
            raise CollectiveError(
                f"axis {axis_name!r} has {mesh.shape[axis_name]} devices, but the plan for "
                f"{plan.topology} has {plan.program.num_ranks}: make the mesh with "
                f"plan.jax_mesh({axis_name!r})"
            )
        types = _axis_types(mesh)
        if len(set(types.values())) > 1 or AxisType.Manual in types.values():
            raise CollectiveError(
                f"the mesh mixes axis types, {types}, and JAX then sums gradients by itself: make "
                "all axes Auto or all Explicit, or call this inside a shard_map over the axis of "
                "the plan"
            )
        other_axes = tuple(name for name in types if name != axis_name)
        if other_axes and not _compat.SUPPORTS_NESTED_SHARD_MAP:
            raise CollectiveError(
                f"a mesh with the axes {other_axes} besides {axis_name!r} needs JAX 0.10 or newer"
            )
        is_explicit = types.get(axis_name) == AxisType.Explicit
        return MeshContext(_with_devices(mesh, plan, axis_name), axis_name, other_axes, is_explicit)

    def weight_specs(self, weights: PyTree, specs: Specs) -> PyTree:
        """A spec for each weight: from its type if axes are Explicit, otherwise from `specs`."""
        if self.is_explicit:
            return jax.tree.map(typed_spec, weights)
        if specs is None and self.other_axes:
            raise ArgumentError(
                f"the mesh has axes {self.other_axes} besides {self.axis_name!r}, and how weights "
                "are sharded along them is not known here: give specs=jax.tree.map(lambda w: "
                "w.sharding, params), taken outside jit, or specs=PartitionSpec() for replicated "
                "weights"
            )
        specs = broadcast_specs(REPLICATED if specs is None else specs, weights)
        entries = [entry for spec in jax.tree.leaves(specs) for entry in spec]
        if unknown := {name for x in entries for name in entry_axes(x)} - {*self.mesh.axis_names}:
            raise ArgumentError(
                f"specs name {sorted(unknown)}, and the mesh has axes {self.mesh.axis_names}"
            )
        return specs

    def check_shards(self, weights: PyTree, specs: Sequence[PartitionSpec]) -> None:
        """Raise ArgumentError unless shards of all weights have equal shapes."""
        leaves = jax.tree_util.tree_leaves_with_path(weights)
        for (path, weight), spec in zip(leaves, specs, strict=True):
            shape = np.shape(weight)
            for dim, (length, entry) in enumerate(zip(shape, spec, strict=False)):
                axes = [name for name in entry_axes(entry) if self.mesh.shape[name] > 1]
                parts = math.prod(self.mesh.shape[name] for name in axes)
                is_mixed = self.axis_name in axes and len(axes) > 1  # which no gather accepts
                if length % parts and not is_mixed:
                    name = jax.tree_util.keystr(path[1:]) or "a weight"
                    raise ArgumentError(
                        f"{name} of shape {shape} has {length} rows along dimension {dim}, "
                        f"and {parts} devices, {spec}, cannot have as many each: pad it with zeros "
                        f"to {-(-length // parts) * parts}, as Cuts in docs/hsdp.md does, or shard "
                        "weights inside tiles"
                    )

    def shard_dimension(self, spec: PartitionSpec) -> int | None:
        """The dimension that is sharded along the axis; None if other axes shard the array too."""
        sharded = [dim for dim, entry in enumerate(spec) if entry_axes(entry)]
        is_alone = len(sharded) == 1 and entry_axes(spec[sharded[0]]) == (self.axis_name,)
        return sharded[0] if is_alone and not self.other_axes else None

    def shard_map(
        self, run: Callable[..., Any], in_specs: Specs, out_specs: Specs, out_types: Specs
    ) -> Callable[..., Any]:
        """Run a function on every rank, and leave the other axes to the compiler.

        `out_types` are the specs of results on all axes, used if those are Explicit. JAX 0.10
        gathers Explicit arrays over axes that a shard_map leaves out, so they become Auto here.
        """

        def mapped(*args: Any) -> Any:
            current = jax.sharding.get_abstract_mesh()  # has devices if it was set
            return jax.shard_map(
                run,
                mesh=None if self.axis_name in current.axis_names else self.mesh,
                axis_names={self.axis_name},
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )(*args)

        if not self.is_explicit:
            return mapped
        mesh, axes = self.mesh.abstract_mesh, tuple(self.mesh.axis_names)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_types, is_leaf=is_spec)
        auto = jax.sharding.auto_axes(mapped, axes=axes, out_sharding=shardings)
        return cast(Callable[..., Any], auto)

    def with_explicit_axes(self, run: Callable[..., Any], types: Specs) -> Callable[..., Any]:
        """Undo for `run` that `shard_map` made the other axes Auto, if they were Explicit."""
        if not (self.is_explicit and self.other_axes):
            return run
        axes = self.other_axes
        specs = jax.tree.map(lambda spec: restrict_spec(spec, axes), types, is_leaf=is_spec)
        explicit = jax.sharding.explicit_axes(run, axes=axes, in_sharding=specs)
        return cast(Callable[..., Any], explicit)


def _mesh_of(leaf: Any) -> Any:
    """The mesh of an array, with its devices unless the array is traced."""
    # Asking a traced array for its sharding takes JAX a pass over the program.
    if not isinstance(leaf, jax.core.Tracer):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            return sharding.mesh
    return jax.typeof(leaf).sharding.mesh


def _with_devices(mesh: Any, plan: PlanLike, axis_name: AxisName) -> Any:
    """Give a mesh without other axes the plan's devices, so that JAX rejects any others."""
    has_other_axes = mesh.size > mesh.shape[axis_name]
    if isinstance(mesh, jax.sharding.Mesh) or has_other_axes or not plan.topology.devices:
        return mesh
    devices = plan.jax_mesh(cast(str, axis_name)).devices.reshape(tuple(mesh.shape.values()))
    return jax.sharding.Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
