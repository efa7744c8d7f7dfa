"""Batches that the ranks do not divide: padding, masks, sizes, and the losses that come of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, BatchSizeWarning, TiledTopology, Topology
from ftmesh.layout.batch_shares import BatchPadding
from ftmesh.testing import cpu_grid
from tests.support.native_batch import (
    LOSSES,
    differences,
    make_batch,
    make_params,
    masked_mean,
    token_losses,
    value_and_grad,
)
from tests.support.slow import slow

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("quick_compiler")


@given(st.integers(1, 600), st.integers(1, 300), st.integers(1, 5))
def test_rows_are_the_fewest_that_divide(num_examples, num_ranks, microbatches):
    padding = ftmesh.batch_padding(num_examples, num_ranks, microbatches=microbatches)
    unit = num_ranks * microbatches
    assert padding.num_rows % unit == 0
    assert 0 <= padding.num_padding < unit
    assert padding.num_rows == padding.rows_per_rank * num_ranks
    assert padding.mask.sum() == num_examples
    assert len(padding.mask) == padding.num_rows
    nearest = padding.nearest_size
    assert nearest % unit == 0
    others = [size for size in (nearest - unit, nearest + unit) if size > 0]
    assert all(abs(size - num_examples) >= abs(nearest - num_examples) for size in others)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 1))
def test_padding_repeats_the_last_example(num_examples, num_ranks, axis):
    rows = np.arange(3 * num_examples, dtype=np.int16).reshape(num_examples, 3)
    batch = {"x": rows if axis == 0 else rows.T, "none": None}
    padded, mask = ftmesh.pad_batch(batch, num_ranks, axis=axis)
    assert padded["none"] is None
    assert isinstance(padded["x"], np.ndarray)
    assert padded["x"].dtype == np.int16
    got = np.moveaxis(padded["x"], axis, 0)
    assert len(got) == len(mask) == -(-num_examples // num_ranks) * num_ranks
    assert (got[mask] == rows).all()
    assert (got[~mask] == rows[-1]).all()
    assert mask.dtype == bool
    assert mask.tolist() == sorted(mask.tolist(), reverse=True)


def test_under_jit_and_of_all_kinds_of_arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    batch = (jnp.arange(6.0).reshape(3, 2), jnp.array([1, 2, 3]), keys)

    def pad(batch):
        (x, y, keys), mask = ftmesh.pad_batch(batch, 2)
        return x, y, jax.random.key_data(keys), mask

    for run in (pad, jax.jit(pad)):
        x, y, data, mask = run(batch)
        assert x.tolist() == [[0, 1], [2, 3], [4, 5], [4, 5]]
        assert y.tolist() == [1, 2, 3, 3]
        assert (data[3] == data[2]).all()
        assert mask.tolist() == [True, True, True, False]


def test_what_needs_no_padding_is_not_copied():
    batch = {"x": np.zeros((8, 2))}
    padded, mask = ftmesh.pad_batch(batch, 4)
    assert padded["x"] is batch["x"]
    assert mask.all()


def test_ranks_of_plans_topologies_and_tiles():
    topology = Topology.grid("4x4", failed="1x1@0,0")
    tiles = TiledTopology.from_topology(Topology.grid("4x4", failed="1x1@0,0"), "2x2")
    cores = Topology((2, 2), (False, False), frozenset({(0, 0)}), devices_per_chip=2)
    for ranks, number in (
        (topology, 15), (ftmesh.plan(topology), 15), (tiles, 3), (cores, 6), (np.int64(7), 7),
    ):  # fmt: skip
        assert ftmesh.batch_padding(16, ranks).num_ranks == number


def test_report():
    assert str(ftmesh.batch_padding(256, 252)) == (
        "256 examples on 252 ranks: 504 rows, 2 a rank, of which 248 (49%) are padding; 252 "
        "examples need none"
    )
    assert str(ftmesh.batch_padding(1024, 12, microbatches=4)) == (
        "1024 examples on 12 ranks in 4 microbatches: 1056 rows, 88 a rank, of which 32 (3%) are "
        "padding; 1008 examples need none"
    )
    assert str(BatchPadding(64, 16)) == "64 examples on 16 ranks: 4 rows a rank, no padding"


def test_nearest_size_is_said():
    with pytest.warns(BatchSizeWarning, match="252 examples instead of 256, so that 252 ranks get"):
        assert ftmesh.nearest_batch_size(256, 252) == 252
    with pytest.warns(BatchSizeWarning, match="60 ranks in 2 microbatches get 18 each"):
        assert ftmesh.nearest_batch_size(1024, 60, microbatches=2) == 1080
    with pytest.warns(BatchSizeWarning, match="252 examples instead of 3"):
        assert ftmesh.nearest_batch_size(3, 252) == 252
    assert ftmesh.nearest_batch_size(240, 60) == 240  # and no warning


class TestBadBatches:
    def test_arrays_of_different_lengths_are_named(self):
        with pytest.raises(
            ArgumentError, match=r"batch\['x'\] has 8 examples and the array at batch\['y'\] has 7"
        ):
            ftmesh.pad_batch({"x": np.zeros(8), "y": np.zeros(7)}, 3)

    def test_no_rows_and_no_arrays(self):
        with pytest.raises(ArgumentError, match=r"batch\[1\] has shape \(\), without dimension 0"):
            ftmesh.pad_batch((np.zeros(8), 3), 3)
        with pytest.raises(ArgumentError, match=r"has shape \(8,\), without dimension 1"):
            ftmesh.pad_batch(np.zeros(8), 3, axis=1)
        with pytest.raises(ArgumentError, match="the batch has no examples"):
            ftmesh.pad_batch(np.zeros((0, 3)), 3)
        with pytest.raises(ArgumentError, match="the batch has no arrays"):
            ftmesh.pad_batch({"x": None}, 3)

    def test_sizes_below_one(self):
        with pytest.raises(ArgumentError, match=r"number of ranks must be a whole .* not 0"):
            ftmesh.pad_batch(np.zeros(3), 0)
        with pytest.raises(ArgumentError, match=r"batch size must be a whole .* not 0"):
            ftmesh.nearest_batch_size(0, 3)
        with pytest.raises(ArgumentError, match="number of microbatches must be a whole"):
            ftmesh.batch_padding(3, 3, microbatches=0)

    @pytest.mark.parametrize("size", [256.0, True, "256"])
    def test_sizes_that_are_no_whole_numbers(self, size):
        with pytest.raises(ArgumentError, match="batch size must be a whole number"):
            ftmesh.nearest_batch_size(size, 3)
        assert ftmesh.nearest_batch_size(np.int64(256), 8) == 256

    def test_what_has_no_ranks(self):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
        with pytest.raises(ArgumentError, match=r'not Mesh: of a mesh, give mesh.shape\["data"\]'):
            ftmesh.pad_batch(np.zeros(3), mesh)

    def test_idle_devices(self):
        plan = ftmesh.plan(Topology.grid("4x4", failed="2x2@0,0"), with_idle=True)
        with pytest.raises(ArgumentError, match=r"4 of the 16 devices of this plan are idle.*Batc"):
            ftmesh.pad_batch(np.zeros(3), plan)


# Losses and gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "failed", "ranks"), [("4x4", "1x1@2,2", 15), slow("8x8", "2x2@2,2", 60)]
)
def test_256_examples_train_as_on_the_whole_mesh(shape, failed, ranks):
    errors = differences(shape, failed)
    assert errors.pop("ranks") == ranks
    assert errors.keys() == LOSSES.keys()
    assert max(errors.values()) < 1e-6


@pytest.mark.slow
def test_256_examples_on_252_ranks_train_as_on_the_whole_mesh():
    flags = "--xla_force_host_platform_device_count=256"
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.native_batch", "16x16", "2x2@2,2"],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "XLA_FLAGS": flags},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert errors.pop("ranks") == 252
    assert max(errors.values()) < 1e-6


def test_a_mean_that_counts_padding_differs():
    """So that the tests above mean something."""
    values = np.arange(16.0)
    padded, mask = ftmesh.pad_batch(values, 15)
    assert padded.mean(where=mask) == values.mean()
    assert abs(padded.mean() - values.mean()) > 1


def test_accumulated_gradients_are_those_of_the_batch():
    """256 examples in four parts on 15 ranks: the last part has most of the padding."""
    topology = cpu_grid("4x4", failed="1x1@2,2")
    expected = value_and_grad(cpu_grid("4x4"), masked_mean, pad=False)
    padded, mask = ftmesh.pad_batch(make_batch(), topology, microbatches=4)
    assert mask.sum() == 256
    assert mask.reshape(4, -1).sum(axis=1).tolist() == [75, 75, 75, 31]
    cut = jax.tree.map(lambda a: a.reshape(4, -1, *a.shape[1:]), (padded, mask))
    cut = jax.device_put(cut, NamedSharding(ftmesh.jax_mesh(topology, "data"), P(None, "data")))

    @jax.jit
    def accumulated(params, cut):
        def summed(params, batch, mask):
            weights = batch["token_mask"] * mask[:, None]
            return (token_losses(params, batch) * weights).sum(), weights.sum()

        def add(total, part):
            one = jax.value_and_grad(summed, has_aux=True)(params, *part)
            return jax.tree.map(jnp.add, total, one), None

        start = jax.tree.map(jnp.zeros_like, ((0.0, 0.0), params))
        ((loss, weight), grads), _ = jax.lax.scan(add, start, cut)
        return loss / weight, jax.tree.map(lambda g: g / weight, grads)

    result = accumulated(make_params(), cut)
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)


def test_dropout_of_examples_stays_as_it_was():
    x = np.ones((256, 7), np.float32)
    padded, _ = ftmesh.pad_batch(x, 252)
    drop = jax.jit(lambda x: jax.random.bernoulli(jax.random.key(3), 0.5, x.shape))
    assert (drop(padded)[:256] == drop(x)).all()


def test_padding_computes_nothing_that_examples_do_not():
    """The derivative of a norm is not a number at zero, and a mask after it does not help."""
    rows = np.array([[3.0, 4.0], [5.0, 12.0], [8.0, 15.0]], np.float32)
    padded, mask = ftmesh.pad_batch(rows, 2)
    zeros = np.where(mask[:, None], padded, 0)

    @jax.jit
    def grad(scale, rows):
        def loss(scale):
            return jnp.linalg.norm(scale * rows, axis=1).mean(where=mask)

        return jax.grad(loss)(scale)

    np.testing.assert_allclose(grad(1.0, padded), (5 + 13 + 17) / 3, rtol=1e-6)
    assert np.isnan(grad(1.0, zeros))
