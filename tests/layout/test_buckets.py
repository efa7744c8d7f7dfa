"""Packing of leaves into buckets, and the order of elements."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftmesh.layout.buckets import (
    WIDTH,
    Packing,
    from_tile_order,
    make_buckets,
    pack,
    to_tile_order,
    unpack,
)
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")

SHAPES = [
    (),
    (5,),
    (16, 128),
    (20, 256),
    (3, 3, 16, 128),
    (3, 3, 5, 128),
    (7, 7, 3, 64),
    (1000, 128),
    (2, 8, 384),
    (256, 10),
    (1, 1, 256, 64),
    (128, 3, 16, 8),
    (128, 128, 2),
]


def numbered(shapes):
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = np.cumsum([0, *sizes])
    return [
        jnp.arange(start, start + size, dtype=jnp.float32).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


@settings(max_examples=12)
@given(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=5), st.integers(1, 40))
@pytest.mark.slow
def test_unpack_returns_what_was_packed(shapes, num_chunks):
    leaves = numbered(shapes)
    buffer = pack(leaves, num_chunks)
    assert buffer.shape[0] == num_chunks
    packing = Packing.for_shapes(shapes, num_chunks, 4)
    assert buffer.shape == packing.shape
    assert all(start % packing.width == 0 for start in packing.starts)
    for leaf, back in zip(leaves, unpack(buffer, shapes), strict=True):
        np.testing.assert_array_equal(leaf, back)


def test_matrices_travel_tile_by_tile():
    """The order of a TPU's memory: 8 rows of 128 columns, then the next 128 columns."""
    (matrix,) = numbered([(8, 256)])
    flat = pack([matrix], 1).reshape(-1)
    np.testing.assert_array_equal(flat[:1024].reshape(8, 128), matrix[:, :128])
    np.testing.assert_array_equal(flat[1024:].reshape(8, 128), matrix[:, 128:])


@pytest.mark.parametrize("shape", [(128, 8), (1, 128, 8), (128, 1, 8), (1, 1, 128, 8)])
def test_an_axis_that_fills_tiles_travels_innermost(shape):
    """As in a TPU's memory: with another axis innermost, tiles would be half empty."""
    (array,) = numbered([shape])
    np.testing.assert_array_equal(pack([array], 1).reshape(8, 128), array.reshape(128, 8).T)


@pytest.mark.parametrize(
    ("size", "chunks", "itemsize", "shape"),
    [
        (10, 4, 4, (1, 3)),
        (3, 40, 4, (1, 1)),
        (4 * 128, 4, 4, (1, 128)),
        (4 * 129, 4, 4, (2, 128)),
        (4 * 128 * 9, 4, 4, (16, 128)),
        (4 * 128 * 17, 4, 2, (32, 128)),
    ],
)
def test_chunks_are_rows_of_128_in_whole_tiles_once_they_are_large(size, chunks, itemsize, shape):
    assert Packing.for_shapes([(size,)], chunks, itemsize).shape == (chunks, *shape)
    assert shape[1] <= WIDTH


def test_buckets_separate_dtypes_and_limit_sizes():
    f32, i32 = np.dtype(np.float32), np.dtype(np.int32)
    leaves = [jnp.zeros(n) for n in (10, 10, 0, 300, 10)]
    dtypes = [f32, i32, f32, f32, f32]
    apart = make_buckets(leaves, dtypes, bucket_bytes=1000)
    assert [bucket.members for bucket in apart] == [(0,), (3,), (4,), (1,)]
    assert [bucket.kind for bucket in apart] == [f32, f32, f32, i32]
    together = make_buckets(leaves, dtypes, bucket_bytes=10**6)
    assert [bucket.members for bucket in together] == [(0, 3, 4), (1,)]


def test_leaves_that_fill_tiles_come_first_in_a_bucket():
    leaves = [jnp.zeros(shape) for shape in ((10,), (8, 128), (3,), (16, 64), (129, 8))]
    (bucket,) = make_buckets(leaves, [leaf.dtype for leaf in leaves], bucket_bytes=10**6)
    assert bucket.members == (1, 3, 0, 2, 4)


@pytest.mark.parametrize("shape", SHAPES)
def test_numpy_gives_the_same_order(shape):
    (array,) = numbered([shape])
    on_host = np.concatenate(to_tile_order(np.asarray(array)))
    np.testing.assert_array_equal(on_host, jnp.concatenate(to_tile_order(array)))
    np.testing.assert_array_equal(from_tile_order(on_host, shape), array)


@pytest.mark.parametrize(
    "dtype", [slow("float32"), "bfloat16", slow("int8"), "bool", slow("complex64")]
)
def test_rows_beyond_whole_tiles_keep_their_bits(dtype):
    array = np.random.default_rng(0).integers(0, 2, (22, 256)).astype(dtype)
    if dtype in ("float32", "bfloat16"):
        array[:, :3] = [-0.0, np.nan, np.inf]
    parts = to_tile_order(jnp.asarray(array))
    assert [part.size for part in parts] == [16 * 256, 6 * 256]
    assert {part.dtype for part in parts} == {jnp.dtype(dtype)}
    back = from_tile_order(jnp.concatenate(parts), array.shape)
    assert back.dtype == dtype
    assert np.asarray(back).tobytes() == array.tobytes()


def test_every_leaf_starts_at_a_row_with_little_padding():
    shapes = [(1000,), (3,), (128, 128), (31,), ()]
    for chunks, shape in ((4, (4, 35, 128)), (400, (400, 1, 44)), (20_000, (20_000, 1, 1))):
        packing = Packing.for_shapes(shapes, chunks, 1024)
        assert packing.shape == shape
        assert all(start % packing.width == 0 for start in packing.starts)
