"""On mesh: how parameters lie on a mesh that may have more axes than the plan's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.plans import Plan


@dataclass(frozen=True, eq=False)
class OnMesh:
    """The axis of a plan, the mesh that has it, and the `specs` of parameters on that.

    Those are a ``PartitionSpec``, a pytree of them or a prefix of one; without any, parameters are
    whole at every device. Without a mesh it is the plan's own.
    """

    plan: Plan
    axis_name: Any
    specs: Any = None
    mesh: Mesh | None = None

    @property
    def is_bound(self) -> bool:
        """Whether the axis is bound: each rank then has its own part of everything."""
        return _compat.axis_exists(self.axis_name)

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`function`, made for a rank, on arrays of the whole mesh."""
        mesh = self.mesh or self.plan.jax_mesh(self.axis_name)
        return jax.jit(
            jax.shard_map(
                function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
            )
        )

    def specs_of(self, params: Any) -> Any:
        """A spec for each parameter, in a pytree like them."""
        specs = PartitionSpec() if self.specs is None else self.specs
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: spec, part), specs, params, is_leaf=_is_spec
        )

    def types_of_rank(self, params: Any) -> list[jax.ShapeDtypeStruct]:
        """The types of the leaves as a rank has them."""
        leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(params)]
        shapes = [jnp.shape(leaf) for leaf in leaves]
        if self.specs is not None and not self.is_bound:
            if self.mesh is None:
                raise ArgumentError("specs speak of a mesh with more axes: give mesh as well")
            shapes = [
                NamedSharding(self.mesh, spec).shard_shape(shape)
                for spec, shape in zip(self._flat_specs(params), shapes, strict=True)
            ]
        return [
            jax.ShapeDtypeStruct(shape, leaf.dtype)
            for shape, leaf in zip(shapes, leaves, strict=True)
        ]

    def other_axes(self, params: Any) -> dict[Any, list[bool]]:
        """The other axes over which parameters are split, and which leaves are."""
        over = [
            {name for part in spec if part for name in _names(part)} - {self.axis_name}
            for spec in self._flat_specs(params)
        ]
        return {
            name: [name in names for names in over] for name in sorted(set().union(*over), key=str)
        }

    def _flat_specs(self, params: Any) -> list[PartitionSpec]:
        specs: list[PartitionSpec] = jax.tree.leaves(self.specs_of(params), is_leaf=_is_spec)
        return specs


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _names(part: Any) -> tuple[Any, ...]:
    """The axes that one dimension is split over."""
    return part if isinstance(part, tuple) else (part,)
