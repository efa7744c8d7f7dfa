"""On mesh: how parameters lie on a mesh that may have more axes than the plan's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh.collectives.meshes import Site
from ftmesh.collectives.pieces import WHOLE, is_spec, names_in, spread, typed_spec
from ftmesh.execute import _compat
from ftmesh.planning.plan import Plan


@dataclass(frozen=True, eq=False)
class OnMesh:
    """The axis of a plan, the mesh that has it, and the `specs` of parameters on that.

    Those are a ``PartitionSpec`` or ``NamedSharding``, or a pytree of them; where none are given
    parameters are whole at every device, but for Explicit axes, which types tell of. Without a mesh
    it is that of `jax.set_mesh`, of the parameters, or the plan's own.
    """

    plan: Plan
    axis_name: Any
    specs: Any = None
    mesh: Any = None
    _made: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def is_bound(self) -> bool:
        """Whether the axis is bound: each rank then has its own part of everything."""
        return _compat.axis_exists(self.axis_name)

    def run(
        self, function: Callable[..., Any], params: Any, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """`function`, made for a rank, on arrays of the whole mesh, on which `params` lie.

        It is compiled once for all parameters of one form: functions are told apart by their names.
        """
        leaves, tree = jax.tree.flatten(params)
        types = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        spec_tree = jax.tree.structure(in_specs, is_leaf=is_spec)
        around = jax.sharding.get_abstract_mesh()
        key = (function.__name__, tree, types, spec_tree, around)
        if key not in self._made:
            self._made[key] = self._run(function, params, in_specs, out_specs)
        return self._made[key]

    def _run(
        self, function: Callable[..., Any], params: Any, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        site = Site.of(self.plan, self.axis_name, params, self.mesh)
        site.specs_of(params, self.specs)  # refuses where nothing says how they lie
        around = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(
            function,
            mesh=None if self.axis_name in around.axis_names else site.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )
        jitted: Callable[..., Any] = jax.jit(mapped)
        return jitted

    def specs_of(self, params: Any) -> Any:
        """A spec for each parameter, in a pytree like them."""
        if self.specs is not None:
            return spread(self.specs, params)
        return jax.tree.map(_spec_of, params)

    def types_of_rank(self, params: Any) -> list[jax.ShapeDtypeStruct]:
        """The types of the leaves as a rank has them."""
        leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(params)]
        shapes = [jnp.shape(leaf) for leaf in leaves]
        specs = self._flat_specs(params)
        if not self.is_bound and any(part for spec in specs for part in spec):
            site = Site.of(self.plan, self.axis_name, params, self.mesh)
            site.specs_of(params, self.specs)  # refuses those of another mesh
            shapes = [
                NamedSharding(site.mesh, spec).shard_shape(shape)
                for spec, shape in zip(specs, shapes, strict=True)
            ]
        return [
            jax.ShapeDtypeStruct(shape, leaf.dtype)
            for shape, leaf in zip(shapes, leaves, strict=True)
        ]

    def whole_types(self, params: Any) -> list[jax.ShapeDtypeStruct]:
        """The types of the whole tensors, of which ranks may have pieces along other axes."""
        types = [
            jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(params)
        ]
        if not self.is_bound:
            return types
        return [
            jax.ShapeDtypeStruct(_whole_shape(each.shape, spec, self.axis_name), each.dtype)
            for each, spec in zip(types, self._flat_specs(params), strict=True)
        ]

    def other_axes(self, params: Any) -> dict[Any, list[bool]]:
        """The other axes over which parameters are split, and which leaves are."""
        over = [
            {name for part in spec for name in names_in(part)} - {self.axis_name}
            for spec in self._flat_specs(params)
        ]
        return {
            name: [name in names for names in over] for name in sorted(set().union(*over), key=str)
        }

    def _flat_specs(self, params: Any) -> list[PartitionSpec]:
        specs: list[PartitionSpec] = jax.tree.leaves(self.specs_of(params), is_leaf=is_spec)
        return specs


def _spec_of(leaf: Any) -> PartitionSpec:
    """What the type of an array says; nothing, for what is but a description of one."""
    return typed_spec(leaf) if isinstance(leaf, jax.Array) else WHOLE


def _whole_shape(shape: tuple[int, ...], spec: PartitionSpec, axis_name: Any) -> tuple[int, ...]:
    """The shape of a tensor of which a rank has such a piece."""
    parts = [
        [lax.axis_size(name) for name in names_in(entry) if name != axis_name] for entry in spec
    ]
    sizes = [math.prod(part) for part in parts] + [1] * (len(shape) - len(parts))
    return tuple(length * size for length, size in zip(shape, sizes, strict=True))
