"""What may be sharded and what must not be, found by tracing; nothing is run here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ftmesh
from ftmesh import Topology
from ftmesh.train import NotElementwiseError, ShardedOptimizer, clip_by_global_norm, lamb, lars

PARAMS = {
    "kernel": np.zeros((5, 7), np.float32),
    "bias": np.zeros(7, np.float32),
    "temperature": np.float32(1),
    "one": np.zeros(1, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


@pytest.fixture(scope="module")
def plan():
    return ftmesh.plan(Topology.grid("4x4", failed="2x2@0,0"), "row_pair")


def trace(transformation, plan):
    """Types of what a step returns, for all ranks."""
    optimizer = ShardedOptimizer(transformation, plan, "data")

    def step(grads):
        return optimizer.update(grads, optimizer.init(PARAMS), PARAMS)

    ranks = jax.vmap(step, axis_name="data", axis_size=plan.program.num_ranks, in_axes=None)
    return jax.eval_shape(ranks, PARAMS)


def by_dimensions(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_size(params):
    return jax.tree.map(lambda x: x.size > 10, params)


LABELS = {name: "matrix" if np.ndim(p) > 1 else "vector" for name, p in PARAMS.items()}
HALVED = optax.linear_schedule(0.1, 0.05, 10)


@pytest.mark.parametrize(
    "transformation",
    [
        optax.sgd(HALVED, momentum=0.9, nesterov=True),
        optax.adam(0.1),
        optax.adam(0.1, mu_dtype=jnp.bfloat16),
        optax.adamw(0.1, mask=by_dimensions),
        optax.adamw(0.1, mask=by_size(PARAMS)),
        optax.adagrad(0.1),
        optax.rmsprop(0.1, centered=True),
        optax.lion(0.1),
        optax.radam(0.1),
        optax.amsgrad(0.1),
        optax.adamax(0.1),
        optax.chain(optax.clip(1.0), optax.ema(0.9), optax.yogi(0.1)),
        optax.inject_hyperparams(optax.adam)(learning_rate=HALVED),
        optax.multi_transform({"matrix": lamb(0.1), "vector": optax.sgd(0.1, 0.9)}, LABELS),
        optax.MultiSteps(optax.adam(0.1), 2),
        optax.chain(clip_by_global_norm(1.0), lars(0.1, weight_decay=0.1)),
    ],
    ids=range(16),
)
def test_elementwise_optimizers_are_taken(transformation, plan):
    params, _ = trace(transformation, plan)
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)
    assert shapes == jax.tree.map(lambda leaf: (12, *np.shape(leaf)), PARAMS)


def mixed_tensors():
    """Adds to each tensor how far its elements are from the tensor's first."""

    def spread(x):
        return 2 * x - jnp.ravel(x)[0] if x.size else x

    return optax.stateless(lambda updates, params: jax.tree.map(spread, updates))


def factored():
    """Keeps a mean of every column of a matrix."""

    def init(params):
        return jax.tree.map(lambda x: jnp.zeros(x.shape[-1:]), params)

    return optax.GradientTransformation(init, lambda updates, state, params: (updates, state))


def counted():
    """Divides a tensor by its size."""
    return optax.stateless(
        lambda updates, params: jax.tree.map(lambda x: x / max(1, x.size), updates)
    )


@pytest.mark.parametrize(
    ("transformation", "why"),
    [
        (optax.lars(0.1), "'reduce_sum' takes more of a tensor than one element"),
        (optax.lamb(0.1), "take lars, lamb or clip_by_global_norm of ftmesh.train"),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "'reduce_sum' takes more"),
        (optax.clip_by_block_rms(1.0), "'reduce_sum' takes more"),
        (optax.apply_if_finite(optax.sgd(0.1), 3), "'reduce_and' takes more"),
        (optax.adafactor(0.1), "cannot be sharded"),
        (optax.add_noise(0.1, 0.5, jax.random.key(0)), "such as random numbers"),
        (optax.flatten(optax.adam(0.1)), "cannot be sharded"),
        (factored(), "it keeps a state of shape"),
        (mixed_tensors(), "cannot be sharded"),
        (counted(), "would do something else with shards than with whole tensors"),
        (optax.adamw(0.1, mask=by_size), "a mask or a choice in it depends on the size"),
    ],
    ids=range(12),
)
def test_others_are_refused(transformation, why, plan):
    with pytest.raises(NotElementwiseError, match=why):
        trace(transformation, plan)
