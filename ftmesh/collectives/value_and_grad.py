"""`jax.value_and_grad` over the whole batch, each rank computing its share of the examples.

    loss, grads = plan.value_and_grad(loss_fn)(params, images, labels)

is ``jax.value_and_grad(loss_fn)(params, images, labels)`` with the plan's all-reduce, or an error.
Where the axis is bound, as in shard_map, it is that of this rank's examples, followed by
`plan.pmean`. `check_loss` compares the two on data, and names what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import jax
import numpy as np

from ftmesh.collectives.all_reduce import BUCKET_BYTES
from ftmesh.collectives.compiled_cache import compile_once, run_compiled
from ftmesh.collectives.local_loss import (
    ArgumentRoles,
    Loss,
    OverRanks,
    check_bound_axis,
    check_keywords,
    mean_value_and_grads,
    own_weights,
)
from ftmesh.collectives.partitioning import MeshContext, is_spec
from ftmesh.collectives.per_rank_loss import AuxReduction, mean_over_ranks
from ftmesh.collectives.whole_batch import PartitionedLoss, TracedLoss, on_native_path
from ftmesh.errors import ArgumentError, CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.lowering import XLA
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.batch_shares import BatchShares


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    plan: PlanLike,
    axis_name: AxisName = "data",
    weighted: bool = False,
    per_rank: bool = False,
    replicated: int | Sequence[int] = (),
    specs: Specs = None,
    mesh: Any = None,
    reduce_aux: Callable[[PyTree], PyTree] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> Callable[..., Any]:
    """Return a function as `jax.value_and_grad` does, computed on the plan.

    In jit, where the axis is not bound, arguments are whole arrays, and value, gradients and aux
    are those of the whole batch. Ranks share the first dimension of the batch, of any size, and
    have everything else whole. Sums over examples are summed over ranks: gradients once, and
    others, such as the sum of a mask or the statistics of a batch norm, where they are used. A
    loss that needs examples of other ranks in any other way is rejected.

    Where the axis is bound, as in shard_map, arguments are those of this rank, and so are the loss
    and aux; value and gradients are means over ranks. A weight that is this rank's own shard keeps
    its gradient: let the loss gather it with `plan.all_gather`.

    Args:
        loss: Returns a number, or a vector with one for each example, whose mean is taken. Keyword
            arguments go to it as they are.
        argnums: The arguments to differentiate by, the weights.
        has_aux: Whether `loss` returns ``(loss, aux)``.
        axis_name: The mesh axis of the plan.
        weighted: Whether `loss` returns ``(sum, weight)``, two numbers or two vectors. The value
            is the sum of sums over the sum of weights. Weights count as constants in the
            derivative.
        per_rank: In jit, average what ranks compute from their own examples, as batch norms per
            rank need. The axis is bound in the loss. Then only a vector allows batches of any
            size; and aux with a row for each example is put together, and other aux averaged.
        replicated: Further arguments that are not the batch, such as a mask of all positions.
        specs: How weights are sharded: a spec or sharding, or a pytree of them, as for
            `jax.device_put`. Each device sums its own shard along other axes. In jit, the operation
            that takes a weight which is sharded along `axis_name` gathers it by the plan, layer by
            layer in a scan, and its gradient is scattered; a weight that is sharded along other
            axes too is gathered before the loss. Inside shard_map these are the rank's own
            shards; with check_vma=False name them here, because types do not show them. Explicit
            axes need no `specs`.
        mesh: The mesh to run on in jit. By default that of `jax.set_mesh`, of the arguments, or of
            the plan. Arrays stay sharded along axes other than `axis_name`.
        reduce_aux: Called on each rank with its aux; returns what is the same on all ranks. In jit
            for `per_rank` only.
        bucket_bytes, wire_dtype, accumulate_dtype: As for `ftmesh.pmean`. Weights sharded along
            `axis_name` are in no bucket.

    Raises:
        ArgumentError: When called, if it is not clear which arguments are the batch, or if ranks
            cannot compute their part of the result from their share of it. The message names the
            source line of the first operation that needs other examples.
    """
    weight_argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    replicated = (replicated,) if isinstance(replicated, int) else tuple(replicated)
    ranks = OverRanks(plan, axis_name, bucket_bytes, wire_dtype, accumulate_dtype)
    specs = (specs,) if isinstance(argnums, int) and specs is not None else specs

    @wraps(loss)
    def run(*args: PyTree, **kwargs: Any) -> Any:
        roles = ArgumentRoles.assign(len(args), weight_argnums, replicated)
        known = Loss(loss, kwargs, roles.weights, has_aux=has_aux, weighted=weighted)
        if _compat.axis_exists(axis_name):
            check_bound_axis(axis_name, mesh)
            weights = tuple(args[i] for i in roles.weights)
            own, other_specs = own_weights(weights, axis_name, specs)
            value, grads, aux = mean_value_and_grads(known, ranks, args, other_specs, is_own=own)
            aux = aux if reduce_aux is None else reduce_aux(aux)
        else:
            if reduce_aux is not None and not per_rank:
                raise ArgumentError(
                    "reduce_aux combines what ranks compute, and in jit aux is that of the whole "
                    "batch: leave it out, or give per_rank=True"
                )
            context = MeshContext.find(plan, axis_name, args, mesh)
            in_jit = _mean_over_ranks if per_rank else _of_whole_batch
            value, grads, aux = in_jit(known, roles, context, ranks, args, specs, reduce_aux)
        grad = grads[0] if isinstance(argnums, int) else grads
        return ((value, aux), grad) if has_aux else (value, grad)

    return run


def _of_whole_batch(
    loss: Loss,
    roles: ArgumentRoles,
    context: MeshContext,
    ranks: OverRanks,
    args: tuple[PyTree, ...],
    specs: Specs,
    _: Any,
) -> Any:
    """Return the value, the gradients and aux of the whole batch."""
    weights = tuple(args[i] for i in roles.weights)
    weight_specs = tuple(jax.tree.leaves(context.weight_specs(weights, specs), is_leaf=is_spec))
    traced = TracedLoss.trace(loss, roles, args, context.axis_name)
    check_keywords(loss.kwargs, traced.batch_size)
    shares = BatchShares.for_ranks(ranks.plan, traced.batch_size)

    def make() -> Callable[..., list[Any]]:
        context.check_devices(ranks.plan)
        if ranks.plan.executor == XLA and shares.is_even:
            return on_native_path(traced.without_arrays(), context, weight_specs)
        context.check_shards(weights, weight_specs)
        dims = [context.shard_dimension(spec) for spec in weight_specs]
        partitioned = PartitionedLoss.find(traced.without_arrays(), ranks, dims)
        return partitioned.rank_program(ranks, weight_specs).on_mesh(context)

    if _compat.is_tracing():
        run = make()
    else:
        run = compile_once((traced.key, ranks.key, context, weight_specs), make)
    return traced.out_tree.unflatten(run(*traced.inputs, *traced.consts))


def _mean_over_ranks(
    loss: Loss,
    roles: ArgumentRoles,
    context: MeshContext,
    ranks: OverRanks,
    args: tuple[PyTree, ...],
    specs: Specs,
    reduce_aux: Callable[[PyTree], PyTree] | None,
) -> Any:
    """Return the means over ranks of their values and gradients, and aux."""
    shares = BatchShares.for_ranks(ranks.plan, roles.batch_size(args, numbers_are_replicated=False))
    check_keywords(loss.kwargs, shares.global_batch)

    def run(args: tuple[PyTree, ...]) -> Any:
        aux_reduction = AuxReduction(ranks, shares, reduce_aux)
        return mean_over_ranks(loss, roles, context, aux_reduction, args, specs)

    return run(args) if _compat.is_tracing() else run_compiled(run, args)


# Compared with JAX ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """One array of the result: on the plan, and without."""

    name: str  # such as "gradient['w']"
    difference: float  # the largest, in units of the largest number; inf if shapes differ
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.difference <= self.tolerance  # False if it is not a number

    def __str__(self) -> str:
        if np.isinf(self.difference):
            return f"{self.name} has another shape or type"
        return f"{self.name} differs by {self.difference:.2g} of its largest number"


class LossCheck(tuple[Comparison, ...]):
    """The arrays that were compared, and as text what differs. True if nothing does."""

    __slots__ = ()

    @property
    def differing(self) -> tuple[Comparison, ...]:
        return tuple(entry for entry in self if not entry.is_equal)

    def __bool__(self) -> bool:
        return not self.differing

    def __str__(self) -> str:
        if self:
            largest = max(entry.difference for entry in self)
            return f"all {len(self)} arrays are those of JAX, up to {largest:.1g}"
        lines = [f"{len(self.differing)} of {len(self)} arrays are not those of JAX:"]
        return "\n  ".join([*lines, *map(str, self.differing)])

    def require_equal(self) -> None:
        """Raise CollectiveError if anything differs."""
        if not self:
            raise CollectiveError(str(self))


def check_loss(
    loss: Callable[..., Any],
    args: Sequence[PyTree],
    *,
    plan: PlanLike,
    tolerance: float = 1e-5,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName = "data",
    weighted: bool = False,
    per_rank: bool = False,
    replicated: int | Sequence[int] = (),
    specs: Specs = None,
    mesh: Any = None,
    reduce_aux: Callable[[PyTree], PyTree] | None = None,
) -> LossCheck:
    """Compare the value, the gradients and aux of a loss on the plan with those of JAX alone.

    Both run on `args`, so use a small batch: ``print(plan.check(loss, params, x, y))`` names the
    arrays that differ. With ``per_rank=True`` it shows how far the mean of ranks is from the whole
    batch.

    Args:
        tolerance: The largest difference that counts as rounding, in units of the largest number
            of the array.
        loss, args, plan: The loss, what it is called with, and the plan.
        argnums, has_aux, axis_name, weighted, per_rank, replicated, specs, mesh, reduce_aux:
            As for `Plan.value_and_grad`.

    Raises:
        ArgumentError: The loss is rejected; the message names the line.
    """
    on_plan = value_and_grad(
        loss,
        argnums,
        has_aux,
        plan=plan,
        axis_name=axis_name,
        weighted=weighted,
        per_rank=per_rank,
        replicated=replicated,
        specs=specs,
        mesh=mesh,
        reduce_aux=reduce_aux,
    )
    outcome = on_plan(*args)
    (value, aux), grads = outcome if has_aux else ((outcome[0], None), outcome[1])
    weights = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    replicated = (replicated,) if isinstance(replicated, int) else tuple(replicated)
    roles = ArgumentRoles.assign(len(args), weights, replicated)
    known = Loss(loss, {}, roles.weights, has_aux=has_aux, weighted=weighted)
    batch_size = roles.batch_size(args, numbers_are_replicated=True)
    plain_value, plain_grads, plain_aux = jax.device_get(
        known.of_whole_batch(tuple(map(_on_one_device, args)), batch_size)
    )
    plain_grads = plain_grads[0] if isinstance(argnums, int) else plain_grads
    results = {"value": value, "gradient": grads, "aux": aux}
    expected = {"value": plain_value, "gradient": plain_grads, "aux": plain_aux}
    entries = []
    for name, tree in expected.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, want), have in zip(leaves, jax.tree.leaves(results[name]), strict=True):
            title = f"{name}{jax.tree_util.keystr(path)}"
            entries.append(Comparison(title, _difference(have, want), tolerance))
    return LossCheck(entries)


def _on_one_device(arg: PyTree) -> PyTree:
    """Arrays without their placement; everything else, such as keys, as it is."""

    def take(leaf: Any) -> Any:
        is_plain = isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.extended
        )
        return jax.numpy.asarray(np.asarray(leaf)) if is_plain else leaf

    return jax.tree.map(take, arg)


def _difference(have: Any, want: Any) -> float:
    have, want = np.asarray(have), np.asarray(want)
    if have.shape != want.shape or have.dtype.kind != want.dtype.kind:
        return np.inf
    if not want.size:
        return 0.0
    kind = complex if want.dtype.kind == "c" else float
    have, want = have.astype(kind), want.astype(kind)
    same = (have == want) | (np.isnan(have) & np.isnan(want))
    scale = max(np.max(np.abs(want[np.isfinite(want)]), initial=0.0), np.finfo(np.float32).tiny)
    return float(np.max(np.where(same, 0.0, np.abs(np.where(same, 0, have - want))) / scale))
