"""The Pallas executor against ppermute, bit for bit, with race detection."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.algorithms import registry, tree
from ftmesh.execute import pallas
from ftmesh.execute.context import NO_CAST, ExecutionContext
from ftmesh.execute.lowering import lower
from ftmesh.execute.pallas_tables import PAGE_ROUNDS, SLOTS, split_loops
from ftmesh.schedule.transfers import ADD, COPY
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.more import more, more_case
from tests.support.on_devices import per_rank
from tests.support.pallas_programs import (
    by_both_executors,
    crossing_loop,
    make_program,
    random_loop,
    run_in_numpy,
    run_on_devices,
)

pytestmark = pytest.mark.usefixtures("quick_compiler", "no_race")

slow = pytest.mark.slow  # every step of an interpreted rank is a call of Python
CASES = [
    pytest.param(("ring", "4x4", "2x2@2,2"), marks=slow),
    pytest.param(("row_pair", "4x4", "2x2@2,2"), marks=slow),
    pytest.param(("two_dim", "4x4", ""), marks=slow),
    *(
        pytest.param((algorithm, "4x4", ""), marks=(slow, more))
        for algorithm in ("ring", "row_pair")
    ),
    *(
        pytest.param((algorithm, "6x6", "2x2@2,2"), marks=(slow, more))
        for algorithm in ("ring", "row_pair")
    ),
]


def buffers(num_ranks, num_chunks, dtype=np.float32, *, rows=8):
    rng = np.random.default_rng(0)
    shape = num_ranks, num_chunks, rows, 128
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-1000, 1000, shape, dtype)
    return rng.normal(size=shape).astype(dtype)


def buffers_of(program, dtype=np.float32, **options):
    return buffers(program.num_ranks, program.num_chunks, dtype, **options)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_sums_have_the_same_bits(case):
    algorithm, shape, failed = case
    plan = ftmesh.plan(cpu_grid(shape, failed=failed), algorithm)
    x = buffers_of(plan.program)
    ppermute, kernel = by_both_executors(plan, lambda plan, x: plan.psum(x, "data"), x)
    np.testing.assert_array_equal(ppermute, kernel)
    assert (kernel == kernel[0]).all()
    np.testing.assert_allclose(kernel[0], x.sum(axis=0), atol=1e-4)  # 32 values near 1


@slow
@pytest.mark.parametrize("algorithm", [more_case("ring"), "row_pair"])
def test_integers_are_exact(algorithm):
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), algorithm, executor="pallas")
    x = buffers_of(plan.program, np.int32)
    total = per_rank(plan, lambda x: plan.psum(x, "data"), x)
    np.testing.assert_array_equal(total, np.broadcast_to(x.sum(axis=0), x.shape))


@slow
def test_a_kernel_sums_along_trees():
    plan = ftmesh.plan(cpu_grid("3x2"), "tree", payload_bytes=4096, executor="pallas")
    x = buffers(6, 8, np.int32, rows=1)  # of 4096 bytes
    total = per_rank(plan, lambda x: plan.psum(x, "data"), x)
    np.testing.assert_array_equal(total, np.broadcast_to(x.sum(axis=0), x.shape))


def tree_program(lag, num_chunks=6):
    """The program of trees on a 3x2 for hops that take `lag` more rounds, and how it is split."""
    program = lower(tree.build_schedule(Topology.grid("3x2"), num_chunks, lag=lag))
    return program, split_loops(program.loops, chunk_rows=8, tile=8, max_rows=8)[0]


@pytest.mark.parametrize(("lag", "sent_ahead"), [(0, 0), (1, 1), (2, 2), (3, 3), (5, 3)])
def test_rounds_overlap_as_far_as_a_plan_allows(lag, sent_ahead):
    _, split = tree_program(lag)
    assert split.min_gap[0] == min(lag + 1, SLOTS)
    assert (split.lag, split.num_pieces) == (sent_ahead, 1)  # a piece is a whole round
    assert split.min_gap[1] == 1  # sums of two children arrive one after the other
    assert split.fetch_lag == split.lag


@slow
@pytest.mark.parametrize("lag", [1, 3])
def test_overlapping_rounds_give_the_same_bits(lag):
    program, _ = tree_program(lag, num_chunks=12)
    assert program.loops[0].num_rounds > PAGE_ROUNDS
    held = buffers_of(program, np.int32)
    np.testing.assert_array_equal(run_on_devices(program, held), run_in_numpy(program, held))


@slow
def test_means_of_one_array_that_fills_its_chunks_have_the_same_bits():
    plan = ftmesh.plan(cpu_grid("2x1"), "chain")
    x = buffers_of(plan.program)
    x[:, 0, 0, :3] = [[-0.0, np.inf, np.nan], [-0.0, 1, 1]]
    ppermute, kernel = by_both_executors(plan, lambda plan, x: plan.pmean(x, "data"), x)
    assert ppermute.tobytes() == kernel.tobytes()
    np.testing.assert_array_equal(kernel[0], (x[0] + x[1]) / 2)

    def slope(plan, x):
        return jax.grad(lambda x: 3 * plan.pmean(x, "data").sum())(x)

    for slopes in by_both_executors(plan, slope, x):
        np.testing.assert_array_equal(slopes, np.full_like(x, 3 / 2))


@pytest.mark.parametrize(
    ("executor", "name", "shapes", "is_computed"),
    [
        ("pallas", "pmean", [(2, 8, 128)], True),
        ("pallas", "pmean", [(1, 8, 128), (1, 8, 128)], False),  # packing computes it
        ("pallas", "psum", [(2, 8, 128)], False),  # nothing is computed afterwards
        ("ppermute", "pmean", [(2, 8, 128)], False),
    ],
)
def test_a_mean_of_one_array_is_computed_first(executor, name, shapes, is_computed):
    plan = ftmesh.plan(cpu_grid("2x1"), "chain", executor=executor)
    assert plan.program.num_chunks == 2
    run = jax.shard_map(
        lambda *x: getattr(plan, name)(x, "data"),
        mesh=plan.jax_mesh("data"),
        in_specs=P("data"),
        out_specs=P(),
    )
    text = str(jax.make_jaxpr(run)(*(jnp.zeros((2 * first, *rest)) for first, *rest in shapes)))
    assert "all_reduce" in text
    assert ("select_n" in text) == is_computed


def test_16_bit_means_are_rounded_like_those_of_ppermute():
    plan = ftmesh.plan(cpu_grid("2x1"), "chain")
    x = buffers_of(plan.program, jnp.bfloat16, rows=16)
    assert plan.partial_sum_dtype("bfloat16") == "bfloat16"
    ppermute, kernel = by_both_executors(plan, lambda plan, x: plan.pmean(x, "data"), x)
    np.testing.assert_array_equal(ppermute, kernel)


def test_with_64_bit_types_enabled():
    plan = ftmesh.plan(cpu_grid("2x1"), "chain")
    x = buffers_of(plan.program)
    with jax.enable_x64(True):
        ppermute, kernel = by_both_executors(plan, lambda plan, x: plan.pmean(x, "data"), x)
    assert ppermute.dtype == np.float32
    np.testing.assert_array_equal(ppermute, kernel)
    np.testing.assert_allclose(ppermute, np.broadcast_to(x.mean(axis=0), x.shape), rtol=1e-6)


@slow
def test_several_chunks_a_message():
    topology = cpu_grid("3x1")
    plan = ftmesh.Plan.from_schedule(
        tree.build_schedule(topology, 4, width=2), topology, executor="pallas"
    )
    x = buffers_of(plan.program, np.int32)
    total = per_rank(plan, lambda x: plan.psum(x, "data"), x)
    np.testing.assert_array_equal(total, np.broadcast_to(x.sum(axis=0), x.shape))


@slow
def test_reduce_scatter_and_all_gather():
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), "ring")

    def run(plan, x):
        own = plan.psum_scatter(x, "data")
        return own, plan.all_gather(own, "data")

    x = buffers_of(plan.program).reshape(12, 12, -1)
    (own, gathered), (pallas_own, pallas_gathered) = by_both_executors(plan, run, x)
    np.testing.assert_array_equal(own, pallas_own)
    np.testing.assert_array_equal(gathered, pallas_gathered)
    np.testing.assert_allclose(gathered[0], x.sum(axis=0), atol=1e-4)


@slow
def test_idle_ranks_receive_the_sum_and_contribute_nothing():
    plan = ftmesh.plan(cpu_grid("4x2", failed="2x2@2,0"), "ring", with_idle=True)
    x = buffers_of(plan.program, np.int32)
    ppermute, kernel = by_both_executors(plan, lambda plan, x: plan.psum(x, "data"), x)
    np.testing.assert_array_equal(ppermute, kernel)
    np.testing.assert_array_equal(kernel[0], x[plan.program.live].sum(axis=0))


@slow
def test_two_devices_per_chip():
    schedule = registry.build_schedule(Topology.grid("2x1"), "chain")
    program = lower(schedule, devices_per_chip=2)
    x = buffers_of(program)
    ppermute, kernel = (
        run_on_devices(replace(program, executor=e), x) for e in ("ppermute", "pallas")
    )
    np.testing.assert_array_equal(ppermute, kernel)
    np.testing.assert_allclose(kernel[0], x.sum(axis=0), atol=1e-4)


@slow
def test_payloads_of_any_size_under_all_transformations():
    """The smallest chunks are less than a tile; batch dimensions follow the other three."""
    plan = ftmesh.plan(cpu_grid("2x1"), "chain")
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)

    def run(plan, x):
        value = jax.vmap(lambda x: plan.psum(jnp.sin(x), "data"), in_axes=1)(x)
        return value, jax.grad(lambda x: plan.pmean(x * x, "data").sum())(x)

    for ppermute, kernel in zip(*by_both_executors(plan, run, x), strict=True):
        np.testing.assert_array_equal(ppermute, kernel)


@slow
def test_every_position_of_a_tile_sums_its_own():
    plan = ftmesh.plan(
        ftmesh.TiledTopology.from_topology(cpu_grid("4x2"), "2x1"), "ring", executor="pallas"
    )
    x = np.random.default_rng(0).integers(-99, 99, (4, 2, 7), np.int32)

    @jax.jit
    def total(x):
        spec = P("data", "model")
        mesh = plan.jax_mesh(("data", "model"))
        return jax.shard_map(
            lambda x: plan.psum(x, "data"), mesh=mesh, in_specs=spec, out_specs=spec
        )(x)

    np.testing.assert_array_equal(total(x), np.broadcast_to(x.sum(axis=0), x.shape))


# Random rounds

SIZE = 3, 4  # ranks, chunks


def test_all_reads_of_a_round_are_before_its_writes():
    """What is sent is overwritten by two lanes that add to one chunk; then transfers overlap."""
    overlapping = random_loop(np.random.default_rng(0), SIZE, 3, (ADD, COPY), count=2, step=1)
    loops = crossing_loop(2), overlapping
    assert [
        split.shares_chunks for split in split_loops(loops, chunk_rows=8, tile=8, max_rows=8)
    ] == [True, True]
    program, held = make_program(loops, SIZE), buffers(*SIZE, np.int32)
    np.testing.assert_array_equal(run_on_devices(program, held), run_in_numpy(program, held))


@pytest.mark.slow
def test_several_chunks_in_several_pieces_and_pages(monkeypatch):
    """The last piece is shorter than the others, and is sent before the first one has arrived.

    What arrives in the second loop is not sent on in the next round, so rounds overlap as well.
    """
    monkeypatch.setattr(pallas, "MAX_PIECE_BYTES", 4 * 4096)
    rng = np.random.default_rng(0)
    loops = random_loop(rng, SIZE, 19, (ADD,), count=2), random_loop(rng, SIZE, 3, (COPY,))
    splits = split_loops(loops, chunk_rows=40, tile=8, max_rows=32)
    assert [(split.num_pieces, split.lag, split.rows) for split in splits] == [
        (4, 3, ((24, 8),)),
        (3, 3, ((16, 8),)),
    ]
    program, held = make_program(loops, SIZE), buffers(*SIZE, np.int32, rows=40)
    np.testing.assert_array_equal(run_on_devices(program, held), run_in_numpy(program, held))


@slow
@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=more) for seed in range(4, 8))]
)
def test_random_rounds(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 5)), int(rng.integers(4, 9))
    monkeypatch.setattr(pallas, "MAX_PIECE_BYTES", int(rng.integers(1, 5)) * 4096)
    loops = []
    for _ in range(rng.integers(1, 4)):
        ops = rng.choice([ADD, COPY], rng.integers(1, 4)).tolist()
        count, num_rounds = (int(rng.integers(1, most)) for most in (4, 18))
        step = int(rng.choice([1, count, count]))
        loops.append(random_loop(rng, size, num_rounds, ops, count=count, step=step))
    program = make_program(loops, size)
    held = buffers(*size, np.int32, rows=8 * int(rng.integers(1, 6)))
    np.testing.assert_array_equal(run_on_devices(program, held), run_in_numpy(program, held))


# Errors


def test_an_emulated_axis():
    plan = ftmesh.plan(Topology.grid("2x2"), "ring", executor="pallas")
    with pytest.raises(CollectiveError, match="moves data between devices, and a vmap has one"):
        on_one_device(lambda x: plan.psum(x, "data"))(jnp.ones((4, 3)))


def test_overlapping_transfers_that_do_not_fit(monkeypatch):
    monkeypatch.setattr(pallas, "MAX_VMEM_BYTES", 10 * 4096)
    loop = random_loop(np.random.default_rng(0), SIZE, 3, (ADD, COPY), count=2, step=1)
    with pytest.raises(CollectiveError, match="sum in smaller buckets"):
        run_on_devices(make_program([loop], SIZE), buffers(*SIZE, np.int32))


def test_too_many_rows():
    plan = ftmesh.plan(cpu_grid("2x2"), "ring", executor="pallas")
    total = jax.shard_map(
        lambda x: plan.psum(x, "data"),
        mesh=plan.jax_mesh("data"),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    with pytest.raises(CollectiveError, match="in 32 bits, and this buffer has 2,147,483,648: sum"):
        jax.jit(total).lower(jax.ShapeDtypeStruct((4 * 2**38,), np.float32))


def test_an_unknown_executor():
    with pytest.raises(
        ArgumentError, match="one of auto, xla, ppermute, ppermute_unrolled, pallas, not 'tpu'"
    ):
        ftmesh.plan(Topology.grid("2x2"), executor="tpu")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ({"platform": "tpu", "device_kind": "TPU v3"}, r"does not run on TPU v3.*'ppermute'"),
        ({"platform": "cpu"}, r"needs all devices in one process, .*'ppermute'"),
    ],
)
def test_unsupported_devices(kind, says):
    devices = tuple(SimpleNamespace(process_index=i, **kind) for i in range(3))
    program = replace(make_program([crossing_loop(1)], SIZE), devices=devices)
    context = ExecutionContext("data", SIZE, NO_CAST, emulated=False)
    with pytest.raises(CollectiveError, match=says):
        pallas.run_loops(jnp.ones((4, 8, 128)), program.loops, program, context)
