"""Optax transformations whose state and work are sharded over the chips of a plan (ZeRO).

    optimizer = plan.shard(optax.adamw(1e-3))
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)

An update runs between the reduce-scatter and the all-gather: gradients are summed to the owners of
chunks, every owner computes the updates of its rows, and these are gathered at all chips, those off
the main rings too. This communicates as much as a plain all-reduce. Each device stores its rows of
the state, about one part in as many as there are owners.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh import collectives
from ftmesh.collectives.gradients import (
    BUCKET_BYTES,
    ReducedGradients,
    check_order,
    local_value_and_grad,
    reduce_in_backward,
)
from ftmesh.collectives.partitioning import REPLICATED
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.owned_buckets import OwnedLayout, ShardedState, Slot
from ftmesh.optim.communication import (
    Communication,
    MeshPlacement,
    Reduce,
    join_groups,
    reduction_groups,
)
from ftmesh.optim.evaluate import OwnedTree, ShardEvaluator, StateForm, dense_rows, state_form
from ftmesh.optim.op_graph import NotShardableError


class ShardedOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optax transformation whose state is sharded over the owners of a plan's chunks.

    It is an optax transformation itself, for `flax.training.train_state`, `nnx.Optimizer` and
    `optax.chain`. The wrapped transformation may do anything element by element, and take sums over
    full tensors, as norms do; otherwise `init` and `update` raise `NotShardableError`. The sums of
    all tensors are reduced together in one small all-reduce. A state keeps its dtypes.

    Inside shard_map or pmap gradients are a rank's own and `update` reduces them. Gradients that
    are the same at all ranks already, as types show under ``check_vma=True``, are used as they are;
    so are all gradients outside, where arrays are global.

    Args:
        transformation: The optax transformation to shard.
        plan: The plan to communicate on. If its algorithm has no reduce-scatter phase,
            `Plan.with_reduce_scatter` is used.
        axis_name: The mesh axis of the plan.
        wire_dtype: The dtype that gradients are sent in, as for `ftmesh.psum`. Updates are sent in
            their own dtype.
        accumulate_dtype: The dtype that gradients are added in, as for `ftmesh.psum`.
        bucket_bytes: The largest size of a bucket. The default is smaller with `overlap`.
        reduce: What to do with gradients that differ between ranks: "mean" or "sum"; "none" if
            they do not differ.
        norm_plan: The plan for sums over tensors. The default is `Plan.for_payload` of their size.
        overlap: Reduce each bucket during the backward pass that `value_and_grad` runs.
        order: The positions of the leaves in the order to fill buckets in; for `overlap`, what
            `ftmesh.collectives.backward_order` returns.
        specs: How parameters are sharded along other axes of the mesh, as for
            `Plan.value_and_grad`. Each shard is reduced by itself, and a norm is that of the full
            tensor.
        mesh: The mesh, if it is not the plan's own, set by `jax.set_mesh` or that of the arguments.
    """

    transformation: optax.GradientTransformation
    comm: Communication
    placement: MeshPlacement
    bucket_bytes: int
    overlap: bool
    order: Sequence[int] | None

    def __new__(
        cls,
        transformation: optax.GradientTransformation,
        plan: PlanLike,
        axis_name: AxisName = "data",
        *,
        wire_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        bucket_bytes: int | None = None,
        reduce: Reduce = "mean",
        norm_plan: PlanLike | None = None,
        overlap: bool = False,
        order: Sequence[int] | None = None,
        specs: Specs = None,
        mesh: jax.sharding.Mesh | None = None,
    ) -> ShardedOptimizer:
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES if overlap else collectives.BUCKET_BYTES
        optimizer: ShardedOptimizer = super().__new__(
            cls,
            lambda params: optimizer._init(params),
            lambda *args, **extra_args: optimizer._update(*args, **extra_args),
        )
        optimizer.transformation = transformation
        optimizer.comm = Communication(
            plan.with_reduce_scatter,
            norm_plan or plan,
            axis_name,
            wire_dtype,
            accumulate_dtype,
            reduce,
        )
        optimizer.placement = MeshPlacement(plan, axis_name, specs, mesh)
        optimizer.bucket_bytes, optimizer.overlap, optimizer.order = bucket_bytes, overlap, order
        return optimizer

    def value_and_grad(
        self, loss: Callable[..., Any], *, has_aux: bool = False
    ) -> Callable[..., Any]:
        """Differentiate `loss` at this rank, as `jax.value_and_grad` does.

        Returns:
            A function that returns the loss of this rank and gradients for `update`: with `overlap`
            this rank's rows of `ReducedGradients`, otherwise the gradients of this rank alone.
        """
        if not self.overlap:
            axis_name = self.comm.axis_name
            local: Callable[..., Any] = local_value_and_grad(loss, axis_name, has_aux=has_aux)
            return local
        # Nothing overlaps with a loop, so the rounds are unrolled.
        comm = replace(self.comm, plan=self.comm.plan.unrolled_variant)

        def run(params: PyTree, *args: Any) -> Any:
            layout, tree = self.layout(params), jax.tree.structure(params)
            leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
            groups = reduction_groups(layout)

            def loss_of_slots(slots: list[list[Any]]) -> Any:
                reduce = partial(comm.reduce_group, layout)
                passed = reduce_in_backward(leaves, groups, slots, reduce, comm.axis_name)
                return loss(tree.unflatten(passed), *args)

            slots = comm.gradient_slots(leaves, layout)
            value, grads = jax.value_and_grad(loss_of_slots, has_aux=has_aux)(slots)
            return value, ReducedGradients(join_groups(grads, layout), layout.fingerprint)

        return run

    def specs(self, params: PyTree) -> ShardedState:
        """Return the `PartitionSpec` of every leaf of the state, for shard_map.

        For this, `layout` and `form` the types of the parameters are enough.
        """
        layout, form = self.layout(params), self.form(params)
        leaves = [x if isinstance(x, Slot) else REPLICATED for x in form.leaves]
        split = PartitionSpec((self.comm.axis_name, *self.placement.other_axes(params)))
        rows = tuple(
            tuple(split if has_slot else None for has_slot in form.buckets(layout, row))
            for row in range(len(form.dtypes))
        )
        return ShardedState(form.tree.unflatten(leaves), rows, layout.fingerprint)

    def gather_state(self, state: ShardedState, params: PyTree) -> PyTree:
        """Return the state as the transformation alone would have it, replicated.

        Use it to continue with another plan, which has other owners; see `shard_state`.
        Checkpoints do not need it.
        """
        if not self.placement.is_bound:
            specs = (self.specs(params), self.placement.param_specs(params))
            return self.placement.run(self.gather_state, params, specs, REPLICATED)(state, params)
        layout, form = self.layout(params), self.form(params)
        _check_owners(state, layout)
        scalars = {i: jnp.zeros((), layout.types[i].dtype) for i in layout.replicated}
        rows = [
            self.comm.all_gather(OwnedTree(row, scalars), layout)
            for row in dense_rows(state, layout)
        ]
        replicated = iter(jax.tree.leaves(state.inner))
        return form.tree.unflatten(
            [rows[x.row][x.leaf] if isinstance(x, Slot) else next(replicated) for x in form.leaves]
        )

    def shard_state(self, state: PyTree, params: PyTree) -> ShardedState:
        """Shard a replicated state: the inverse of `gather_state`."""
        if not self.placement.is_bound:
            in_specs = (REPLICATED, self.placement.param_specs(params))
            shard = self.placement.run(self.shard_state, params, in_specs, self.specs(params))
            sharded: ShardedState = shard(state, params)
            return sharded
        layout, form = self.layout(params), self.form(params)
        zeros = [jnp.zeros(t.shape, t.dtype) for t in layout.types]
        tensors = [[x.astype(dtype) for x in zeros] for dtype in form.dtypes]
        inner: list[Any] = []
        for slot, leaf in zip(form.leaves, jax.tree.leaves(state), strict=True):
            if isinstance(slot, Slot):
                tensors[slot.row][slot.leaf] = leaf
            inner.append(slot if isinstance(slot, Slot) else leaf)
        rows = []
        for i, row in enumerate(tensors):
            owned, has_slots = self.comm.take_owned(row, layout).rows, form.buckets(layout, i)
            rows.append(tuple(x if y else None for x, y in zip(owned, has_slots, strict=True)))
        return ShardedState(form.tree.unflatten(inner), tuple(rows), layout.fingerprint)

    def layout(self, params: PyTree) -> OwnedLayout:
        """Return the buckets that hold the leaves of `params`, and the owners of their chunks."""
        types, program = self.placement.local_types(params), self.comm.plan.program
        order = self.order
        if order is None and self.overlap:
            order = range(len(types))[::-1]  # the gradients of the last leaves come first
        if order is not None:
            check_order(order, len(types))
        return OwnedLayout.build(
            types, program.owned_chunks, program.num_chunks, self.bucket_bytes, order
        )

    def form(self, params: PyTree) -> StateForm:
        """Return the structure of the state, with a slot for every sharded tensor."""
        types, tree = self.placement.global_types(params), jax.tree.structure(params)
        return state_form(self.transformation.init, self.layout(params), types, tree)

    def _init(self, params: PyTree) -> Any:
        """Return the first state: this rank's where the axis is bound, else a global one."""
        if not self.placement.is_bound:
            in_specs = (self.placement.param_specs(params),)
            return self.placement.run(self._init, params, in_specs, self.specs(params))(params)
        layout, tree = self.layout(params), jax.tree.structure(params)
        evaluator = self._evaluator(layout, params)
        jaxpr = jax.make_jaxpr(self.transformation.init)(tree.unflatten(evaluator.types))
        inputs = evaluator.input_tree("params", self.comm.take_owned(params, layout))
        return evaluator.output_state(self.form(params), evaluator.run(jaxpr, inputs))

    def _update(self, updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any) -> Any:
        """Return replicated updates and the new state, given gradients or `ReducedGradients`."""
        if self.placement.is_bound:
            return self._update_rank(self.comm, updates, state, params, extra_args)
        like = updates if params is None else params
        param_specs, state_specs = self.placement.param_specs(like), self.specs(like)
        _check_owners(state, self.layout(like))
        comm = replace(self.comm, reduce="none")  # global gradients are the same at all ranks
        given_specs = REPLICATED if params is None else param_specs
        in_specs = (param_specs, state_specs, given_specs, REPLICATED)

        def update(*args: Any) -> Any:
            return self._update_rank(comm, *args)

        mapped = self.placement.run(update, like, in_specs, (param_specs, state_specs))
        return mapped(updates, state, params, extra_args)

    def _update_rank(
        self, comm: Communication, updates: PyTree, state: Any, params: PyTree, extra_args: Any
    ) -> tuple[PyTree, ShardedState]:
        like = updates if params is None else params
        layout, tree, form = self.layout(like), jax.tree.structure(like), self.form(like)
        if any(comm.axis_name in _compat.varying_axes(x) for x in jax.tree.leaves(extra_args)):
            raise ArgumentError(
                f"extra arguments must be the same at all ranks, and some of {sorted(extra_args)} "
                "differ: average them first, with plan.pmean"
            )
        _check_owners(state, layout)
        evaluator = self._evaluator(layout, like)
        grads = comm.reduce_scatter(updates, layout, tree)
        inputs = evaluator.input_tree("grads", grads) + evaluator.input_state(state, form)
        dtypes = grads.dtypes(layout)
        types = [
            tree.unflatten(
                [jax.ShapeDtypeStruct(t.shape, dtypes[i]) for i, t in enumerate(evaluator.types)]
            ),
            form.tree.unflatten(form.types),
        ]
        if params is not None:
            inputs += evaluator.input_tree("params", comm.take_owned(params, layout))
            types.append(tree.unflatten(evaluator.types))
        transform = optax.with_extra_args_support(self.transformation).update
        jaxpr, (out, _) = jax.make_jaxpr(
            lambda *args: transform(*args, **extra_args), return_shape=True
        )(*types)
        if jax.tree.structure(out) != tree:
            raise NotShardableError(
                "this optimizer cannot be sharded: its updates have another structure than the "
                "parameters"
            )
        values = evaluator.run(jaxpr, inputs)
        owned = evaluator.output_tree(
            values[: tree.num_leaves], [x.dtype for x in jax.tree.leaves(out)]
        )
        new_updates = tree.unflatten(comm.all_gather(owned, layout))
        return new_updates, evaluator.output_state(form, values[tree.num_leaves :])

    def _evaluator(self, layout: OwnedLayout, params: PyTree) -> ShardEvaluator:
        def sum_over_ranks(vectors: list[jax.Array]) -> list[jax.Array]:
            other_axes = self.placement.other_axes(params)
            known = {self.comm.axis_name, *other_axes}
            varying = set().union(*map(_compat.varying_axes, vectors))
            for axis in sorted(varying - known, key=str):
                raise ArgumentError(
                    f"this optimizer sums over full tensors, which vary along {axis!r} too: give "
                    "specs=, to say how they are sharded along it"
                )
            sums = self.comm.sum_vectors(vectors)
            for name, is_sharded in other_axes.items():
                sums = [jnp.where(np.array(is_sharded), lax.psum(x, name), x) for x in sums]
            return sums

        rows = [bucket.rows(self.comm.axis_name) for bucket in layout.buckets]
        return ShardEvaluator(layout, self.placement.global_types(params), rows, sum_over_ranks)


def _check_owners(state: Any, layout: OwnedLayout) -> None:
    if not isinstance(state, ShardedState) or state.owners != layout.fingerprint:
        raise ArgumentError(
            "this state is not sharded for the owners of this plan, or is of other parameters: "
            "call gather_state of the optimizer that it comes from, if it is sharded, and then "
            "shard_state of this one"
        )
