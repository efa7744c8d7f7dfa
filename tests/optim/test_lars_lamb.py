"""LARS, LAMB and clipping against their formulas in NumPy, and against optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ftmesh.optim import clip_by_global_norm, lamb, lars, matrix_mask

RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.normal(size=(4, 3)),
    "bias": RNG.normal(size=3),
    "zero": np.zeros((2, 2)),
}
GRADS = [jax.tree.map(lambda p: RNG.normal(size=p.shape), PARAMS) for _ in range(3)]
IS_MATRIX = {"kernel": True, "bias": False, "zero": True}


def train(transformation):
    """Return the parameters after three steps in float64."""
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, PARAMS)
        state = transformation.init(params)
        for grads in GRADS:
            updates, state = transformation.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return jax.device_get(params)


def assert_same(got, want):
    for name in PARAMS:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, err_msg=name)


def norm(x):
    return np.sqrt((x * x).sum())


@pytest.mark.parametrize("mask", [IS_MATRIX, matrix_mask, lambda params: IS_MATRIX])
def test_lars_follows_the_paper(mask):
    """v = m v + rate * eta |w| / (|g| + wd |w|) * (g + wd w); plain momentum for biases."""
    rate, decay, momentum, eta = 0.3, 0.02, 0.9, 0.01
    want = dict(PARAMS)
    velocity = jax.tree.map(np.zeros_like, PARAMS)
    for grads in GRADS:
        for name, g in grads.items():
            w, step = want[name], g
            if name != "bias":
                ratio = eta * norm(w) / (norm(g) + decay * norm(w)) if norm(w) else 1
                step = ratio * (g + decay * w)
            velocity[name] = momentum * velocity[name] + rate * step
            want[name] = w - velocity[name]
    ours = lars(
        rate,
        weight_decay=decay,
        weight_decay_mask=mask,
        momentum=momentum,
        trust_coefficient=eta,
    )
    assert_same(train(ours), want)


def test_optax_lars_agrees_without_weight_decay_only():
    assert_same(train(lars(0.1)), train(optax.lars(0.1)))
    decayed = [train(make(0.1, weight_decay=0.5)) for make in (lars, optax.lars)]
    assert abs(decayed[0]["kernel"] - decayed[1]["kernel"]).max() > 1e-6


def test_lamb_agrees_with_optax():
    schedule = optax.linear_schedule(0.1, 0.01, 3)
    theirs = optax.lamb(schedule, weight_decay=0.1)
    assert_same(train(lamb(schedule, weight_decay=0.1)), train(theirs))


def test_lamb_masks():
    """A bias out of both masks gets Adam's update; out of the decay mask only, LAMB's."""
    plain, adapted = (
        train(lamb(0.1, weight_decay=0.1, weight_decay_mask=IS_MATRIX, trust_ratio_mask=mask))
        for mask in (None, True)
    )
    np.testing.assert_allclose(plain["bias"], train(optax.adam(0.1, eps=1e-6))["bias"])
    np.testing.assert_allclose(adapted["bias"], train(optax.lamb(0.1))["bias"])
    assert_same(plain, {**adapted, "bias": plain["bias"]})


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_agrees_with_optax(max_norm):
    results = [
        train(optax.chain(clip(max_norm), optax.sgd(0.1)))
        for clip in (clip_by_global_norm, optax.clip_by_global_norm)
    ]
    assert_same(*results)


def test_updates_keep_bfloat16():
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), PARAMS)
    for transformation in (lars(0.1, weight_decay=0.1), lamb(0.1), clip_by_global_norm(1.0)):
        state = transformation.init(params)
        updates, _ = transformation.update(params, state, params)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(updates))


def test_update_needs_the_parameters():
    with pytest.raises(ValueError, match="layerwise rates need the parameters"):
        lars(0.1).update(GRADS[0], lars(0.1).init(PARAMS))
