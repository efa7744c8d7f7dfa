"""Tensors in natural order, cut equally over ranks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh.errors import ArgumentError
from ftmesh.layout import flat_shards
from ftmesh.layout.flat_shards import LeafLayout, TreeLayout, flatten_tensor, unflatten_tensor
from tests.support.slow import slow

SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
RANKS = st.integers(1, 20)


def leaf_layout(shape, num_ranks, kind="flat", counts=()):
    return LeafLayout(jax.ShapeDtypeStruct(shape, np.float32), kind, num_ranks, counts)


def natural_parts(x, num_ranks):
    """The definition: elements in order, padded with zeros, in equal parts."""
    size = -(-x.size // num_ranks)
    return np.pad(x.reshape(-1), (0, num_ranks * size - x.size)).reshape(num_ranks, size)


@pytest.mark.parametrize("num_ranks", [slow(1), slow(5), 12])
@pytest.mark.parametrize("shape", [(1,), (13,), (24,), (13, 7), (2, 100), (50, 2), (3, 4, 5)])
@pytest.mark.parametrize("is_small", [True, False])
def test_parts_of_every_rank(shape, num_ranks, is_small, monkeypatch):
    """They are cut in one of two ways, by the size of the tensor."""
    monkeypatch.setattr(flat_shards, "SMALL_TENSOR", 1000 if is_small else 0)
    leaf, x = leaf_layout(shape, num_ranks), 1 + np.arange(np.prod(shape), dtype=np.float32)
    x = x.reshape(shape)
    want = natural_parts(x, num_ranks)
    assert leaf.part_size == want.shape[1]
    parts, counts = jax.jit(
        jax.vmap(lambda rank: (leaf.take_part(jnp.asarray(x), rank), leaf.num_real(rank)))
    )(np.arange(num_ranks))
    np.testing.assert_array_equal(parts, want)
    np.testing.assert_array_equal(counts, (want > 0).sum(axis=1))
    rows = leaf.to_rows(jnp.asarray(x))
    np.testing.assert_array_equal(rows, want)
    np.testing.assert_array_equal(leaf.from_rows(rows), x)
    np.testing.assert_array_equal(flatten_tensor(x, leaf.global_shape), want.reshape(-1))


@given(SHAPES, RANKS, RANKS, st.data())
def test_shards_of_other_axes_and_other_numbers_of_ranks(shape, num_ranks, others, data):
    """What one number of ranks stores is padded or cut to what another does."""
    counts = tuple(data.draw(st.sampled_from([1, 2, 3])) for _ in shape)
    full = tuple(n * count for n, count in zip(shape, counts, strict=True))
    x = 1 + np.arange(np.prod(full), dtype=np.float32).reshape(full)
    leaf, other = (leaf_layout(shape, n, counts=counts) for n in (num_ranks, others))
    stored = flatten_tensor(x, leaf.global_shape)
    assert stored.shape == leaf.global_shape
    np.testing.assert_array_equal(unflatten_tensor(stored, full), x)
    length = other.global_shape[-1]
    padded = np.pad(stored, [*[(0, 0)] * (stored.ndim - 1), (0, length)])[..., :length]
    np.testing.assert_array_equal(padded, flatten_tensor(x, other.global_shape))
    # Each shard by itself, in its natural order.
    first = x[tuple(slice(n) for n in shape)].reshape(-1)
    np.testing.assert_array_equal(stored.reshape(-1)[: first.size], first)


@pytest.mark.parametrize(
    ("stored", "shape"),
    [((96,), (13, 8)), ((1, 2, 96), (13, 7)), ((2, 96), (13, 7)), ((), (3,)), ((2, 1, 96), (3, 4))],
)
def test_arrays_that_store_another_tensor(stored, shape):
    with pytest.raises(ArgumentError, match="does not store a tensor of shape"):
        unflatten_tensor(np.zeros(stored), shape)
    with pytest.raises(ArgumentError, match="does not store a tensor of shape"):
        flatten_tensor(np.zeros(shape), stored)


def test_buckets_have_flat_leaves_of_one_dtype():
    leaves = [
        leaf_layout((100,), 4),
        leaf_layout((), 4, "replicated"),
        leaf_layout((8, 4), 4, "local"),
        LeafLayout(jax.ShapeDtypeStruct((100,), jnp.bfloat16), "flat", 4),
        leaf_layout((50,), 4),
    ]
    layout = TreeLayout.build(leaves, 1000)
    assert sorted(map(sorted, layout.buckets)) == [[0, 4], [3]]
    assert layout.replicated == (1,)
    assert layout.cut == {0, 2, 3, 4}
    assert TreeLayout.build(leaves, 400, order=[4, 3, 2, 1, 0]).buckets == ((4,), (3,), (0,))


@pytest.mark.parametrize("shape", [(1024, 1024), (512, 2048), (7, 7, 512, 64)])
def test_parts_of_large_tensors_are_cut_without_a_copy(shape):
    """On 252 chips: only a reshape, which takes nothing, is as large as the tensor."""
    full = jax.ShapeDtypeStruct(shape, jnp.float32)
    leaf = LeafLayout(full, "flat", 252, (1,) * len(shape))
    jaxpr = jax.make_jaxpr(leaf.take_part)(full, 3)
    made = [v.aval for e in jaxpr.eqns if e.primitive.name != "reshape" for v in e.outvars]
    assert max(aval.size for aval in made) < full.size / 50
