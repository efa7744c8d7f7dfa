"""The compiled functions of a run, built from a model's loss, optimizer and batch type.

The model's functions are those of one rank. The trainer is for training, for benchmarks, and for
compilation without devices:

    trainer = make_trainer(parallel, shares, types=types, row=row, loss=loss, ...)
    state = trainer.first(params, stats)
    state, loss = trainer.step(state, batch)

    trainer.step.lower(*trainer.inputs).compile()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from examples.common.data_parallel import DataParallel
from examples.common.device_arrays import REPLICATED, SHARDED
from ftmesh.collectives.gradients import BUCKET_BYTES
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup
from ftmesh.layout.batch_shares import BatchShares
from ftmesh.optim.sharded import ShardedOptimizer
from ftmesh.planning.selection import AUTO
from ftmesh.topology.topology import Topology


class State(NamedTuple):
    """What a step updates."""

    params: Any
    stats: Any  # one row per rank; () for a model without statistics
    optimizer: Any


LARGE_MODEL = 2**20  # parameters: of a smaller model, all tensors of the optimizer are sharded
SMALL = 2**17  # elements: smaller tensors of a large model are replicated


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is distributed. See `DataParallel.create`; `sharded` is the optimizer's state."""

    algorithm: str = "auto"
    executor: str = AUTO
    sharded: bool = True
    with_idle: bool = False
    overlap: bool = False
    bucket_bytes: int = BUCKET_BYTES
    keeps_state: bool = True

    def data_parallel(
        self,
        topology: Topology,
        params: Any,
        wire_dtype: Any = jnp.float32,
        group: ElasticGroup = SINGLE_PROCESS,
    ) -> DataParallel:
        """Plan the sums of the gradients of `params`, which may be types."""
        itemsize = jnp.dtype(wire_dtype).itemsize
        return DataParallel.create(
            topology,
            self.algorithm,
            payload_bytes=sum(leaf.size for leaf in jax.tree.leaves(params)) * itemsize,
            wire_dtype=wire_dtype,
            with_idle=self.with_idle,
            overlap=self.overlap,
            bucket_bytes=self.bucket_bytes,
            group=group,
            keeps_state=self.keeps_state,
            reduce_scatter=self.sharded,
            executor=self.executor,
        )


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """The compiled functions of a run. `step` donates its state unless `parallel.keeps_state`."""

    parallel: DataParallel
    shares: BatchShares
    lr_schedule: Callable[[int], float]  # step, from 0 -> learning rate; uses no device
    first: Callable[[Any, Any], State]  # params, stats -> state
    step: Any  # state, batch -> state, loss
    mean_stats: Any  # stats of all ranks -> stats for evaluation
    evaluate: Any  # params, mean stats, batch -> number right, number of answers
    own_stats: Any  # mean stats -> the same row for every rank
    inputs: tuple[State, Any]  # types and shardings of the arguments of `step`
    saved: State  # types and shardings of what `to_saved` returns
    full_types: State | None = None  # of the state of a sharded optimizer, before sharding

    def to_saved(self, state: State) -> State:
        """Return a state that any mesh can continue from: with the mean of its statistics."""
        has_stats = bool(jax.tree.leaves(state.stats))
        return state._replace(stats=self.mean_stats(state.stats)) if has_stats else state

    def from_saved(self, saved: State) -> State:
        """Return a state for `step`."""
        return saved._replace(stats=self.own_stats(saved.stats))


def make_trainer(
    parallel: DataParallel,
    shares: BatchShares,
    *,
    types: tuple[Any, Any],
    row: Any,
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]],
    count_right: Callable[[Any, Any, Any], tuple[jax.Array, jax.Array]],
    transformation: optax.GradientTransformation,
    lr_schedule: Callable[[Any], Any],
    sharded: bool = True,
    wire_dtype: Any = None,
) -> Trainer:
    """Build the trainer of a model on the devices of `parallel`.

    Args:
        parallel: The devices.
        shares: Which examples of a batch each rank has.
        types: Of the model's parameters and statistics.
        row: Type of one row of a batch.
        loss: ``(params, stats, batch)`` of a rank -> its term of the mean over ranks, new stats.
        count_right: ``(params, stats, batch)`` of a rank -> number right, number of answers.
        transformation: The optimizer.
        lr_schedule: Its learning rate by step.
        sharded: Shard the optimizer's state.
        wire_dtype: What gradients are sent in.
    """
    params, stats = types
    own_batch = _batch_type(row, shares.per_rank)
    batch = _batch_type(row, shares.per_rank * parallel.num_ranks)
    num_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    optimizer = parallel.optimizer(
        transformation,
        sharded=sharded,
        wire_dtype=wire_dtype,
        order=parallel.backward_order(loss, params, stats, own_batch),
        min_size=SMALL if num_params >= LARGE_MODEL else 0,
    )
    optimizer_specs = optimizer.specs(params)
    specs = State(REPLICATED, SHARDED, optimizer_specs)
    batch_specs = jax.tree.map(lambda _: SHARDED, row)
    init_optimizer = parallel.jit(optimizer.init, in_specs=(REPLICATED,), out_specs=optimizer_specs)

    def first(params: Any, stats: Any) -> State:
        params = parallel.put(params)
        stats = parallel.put(_as_rows(stats, parallel.num_ranks), SHARDED)
        return State(params, stats, init_optimizer(params))

    def rank_step(state: State, batch: Any) -> tuple[State, jax.Array]:
        def rank_loss(params: Any) -> tuple[jax.Array, Any]:
            return loss(params, _own_row(state.stats), batch)

        (value, stats), grads = optimizer.value_and_grad(rank_loss, has_aux=True)(state.params)
        params, inner = optimizer.apply(grads, state.optimizer, state.params)
        return State(params, _as_rows(stats, 1), inner), parallel.mean(value)

    def rank_evaluate(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        counts: tuple[jax.Array, jax.Array] = parallel.sum(count_right(params, stats, batch))
        return counts

    def rank_mean_stats(stats: Any) -> Any:
        return parallel.mean(_own_row(stats))

    state = State(
        params,
        jax.eval_shape(lambda stats: _as_rows(stats, parallel.num_ranks), stats),
        init_optimizer.eval_shape(params),
    )
    is_sharded = SHARDED in jax.tree.leaves(optimizer_specs)
    return Trainer(
        parallel=parallel,
        shares=shares,
        lr_schedule=lr_schedule,
        first=first,
        step=parallel.jit(
            rank_step,
            in_specs=(specs, batch_specs),
            out_specs=(specs, REPLICATED),
            donate_argnums=() if parallel.keeps_state else (0,),
        ),
        mean_stats=parallel.jit(rank_mean_stats, in_specs=(SHARDED,), out_specs=REPLICATED),
        evaluate=parallel.jit(
            rank_evaluate, in_specs=(REPLICATED, REPLICATED, batch_specs), out_specs=REPLICATED
        ),
        own_stats=parallel.jit(
            lambda stats: _as_rows(stats, 1), in_specs=(REPLICATED,), out_specs=SHARDED
        ),
        inputs=parallel.with_shardings((state, batch), (specs, batch_specs)),
        saved=parallel.with_shardings(
            state._replace(stats=stats), specs._replace(stats=REPLICATED)
        ),
        full_types=State(None, None, optimizer.full_types(params))
        if isinstance(optimizer, ShardedOptimizer) and is_sharded
        else None,
    )


def _batch_type(row: Any, num_rows: int) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape), x.dtype), row)


def _as_rows(stats: Any, num_ranks: int) -> Any:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_ranks, *x.shape)), stats)


def _own_row(stats: Any) -> Any:
    return jax.tree.map(lambda x: x[0], stats)
