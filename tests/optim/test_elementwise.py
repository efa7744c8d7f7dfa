"""Transformations of every kind give the same weights sharded, as tracing finds what they need."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftmesh.optim import ShardedOptimizer, clip_by_global_norm, lamb, lars
from ftmesh.optim.communication import Communication
from tests.support.slow import slow
from tests.support.updates import assert_close, gradients, take_rank, train_unsharded

pytestmark = pytest.mark.usefixtures("quick_compiler")
RNG = np.random.default_rng(0)

PARAMS = {
    "kernel": RNG.normal(size=(45, 7)).astype(np.float32),
    "bias": RNG.normal(size=7).astype(np.float32),
    "temperature": jnp.float32(1),
    "one": np.ones(1, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


class SingleRank(Communication):
    """One rank that has everything: nothing is communicated."""

    def sum_vectors(self, other_axes, vectors):
        return vectors

    def all_gather(self, own, layout):
        pairs = zip(own, layout.leaves, strict=True)
        return [leaf.from_rows(x) if leaf.kind == "flat" else x for x, leaf in pairs]


def single_rank_optimizer(transformation):
    plan = SimpleNamespace(
        program=SimpleNamespace(num_ranks=1), with_idle=False, executor="ppermute"
    )
    plan.with_reduce_scatter = plan
    optimizer = ShardedOptimizer(transformation, plan, bucket_bytes=200)
    optimizer.comm = SingleRank(plan, plan, "data", reduce="none")
    return optimizer


def params_after(transformation, steps=2):
    optimizer = single_rank_optimizer(transformation)

    def run(*grads):
        params, state = PARAMS, optimizer.init(PARAMS)
        for step_grads in grads:
            updates, state = optimizer.update(step_grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    grads = (gradients(PARAMS, 1, step) for step in range(steps))
    return take_rank(0, jax.jit(jax.vmap(run, axis_name="data"))(*grads))


def has_two_dimensions(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def has_10_000_elements(params):
    return jax.tree.map(lambda x: x.size > 10_000, params)


def has_10_elements(params):
    return jax.tree.map(lambda x: x.size > 10, params)


LABELS = {name: "matrix" if np.ndim(p) > 1 else "vector" for name, p in PARAMS.items()}
LR_SCHEDULE = optax.linear_schedule(0.1, 0.05, 10)


@pytest.mark.parametrize(
    "transformation",
    [
        optax.sgd(LR_SCHEDULE, momentum=0.9, nesterov=True),
        slow(optax.adam(0.1)),
        slow(optax.adafactor(0.1)),
        slow(optax.adamw(0.1, mask=has_two_dimensions)),
        optax.adamw(0.1, mask=has_10_elements(PARAMS)),
        slow(optax.adagrad(0.1)),
        slow(optax.rmsprop(0.1, centered=True)),
        slow(optax.lion(0.1)),
        slow(optax.radam(0.1)),
        slow(optax.amsgrad(0.1)),
        slow(optax.adamax(0.1)),
        slow(optax.chain(optax.clip(1.0), optax.ema(0.9), optax.yogi(0.1))),
        optax.inject_hyperparams(optax.adam)(learning_rate=LR_SCHEDULE),
        optax.multi_transform({"matrix": lamb(0.1), "vector": optax.sgd(0.1, 0.9)}, LABELS),
        slow(optax.MultiSteps(optax.adam(0.1), 2)),
        optax.chain(clip_by_global_norm(1.0), lars(0.1, weight_decay=0.1)),
        slow(optax.lars(0.1)),
        optax.lamb(0.1),
        slow(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))),
        slow(optax.clip_by_block_rms(1.0)),
        optax.adamw(0.1, mask=has_10_elements),
        slow(optax.novograd(0.1)),
    ],
    ids=range(22),
)
def test_shardable_transformations_give_the_same_weights(transformation):
    """Elementwise ones, those with norms, and those with masks that depend on shapes."""
    want, _ = train_unsharded(transformation, PARAMS, 1)
    assert_close(params_after(transformation), want)


def test_constants_that_print_alike_stay_different():
    """Learning rates that differ in the sixth digit."""
    with np.printoptions(precision=3):
        rates = {"x": jnp.float32(1.00001), "y": jnp.float32(1.00002)}
        labels = {name: "xy"[i % 2] for i, name in enumerate(PARAMS)}
        transformation = optax.multi_transform(
            {name: optax.sgd(rate) for name, rate in rates.items()}, labels
        )
        params = params_after(transformation, steps=1)
    for name, label in labels.items():
        grad = gradients(PARAMS, 1, 0)[name][0]
        np.testing.assert_allclose(params[name], PARAMS[name] - rates[label] * grad, rtol=2e-7)


def test_bfloat16_moments():
    """Fused operations round differently: the tolerance is a rate of 0.1 times 8 bits."""
    transformation = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    want, _ = train_unsharded(transformation, PARAMS, 1)
    jax.tree.map(partial(np.testing.assert_allclose, atol=4e-4), params_after(transformation), want)


def subtract_first_element():
    """Add to each element its difference from the first of its tensor."""

    def difference(x):
        return 2 * x - jnp.ravel(x)[0] if x.size else x

    return optax.stateless(lambda updates, params: jax.tree.map(difference, updates))


def factored_state():
    """A state with one number for each column of a matrix."""

    def init(params):
        return jax.tree.map(lambda x: jnp.zeros(x.shape[-1:]), params)

    return optax.GradientTransformation(init, lambda updates, state, params: (updates, state))


def mix_two_tensors():
    """Add one tensor to another."""

    def cross(updates, params):
        return updates | {"one": updates["bias"][:1] * 0 + updates["one"]}

    return optax.stateless(cross)


def drop_negative_sums(updates, params):
    """Zero the tensors whose sum is negative, with lax.cond."""
    return jax.tree.map(
        lambda u: jax.lax.cond(u.sum() > 0, lambda u: u, lambda u: 0 * u, u), updates
    )


def transpose_and_broadcast(updates, params):
    """Use tensors in other shapes than their own, of one size or with dimensions repeated."""

    def change(u):
        if u.ndim != 2 or not u.size:
            return u.reshape(-1)[::-1].reshape(u.shape) if u.ndim else u
        other = u.reshape(u.shape[::-1])
        return u + other.T + u[:1] + jnp.max(u, axis=1, keepdims=True) * jnp.sum(u.ravel())

    return jax.tree.map(change, updates)


@pytest.mark.parametrize(
    "transformation",
    [
        factored_state(),
        subtract_first_element(),
        mix_two_tensors(),
        optax.stateless(drop_negative_sums),
        optax.masked(optax.sgd(0.1, 0.9), has_10_000_elements),
        optax.masked(optax.sgd(0.1, 0.9), has_10_elements),
        slow(optax.apply_if_finite(optax.chain(factored_state(), optax.add_noise(0.1, 0.5, 0)), 3)),
        optax.stateless(transpose_and_broadcast),
    ],
    ids=range(8),
)
def test_others_get_full_tensors(transformation):
    want, _ = train_unsharded(transformation, PARAMS, 1)
    assert_close(params_after(transformation), want)
