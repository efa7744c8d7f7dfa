"""What may be sharded and what must not be, found by tracing; what is taken learns the same."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftmesh.optim import NotShardableError, clip_by_global_norm, lamb, lars
from ftmesh.optim.communication import OnMesh, Travel
from ftmesh.optim.sharded import Work
from tests.support.updates import assert_close, at, gradients, unsharded

pytestmark = pytest.mark.usefixtures("quick_compiler")
RNG = np.random.default_rng(0)

PARAMS = {
    "kernel": RNG.normal(size=(45, 7)).astype(np.float32),
    "bias": RNG.normal(size=7).astype(np.float32),
    "temperature": jnp.float32(1),
    "one": np.ones(1, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


class Alone(Travel):
    """One rank that owns everything: nothing travels."""

    def gathered(self, held, layout):
        leaves = dict(held.whole)
        for bucket, rows in zip(layout.buckets, held.rows, strict=True):
            leaves.update(zip(bucket.members, bucket.packing.unpack(rows), strict=True))
        return [leaves[i] for i in range(len(layout.types))]


def optimizer_of(transformation):
    """What an optimizer does with buckets of a few hundred bytes, in five chunks each."""
    chunks = np.arange(5)[None]
    plan = SimpleNamespace(program=SimpleNamespace(owned=chunks, num_chunks=5, owner=chunks[0]))
    return Work(
        transformation,
        Alone(plan, "data", reduce="none"),
        OnMesh(plan, "data"),
        SimpleNamespace(psum=lambda sums, axis_name: sums),
        bucket_bytes=200,
        overlap=False,
        order=None,
    )


def params_after(transformation, steps=2):
    """The weights after some steps."""
    optimizer = optimizer_of(transformation)

    def run(*grads):
        params, state = PARAMS, optimizer.init(PARAMS)
        for each in grads:
            updates, state = optimizer.update(each, state, params)
            params = optax.apply_updates(params, updates)
        return params

    grads = (gradients(PARAMS, 1, step) for step in range(steps))
    return at(0, jax.jit(jax.vmap(run, axis_name="data"))(*grads))


def by_dimensions(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def by_huge(params):
    return jax.tree.map(lambda x: x.size > 10_000, params)


def by_size(params):
    return jax.tree.map(lambda x: x.size > 10, params)


LABELS = {name: "matrix" if np.ndim(p) > 1 else "vector" for name, p in PARAMS.items()}
HALVED = optax.linear_schedule(0.1, 0.05, 10)


@pytest.mark.parametrize(
    "transformation",
    [
        optax.sgd(HALVED, momentum=0.9, nesterov=True),
        optax.adam(0.1),
        optax.adafactor(0.1),
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
        optax.lars(0.1),
        optax.lamb(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.clip_by_block_rms(1.0),
        optax.adamw(0.1, mask=by_size),
        optax.novograd(0.1),
    ],
    ids=range(22),
)
def test_what_it_takes_learns_the_same(transformation):
    """Element by element, by the norms of tensors, and by choices that depend on shapes."""
    want, _ = unsharded(transformation, PARAMS, 1)
    assert_close(params_after(transformation), want)


def test_constants_that_look_alike_are_not_the_same():
    """Rates that differ in the sixth digit, which are printed as one."""
    with np.printoptions(precision=3):
        rates = {"x": jnp.float32(1.00001), "y": jnp.float32(1.00002)}
        labels = {name: "xy"[i % 2] for i, name in enumerate(PARAMS)}
        transformation = optax.multi_transform(
            {name: optax.sgd(rate) for name, rate in rates.items()}, labels
        )
        found = params_after(transformation, steps=1)
    for name, label in labels.items():
        grad = gradients(PARAMS, 1, 0)[name][0]
        np.testing.assert_allclose(found[name], PARAMS[name] - rates[label] * grad, rtol=2e-7)


def test_moments_of_sixteen_bits():
    """Rounded in fused operations, or one by one: a rate of 0.1 times 8 bits."""
    transformation = optax.adam(0.1, mu_dtype=jnp.bfloat16)
    want, _ = unsharded(transformation, PARAMS, 1)
    jax.tree.map(partial(np.testing.assert_allclose, atol=4e-4), params_after(transformation), want)


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


def crossed():
    """Adds to each tensor the one before."""

    def cross(updates, params):
        return updates | {"one": updates["bias"][:1] * 0 + updates["one"]}

    return optax.stateless(cross)


def by_total(updates, params):
    """Leaves tensors out whose sum is negative, branch by branch."""
    return jax.tree.map(
        lambda u: jax.lax.cond(u.sum() > 0, lambda u: u, lambda u: 0 * u, u), updates
    )


@pytest.mark.parametrize(
    ("transformation", "why"),
    [
        (optax.apply_if_finite(optax.sgd(0.1), 3), "'reduce_and' takes more"),
        (optax.adafactor(0.1, min_dim_size_to_factor=4), "cannot be sharded"),
        (optax.add_noise(0.1, 0.5, jax.random.key(0)), "such as random numbers"),
        (optax.flatten(optax.adam(0.1)), "cannot be sharded"),
        (optax.adaptive_grad_clip(0.01), "'reduce_sum' takes more of a tensor than one element"),
        (factored(), "it keeps a state of shape"),
        (mixed_tensors(), "cannot be sharded"),
        (crossed(), "takes more of a tensor than one element"),
        (optax.stateless(by_total), "depends on a number of one tensor"),
        (optax.masked(optax.sgd(0.1, 0.9), by_huge), "the form of its state depends on the size"),
    ],
    ids=range(10),
)
def test_others_are_refused(transformation, why):
    with pytest.raises(NotShardableError, match=why):
        jax.eval_shape(lambda: params_after(transformation))
