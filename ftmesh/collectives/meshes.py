"""Meshes: where a loss runs in jit, and what JAX does there with other axes than the plan's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, NamedSharding

from ftmesh.collectives.pieces import WHOLE, is_spec, names_in, only, spread, typed_spec
from ftmesh.errors import ArgumentError, CollectiveError
from ftmesh.execute import _compat

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
