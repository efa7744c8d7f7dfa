"""Global batches split over ranks: shares, padding and weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftmesh
from ftmesh import ArgumentError, Topology
from ftmesh.collectives import BatchShares, weighted_sum
from ftmesh.testing import on_one_device
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(scope="module")
def plan():
    return ftmesh.plan(Topology.grid("8x8", failed="2x2@2,2"), "ring")


@given(st.integers(1, 70), st.integers(0, 200), st.data())
def test_every_example_is_on_one_rank(num_ranks, more, data):
    shares = BatchShares(num_ranks + more, np.arange(num_ranks), num_ranks)
    size = data.draw(st.integers(1, shares.global_batch))
    counts = shares.counts(size)
    assert counts.sum() == size
    assert counts.max() - counts.min() <= 1
    positions = shares.positions(size)
    assert positions[positions >= 0].tolist() == list(range(size))
    batch = {"x": np.arange(size), "y": np.arange(2 * size).reshape(size, 2)}
    padded, weights = shares.pad_batch(batch)
    assert len(padded["x"]) == len(weights) == num_ranks * shares.per_rank
    assert padded["x"][weights == 1].tolist() == list(range(size))
    assert (padded["y"][:, 1] == 2 * padded["x"] + 1).all()
    assert set(weights.tolist()) <= {0.0, 1.0}


def test_512_examples_on_60_chips_give_the_gradient_of_the_batch(plan):
    """In float64: only the order of additions differs from one device, by some 1e-15 of the sum."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        images, labels = rng.normal(size=(512, 6)), rng.integers(0, 3, 512)
        params = {"kernel": rng.normal(size=(6, 3)), "bias": rng.normal(size=3)}

        def losses(params, images, labels):
            logits = jnp.tanh(images) @ params["kernel"] + params["bias"]
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)[:, 0]

        expected = jax.value_and_grad(lambda p: losses(p, images, labels).mean())(params)
        shares = BatchShares.for_ranks(plan, 512)
        assert shares.per_rank == 9
        (x, y), weights = shares.pad_batch((images, labels))
        assert weights.sum() == 512

        def step(x, y, weights):
            def loss_fn(params):
                return shares.mean_contribution(losses(params, x, y), weights)

            return plan.pmean(jax.value_and_grad(loss_fn)(params), "data")

        split = [a.reshape(60, 9, *a.shape[1:]) for a in (x, y, weights)]
        ranks = on_one_device(step)(*split)
        for got, want in zip(jax.tree.leaves(ranks), jax.tree.leaves(expected), strict=True):
            assert got.dtype == np.float64
            np.testing.assert_allclose(got[0], want, rtol=1e-12, atol=1e-12)
            assert (got == got[0]).all()

        assert (
            abs(losses(params, x, y).mean() - expected[0]) > 1e-6
        )  # without weights it would differ


@pytest.mark.parametrize("size", [slow(100), 61, 30])
def test_the_mean_of_a_partial_batch(plan, size):
    """30 examples are fewer than there are ranks."""
    shares = BatchShares.for_ranks(plan, 100)
    values = np.random.default_rng(size).integers(0, 99, size).astype(np.float32)
    x, weights = (part.reshape(60, -1) for part in shares.pad_batch(values))

    def given_count(x, weights):
        return plan.pmean(shares.mean_contribution(x, weights, size), "data")

    def counted(x, weights):
        number = plan.psum(weights.sum(), "data")
        return plan.pmean(shares.mean_contribution(x, weights, number), "data")

    for run in (given_count, counted):
        np.testing.assert_allclose(on_one_device(run)(x, weights), values.mean(), rtol=1e-6)


def test_half_a_batch_has_its_own_mean():
    shares = BatchShares(24, np.arange(4), 4)
    x, weights = (part.reshape(4, -1) for part in shares.pad_batch(np.arange(12.0)))
    parts = [shares.mean_contribution(*rank, 12) for rank in zip(x, weights, strict=True)]
    assert float(np.mean(parts)) == 5.5


def test_evaluation_counts_every_example_once(plan):
    shares = BatchShares.for_ranks(plan, 100)
    values = np.random.default_rng(0).integers(0, 9, 130).astype(np.float32)
    totals = np.zeros(2)
    sums = on_one_device(lambda x, w: plan.psum((weighted_sum(x, w), w.sum()), "data"))
    for start in (0, 100):  # the second batch has 30 examples, fewer than there are ranks
        x, weights = shares.pad_batch(values[start : start + 100])
        totals += [float(total[0]) for total in sums(x.reshape(60, -1), weights.reshape(60, -1))]
    assert totals.tolist() == [values.sum(), 130]


def test_idle_and_second_devices():
    failed = frozenset({(0, 0), (1, 0), (0, 1), (1, 1)})
    topology = Topology((4, 4), (False, False), failed, devices_per_chip=2)
    plan = ftmesh.plan(topology, with_idle=True)
    counts = BatchShares.for_ranks(plan, 100).counts()
    assert len(counts) == 32
    assert sorted(set(counts[plan.program.live].tolist())) == [4, 5]
    assert counts.sum() == 100
    batch, weights = BatchShares.for_ranks(plan, 100).pad_batch(np.arange(100))
    assert batch[weights == 1].tolist() == list(range(100))


class TestBadBatches:
    def test_too_small_for_the_live_ranks(self, plan):
        with pytest.raises(ArgumentError, match="a global batch of 59 is too small for 60 live"):
            BatchShares.for_ranks(plan, 59)

    def test_too_many_examples_or_none(self, plan):
        with pytest.raises(ArgumentError, match="a batch of 101 examples: give 1 to 100"):
            BatchShares.for_ranks(plan, 100).pad_batch(np.zeros(101))
        with pytest.raises(ArgumentError, match="a batch of 0 examples"):
            BatchShares.for_ranks(plan, 100).pad_batch(np.zeros(0))

    def test_arrays_of_different_lengths(self, plan):
        with pytest.raises(ArgumentError, match="must have the same number of examples"):
            BatchShares.for_ranks(plan, 100).pad_batch({"x": np.zeros(100), "y": np.zeros(99)})

    def test_averaged_values(self):
        with pytest.raises(ArgumentError, match="give one value for each example, not yet averag"):
            weighted_sum(jnp.float32(1), jnp.ones(9))

    def test_values_of_padding_do_not_count(self):
        values = jnp.array([1.0, 2.0, jnp.nan])
        assert weighted_sum(values, jnp.array([1.0, 1.0, 0.0])) == 3
