"""Sums a slab at a time: the same sums, in the memory of a slab."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.collectives.slabs import cut_of
from ftmesh.execute import _compat
from ftmesh.layout.element_order import TILE_ROWS, WIDTH
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.on_devices import odd_tree, per_rank, planned

pytestmark = pytest.mark.usefixtures("quick_compiler")

slow = pytest.mark.slow

CUTS = [
    ((), 3),
    ((1,), 3),
    ((3001,), 700),
    ((3001,), 1),
    ((3001,), 10**6),
    ((40, 130), 700),
    ((40, 130), 5000),
    ((5, 4000), 700),
    ((5, 4000), 5000),
    ((3, 9, 50), 700),
    ((3, 300, 5), 3000),
    ((4, 8, 128), 5000),
    ((2, 256, 3, 5), 1),
    ((2, 256, 3, 5), 5000),
]


@pytest.mark.parametrize(("shape", "slab_bytes"), CUTS, ids=str)
def test_sums_are_exact(twelve, shape, slab_bytes):
    x = np.random.default_rng(0).integers(-99, 99, (12, *shape))
    found = on_one_device(lambda x: twelve.psum(x, "data", slab_bytes=slab_bytes))(x)
    np.testing.assert_array_equal(found, np.broadcast_to(x.sum(axis=0), x.shape))


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=slow)])
def test_trees_of_every_dtype_are_as_those_at_once(twelve, check_vma):
    tree = odd_tree(12)
    slabs, whole = (
        per_rank(
            twelve,
            lambda t, size=size: twelve.pmean(t, "data", slab_bytes=size),
            tree,
            out=P(),
            check_vma=check_vma,
        )
        for size in (20, None)
    )
    for leaf in tree:
        assert slabs[leaf].dtype == whole[leaf].dtype
        np.testing.assert_allclose(slabs[leaf], whole[leaf], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=slow)])
def test_derivatives(twelve, check_vma):
    x = np.random.default_rng(0).normal(size=(12, 9, 40)).astype(np.float32)

    def derivatives(collective):
        def loss(x):
            return jnp.sin(collective(0.1 * x**2)).sum()

        def twice(x):
            return jax.grad(lambda x: (jax.grad(loss)(x) ** 2).sum())(x)

        return lambda x: (jax.grad(loss)(x), jax.jvp(loss, (x,), (x + 1,))[1], twice(x))

    ours, theirs = (
        per_rank(twelve, derivatives(run), x, check_vma=check_vma)
        for run in (
            lambda x: twelve.pmean(x, "data", slab_bytes=300),
            lambda x: lax.pmean(x, "data"),
        )
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_idle_ranks(check_vma):
    topology = cpu_grid("4x2", failed="2x2@2,0")
    plan = ftmesh.plan(topology, "ring", with_idle=True)
    x = np.random.default_rng(0).normal(size=(8, 5, 60)).astype(np.float32)

    def run(slab_bytes):
        def mean(x):
            return plan.pmean(x, "data", slab_bytes=slab_bytes)

        return lambda x: (mean(x), jax.grad(lambda x: (mean(x) ** 3).sum())(x))

    whole, slabs = (per_rank(plan, run(size), x, check_vma=check_vma) for size in (None, 100))
    for one, other in zip(whole, slabs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_batches_along_other_axes_scans_and_remat(twelve):
    x = np.random.default_rng(0).normal(size=(12, 3, 50, 7)).astype(np.float32)

    def steps(psum):
        def step(carry, _):
            carry = 0.1 * carry + jax.vmap(jax.checkpoint(psum), in_axes=1, out_axes=1)(carry)
            return carry, carry.sum()

        return lambda x: lax.scan(step, x, None, length=2)[0]

    ours, theirs = (
        per_rank(twelve, steps(run), x)
        for run in (
            lambda x: _compat.to_varying(twelve.psum(x, "data", slab_bytes=99), "data"),
            lambda x: _compat.to_varying(lax.psum(x, "data"), "data"),
        )
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.skipif(not _compat.NESTS_SHARD_MAPS, reason="takes JAX 0.10")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_slabs_of_pieces(kind):
    plan = ftmesh.plan(Topology.from_devices(jax.devices()[:12:2], shape="3x2"), "ring")
    devices = np.array(jax.devices()[:12]).reshape(6, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, kind))
    x = np.random.default_rng(0).normal(size=(6, 12, 80)).astype(np.float32)
    specs = P(None, "model") if kind == AxisType.Auto else None
    run = jax.shard_map(
        lambda x: plan.pmean(x[0], "data", specs=specs, slab_bytes=500),
        mesh=mesh,
        axis_names={"data"},
        in_specs=P("data"),
        out_specs=P(),
    )
    held = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
    np.testing.assert_allclose(jax.jit(run)(held), x.mean(axis=0), rtol=1e-5, atol=1e-6)


@slow
def test_sixteen_bits_of_hundreds_of_ranks():
    """Numbers of one sign, of which a sum that is rounded on its way would lose most."""
    plan = ftmesh.plan(Topology.grid("16x32", failed="4x2@6,14"), "row_pair")
    ranks = plan.program.num_ranks
    x = np.random.default_rng(0).uniform(1, 2, (ranks, 1000)).astype(jnp.bfloat16)
    total = on_one_device(lambda x: plan.psum(x, "data", slab_bytes=2000))(x)
    assert total.dtype == jnp.bfloat16
    exact = x.astype(np.float64).sum(axis=0)
    np.testing.assert_allclose(np.asarray(total[0], np.float64), exact, rtol=2**-8)
    assert (total == total[0]).all()


def traced(plan, run, *arrays):
    """What a rank does, as JAX has traced it."""
    mapped = jax.shard_map(run, mesh=plan.jax_mesh("data"), in_specs=P("data"), out_specs=P())
    (equation,) = jax.make_jaxpr(mapped)(*arrays).eqns
    return equation.params["jaxpr"].eqns


def temporary_bytes(plan, tree, **options):
    """What a mean of a donated pytree takes beside it, as the compiler for CPUs has it."""
    mesh = plan.jax_mesh("data")
    ranks = NamedSharding(mesh, P("data"))
    run = jax.shard_map(
        lambda x: plan.pmean(x, "data", **options), mesh=mesh, in_specs=P("data"), out_specs=P()
    )

    def of_all_ranks(leaf):
        first, *others = leaf.shape
        return jax.ShapeDtypeStruct((mesh.size * first, *others), leaf.dtype, sharding=ranks)

    held = jax.tree.map(of_all_ranks, tree)
    return jax.jit(run, donate_argnums=0).lower(held).compile().memory_analysis().temp_size_in_bytes


OLD = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="the compiler for CPUs before JAX 0.10 copies a matrix"
)


@pytest.mark.parametrize("shape", [(2_000_000,), pytest.param((8, 256, 1024), marks=OLD)], ids=str)
def test_memory_is_that_of_few_slabs(shape):
    """Those of 5 %: what is summed, what is sent and what is received are one each, at most."""
    plan = planned("row_pair", "4x4", "2x2@2,2")
    tree = [jax.ShapeDtypeStruct(shape, np.float32)]
    payload = sum(4 * leaf.size for leaf in tree)
    slab = payload // 20
    assert temporary_bytes(plan, tree) > payload
    assert temporary_bytes(plan, tree, slab_bytes=slab) <= 4 * slab


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_no_buffer_is_larger_than_a_slab(twelve, dtype):
    """But for the padding of buckets, which is less than a tile for each chunk."""
    tiles = twelve.program.num_chunks * 4096
    slab = 3 * tiles
    shapes = [(300_000,), (700, 128), (7, 12_800), (100, 100), (100, 99), (50,), (4, 64, 128)]
    tree = [jax.ShapeDtypeStruct((12, *shape), dtype) for shape in shapes]

    def run(tree):
        return twelve.psum([x[0] for x in tree], "data", slab_bytes=slab)

    sizes = {"ftmesh_all_reduce": [], "ftmesh_sum_in_slabs": [], "ftmesh_barrier": []}
    for equation in traced(twelve, run, tree):
        name = equation.primitive.name
        if name not in sizes:
            continue
        shape = list(equation.invars[0].aval.shape)
        if name == "ftmesh_sum_in_slabs":
            cut = equation.params["cut"]
            shape[cut.axis] = cut.length
        sizes[name].append(4 * math.prod(shape))  # added in float32
    buckets, slabs, turns = sizes.values()
    assert max(buckets) <= slab + tiles
    assert max(slabs) <= slab
    assert len(slabs) >= 2
    assert len(turns) == len(buckets) + len(slabs) - 1


def test_more_elements_than_int32_counts():
    """Then a start of a slab would not be one: an array that is so long is cut as rows."""
    plan = planned("line", "2x1", "")

    def cut(first, *others):
        whole = jax.ShapeDtypeStruct((2 * first, *others), np.int8)
        found = traced(plan, lambda x: plan.psum(x, "data", slab_bytes=2**28), whole)
        (slabs,) = (each for each in found if each.primitive.name == "ftmesh_sum_in_slabs")
        return slabs.invars[0].aval.shape

    assert cut(2**31 - 128) == (2**31 - 128,)
    assert cut(2**31) == cut(1, 2**31) == cut(2**31, 1) == (2**24, 128)
    assert cut(2**16, 2**16) == cut(1, 2**16, 2**16) == (2**16, 2**16)
    assert cut(2, 2**30 + 1, 3) == (2, 2**30 + 1, 3)
    for shape in [(2**31 + 1,), (1, 2**31 + 1), (2**31 + 1, 1), (1, 2**31 + 1, 3)]:
        with pytest.raises(CollectiveError, match="only if it fills rows of 128"):
            cut(*shape)


def test_a_derivative_by_one_leaf_sums_that_one(twelve):
    tree = [jax.ShapeDtypeStruct((12, 50), np.float32)] * 6

    def sums(**options):
        def run(first, *others):
            def total(first):
                return twelve.psum([first[0], *(x[0] for x in others)], "data", **options)

            return jax.jvp(total, (first,), (jnp.sin(first),))[1]

        names = [each.primitive.name for each in traced(twelve, run, *tree)]
        return sum(name in ("ftmesh_all_reduce", "ftmesh_sum_in_slabs") for name in names)

    assert sums(slab_bytes=120) == sums(bucket_bytes=120)


def test_a_derivative_is_divided_before_it_is_rounded():
    """By 9, which a number of 8 bits cannot be: 180 / 9 is 20, and 180 / 8 would be 22.5."""
    plan = planned("line", "9x1", "")
    x = np.ones((9, 40), jnp.float8_e5m2)

    def gradient(x):
        def total(x):
            mean = plan.pmean(x, "data", slab_bytes=16)
            return (mean.astype(np.float32) * 180).sum()

        return jax.grad(total)(x).astype(np.float32)

    np.testing.assert_array_equal(per_rank(plan, gradient, x), np.full((9, 40), 20, np.float32))


@given(
    shape=st.lists(st.integers(1, 5000), min_size=1, max_size=4).map(tuple),
    most=st.integers(1, 10**6),
    itemsize=st.sampled_from([1, 2, 4, 8]),
)
def test_cuts(shape, most, itemsize):
    """No slab has more than it may, unless the least there is has; few cuts go through tiles."""
    cut = cut_of(shape, most, itemsize)
    size = cut.length * math.prod(shape) // shape[cut.axis]
    assert cut.length >= 1
    assert size <= most or (cut.length == 1 and size == math.prod(shape) // max(shape))
    rows = TILE_ROWS * 4 // itemsize
    outwards = cut.order[::-1].index(cut.axis)
    tile = (WIDTH, rows, 1)[min(outwards, 2)] if len(shape) > 1 else rows * WIDTH
    assert cut.length % tile == 0 or cut.length < tile


def test_numbers_of_bytes_may_be_numpys(twelve):
    tree = [jax.ShapeDtypeStruct((12, 50), np.float32)] * 6

    def taken(number):
        options = {"slab_bytes": number(120), "bucket_bytes": number(400)}
        return str(traced(twelve, lambda *x: twelve.psum(x, "data", **options), *tree))

    assert taken(np.int64) == taken(int)


@pytest.mark.parametrize("slab_bytes", [0, -1, 1.5, True, np.float32(64), np.True_, "5MB"])
def test_a_slab_has_a_whole_number_of_bytes(twelve, slab_bytes):
    run = on_one_device(lambda x: twelve.psum(x, "data", slab_bytes=slab_bytes))
    with pytest.raises(ArgumentError, match="slab_bytes must be a positive whole number"):
        run(jnp.ones((12, 3)))
