"""`Plan.check` tells what differs from JAX alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ftmesh import ArgumentError, CollectiveError
from tests.support.whole_batch import ARGS, loss, losses

pytestmark = pytest.mark.usefixtures("quick_compiler")


def deviation(params, x, y):
    each = losses(params, x, y)
    return each.mean(), {"spread": jnp.std(each), "count": len(x)}


def test_equal(even):
    check = even.check(deviation, *ARGS, has_aux=True)
    assert check
    assert [entry.name for entry in check] == [
        "value",
        "gradient['v']",
        "gradient['w']",
        "aux['count']",
        "aux['spread']",
    ]
    assert str(check).startswith("all 5 arrays are those of JAX, up to ")
    check.require_equal()


def test_what_differs_is_named(even):
    check = even.check(deviation, *ARGS, has_aux=True, per_rank=True, reduce_aux=lambda aux: aux)
    assert [entry.name for entry in check.differing] == ["aux['count']", "aux['spread']"]
    spread = np.asarray(losses(*ARGS))
    ranks = spread.reshape(12, 3).std(axis=1)[0]
    expected = abs(ranks - spread.std()) / spread.std()
    assert check.differing[1].difference == pytest.approx(expected, rel=1e-4)
    assert f"aux['spread'] differs by {expected:.2g} of its largest number" in str(check)
    with pytest.raises(CollectiveError, match="2 of 5 arrays are not those of JAX"):
        check.require_equal()


def test_tolerance(even):
    assert not even.check(loss, *ARGS, tolerance=-1.0)


def test_several_weights_and_a_key(even):
    def noisy(w, x, y, v, key):
        return loss({"w": w, "v": v}, x + jax.random.normal(key, x.shape), y)

    params, x, y = ARGS
    args = params["w"], x, y, params["v"], jax.random.key(0)
    check = even.check(noisy, *args, argnums=(0, 3), replicated=4)
    assert check
    assert [entry.name for entry in check] == ["value", "gradient[0]", "gradient[1]"]


def test_numbers_that_are_none_are_equal_to_each_other_only(even):
    assert even.check(lambda w, x, y: loss(w, x, y) * jnp.nan, *ARGS)
    check = even.check(lambda w, x, y: jnp.log(-losses(w, x, y).mean()), *ARGS)
    assert check


def test_rejected_losses_raise(even):
    with pytest.raises(ArgumentError, match=r"'sort' at test_check_loss.py"):
        even.check(lambda w, x, y: jnp.median(losses(w, x, y)), *ARGS)
