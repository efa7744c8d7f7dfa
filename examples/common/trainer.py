"""Trainer: all that a run computes on one mesh, made of what a model has of its own.

A model brings a loss, an optimizer and the types of its data, all as one rank sees them; what is
made of them is trained with, is measured, and is compiled for devices that are not there:

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

from examples.common.data_parallel import Parallel
from examples.common.device_arrays import SPLIT, WHOLE
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.collectives.gradients import BUCKET_BYTES
from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.elastic.peer_checkpoint import Memory
from ftmesh.execute.lowering import PPERMUTE
from ftmesh.layout.batch_shares import Shares
from ftmesh.layout.owned_buckets import Owned
from ftmesh.optim.sharded import ShardedOptimizer
from ftmesh.topology.topology import Topology


class State(NamedTuple):
    """What a step changes.

    Every rank has statistics of its own, in a row, and whole ones are their mean; a model without
    any has an empty tuple of them. Of a sharded optimizer's state, `copies` are what the rank has
    of another rank's part, where processes may be lost.
    """

    params: Any
    stats: Any
    optimizer: Any
    copies: Any = ()


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is spread over the chips: what every trainer can be told of it.

    The optimizer's state is `sharded`, or whole at every device. The rest is as for `Parallel.on`.
    """

    algorithm: str = "auto"
    executor: str = PPERMUTE
    sharded: bool = True
    with_idle: bool = False
    overlap: bool = False
    bucket_bytes: int = BUCKET_BYTES
    in_vmem: bool = False
    keeps_state: bool = True
    copies: bool = True

    def on(
        self,
        topology: Topology,
        params: Any,
        wire_dtype: Any = jnp.float32,
        cluster: Cluster = ALONE,
    ) -> Parallel:
        """The devices, with a plan for the gradients of `params`, which may be types."""
        itemsize = jnp.dtype(wire_dtype).itemsize
        return Parallel.on(
            topology,
            self.algorithm,
            payload_bytes=sum(leaf.size for leaf in jax.tree.leaves(params)) * itemsize,
            wire_dtype=wire_dtype,
            with_idle=self.with_idle,
            overlap=self.overlap,
            bucket_bytes=self.bucket_bytes,
            in_vmem=self.in_vmem,
            cluster=cluster,
            keeps_state=self.keeps_state,
            copies=self.copies and self.sharded,
            halved=self.sharded,
            executor=self.executor,
        )


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What is compiled for a run, when it is first called or ahead of that.

    `step` takes over the state that it is given, unless `parallel` keeps it. `inputs` are the types
    of what it takes, as they lie on the devices.
    """

    parallel: Parallel
    shares: Shares
    lr_schedule: Callable[[int], float]  # of a step, counted from 0, without a device
    first: Callable[[Any, Any], State]  # parameters and statistics of the model -> state
    step: Any  # state, batch -> state, loss
    mean_stats: Any  # the statistics of all ranks -> those for evaluation
    evaluate: Any  # parameters, such statistics, batch -> how many are right, how many there are
    own_stats: Any  # statistics -> the same for all ranks
    copies: Any  # the optimizer's state -> copies of it, with partners
    inputs: tuple[State, Any]
    saved: State  # the types of what a checkpoint holds
    layouts: tuple[Owned, ...] = ()  # of a sharded optimizer

    def save(self, checkpoints: Checkpoints | Memory, step: int, state: State) -> None:
        """Begin to write a state, or to keep it; of statistics, their mean."""
        mean = state._replace(stats=self.mean_stats(state.stats), copies=())
        devices = self.parallel.live_devices
        checkpoints.save(step, mean, layouts=self.layouts, devices=devices)

    def restore(self, checkpoints: Checkpoints | Memory) -> tuple[int, State] | None:
        """The step and the state of the last sound checkpoint, if there is one."""

        def agree(found: str) -> None:
            self.parallel.cluster.agree({"the step to go on from": found})

        found = checkpoints.restore(self.saved, layouts=self.layouts, agree=agree)
        return None if found is None or not found[0] else (found[0], self.ready(found[1]))

    def ready(self, saved: State) -> State:
        """A state as a step takes it, from one as a checkpoint holds it."""
        copies = self.copies(saved.optimizer)
        return saved._replace(stats=self.own_stats(saved.stats), copies=copies)


def make_trainer(
    parallel: Parallel,
    shares: Shares,
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
    """The trainer of a model on the devices of `parallel`.

    `types` are those of its parameters and statistics, `row` is that of a row of a batch. As a rank
    does it, ``loss(params, stats, batch)`` is what the rank gives to the mean over all ranks, with
    the new statistics, and ``count_right(params, stats, batch)`` how many answers are right and how
    many there are. Gradients travel in `wire_dtype`.
    """
    params, stats = types
    own_batch, batch = (_rows_of(row, shares.per_rank * ranks) for ranks in (1, parallel.num_ranks))
    optimizer = parallel.optimizer(
        transformation,
        sharded=sharded,
        wire_dtype=wire_dtype,
        order=parallel.backward_order(loss, params, stats, own_batch),
    )
    has_copies = isinstance(optimizer, ShardedOptimizer) and parallel.partners is not None
    of_optimizer = optimizer.specs(params)
    specs = State(WHOLE, SPLIT, of_optimizer, SPLIT if has_copies else ())
    rows = jax.tree.map(lambda _: SPLIT, row)
    first_of_optimizer = parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=specs.optimizer)

    def copies_of_rank(inner: Any) -> Any:
        return parallel.copies(inner.rows) if has_copies else ()

    copies = parallel.jit(copies_of_rank, in_specs=(of_optimizer,), out_specs=specs.copies)

    def first(params: Any, stats: Any) -> State:
        params = parallel.put(params)
        stats = parallel.put(_in_rows(stats, parallel.num_ranks), SPLIT)
        inner = first_of_optimizer(params)
        return State(params, stats, inner, copies(inner))

    def step_of_rank(state: State, batch: Any) -> tuple[State, jax.Array]:
        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            return loss(params, _own_row(state.stats), batch)

        (value, stats), grads = optimizer.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, inner = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        after = State(params, _in_rows(stats, 1), inner, copies_of_rank(inner))
        return after, parallel.mean(value)

    def evaluation_of_rank(params: Any, stats: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        counts: tuple[jax.Array, jax.Array] = parallel.sum(count_right(params, stats, batch))
        return counts

    def mean_of_ranks(stats: Any) -> Any:
        return parallel.mean(_own_row(stats))

    inner = first_of_optimizer.eval_shape(params)
    state = State(
        params,
        jax.eval_shape(lambda stats: _in_rows(stats, parallel.num_ranks), stats),
        inner,
        copies.eval_shape(inner),
    )
    return Trainer(
        parallel=parallel,
        shares=shares,
        lr_schedule=lr_schedule,
        first=first,
        step=parallel.jit(
            step_of_rank,
            in_specs=(specs, rows),
            out_specs=(specs, WHOLE),
            donate_argnums=() if parallel.keeps_state else (0,),
        ),
        mean_stats=parallel.jit(mean_of_ranks, in_specs=(SPLIT,), out_specs=WHOLE),
        evaluate=parallel.jit(evaluation_of_rank, in_specs=(WHOLE, WHOLE, rows), out_specs=WHOLE),
        own_stats=parallel.jit(
            lambda stats: _in_rows(stats, 1), in_specs=(WHOLE,), out_specs=SPLIT
        ),
        copies=copies,
        inputs=parallel.typed((state, batch), (specs, rows)),
        saved=parallel.typed(
            state._replace(stats=stats, copies=()), specs._replace(stats=WHOLE, copies=())
        ),
        layouts=(optimizer.layout(params),) if isinstance(optimizer, ShardedOptimizer) else (),
    )


def _rows_of(row: Any, number: int) -> Any:
    """The types of a batch with so many rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((number, *x.shape), x.dtype), row)


def _in_rows(stats: Any, num_ranks: int) -> Any:
    """The same statistics for so many ranks, in rows."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_ranks, *x.shape)), stats)


def _own_row(stats: Any) -> Any:
    """The statistics of a rank, from the one row that it has."""
    return jax.tree.map(lambda x: x[0], stats)
