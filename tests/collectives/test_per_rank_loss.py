"""`Plan.value_and_grad` with ``per_rank=True``: means of what ranks compute by themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from ftmesh import ArgumentError
from tests.support.whole_batch import ARGS, PARAMS, X, Y, as_float32, assert_close, loss, losses

pytestmark = pytest.mark.usefixtures("quick_compiler")


def test_deviations_of_ranks(even):
    """Not that of the batch."""

    def deviation(params, x, y):
        return jnp.std(losses(params, x, y))

    value, _ = jax.jit(even.value_and_grad(deviation, per_rank=True))(*ARGS)
    ranks = np.asarray(losses(*ARGS)).reshape(12, 3)
    assert_close(value, ranks.std(axis=1).mean())
    assert abs(value - deviation(*ARGS)) > 0.1


def test_aux(even):
    """Rows are put together, statistics averaged, and what is no matter of the batch stays."""

    def function(params, x, y):
        each = losses(params, x, y)
        aux = {"rows": x, "is_large": each > 1, "stats": (x.mean(0)[:3], None)}
        return each.mean(), {**aux, "same": (params["v"] > 0, 7)}

    result = jax.jit(even.value_and_grad(function, has_aux=True, per_rank=True))(*ARGS)
    assert_close(result, jax.value_and_grad(function, has_aux=True)(*ARGS))


def test_rows_of_unequal_shares(even):
    args = as_float32(PARAMS, X[:29], Y[:29])
    run = even.value_and_grad(lambda *args: (losses(*args), args[1]), has_aux=True, per_rank=True)
    result = jax.jit(run)(*args)
    assert_close(result, ((loss(*args), args[1]), jax.grad(loss)(*args)))


def test_outside_jit(even):
    run = even.value_and_grad(losses, per_rank=True)
    for _ in range(2):
        assert_close(run(*ARGS), jax.value_and_grad(loss)(*ARGS))


def test_the_rank_is_known(even):
    """A random key that every rank folds its index into, and a keyword argument."""

    def noisy(params, x, y, key, *, scale):
        own = jax.random.fold_in(key, lax.axis_index("data"))
        return loss(params, x, y) + scale * jax.random.normal(own)

    key = jax.random.key(0)
    run = even.value_and_grad(noisy, replicated=3, per_rank=True)
    value, _ = jax.jit(lambda *args: run(*args, scale=2.0))(*ARGS, key)
    noise = [jax.random.normal(jax.random.fold_in(key, rank)) for rank in range(12)]
    assert float(value) == pytest.approx(float(loss(*ARGS)) + 2 * np.mean(noise), rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
def test_scalar_loss_of_unequal_shares_raises(even, weighted):
    def one(params, x, y):
        total = losses(params, x, y).sum()
        return (total, len(x)) if weighted else total / len(x)

    with pytest.raises(ArgumentError, match="return one number for each example"):
        jax.eval_shape(
            even.value_and_grad(one, weighted=weighted, per_rank=True),
            *as_float32(PARAMS, X[:29], Y[:29]),
        )


@pytest.mark.parametrize(
    ("aux", "size", "message"),
    [
        (lambda x: jnp.sum(x > 0), 36, r"aux\['it'\] has dtype int32, .* give reduce_aux="),
        (lambda x: x.T, 36, r"has shape \(6, 3\) for 3 examples and \(6, 36\) for 36"),
        (lambda x: x.mean(0), 29, "padding would count in it"),
    ],
)
def test_ambiguous_aux_raises(even, aux, size, message):
    def function(params, x, y):
        return losses(params, x, y), {"it": aux(x)}

    with pytest.raises(ArgumentError, match=message):
        jax.eval_shape(
            even.value_and_grad(function, has_aux=True, per_rank=True),
            *as_float32(PARAMS, X[:size], Y[:size]),
        )


def test_reduce_aux(even):
    run = even.value_and_grad(
        lambda params, x, y: (loss(params, x, y), jnp.sum(x > 0)),
        has_aux=True,
        per_rank=True,
        reduce_aux=lambda count: even.psum(count, "data"),
    )
    (_, count), _ = jax.jit(run)(*ARGS)
    assert count == (X > 0).sum()


@pytest.mark.parametrize(
    "aux",
    [lambda x: jnp.sum(jnp.ones_like(x)), lambda x: x.shape[0], lambda x: jnp.arange(len(x))],
    ids=["sum of ones", "a number", "numbers of rows"],
)
def test_aux_that_depends_on_it_raises(even, aux):
    run = even.value_and_grad(
        lambda p, x: (jnp.mean(p * x), {"n": aux(x)}), has_aux=True, per_rank=True
    )
    with pytest.raises(ArgumentError, match=r"aux\['n'\] depends on the number of examples"):
        jax.eval_shape(run, jnp.float32(2), jnp.arange(24.0))
