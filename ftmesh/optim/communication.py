"""What a sharded update communicates, and how parameters are laid out on the mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
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
    pad_spec,
    typed_spec,
)
from ftmesh.collectives.reduce_scatter import (
    gather_in_place,
    gather_rows,
    row_length,
    scatter_rows,
)
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.flat_shards import Kind, LeafLayout, TreeLayout

Reduce = Literal["mean", "sum", "none"]


@dataclass(frozen=True, eq=False)
class Communication:
    """Reduces gradients to a rank's parts of them, and gathers updates from the parts."""

    plan: PlanLike
    norm_plan: PlanLike
    axis_name: AxisName
    wire_dtype: DTypeLike | None = None
    accumulate_dtype: DTypeLike | None = None
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduce must be 'mean', 'sum' or 'none', not {self.reduce!r}")

    @property
    def rank(self) -> Any:
        return lax.axis_index(self.axis_name)

    def take_own(self, tree: PyTree, layout: TreeLayout) -> list[jax.Array]:
        """Return this rank's part of each leaf of a pytree that all ranks have."""
        return self._take_parts(map(jnp.asarray, jax.tree.leaves(tree)), layout.leaves)

    def reduce_scatter(
        self, grads: PyTree, layout: TreeLayout, tree: Any
    ) -> tuple[list[jax.Array], list[jax.Array] | None]:
        """Reduce gradients, if they are not yet, and return this rank's parts of the result.

        Full tensors too, if they are reduced already. A leaf cut along the axis is this rank's own.
        """
        is_reduced = self.reduce == "none"
        if isinstance(grads, ReducedGradients):
            if grads.is_sharded:
                return self._check_parts(grads.tree, layout), None
            grads, is_reduced = grads.tree, True
        leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(grads)]
        shapes = [leaf.shape for leaf in leaves]
        if jax.tree.structure(grads) != tree or shapes != [x.type.shape for x in layout.leaves]:
            rule = "gradients must have the structure and shapes of the parameters"
            raise ArgumentError(
                f"{rule}: put optax.lookahead, or what aggregates, around plan.shard"
            )
        whole = [x for x, y in zip(leaves, layout.leaves, strict=True) if y.kind != "local"]
        if is_reduced or self._are_reduced(whole):
            return self._take_parts(leaves, layout.leaves), leaves
        own = list(leaves)
        for index, group in enumerate(reduction_groups(layout)):
            arrays = [_compat.as_varying(leaves[i], self.axis_name) for i in group]
            for i, array in zip(group, self.reduce_group(layout, index, arrays), strict=True):
                own[i] = array
        return own, None

    def reduce_group(self, layout: TreeLayout, index: int, grads: list[Any]) -> list[jax.Array]:
        """Reduce one of `reduction_groups`; a gradient that is None counts as zeros."""
        leaves = [layout.leaves[i] for i in reduction_groups(layout)[index]]
        arrays = [
            _compat.as_varying(jnp.zeros(leaf.type.shape, leaf.type.dtype), self.axis_name)
            if grad is None
            else grad
            for grad, leaf in zip(grads, leaves, strict=True)
        ]
        if not arrays:
            return []
        options: dict[str, Any] = {
            "plan": self.plan,
            "wire_dtype": self.wire_dtype,
            "accumulate_dtype": self.accumulate_dtype,
        }
        is_bucket = index < len(layout.buckets)
        if is_bucket and self.plan.executor != "xla":
            mean = self.reduce == "mean"
            dtype = jnp.result_type(*arrays)
            rows = [leaf.to_rows(x.astype(dtype)) for leaf, x in zip(leaves, arrays, strict=True)]
            own = scatter_rows(self._join(rows), self.axis_name, mean=mean, **options)
            parts = _split(own, leaves)
            return [part.astype(x.dtype) for part, x in zip(parts, arrays, strict=True)]
        if not is_bucket and not self.plan.with_idle:
            options = {"plan": self.plan}  # a few numbers
        reduce = collectives.pmean if self.reduce == "mean" else collectives.psum
        return self._take_parts(reduce(arrays, self.axis_name, **options), leaves)

    def gradient_slots(self, leaves: list[jax.Array], layout: TreeLayout) -> list[list[jax.Array]]:
        """Return arrays of the types that `reduce_group` returns for the gradients of `leaves`."""

        def slot(i: int) -> jax.Array:
            if layout.leaves[i].kind == "replicated":
                return leaves[i]
            zeros = jnp.zeros(layout.leaves[i].own_shape, leaves[i].dtype)
            return _compat.varying_like(_compat.as_varying(zeros, self.axis_name), leaves[i])

        return [[slot(i) for i in group] for group in reduction_groups(layout)]

    def all_gather(self, own: Sequence[jax.Array], layout: TreeLayout) -> list[jax.Array]:
        """Return all leaves, replicated unless cut along the axis, from the parts of ranks."""
        result = list(own)
        for bucket in layout.buckets:
            if self.plan.executor == "xla":
                by_rows = [i for i in bucket if layout.leaves[i].row_shape[0]]
                bucket = tuple(i for i in bucket if i not in by_rows)
                for i in by_rows:
                    leaf = layout.leaves[i]
                    part = _compat.as_varying(own[i], self.axis_name).reshape(leaf.row_shape)
                    matrix = gather_in_place(part, self.axis_name, plan=self.plan)
                    result[i] = leaf.from_gathered_rows(matrix)
            dtypes = {i: own[i].dtype for i in bucket}
            groups = [
                tuple(i for i in bucket if dtypes[i] == dtype)
                for dtype in dict.fromkeys(dtypes.values())
            ]
            for group in groups:
                leaves = [layout.leaves[i] for i in group]
                parts = [_compat.as_varying(own[i], self.axis_name) for i in group]
                rows = gather_rows(self._join(parts), self.axis_name, plan=self.plan)
                for i, leaf, part in zip(group, leaves, _split(rows, leaves), strict=True):
                    result[i] = leaf.from_rows(part)
        return result

    def gather_tensors(
        self, bucket_bytes: int, own: Sequence[jax.Array], leaves: Sequence[LeafLayout]
    ) -> list[jax.Array]:
        """Return full tensors, the same at all ranks, from flat parts."""
        parts = [x.astype(np.int32) if x.dtype == np.bool_ else x for x in own]
        tensors = self.all_gather(parts, TreeLayout.build(leaves, bucket_bytes))
        return [tensor.astype(x.dtype) for tensor, x in zip(tensors, own, strict=True)]

    def take_part(self, tensor: jax.Array, leaf: LeafLayout) -> jax.Array:
        """Return this rank's part of a tensor that all ranks have."""
        return self._take_parts([tensor], [leaf])[0]

    def sum_vectors(
        self, other_axes: dict[Any, list[bool]], vectors: list[jax.Array]
    ) -> list[jax.Array]:
        """Sum small vectors, with an element for each leaf, over all ranks, on the plan for norms.

        Also over each of the `other_axes`, for the leaves that it shards.
        """
        varying = set().union(*map(_compat.varying_axes, vectors))
        for axis in sorted(varying - {self.axis_name, *other_axes}, key=str):
            raise ArgumentError(
                f"this optimizer sums over full tensors, which vary along {axis!r} too: give "
                "specs=, to say how they are sharded along it"
            )
        vectors = [_compat.as_varying(x, self.axis_name) for x in vectors]
        sums: list[jax.Array] = collectives.psum(vectors, self.axis_name, plan=self.norm_plan)
        for name, is_sharded in other_axes.items():
            sums = [jnp.where(np.array(is_sharded), lax.psum(x, name), x) for x in sums]
        return sums

    def _take_parts(self, arrays: Any, leaves: Sequence[LeafLayout]) -> list[jax.Array]:
        return [
            leaf.take_part(_compat.as_varying(x, self.axis_name), self.rank)
            if leaf.kind == "flat"
            else x
            for x, leaf in zip(arrays, leaves, strict=True)
        ]

    def _join(self, parts: list[jax.Array]) -> jax.Array:
        """Concatenate along the last dimension, with zeros up to a length that needs no padding."""
        size = sum(part.shape[-1] for part in parts)
        length = row_length(size, parts[0].dtype, plan=self.plan)
        shape = (*parts[0].shape[:-1], length - size)
        zeros = _compat.varying_like(jnp.zeros(shape, parts[0].dtype), parts[0])
        return jnp.concatenate([*parts, zeros], axis=-1)

    def _check_parts(self, parts: list[jax.Array], layout: TreeLayout) -> list[jax.Array]:
        if [x.shape for x in parts] != [leaf.own_shape for leaf in layout.leaves]:
            raise ArgumentError(
                "these gradients are sharded for another plan or other parameters: call "
                "value_and_grad and update of the same optimizer"
            )
        return parts

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


def reduction_groups(layout: TreeLayout) -> list[tuple[int, ...]]:
    """Return the leaves that are reduced together: those of each bucket, then the replicated."""
    return [*layout.buckets, layout.replicated]


def _split(x: jax.Array, leaves: Sequence[LeafLayout]) -> list[jax.Array]:
    """Cut what ranks have of several leaves, concatenated along the last dimension."""
    stops = list(itertools.accumulate(leaf.part_size for leaf in leaves))
    return [x[..., stop - leaf.part_size : stop] for stop, leaf in zip(stops, leaves, strict=True)]


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
    min_size: int = 0  # tensors with fewer elements are replicated
    _compiled: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    @property
    def is_bound(self) -> bool:
        """True inside shard_map, pmap or vmap over the axis, where arrays are a rank's own."""
        return _compat.axis_exists(self.axis_name)

    def run(
        self, function: Callable[..., Any], params: PyTree, in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return `function`, written for one rank, as a function of global arrays.

        It is compiled once per function name, mesh, tree and types of `params`.
        """
        leaves, tree = jax.tree.flatten(params)
        types = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
        specs, spec_tree = jax.tree.flatten(in_specs, is_leaf=is_spec)
        current, context = jax.sharding.get_abstract_mesh(), self._context(params)
        key = (function.__name__, tree, types, (*specs,), spec_tree, current, context.mesh)
        if key not in self._compiled:
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

    def leaf_layouts(self, params: PyTree) -> list[LeafLayout]:
        """Return how tensors of the shape of each parameter are stored."""
        self._check_idle(params)
        leaves, num_ranks = jax.tree.leaves(params), self.plan.program.num_ranks
        layouts = []
        types, specs = self._local_types(params), self._flat_specs(params)
        for leaf, type_, spec in zip(leaves, types, specs, strict=True):
            is_local = self.axis_name in _axes_of(spec)
            if not is_local and self.is_bound and self.axis_name in _compat.varying_axes(leaf):
                raise ArgumentError(
                    f"a parameter of shape {type_.shape} varies along {self.axis_name!r}, and "
                    "specs= does not say so: if each rank has a piece of its own, as in FSDP, give "
                    f"specs= that name {self.axis_name!r}; otherwise give parameters that are "
                    "replicated along it"
                )
            counts = tuple(self._num_shards(entry, params) for entry in spec)
            counts += (1,) * (len(type_.shape) - len(counts))
            kind: Kind = "local" if is_local else "flat"
            is_small = type_.size < max(1, self.min_size) and set(counts) <= {1}
            if not is_local and (self.plan.with_idle or not type_.shape or is_small):
                kind = "replicated"
            layouts.append(LeafLayout(type_, kind, num_ranks, counts))
        return layouts

    def stored_specs(self, params: PyTree) -> list[PartitionSpec]:
        """Return the specs of arrays that store tensors of the shape of each parameter."""

        def stored_spec(leaf: LeafLayout, spec: PartitionSpec) -> PartitionSpec:
            if leaf.kind != "flat":
                return spec if leaf.kind == "local" else REPLICATED
            entries = pad_spec(spec, len(leaf.counts)) if leaf.is_split else ()
            return PartitionSpec(*entries, self.axis_name)

        return list(map(stored_spec, self.leaf_layouts(params), self._flat_specs(params)))

    def global_types(self, params: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the full tensors."""

        def global_type(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            shape = list(jnp.shape(leaf))
            for i, entry in enumerate(spec if self.is_bound else ()):
                shape[i] *= math.prod(map(lax.axis_size, entry_axes(entry)))
            return jax.ShapeDtypeStruct(tuple(shape), jnp.result_type(leaf))

        return list(map(global_type, jax.tree.leaves(params), self._flat_specs(params)))

    def other_axes(self, params: PyTree) -> dict[Any, list[bool]]:
        """Return the other axes that shard parameters and, for each, which leaves it shards."""
        axes = [_axes_of(spec) - {self.axis_name} for spec in self._flat_specs(params)]
        names = sorted(set().union(*axes), key=str)
        return {name: [name in sharding for sharding in axes] for name in names}

    def without_other_meshes(self, params: PyTree) -> PyTree:
        """Return `params`, or their types alone if they are on another number of ranks."""
        meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(params)]
        sizes = {mesh.shape.get(self.axis_name) for mesh in meshes} - {None}
        if sizes <= {self.plan.program.num_ranks}:
            return params
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype), params)

    def place(self, x: Any, spec: PartitionSpec, params: PyTree) -> jax.Array:
        """Lay a global array out on the mesh."""
        context = self._context(params)
        if isinstance(x, jax.core.Tracer) and not isinstance(context.mesh, jax.sharding.Mesh):
            return jax.sharding.reshard(x, spec) if context.is_explicit else x
        mesh = context.mesh
        if not isinstance(mesh, jax.sharding.Mesh) and (mesh := jax.sharding.get_mesh()).empty:
            raise ArgumentError("arrays outside jit need a mesh: give mesh=, or set jax.set_mesh")
        return jax.device_put(x, NamedSharding(mesh, spec))

    def _context(self, params: PyTree) -> MeshContext:
        return MeshContext.find(self.plan, self.axis_name, params, self.mesh)

    def _local_types(self, params: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Return the types of the leaves as one rank has them."""
        leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(params)]
        shapes = [jnp.shape(leaf) for leaf in leaves]
        specs = self._flat_specs(params)
        if not self.is_bound and any(entry for spec in specs for entry in spec):
            context = self._context(params)
            context.weight_specs(params, self.specs)  # raises if specs are for another mesh
            shapes = [
                NamedSharding(context.mesh, spec).shard_shape(shape)
                for spec, shape in zip(specs, shapes, strict=True)
            ]
        return [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(shapes, leaves, strict=True)]

    def _num_shards(self, entry: Any, params: PyTree) -> int:
        """Return how many shards the entry of a spec makes, along axes other than the plan's."""
        names = [name for name in entry_axes(entry) if name != self.axis_name]
        if not names:
            return 1
        sizes = lax.axis_size if self.is_bound else self._context(params).mesh.shape.__getitem__
        return math.prod(map(sizes, names))

    def _check_idle(self, params: PyTree) -> None:
        if self.plan.with_idle and any(map(_axes_of, self._flat_specs(params))):
            raise ArgumentError(
                "a plan with idle devices cannot shard an optimizer of parameters that are "
                "sharded themselves: the idle devices would hold parts of them. Plan without "
                "with_idle=True"
            )

    def _flat_specs(self, params: PyTree) -> list[PartitionSpec]:
        specs: list[PartitionSpec] = jax.tree.leaves(self.param_specs(params), is_leaf=is_spec)
        return specs


def _axes_of(spec: PartitionSpec) -> set[Any]:
    return {name for entry in spec for name in entry_axes(entry)}
