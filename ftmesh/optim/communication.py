"""Travel: what goes between ranks in an update: gradients to the owners of rows, updates back.

On mesh: how parameters lie on a mesh that may have more axes than the plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh.collectives.gradients import Means
from ftmesh.collectives.partitioning import WHOLE, Site, is_spec, names_in, spread, typed_spec
from ftmesh.collectives.reduce_scatter import check_owned, gather_chunks, own_chunks, scatter_chunks
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.layout.owned_buckets import Owned, OwnedBucket
from ftmesh.optim.state import Held
from ftmesh.planning.plan import Plan

Reduce = Literal["mean", "sum", "none"]


@dataclass(frozen=True, eq=False)
class Travel:
    """How gradients are added up on a plan, and what is made of them."""

    plan: Plan
    axis_name: Any
    wire_dtype: Any = None
    accumulate_dtype: Any = None
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_owned(self.plan)
        if self.reduce not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduce is 'mean', 'sum' or 'none', not {self.reduce!r}")

    def owned(self, tree: Any, layout: Owned) -> Held:
        """What a rank owns of arrays that all ranks have."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]

        def own(bucket: OwnedBucket) -> jax.Array:
            buffer = bucket.packing.pack(alike([leaves[i] for i in bucket.members]))
            buffer = _compat.as_varying(buffer, self.axis_name)
            return own_chunks(buffer, self.axis_name, self.plan.program).reshape(bucket.shape)

        return Held([own(b) for b in layout.buckets], {i: leaves[i] for i in layout.whole})

    def reduced(self, grads: Any, layout: Owned, tree: Any) -> Held:
        """What a rank owns of what is made of gradients; `tree` is the structure they must have."""
        if isinstance(grads, Means):
            if grads.owners == layout.fingerprint:
                held: Held = grads.tree
                return held
            if grads.owners:
                raise ArgumentError("these gradients are sharded for the owners of another plan")
            return self.owned(grads.tree, layout)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads)]
        shapes = [leaf.shape for leaf in leaves]
        if jax.tree.structure(grads) != tree or shapes != [t.shape for t in layout.types]:
            raise ArgumentError("gradients must have the structure and shapes of the parameters")
        if self.reduce == "none" or self._are_the_same(leaves):
            return self.owned(grads, layout)
        leaves = [_compat.as_varying(leaf, self.axis_name) for leaf in leaves]
        made = [
            self.reduced_turn(layout, at, [leaves[i] for i in turn])
            for at, turn in enumerate(turns(layout))
        ]
        return held_of(made, layout)

    def reduced_turn(self, layout: Owned, at: int, given: list[Any]) -> list[jax.Array]:
        """The same of one turn: a bucket, or those that are in none. None stands for zeros."""
        types = [layout.types[i] for i in turns(layout)[at]]
        arrays = [
            _compat.as_varying(jnp.zeros(type_.shape, type_.dtype), self.axis_name)
            if array is None
            else array
            for array, type_ in zip(given, types, strict=True)
        ]
        if at == len(layout.buckets):
            reduce = self.plan.pmean if self.reduce == "mean" else self.plan.psum
            whole: list[jax.Array] = reduce(arrays, self.axis_name)
            return whole
        bucket = layout.buckets[at]
        mine = scatter_chunks(
            bucket.packing.pack(alike(arrays)),
            self.axis_name,
            plan=self.plan,
            mean=self.reduce == "mean",
            wire_dtype=self.wire_dtype,
            accumulate_dtype=self.accumulate_dtype,
        )
        return [mine.reshape(bucket.shape)]

    def slots(self, leaves: list[jax.Array], layout: Owned) -> list[list[jax.Array]]:
        """Arrays in place of what `reduced_turn` will make of the gradients of `leaves`."""
        made = []
        for bucket in layout.buckets:
            some = alike([leaves[i] for i in bucket.members])[0]
            zeros = jnp.zeros(bucket.shape, some.dtype)
            made.append([_compat.varying_as(_compat.as_varying(zeros, self.axis_name), some)])
        return [*made, [leaves[i] for i in layout.whole]]

    def gathered(self, held: Held, layout: Owned) -> list[jax.Array]:
        """The leaves of which every rank has its rows, the same at all."""
        leaves = dict(held.whole)
        for bucket, mine in zip(layout.buckets, held.rows, strict=True):
            chunks = _compat.as_varying(mine, self.axis_name)
            chunks = chunks.reshape(-1, *bucket.packing.shape[1:])
            buffer = gather_chunks(chunks, self.axis_name, plan=self.plan)
            leaves.update(zip(bucket.members, bucket.packing.unpack(buffer), strict=True))
        return [leaves[i] for i in range(len(layout.types))]

    def _are_the_same(self, leaves: list[jax.Array]) -> bool:
        """Whether gradients are typed as the same at all ranks: they have been summed already."""
        if not _compat.checks_varying() or not leaves:
            return False
        kinds = {self.axis_name in _compat.varying_axes(leaf) for leaf in leaves}
        if len(kinds) > 1:
            raise ArgumentError(
                f"some of these gradients differ along {self.axis_name!r} and others are the same "
                "everywhere, summed already: differentiate with respect to parameters that are "
                "all of one kind, as plan.value_and_grad does"
            )
        return kinds == {False}


def turns(layout: Owned) -> list[tuple[int, ...]]:
    """The leaves that travel together: those of each bucket, and last those in none."""
    return [*(bucket.members for bucket in layout.buckets), layout.whole]


def held_of(made: Sequence[list[jax.Array]], layout: Owned) -> Held:
    """What the turns have made."""
    *rows, few = made
    return Held([row for (row,) in rows], dict(zip(layout.whole, few, strict=True)))


def alike(arrays: list[jax.Array]) -> list[jax.Array]:
    """The same arrays, in one dtype for all of them."""
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


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
