"""Optax transformations whose state and work are sharded over the chips of a plan (ZeRO).

    optimizer = plan.shard(optax.adamw(1e-3))
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)

An update runs between a reduce-scatter and an all-gather: each chip gets the sum of its part of
the gradients, computes its part of the updates, and all gather these. This communicates as much as
a plain all-reduce. Each of N chips stores one N-th of the state.

The state has the tree that optax gives it. In place of a tensor of a parameter's shape it has that
tensor as a vector, in its natural order, padded to a multiple of N and sharded along the axis. So
it is made of ordinary arrays, and means the same on every mesh of N chips, whichever have failed
and whatever the algorithm; see `ftmesh.layout.flat_shards`. On a plan with idle devices it is
replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ftmesh import collectives
from ftmesh.collectives.gradients import (
    BUCKET_BYTES,
    ReducedGradients,
    check_order,
    local_value_and_grad,
    reduce_in_backward,
)
from ftmesh.collectives.partitioning import REPLICATED, is_spec
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.flat_shards import LeafLayout, StateForm, TreeLayout, state_form
from ftmesh.optim.communication import (
    Communication,
    MeshPlacement,
    Reduce,
    reduction_groups,
)
from ftmesh.optim.evaluate import ShardEvaluator, unusable


class ShardedOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optax transformation whose state is sharded over the chips of a plan.

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
        specs: How parameters are sharded, as for `Plan.value_and_grad`. Along other axes of the
            mesh each shard is reduced by itself. Along the axis of the plan (FSDP), each rank
            updates its own piece, with the state of that piece, and its gradient is used as it is:
            it must be that of the loss of all ranks. A norm is always that of the full tensor.
        min_size: Tensors with fewer elements are replicated: to cut what is small takes longer than
            to update all of it on every rank.
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
        min_size: int = 0,
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
        optimizer.placement = MeshPlacement(plan, axis_name, specs, mesh, min_size)
        optimizer.bucket_bytes, optimizer.overlap, optimizer.order = bucket_bytes, overlap, order
        return optimizer

    def value_and_grad(
        self, loss: Callable[..., Any], *, has_aux: bool = False
    ) -> Callable[..., Any]:
        """Differentiate `loss` at this rank, as `jax.value_and_grad` does.

        Returns:
            A function that returns the loss of this rank and gradients for `update`: with `overlap`
            this rank's parts, as `ReducedGradients`, otherwise the gradients of this rank alone.
            Those of parameters that are cut along the axis are of the mean loss of all ranks, or of
            the sum.
        """
        if not self.overlap:
            local = local_value_and_grad(loss, self.comm.axis_name, has_aux=has_aux)

            def run_local(params: PyTree, *args: Any) -> Any:
                value, grads = local(params, *args)
                leaves, tree = jax.tree.flatten(grads)
                return value, tree.unflatten(self._scale_local(leaves, self.layout(params)))

            return run_local
        # Nothing overlaps with a loop, so the rounds are unrolled.
        comm = replace(self.comm, plan=self.comm.plan.unrolled_variant)

        def run(params: PyTree, *args: Any) -> Any:
            layout, tree = self.layout(params), jax.tree.structure(params)
            leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]
            groups = reduction_groups(layout)
            in_no_group = [i for i, leaf in enumerate(layout.leaves) if leaf.kind == "local"]

            def loss_of_slots(slots: list[list[Any]], others: list[Any]) -> Any:
                reduce = partial(comm.reduce_group, layout)
                passed = reduce_in_backward(leaves, groups, slots, reduce, comm.axis_name)
                for i, leaf in zip(in_no_group, others, strict=True):
                    passed[i] = leaf
                return loss(tree.unflatten(passed), *args)

            slots = comm.gradient_slots(leaves, layout)
            others = [leaves[i] for i in in_no_group]
            value, (grads, other_grads) = jax.value_and_grad(
                loss_of_slots, argnums=(0, 1), has_aux=has_aux
            )(slots, others)
            own: dict[int, Any] = dict(zip(in_no_group, other_grads, strict=True))
            for group, parts in zip(groups, grads, strict=True):
                own |= zip(group, parts, strict=True)
            parts = self._scale_local([own[i] for i in range(len(leaves))], layout)
            return value, ReducedGradients(parts, is_sharded=True)

        return run

    def _scale_local(self, grads: list[Any], layout: TreeLayout) -> list[Any]:
        """Turn gradients of a sum over ranks into those of the mean, of what is cut along the axis.

        The transpose of a gather has summed them.
        """
        if self.comm.reduce != "mean":
            return grads
        return [
            grad / leaf.num_ranks if leaf.kind == "local" else grad
            for grad, leaf in zip(grads, layout.leaves, strict=True)
        ]

    def apply(
        self, updates: PyTree, state: Any, params: PyTree, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        """Return the new parameters and the new state: `update` and `optax.apply_updates` in one.

        Ranks add updates to their parts of the parameters and gather these, which takes one pass
        over memory less.
        """
        new_params, state = self._run_update(updates, state, params, extra_args, applies=True)
        return new_params, state

    def specs(self, params: PyTree) -> PyTree:
        """Return the `PartitionSpec` of every leaf of the state, for shard_map.

        For this, `layout`, `form` and `full_types` the types of the parameters are enough.
        """
        form, stored = self.form(params), self.placement.stored_specs(params)
        return form.tree.unflatten(
            REPLICATED if param is None else stored[param] for param in form.params
        )

    def full_types(self, params: PyTree) -> PyTree:
        """Return the types of the state as the transformation alone would have it.

        Checkpoints need them, to store a state in the shapes of the parameters.
        """
        form = self.form(params)
        return form.tree.unflatten(form.types)

    def gather_state(self, state: PyTree, params: PyTree) -> PyTree:
        """Return the state as the transformation alone would have it, in the parameters' shapes.

        Outside shard_map the state may be that of any number of ranks: use this and `shard_state`
        to continue on another number. Of the parameters, the types matter alone. Tensors are
        sharded as the parameters are.
        """
        params = self.placement.without_other_meshes(params)
        form = self.form(params)
        if self.placement.is_bound:
            form.check(state, is_global=False)
            own = enumerate(form.leaves(state))
            return form.tree.unflatten([self._gather_tensor(x, form.stored(i)) for i, x in own])
        specs = jax.tree.leaves(self.placement.param_specs(params), is_leaf=is_spec)
        return self._convert(state, params, form.full_tensor, specs)

    def shard_state(self, state: PyTree, params: PyTree) -> PyTree:
        """Shard a state in the parameters' shapes: the inverse of `gather_state`."""
        params = self.placement.without_other_meshes(params)
        form = self.form(params)
        if self.placement.is_bound:
            own = enumerate(form.leaves(state))
            return form.tree.unflatten([self._own_part(x, form.stored(i)) for i, x in own])
        return self._convert(state, params, form.stored_array, self.placement.stored_specs(params))

    def _convert(
        self,
        state: PyTree,
        params: PyTree,
        convert: Callable[[Any, int], Any],
        specs: Sequence[PartitionSpec],
    ) -> PyTree:
        """Convert the leaves of a global state one by one, each replicated for the time."""
        form, place = self.form(params), self.placement.place
        leaves = []
        for i, (leaf, param) in enumerate(zip(form.leaves(state), form.params, strict=True)):
            if form.stored(i) is not None:
                leaf = convert(place(leaf, REPLICATED, params), i)
            leaves.append(place(leaf, REPLICATED if param is None else specs[param], params))
        return form.tree.unflatten(leaves)

    def layout(self, params: PyTree) -> TreeLayout:
        """Return how the tensors of each parameter are stored, and the buckets they travel in."""
        leaves, order = self.placement.leaf_layouts(params), self.order
        if order is None and self.overlap:
            order = range(len(leaves))[::-1]  # the gradients of the last leaves come first
        if order is not None:
            check_order(order, len(leaves))
        return TreeLayout.build(leaves, self.bucket_bytes, order)

    def form(self, params: PyTree) -> StateForm:
        """Return the structure of the state."""
        types, tree = self.placement.global_types(params), jax.tree.structure(params)
        return state_form(self.transformation.init, self.layout(params), types, tree)

    def _init(self, params: PyTree) -> Any:
        """Return the first state: this rank's where the axis is bound, else a global one."""
        if not self.placement.is_bound:
            param_specs = self.placement.param_specs(params)
            init = self._with_specs(param_specs)._init
            state = self.placement.run(init, params, (param_specs,), self.specs(params))(params)
            traced = [x for x in jax.tree.leaves(params) if isinstance(x, jax.core.Tracer)]
            # jit takes its devices from arguments that are used, and zeros use none.
            return jax.lax.optimization_barrier((state, traced))[0] if traced else state
        layout, tree = self.layout(params), jax.tree.structure(params)
        evaluator = self._evaluator(layout, params)
        jaxpr = jax.make_jaxpr(self.transformation.init)(tree.unflatten(evaluator.types))
        own = self.comm.take_own(params, layout)
        inputs = evaluator.input_tree("params", own, jax.tree.leaves(params))
        return evaluator.output_state(self.form(params), evaluator.run(jaxpr, inputs))

    def _update(self, updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any) -> Any:
        """Return updates like the parameters and the new state."""
        return self._run_update(updates, state, params, extra_args, applies=False)

    def _run_update(
        self, updates: PyTree, state: Any, params: PyTree, extra_args: Any, *, applies: bool
    ) -> Any:
        """Return updates, or the parameters with them applied, and the new state."""
        stubs = {name: unusable(name) for name, value in extra_args.items() if callable(value)}
        extra_args = {name: x for name, x in extra_args.items() if name not in stubs}
        if self.placement.is_bound:
            return self._update_rank(self.comm, applies, stubs, updates, state, params, extra_args)
        like = updates if params is None else params
        param_specs, state_specs = self.placement.param_specs(like), self.specs(like)
        self.form(like).check(state, is_global=True)
        comm = replace(self.comm, reduce="none")  # global gradients are the same at all ranks
        given_specs = REPLICATED if params is None else param_specs
        in_specs = (param_specs, state_specs, given_specs, REPLICATED)
        known = self._with_specs(param_specs)

        def update(*args: Any) -> Any:
            return known._update_rank(comm, applies, stubs, *args)

        # Programs are kept by name.
        update.__name__ = "_".join(["apply" if applies else "update", *sorted(stubs)])
        mapped = self.placement.run(update, like, in_specs, (param_specs, state_specs))
        return mapped(updates, state, params, extra_args)

    def _with_specs(self, specs: Specs) -> ShardedOptimizer:
        """Return this optimizer with the specs that types show outside of shard_map alone."""
        if self.placement.specs is not None:
            return self
        other = ShardedOptimizer(
            self.transformation,
            self.placement.plan,
            self.comm.axis_name,
            bucket_bytes=self.bucket_bytes,
            overlap=self.overlap,
            order=self.order,
            specs=specs,
            min_size=self.placement.min_size,
        )
        other.comm = self.comm
        return other

    def _update_rank(
        self,
        comm: Communication,
        applies: bool,
        stubs: dict[str, Any],
        updates: PyTree,
        state: Any,
        params: PyTree,
        extra_args: Any,
    ) -> tuple[PyTree, PyTree]:
        like = updates if params is None else params
        layout, tree, form = self.layout(like), jax.tree.structure(like), self.form(like)
        if any(comm.axis_name in _compat.varying_axes(x) for x in jax.tree.leaves(extra_args)):
            raise ArgumentError(
                f"extra arguments must be the same at all ranks, and some of {sorted(extra_args)} "
                "differ: average them first, with plan.pmean"
            )
        form.check(state, is_global=False)
        evaluator = self._evaluator(layout, like)
        grads, full = comm.reduce_scatter(updates, layout, tree)
        inputs = evaluator.input_tree("grads", grads, full) + evaluator.input_state(state, form)
        grad_types = [
            jax.ShapeDtypeStruct(type_.shape, grad.dtype)
            for type_, grad in zip(evaluator.types, grads, strict=True)
        ]
        types = [tree.unflatten(grad_types), form.tree.unflatten(form.types)]
        own_params: list[jax.Array] = []
        if params is not None:
            own_params = comm.take_own(params, layout)
            inputs += evaluator.input_tree("params", own_params, jax.tree.leaves(params))
            types.append(tree.unflatten(evaluator.types))
        transform = optax.with_extra_args_support(self.transformation).update
        jaxpr, (out, new_state) = jax.make_jaxpr(
            lambda *args: transform(*args, **extra_args, **stubs), return_shape=True
        )(*types)
        evaluator.check_outputs(tree, form, out, new_state)
        values = evaluator.run(jaxpr, inputs)
        dtypes = [x.dtype for x in jax.tree.leaves(out)]
        own = evaluator.output_tree(values[: tree.num_leaves], dtypes)
        if applies:
            own = optax.apply_updates(own_params, own)
        gathered = tree.unflatten(comm.all_gather(own, layout))
        return gathered, evaluator.output_state(form, values[tree.num_leaves :])

    def _evaluator(self, layout: TreeLayout, params: PyTree) -> ShardEvaluator:
        sum_over_ranks = partial(self.comm.sum_vectors, self.placement.other_axes(params))
        types = self.placement.global_types(params)
        gather = partial(self.comm.gather_tensors, self.bucket_bytes)
        comm = self.comm
        return ShardEvaluator(layout, types, comm.rank, sum_over_ranks, gather, comm.take_part)

    def _gather_tensor(self, array: Any, stored: LeafLayout | None) -> Any:
        if stored is None:
            return array
        return self.comm.gather_tensors(self.bucket_bytes, [array.reshape(-1)], [stored])[0]

    def _own_part(self, tensor: Any, stored: LeafLayout | None) -> Any:
        if stored is None:
            return tensor
        (part,) = self.comm.take_own([tensor], TreeLayout((stored,), ()))
        return part.reshape(stored.stored_shape)
