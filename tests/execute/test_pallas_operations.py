"""Every collective, dtype and option in the Pallas kernel: the bits of ppermute, or an error."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import CollectiveError
from ftmesh.execute import pallas
from ftmesh.testing import cpu_grid
from tests.support.more import more_case
from tests.support.on_devices import odd_tree, per_rank
from tests.support.pallas_programs import assert_same_bits, by_both_executors, in_kernel
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler", "no_race")

LENGTH = 6  # of what a rank has of each dimension
COLLECTIVES = {
    "psum": lambda plan, x: plan.psum(x, "data"),
    "pmean": lambda plan, x: plan.pmean(x, "data"),
    "psum_scatter": lambda plan, x: plan.psum_scatter(x, "data", tiled=True),
    "all_gather": lambda plan, x: plan.all_gather(x, "data"),
}
DTYPES = [
    "float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn", "complex64",
    "int32", "uint32", "int16", "uint16", "int8", "uint8", "bool",
]  # fmt: skip
SLOW = ("bfloat16", "float16", "complex64")
MOSTLY_SLOW = [
    dtype if dtype == "int8" else slow(dtype) if dtype in SLOW else more_case(dtype)
    for dtype in DTYPES
]
WIDE = ["float64", "complex128", "int64", "uint64"]


@pytest.fixture(scope="module")
def plan():
    """Two chips; each owns a chunk."""
    plan = ftmesh.plan(cpu_grid("2x1"), "chain")
    assert plan.program.owns_evenly
    return plan


def random_numbers(dtype, shape=(2, 2 * LENGTH, 3)):
    """Integers from all bits, so that sums wrap around; and the zeros and infinities of floats."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
        return bits.view(dtype).reshape(shape)
    x = rng.normal(size=shape)
    if dtype.name == "bool":
        return x > 0
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (x + 1j * rng.normal(size=shape)).astype(dtype)
    x[:, 0] = [[-0.0, np.inf, 1], [-0.0, 1, -1]]
    return x.astype(dtype)


@pytest.mark.parametrize("dtype", MOSTLY_SLOW)
def test_every_collective_of_every_dtype(plan, dtype):
    names = [name for name in COLLECTIVES if (dtype, name) != ("bool", "psum_scatter")]

    def run(plan, x):
        return {name: COLLECTIVES[name](plan, x) for name in names}

    x = random_numbers(dtype)
    ppermute, kernel = by_both_executors(plan, run, x)
    assert_same_bits(ppermute, kernel)
    assert kernel["all_gather"][0].tobytes() == x.tobytes()
    with np.errstate(over="ignore"):
        total = (x[0].astype("int32") if dtype == "bool" else x[0]) + x[1]
    assert kernel["psum"][0].tobytes() == total.tobytes()


@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize("dtype", WIDE)
def test_64_bits_raise(plan, dtype, name):
    kernel = in_kernel(plan)
    with jax.enable_x64(True), pytest.raises(CollectiveError, match="has no 64-bit numbers, and"):
        per_rank(kernel, partial(COLLECTIVES[name], kernel), random_numbers(dtype))


def test_sums_in_float16_raise(plan):
    kernel = in_kernel(plan)
    x = random_numbers("float32")
    with pytest.raises(CollectiveError, match=r"does not add float16: add in float32, which is"):
        per_rank(kernel, lambda x: kernel.psum(x, "data", accumulate_dtype="float16"), x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"wire_dtype": "bfloat16"},
        more_case({"wire_dtype": "float16"}),
        more_case({"wire_dtype": "float8_e4m3fn"}),
        {"accumulate_dtype": "bfloat16"},
        more_case({"accumulate_dtype": "float32", "wire_dtype": "float32"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", more_case("bfloat16")])
def test_dtypes_of_wires_and_sums(plan, dtype, options):
    def run(plan, x):
        own = plan.psum_scatter(x, "data", tiled=True, **options)
        return plan.psum(x, "data", **options), plan.pmean(x, "data", **options), own

    assert_same_bits(*by_both_executors(plan, run, random_numbers(dtype)))


@pytest.mark.slow
def test_trees_of_arrays_in_several_buckets(plan):
    """Of many dtypes and sizes, some empty, some scalar; each bucket is a kernel of its own."""
    tree = odd_tree(2)

    def run(plan, tree):
        return plan.psum(tree, "data", bucket_bytes=300), plan.pmean(tree, "data")

    ppermute, kernel = by_both_executors(plan, run, tree)
    assert_same_bits(ppermute, kernel)
    np.testing.assert_allclose(kernel[0]["wave"][0], tree["wave"].sum(axis=0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLLECTIVES)
def test_derivatives(plan, name):
    def run(plan, x):
        return jax.grad(lambda x: jnp.sin(COLLECTIVES[name](plan, x)).sum())(x)

    x = np.random.default_rng(0).normal(size=(2, 2 * LENGTH, 3)).astype(np.float32)
    assert_same_bits(*by_both_executors(plan, run, x))


@pytest.mark.parametrize("dtype", MOSTLY_SLOW)
def test_every_dtype_is_lowered_for_tpus(plan, monkeypatch, dtype):
    """A kernel each, or two for sums that are rounded in between."""
    monkeypatch.setattr(pallas, "is_interpreted", lambda program: False)
    kernel = in_kernel(plan)
    held = jax.ShapeDtypeStruct((4 * LENGTH, 3), dtype)
    counts = {}
    for name, collective in COLLECTIVES.items():
        if (dtype, name) != ("bool", "psum_scatter"):
            run = jax.shard_map(
                partial(collective, kernel),
                mesh=kernel.jax_mesh("data"),
                in_specs=P("data"),
                out_specs=P("data"),
            )
            lowered = jax.jit(run).trace(held).lower(lowering_platforms=("tpu",))
            counts[name] = lowered.as_text().count("tpu_custom_call")
    is_rounded = jnp.issubdtype(dtype, jnp.floating) and dtype != "float32"
    assert counts.pop("psum") == counts.pop("pmean") == 1 + is_rounded
    assert set(counts.values()) == {1}


def test_64_bit_types_do_not_reach_the_kernel(plan, monkeypatch):
    """Mosaic has none: also where JAX has them enabled, all of a kernel is the same."""
    monkeypatch.setattr(pallas, "is_interpreted", lambda program: False)
    kernel = in_kernel(plan)
    held = jax.ShapeDtypeStruct((4 * LENGTH, 3), jnp.float32)
    texts = []
    for is_enabled in (False, True):
        with jax.enable_x64(is_enabled):
            run = jax.shard_map(
                lambda x: kernel.psum(x, "data"),
                mesh=kernel.jax_mesh("data"),
                in_specs=P("data"),
                out_specs=P("data"),
            )
            lowered = jax.jit(run).trace(held).lower(lowering_platforms=("tpu",))
            (call,) = [line for line in lowered.as_text().splitlines() if "tpu_custom_call" in line]
            texts.append(re.search(r"\\22body\\22: \\22([^\\]*)", call)[1])
    assert texts[0] == texts[1]
