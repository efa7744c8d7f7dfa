"""A program of the whole batch as ranks run it: its sums over ranks, and what is rejected."""

import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import ftmesh
from ftmesh import ArgumentError, Topology
from ftmesh.collectives.batch_layout import BatchLayout, RankUnits, Spread, UnitSplit
from ftmesh.execute import _compat
from ftmesh.layout.batch_shares import BatchShares
from ftmesh.testing import on_one_device as on_ranks
from tests.support.random_losses import on_one_device
from tests.support.slow import slow
from tests.support.whole_batch import assert_close

pytestmark = pytest.mark.usefixtures("quick_compiler")

PLAN = ftmesh.plan(Topology.grid("3x1"), executor="ppermute")
RNG = np.random.default_rng(0)
W = np.float32(RNG.normal(size=(4, 5)))


def examples(size):
    """Inputs, labels, a mask, and a key."""
    x = np.float32(RNG.normal(size=(size, 4)))
    mask = np.float32(np.arange(size) % 3 == 0)
    return x, RNG.integers(0, 5, size), mask, jax.random.key(0)


def each(w, x):
    return jnp.square(jnp.tanh(x @ w)).sum(-1)


LOSSES = {
    "masked mean": lambda w, x, n, mask, key: (each(w, x) * mask).sum() / mask.sum(),
    "mean and penalty": lambda w, x, n, mask, key: each(w, x).mean() + jnp.square(w).sum(),
    "maximum": lambda w, x, n, mask, key: jnp.max(each(w, x)) - jnp.min(each(w, x)),
    "dropout": lambda w, x, n, mask, key: (each(w, x) * jax.random.normal(key, n.shape)).mean(),
    "labels": lambda w, x, n, mask, key: jax.nn.log_softmax(x @ w)[jnp.arange(len(x)), n].mean(),
    "product over examples": lambda w, x, n, mask, key: jnp.square((x @ w).T @ x).mean(),
    "two halves": lambda w, x, n, mask, key: jnp.mean(jnp.concatenate([x, 2 * x]) @ w),
    "counts": lambda w, x, n, mask, key: (each(w, x) / jnp.bincount(n, length=5)[n]).sum(),
    "pairs of neighbours": lambda w, x, n, mask, key: jnp.square(
        x.reshape(-1, 8)[:, 4:] @ w
    ).mean(),
    "square of a sum": lambda w, x, n, mask, key: jnp.square(each(w, x).sum()) * mask.sum(),
    "a closed-over vector": lambda w, x, n, mask, key: each(w, x) @ np.arange(len(x)),
}
# test_losses.py has the others in its tables.
QUICK = [
    "masked mean",
    "product over examples",
    "pairs of neighbours",
    "square of a sum",
    "a closed-over vector",
]


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("masked mean", 12),
        *((name, 10) for name in QUICK),
        *(slow(name, 10) for name in LOSSES if name not in QUICK),
        *(slow(name, 12) for name in LOSSES if name != "masked mean"),
    ],
)
def test_equal(name, size):
    """Ten examples on three ranks: two have padding."""
    args = W, *examples(size)
    value, grads, _ = on_one_device(PLAN, LOSSES[name], args)
    assert_close((value, grads), jax.value_and_grad(LOSSES[name])(*args))


@pytest.mark.parametrize("size", [12, 10])
def test_aux(size):
    def loss(w, x, n, mask, key):
        aux = {"count": mask.sum(), "rows": x.T, "largest": x.max(0), "any": (n > 3).any()}
        return each(w, x).mean(), {**aux, "weights": w, "twice": jnp.tile(x, (2, 1))}

    args = W, *examples(size)
    _, _, aux = on_one_device(PLAN, loss, args, has_aux=True)
    assert_close(aux, loss(*args)[1])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda w, x: jnp.square((x @ w) @ (x @ w).T).mean(), "'dot_general' .* with others"),
        (lambda w, x: each(w, x)[::-1].mean(), "'rev' .*reverses"),
        (lambda w, x: each(w, x)[np.arange(10) // 2].mean(), "'gather' .*picks examples by index"),
        (lambda w, x: (each(w, x)[:, None] - each(w, x)).mean(), "'sub' .*combines each example"),
        (lambda w, x: each(w, x).at[3].set(0).mean(), "'scatter' .*writes"),
        (lambda w, x: jnp.pad(each(w, x), (0, 2)).mean(), "'pad' .*not those of ranks"),
        (lambda w, x: jnp.sum(lax.map(lambda r: each(w, r), x)), "'scan' .*one by one"),
        (lambda w, x: x.reshape(8, 5).sum(1).mean() * w.sum(), "'reshape' .*not those of ranks"),
        (lambda w, x: lax.rng_uniform(0.0, 1.0, (3,)).sum() + each(w, x).mean(), "'rng_uniform'"),
    ],
)
def test_rejected(loss, message):
    with pytest.raises(ArgumentError, match=f"{message}.*, and a rank has only its share") as error:
        on_one_device(PLAN, loss, (W, examples(10)[0]))
    assert "at test_batch_program.py:" in str(error.value)


def test_line_is_that_of_this_call():
    """Not that of a call which JAX traced before, with the same shapes."""
    x = examples(12)[0]
    jnp.roll(jnp.ones(12, np.float32), 1)
    with pytest.raises(ArgumentError) as error:
        on_one_device(PLAN, lambda w, x: (x[:, 0] * jnp.roll(x[:, 1], 1)).sum(), (W, x))  # this one
    assert "# this one" in line_of(error.value)


def test_line_is_inside_a_function_of_the_user():
    @jax.jit
    def summed(x):
        return jnp.cumsum(x)  # this one

    x = examples(12)[0]
    with pytest.raises(ArgumentError) as error:
        on_one_device(PLAN, lambda w, x: summed(each(w, x)).mean(), (W, x))
    assert "# this one" in line_of(error.value)


def line_of(error):
    line = int(str(error).split("test_batch_program.py:")[1].split(" ")[0])
    return linecache.getline(__file__, line)


class TestSums:
    """How often ranks sum: gradients once, and what the loss needs before."""

    def count(self, loss, *args):
        plan = ftmesh.plan(Topology.from_devices(jax.devices()[:3], shape="3x1"), "chain")
        program = jax.make_jaxpr(plan.value_and_grad(loss))(*args)
        return sum(
            eqn.primitive.name.startswith("ftmesh_all_reduce") for eqn in walk(program.jaxpr)
        )

    def test_once_for_a_mean(self):
        def loss(w, x):
            layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
            x, _ = lax.scan(layer, x, w["layers"])
            return jnp.square(x @ w["last"]).mean() + jnp.square(w["last"]).sum()

        weights = {"layers": np.ones((7, 4, 4), np.float32), "last": W}
        assert self.count(loss, weights, examples(12)[0]) == 1

    def test_once_more_for_a_mask(self):
        assert self.count(LOSSES["masked mean"], W, *examples(12)) == 2
        assert self.count(LOSSES["masked mean"], W, *examples(10)) == 2

    def test_of_statistics_in_their_own_size(self):
        """A mean is summed before it is broadcast to examples."""

        def loss(w, x):
            hidden = x @ w
            return jnp.square(hidden - jnp.broadcast_to(hidden.mean(0), hidden.shape)).mean()

        plan = ftmesh.plan(Topology.from_devices(jax.devices()[:3], shape="3x1"), "chain")
        program = jax.make_jaxpr(plan.value_and_grad(loss))(W, examples(120)[0])
        sums = [e for e in walk(program.jaxpr) if e.primitive.name.startswith("ftmesh_all_reduce")]
        assert max(eqn.invars[0].aval.size for eqn in sums) <= 64


def walk(jaxpr):
    """All equations of a program, also of those inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for param in eqn.params.values():
            for inner in param if isinstance(param, (tuple, list)) else [param]:
                if _compat.is_program(inner):
                    yield from walk(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("units", [6, 7])
@pytest.mark.parametrize("layout", [BatchLayout(Spread.ROWS, 1, 2, 3), UnitSplit(1, 6, 1).layout])
def test_rows_of_ranks_are_gathered_again(units, layout):
    ranks = RankUnits(PLAN, "data", BatchShares.for_ranks(PLAN, units))
    length = layout.outer * units * layout.inner
    whole = np.arange(2 * length).reshape((2, length) if layout.dim else (length, 2))

    def run(_):
        rows = ranks.take_rows(jnp.asarray(whole), layout)
        assert rows.shape == ranks.local_shape(whole.shape, layout)
        return ranks.gather_rows(rows, layout)

    for result in on_ranks(run)(np.zeros(3)):
        np.testing.assert_array_equal(result, whole)
