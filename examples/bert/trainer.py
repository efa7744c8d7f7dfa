"""The programs of the trainer: what every rank does, on the devices of a mesh."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from examples.bert.batch import Batch
from examples.bert.config import Config
from examples.bert.model import init
from examples.bert.steps import (
    State,
    evaluation_of_rank,
    make_model,
    make_transformation,
    step_of_rank,
)
from ftmesh.collectives.gradients import BUCKET_BYTES
from ftmesh.mesh.topology import Topology
from ftmesh.optim.lr_schedules import poly_decay
from ftmesh.train.parallel import SPLIT, WHOLE, Parallel
from ftmesh.train.programs import Programs


def make_programs(
    config: Config,
    topology: Topology,
    *,
    algorithm: str = "auto",
    sharded: bool = True,
    overlap: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
    wire_dtype: Any = jnp.bfloat16,
    attention: Literal["xla", "cudnn"] = "xla",
    remat: bool = False,
    unrolled: bool = False,
) -> Programs:
    """Everything that is compiled for a run on the live devices of `topology`.

    The optimizer's state is `sharded` over them. Gradients travel as `wire_dtype`; beside sums that
    `overlap` the backward pass, that goes on only where layers are `unrolled`. See `Parallel.on`
    for what has to do with sums, and `Bert` for the rest.
    """
    model = make_model(config, attention=attention, remat=remat, unrolled=unrolled)
    params = jax.eval_shape(partial(init, model, seed=0))
    wire_dtype = jnp.dtype(wire_dtype)
    parallel = Parallel.on(
        topology,
        algorithm,
        payload_bytes=sum(leaf.size for leaf in jax.tree.leaves(params)) * wire_dtype.itemsize,
        overlap=overlap,
        bucket_bytes=bucket_bytes,
    )
    shares = parallel.shares(config.batch)
    lr_schedule = poly_decay(
        config.base_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.total_steps,
        end=config.end_lr,
        power=config.lr_power,
    )
    optimizer = parallel.optimizer(
        make_transformation(config, lr_schedule),
        sharded=sharded,
        wire_dtype=wire_dtype,
    )
    specs = State(WHOLE, optimizer.specs(params))
    rows = Batch(*(SPLIT for _ in Batch._fields))
    first_of_optimizer = parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=specs.optimizer)

    def first(params: Any) -> State:
        params = parallel.put(params)
        return State(params, first_of_optimizer(params))

    def whole_of_rank(state: State) -> State:
        return State(state.params, optimizer.gather_state(state.optimizer, state.params))

    def state_of_rank(whole: State) -> State:
        return State(whole.params, optimizer.shard_state(whole.optimizer, whole.params))

    state = State(params, first_of_optimizer.eval_shape(params))
    num_rows = shares.per_rank * parallel.num_ranks
    sizes = Batch(
        tokens=config.length,
        segments=config.length,
        lengths=config.packed,
        positions=config.predictions,
        targets=config.predictions,
        is_random=config.packed,
    )
    batch = Batch(*(jax.ShapeDtypeStruct((num_rows, size), jnp.int32) for size in sizes))
    return Programs(
        parallel=parallel,
        shares=shares,
        lr_schedule=lr_schedule,
        first=first,
        step=parallel.jit(
            partial(step_of_rank, model, parallel, shares, optimizer),
            in_specs=(specs, rows),
            out_specs=(specs, WHOLE),
            donate_argnums=(0,),
        ),
        evaluate=parallel.jit(
            partial(evaluation_of_rank, model, parallel), in_specs=(WHOLE, rows), out_specs=WHOLE
        ),
        to_checkpoint=parallel.jit(whole_of_rank, in_specs=(specs,), out_specs=WHOLE),
        from_checkpoint=parallel.jit(state_of_rank, in_specs=(WHOLE,), out_specs=specs),
        inputs=parallel.typed((state, batch), (specs, rows)),
    )


def add_bert_step(parser: argparse.ArgumentParser) -> None:
    """The arguments of a step that only this trainer has."""
    parser.add_argument(
        "--wire-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="in which gradients travel; they are added up in float32 (bfloat16)",
    )
    parser.add_argument(
        "--attention",
        choices=("xla", "cudnn"),
        default="xla",
        help="whose attention to use; cudnn is for NVIDIA GPUs (xla)",
    )
    parser.add_argument(
        "--remat",
        action="store_true",
        help="compute layers once more in the backward pass: slower, and less memory",
    )
    parser.add_argument(
        "--unrolled",
        action="store_true",
        help="run layers without a loop over them: much faster on GPUs, and less memory",
    )


def bert_options(args: argparse.Namespace) -> dict[str, Any]:
    """Those arguments, as `make_programs` takes them."""
    return {name: getattr(args, name) for name in ("wire_dtype", "attention", "remat", "unrolled")}
