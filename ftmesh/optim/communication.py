"""What a sharded update communicates, and how parameters are laid out on the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh import collectives
from ftmesh.collectives.gradients import ReducedGradients
from ftmesh.collectives.partitioning import (
    REPLICATED,
    MeshContext,
    broadcast_specs,
    entry_axes,
    is_spec,
    typed_spec,
)
from ftmesh.collectives.reduce_scatter import (
    check_has_owners,
    gather_chunks,
    scatter_chunks,
    take_owned_chunks,
)
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.owned_buckets import OwnedBucket, OwnedLayout
from ftmesh.optim.evaluate import OwnedTree

Reduce = Literal["mean", "sum", "none"]


@dataclass(frozen=True, eq=False)
class Communication:
    """Reduces gradients to the owners of rows, and gathers updates from them."""

    plan: PlanLike
    norm_plan: PlanLike
    axis_name: AxisName
    wire_dtype: DTypeLike | None = None
    accumulate_dtype: DTypeLike | None = None
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_has_owners(self.plan)
        if self.reduce not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduce must be 'mean', 'sum' or 'none', not {self.reduce!r}")

    def take_owned(self, tree: PyTree, layout: OwnedLayout) -> OwnedTree:
        """Return what this rank owns of arrays that all ranks have."""
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]

        def take(bucket: OwnedBucket) -> jax.Array:
            buffer = bucket.packing.pack(_to_common_dtype([leaves[i] for i in bucket.members]))
            buffer = _compat.as_varying(buffer, self.axis_name)
            chunks = take_owned_chunks(buffer, self.axis_name, self.plan.program)
            return chunks.reshape(bucket.shape)

        return OwnedTree(
            [take(b) for b in layout.buckets], {i: leaves[i] for i in layout.replicated}
        )

    def reduce_scatter(self, grads: PyTree, layout: OwnedLayout, tree: Any) -> OwnedTree:
        """Reduce gradients, if they are not yet, and return what this rank owns of the result.

        `tree` is that of the parameters, which gradients must have too.
        """
        if isinstance(grads, ReducedGradients):
            if grads.owners == layout.fingerprint:
                owned: OwnedTree = grads.tree
                return owned
            if grads.owners:
                raise ArgumentError(
                    "these gradients are sharded for another plan: call value_and_grad and update "
                    "of the same optimizer"
                )
            return self.take_owned(grads.tree, layout)
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads)]
        shapes = [leaf.shape for leaf in leaves]
        if jax.tree.structure(grads) != tree or shapes != [t.shape for t in layout.types]:
            raise ArgumentError("gradients must have the structure and shapes of the parameters")
        if self.reduce == "none" or self._are_reduced(leaves):
            return self.take_owned(grads, layout)
        leaves = [_compat.as_varying(leaf, self.axis_name) for leaf in leaves]
        groups = enumerate(reduction_groups(layout))
        results = [self.reduce_group(layout, i, [leaves[x] for x in group]) for i, group in groups]
        return join_groups(results, layout)

    def reduce_group(self, layout: OwnedLayout, index: int, grads: list[Any]) -> list[jax.Array]:
        """Reduce one of `reduction_groups`; a gradient that is None counts as zeros."""
        types = [layout.types[i] for i in reduction_groups(layout)[index]]
        arrays = [
            _compat.as_varying(jnp.zeros(type_.shape, type_.dtype), self.axis_name)
            if grad is None
            else grad
            for grad, type_ in zip(grads, types, strict=True)
        ]
        if index == len(layout.buckets):
            reduce = collectives.pmean if self.reduce == "mean" else collectives.psum
            replicated: list[jax.Array] = reduce(arrays, self.axis_name, plan=self.plan)
            return replicated
        bucket = layout.buckets[index]
        chunks = scatter_chunks(
            bucket.packing.pack(_to_common_dtype(arrays)),
            self.axis_name,
            plan=self.plan,
            mean=self.reduce == "mean",
            wire_dtype=self.wire_dtype,
            accumulate_dtype=self.accumulate_dtype,
        )
        return [chunks.reshape(bucket.shape)]

    def gradient_slots(self, leaves: list[jax.Array], layout: OwnedLayout) -> list[list[jax.Array]]:
        """Return arrays of the types that `reduce_group` returns for the gradients of `leaves`."""
        slots = []
        for bucket in layout.buckets:
            first = _to_common_dtype([leaves[i] for i in bucket.members])[0]
            zeros = jnp.zeros(bucket.shape, first.dtype)
            slots.append([_compat.varying_like(_compat.as_varying(zeros, self.axis_name), first)])
        return [*slots, [leaves[i] for i in layout.replicated]]

    def all_gather(self, owned: OwnedTree, layout: OwnedLayout) -> list[jax.Array]:
        """Return all leaves, replicated, from what every rank owns of them."""
        leaves = dict(owned.replicated)
        for bucket, rows in zip(layout.buckets, owned.rows, strict=True):
            chunks = _compat.as_varying(rows, self.axis_name)
            chunks = chunks.reshape(-1, *bucket.packing.shape[1:])
            buffer = gather_chunks(chunks, self.axis_name, plan=self.plan)
            leaves.update(zip(bucket.members, bucket.packing.unpack(buffer), strict=True))
        return [leaves[i] for i in range(len(layout.types))]

    def sum_vectors(self, vectors: list[jax.Array]) -> list[jax.Array]:
        """Sum small vectors over all ranks, on the plan for norms."""
        sums: list[jax.Array] = collectives.psum(vectors, self.axis_name, plan=self.norm_plan)
        return sums

    def _are_reduced(self, leaves: list[jax.Array]) -> bool:
        """Return whether gradients are typed as replicated, which means they have been summed."""
        if not _compat.checks_vma() or not leaves:
            return False
        varying = {self.axis_name in _compat.varying_axes(leaf) for leaf in leaves}
        if len(varying) > 1:
            raise ArgumentError(
                f"some of these gradients vary along {self.axis_name!r} and others are summed "
                "already: differentiate with respect to parameters that are all replicated or all "
                "varying, as plan.value_and_grad does"
            )
        return varying == {False}


def reduction_groups(layout: OwnedLayout) -> list[tuple[int, ...]]:
    """Return the leaves that are reduced together: those of each bucket, then the replicated."""
    return [*(bucket.members for bucket in layout.buckets), layout.replicated]


def join_groups(results: Sequence[list[jax.Array]], layout: OwnedLayout) -> OwnedTree:
    """Return the results of `Communication.reduce_group` for all groups as a tree."""
    *rows, replicated = results
    return OwnedTree(
        [row for (row,) in rows], dict(zip(layout.replicated, replicated, strict=True))
    )


def _to_common_dtype(arrays: list[jax.Array]) -> list[jax.Array]:
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


@dataclass(frozen=True, eq=False)
class MeshPlacement:
    """How parameters are laid out on a mesh that may have more axes than the plan's.

    Without `specs` parameters are replicated, except along Explicit axes, which their types show.
    Without `mesh` it is that of `jax.set_mesh`, that of the parameters, or the plan's own.
    """

    plan: PlanLike
    axis_name: AxisName
    specs: Specs = None
    mesh: Any = None
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def is_bound(self) -> bool:
        """True inside shard_map, pmap or vmap over the axis, where arrays are a rank's own."""
        return _compat.axis_exists(self.axis_name)

    def run(
        self, function: Callable[..., Any], params: PyTree, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return `function`, written for one rank, as a function of global arrays.

        It is compiled once per function name, tree and types of `params`.
        """
        leaves, tree = jax.tree.flatten(params)
        types = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        spec_tree = jax.tree.structure(in_specs, is_leaf=is_spec)
        current = jax.sharding.get_abstract_mesh()
        key = (function.__name__, tree, types, spec_tree, current)
        if key not in self._compiled:
            context = MeshContext.find(self.plan, self.axis_name, params, self.mesh)
            context.weight_specs(params, self.specs)  # raises if the layout is unknown
            mapped = jax.shard_map(
                function,
                mesh=None if self.axis_name in current.axis_names else context.mesh,
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=False,
            )
            self._compiled[key] = jax.jit(mapped)
        return self._compiled[key]

    def param_specs(self, params: PyTree) -> PyTree:
        """Return the spec of every parameter, as a pytree like `params`."""
        if self.specs is not None:
            return broadcast_specs(self.specs, params)
        return jax.tree.map(
            lambda leaf: typed_spec(leaf) if isinstance(leaf, jax.Array) else REPLICATED, params
        )

    def local_types(self, params: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the leaves as one rank has them."""
        leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(params)]
        shapes = [jnp.shape(leaf) for leaf in leaves]
        specs = self._flat_specs(params)
        if not self.is_bound and any(entry for spec in specs for entry in spec):
            context = MeshContext.find(self.plan, self.axis_name, params, self.mesh)
            context.weight_specs(params, self.specs)  # raises if specs are for another mesh
            shapes = [
                NamedSharding(context.mesh, spec).shard_shape(shape)
                for spec, shape in zip(specs, shapes, strict=True)
            ]
        return [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, leaves, strict=True)]

    def global_types(self, params: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the full tensors, which other axes may shard."""

        def global_type(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            shape = list(jnp.shape(leaf))
            for i, entry in enumerate(spec if self.is_bound else ()):
                sizes = [lax.axis_size(x) for x in entry_axes(entry) if x != self.axis_name]
                shape[i] *= math.prod(sizes)
            return jax.ShapeDtypeStruct(tuple(shape), jnp.result_type(leaf))

        return list(map(global_type, jax.tree.leaves(params), self._flat_specs(params)))

    def other_axes(self, params: PyTree) -> dict[Any, list[bool]]:
        """Return the other axes that shard parameters and, for each, which leaves it shards."""
        axes = [
            {name for entry in spec for name in entry_axes(entry)} - {self.axis_name}
            for spec in self._flat_specs(params)
        ]
        names = sorted(set().union(*axes), key=str)
        return {name: [name in sharding for sharding in axes] for name in names}

    def _flat_specs(self, params: PyTree) -> list[PartitionSpec]:
        specs: list[PartitionSpec] = jax.tree.leaves(self.param_specs(params), is_leaf=is_spec)
        return specs
