"""The programs of the trainer: what every rank does, on the devices of a mesh."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from examples.resnet50.batch import Batch
from examples.resnet50.config import Config
from examples.resnet50.model import init
from examples.resnet50.steps import (
    State,
    evaluation_of_rank,
    in_rows,
    make_model,
    make_transformation,
    own_row,
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
) -> Programs:
    """Everything that is compiled for a run on the live devices of `topology`.

    The optimizer's state is `sharded` over them. See `Parallel.on` for what has to do with sums.
    """
    variables = jax.eval_shape(
        partial(init, make_model(config), image_size=config.image_size, seed=0)
    )
    params = variables["params"]
    parallel = Parallel.on(
        topology,
        algorithm,
        payload_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)),
        overlap=overlap,
        bucket_bytes=bucket_bytes,
    )
    shares = parallel.shares(config.batch)
    model = make_model(
        config,
        parallel.groups(config.norm_group, config.batch),
        blocked_stem=parallel.platform == "gpu",
    )
    lr_schedule = poly_decay(
        config.base_lr,
        warmup_steps=config.warmup_steps,
        total_steps=config.total_steps,
        end=config.end_lr,
        power=config.lr_power,
    )
    optimizer = parallel.optimizer(make_transformation(config, lr_schedule), sharded=sharded)
    specs = State(WHOLE, SPLIT, optimizer.specs(params))
    rows = Batch(SPLIT, SPLIT)
    first_of_optimizer = parallel.jit(optimizer.init, in_specs=(WHOLE,), out_specs=specs.optimizer)

    def first(variables: Any) -> State:
        params = parallel.put(variables["params"])
        stats = parallel.put(in_rows(variables["batch_stats"], parallel.num_ranks), SPLIT)
        return State(params, stats, first_of_optimizer(params))

    def whole_of_rank(state: State) -> State:
        return State(
            state.params,
            parallel.mean(own_row(state.stats)),
            optimizer.gather_state(state.optimizer, state.params),
        )

    def state_of_rank(whole: State) -> State:
        return State(
            whole.params,
            in_rows(whole.stats, 1),
            optimizer.shard_state(whole.optimizer, whole.params),
        )

    state = State(
        params,
        jax.eval_shape(lambda stats: in_rows(stats, parallel.num_ranks), variables["batch_stats"]),
        first_of_optimizer.eval_shape(params),
    )
    num_rows = shares.per_rank * parallel.num_ranks
    batch = Batch(
        jax.ShapeDtypeStruct((num_rows, config.image_size, config.image_size, 3), jnp.uint8),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    )
    return Programs(
        parallel=parallel,
        shares=shares,
        lr_schedule=lr_schedule,
        first=first,
        step=parallel.jit(
            partial(step_of_rank, model, config, parallel, shares, optimizer),
            in_specs=(specs, rows),
            out_specs=(specs, WHOLE),
            donate_argnums=(0,),
        ),
        evaluate=parallel.jit(
            partial(evaluation_of_rank, model, parallel),
            in_specs=(WHOLE, WHOLE, rows),
            out_specs=WHOLE,
        ),
        to_checkpoint=parallel.jit(whole_of_rank, in_specs=(specs,), out_specs=WHOLE),
        from_checkpoint=parallel.jit(state_of_rank, in_specs=(WHOLE,), out_specs=specs),
        inputs=parallel.typed((state, batch), (specs, rows)),
    )
