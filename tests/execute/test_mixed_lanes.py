"""Lanes that add and copy: trees, against NumPy, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

import ftmesh
from ftmesh import Topology, VerificationError
from ftmesh.execute import pallas, primitives
from ftmesh.execute.check_lowered import LoopRounds, check_program
from ftmesh.execute.chunk_tables import ChunkTable, _merge_into_slots
from ftmesh.execute.context import ExecutionContext, WireDtypes
from ftmesh.execute.device_schedule import schedule_for_devices
from ftmesh.execute.lowering import IDLE, MIXED, Table, lower
from ftmesh.execute.ppermute import run_loop
from ftmesh.schedule.transfers import ADD, COPY, join_transfers
from ftmesh.testing import cpu_grid
from tests.support.more import more
from tests.support.numpy_executor import run, run_phases, run_schedule
from tests.support.on_devices import PER_RANK, per_rank
from tests.support.pallas_programs import make_program, random_loop, run_in_numpy, run_on_devices
from tests.support.trees import tree_schedule

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOLES = "4x4", "1x1@0,0;1x1@2,1"
CASES = {
    "4x4": (*HOLES, 1, 4),
    "3x3x2": ("3x3x2", "", 1, 6),
    "two devices a chip": (*HOLES, 2, 4),
}  # mesh, failed, devices of a chip, lanes


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """The schedule of the devices, the program, and its number of lanes."""
    shape, failed, devices_per_chip, num_lanes = CASES[request.param]
    schedule = tree_schedule(Topology.grid(shape, failed=failed), 12)
    ranks = schedule_for_devices(schedule, devices_per_chip=devices_per_chip)
    return ranks, lower(schedule, devices_per_chip=devices_per_chip), num_lanes


def random_buffers(program, dtype=np.float32, *, size=3):
    shape = program.num_ranks, program.num_chunks, 1, size
    rng = np.random.default_rng(0)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-1000, 1000, shape, dtype)
    return rng.normal(size=shape).astype(dtype)


def emulated(program, held, **options):
    def body(x):
        return primitives.all_reduce_varying(x, axis_name="rank", program=program, **options)

    return np.asarray(jax.jit(jax.vmap(body, axis_name="rank"))(held))


def tree_loop(program):
    """The loop whose lanes are mixed."""
    return next(loop for loop in program.loops if loop.name == "trees")


# Lowering ---------------------------------------------------------------------------------------


def test_one_mixed_lane_for_each_direction(case):
    ranks, program, num_lanes = case
    loop = tree_loop(program)
    assert [(lane.op, lane.count) for lane in loop.lanes] == [(MIXED, 1)] * num_lanes
    check_program(program)
    phase = next(phase for phase in ranks.phases if phase.name == "trees")
    names = ("round", "lane", "src", "dst", "chunk", "op")
    actual, expected = (
        sorted(zip(*(getattr(c, name).tolist() for name in names), strict=True))
        for c in (join_transfers(LoopRounds(**vars(loop)).rounds()), phase.transfers)
    )
    assert actual == expected


def test_lanes_that_only_add_keep_their_operation():
    """Nothing is copied in the first rounds."""
    schedule = tree_schedule(Topology.grid("4x4"), 6)
    c = schedule.phases[0].transfers
    first = int(c.round[c.op == COPY].min())
    early = ftmesh.Phase("early", c.take(c.round < first))
    bare = ftmesh.Schedule(schedule.topology, "early", 6, (early,))
    assert {lane.op for lane in lower(bare).loops[0].lanes} == {ADD}


def test_idle_devices_receive_the_sums_of_trees():
    schedule = tree_schedule(Topology.grid(HOLES[0], failed=HOLES[1]), 6)
    program = lower(schedule, with_idle=True)
    check_program(program)
    held = np.random.default_rng(0).integers(0, 99, (16, program.num_chunks))
    assert (run(program, held.copy()) == held[program.live].sum(axis=0)).all()


# Results ----------------------------------------------------------------------------------------


def test_sums_have_the_bits_of_numpy(case):
    ranks, program, _ = case
    held = random_buffers(program)
    expected = run_phases(ranks.phases, held.copy())
    assert (expected == expected[0]).all()
    np.testing.assert_array_equal(emulated(program, held), expected)


def test_integers_are_exact():
    program = lower(tree_schedule(Topology.grid("3x3", failed="1x1@1,1"), 5), devices_per_chip=2)
    held = random_buffers(program, np.int32, size=1)
    expected = np.broadcast_to(held.sum(axis=0), held.shape)
    np.testing.assert_array_equal(emulated(program, held), expected)


def test_unrolled_rounds_have_the_same_bits():
    schedule = tree_schedule(Topology.grid("3x1"), 3)
    program = replace(lower(schedule), unrolled=True)
    held = random_buffers(program)
    np.testing.assert_array_equal(emulated(program, held), run_schedule(schedule, held))


def test_results_of_16_bits_are_rounded_once_at_the_end():
    """A mixed lane cannot tell partial sums from results: both travel in the dtype of the sum."""
    schedule = tree_schedule(Topology.grid("3x2"), 4)
    program = lower(schedule)
    held = random_buffers(program)
    expected = run_schedule(schedule, held).astype(jnp.bfloat16).astype(np.float32)
    wire = WireDtypes(jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(emulated(program, held, wire=wire), expected)


def test_a_mixed_lane_travels_in_the_dtype_of_partial_sums():
    schedule = tree_schedule(Topology.grid("3x2"), 4)
    (loop,) = lower(schedule).loops
    context = ExecutionContext("rank", 6, WireDtypes(None, jnp.bfloat16), emulated=True)
    held = random_buffers(lower(schedule))
    result = jax.jit(jax.vmap(lambda x: run_loop(x, loop, context), axis_name="rank"))(held)
    np.testing.assert_array_equal(result, run_schedule(schedule, held))


def test_on_devices_and_through_the_collectives():
    topology = cpu_grid(HOLES[0], failed=HOLES[1])
    schedule = tree_schedule(topology.without_devices(), 12)
    plan = ftmesh.Plan.from_schedule(schedule, topology)
    held = random_buffers(plan.program)
    result = per_rank(plan, lambda x: plan.psum(x, "data"), held)
    np.testing.assert_array_equal(result, run_schedule(schedule, held))


def test_unused_values_leave_no_trace():
    """Random rounds: NaN and infinities are overwritten, or left alone."""
    rng = np.random.default_rng(0)
    size = 5, 8
    loops = [
        random_loop(rng, size, 4, (MIXED, MIXED), count=2, step=1),
        random_loop(rng, size, 4, (MIXED, ADD, COPY)),
        random_loop(rng, size, 2, (MIXED, MIXED, MIXED, MIXED)),
    ]
    program = replace(make_program(loops, size), executor="ppermute")
    held = rng.integers(-9, 9, (*size, 1, 50)).astype(np.float32)
    for odd in (np.nan, np.inf, -np.inf):
        held[rng.random(held.shape) < 0.05] = odd
    with np.errstate(invalid="ignore"):
        expected = run_in_numpy(program, held)
    assert 0.1 < np.isfinite(expected).mean() < 0.9
    np.testing.assert_array_equal(emulated(program, held), expected)


# Tables -----------------------------------------------------------------------------------------

ARRIVALS = st.lists(
    st.lists(st.sampled_from([IDLE, 0, 1, 4, 5, 6]), min_size=4, max_size=4),
    min_size=1, max_size=6,
)  # fmt: skip


@given(ARRIVALS, st.integers(1, 2))
def test_slots_keep_the_operations(arrivals, count):
    """An entry is twice the chunk, plus 1 for a copy."""
    received = np.array(arrivals, np.int32)[None]
    slots = _merge_into_slots(received, count, has_ops=True)
    sent = np.full_like(received, IDLE)
    rows = np.concatenate([sent, slots], axis=2)[0].T
    row = np.arange(len(rows), dtype=np.int32)[None]
    table = ChunkTable(4, slots.shape[2], np.zeros_like(row), row, rows, has_ops=True)
    np.testing.assert_array_equal(table.chunk_ids()[1], received >> 1)
    np.testing.assert_array_equal(table.ops(), np.where(received == IDLE, IDLE, received & 1))


def test_the_operation_is_part_of_an_entry(case):
    _, program, num_lanes = case
    table = ChunkTable.from_loop(tree_loop(program))
    assert table.has_ops
    assert table.num_slots < num_lanes  # no chip here has links in all directions at once
    assert table.base.shape[1] == num_lanes + table.num_slots


def test_receivers_share_the_rows_of_senders():
    """25 chips with 8 entries each have one row per link, and one idle row."""
    program = lower(tree_schedule(Topology.grid("5x5"), 24), devices_per_chip=2)
    table = ChunkTable.from_loop(tree_loop(program))
    assert table.row.shape == (50, 8)
    assert len(table.rows) == 80 + 1


# Faults -----------------------------------------------------------------------------------------


def with_table(program, lane, **changes):
    """The program with the table of a lane changed."""
    (loop,) = program.loops
    lanes = list(loop.lanes)
    lanes[lane] = replace(lanes[lane], send=replace(lanes[lane].send, **changes))
    return replace(program, all_gather=(replace(loop, lanes=tuple(lanes)),))


@pytest.fixture(scope="module")
def program():
    program = lower(tree_schedule(Topology.grid(HOLES[0], failed=HOLES[1]), 12))
    check_program(program)
    return program


class TestFaults:
    """A program with one bit changed is rejected."""

    @pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
    @pytest.mark.parametrize("lane", [0, 3])
    def test_an_operation_in_a_table(self, program, lane, where):
        send = program.loops[0].lanes[lane].send
        assert isinstance(send, Table)
        rows = send.rows.copy()
        used = np.argwhere(rows != IDLE)
        rank, now = used[int(where * len(used))]
        entry = rows[rank, now] + send.base[send.row == rank][0]
        rows[rank, now] += 1 if entry % 2 == ADD else -1
        with pytest.raises(VerificationError, match=r"lowered program, read back: .*chunk \d+ "):
            check_program(with_table(program, lane, rows=rows))

    @pytest.mark.parametrize("op", [ADD, COPY])
    def test_one_operation_for_all_of_a_lane(self, program, op):
        (loop,) = program.loops
        first, *others = loop.lanes
        entries = first.send.entries(loop.num_rounds)
        plain = replace(first, op=op, send=Table.from_entries(first.chunk_ids(entries)))
        faulty = replace(program, all_gather=(replace(loop, lanes=(plain, *others)),))
        with pytest.raises(VerificationError, match=r"read back: .*chunk \d+ "):
            check_program(faulty)

    @pytest.mark.parametrize("where", [0.2, 0.8])
    def test_an_operation_in_the_entries_of_a_rank(self, program, where, monkeypatch):
        from_loop = ChunkTable.from_loop

        def faulty(loop):
            table = from_loop(loop)
            bit = 1 << table.num_lane_bits
            rank, entry = 7, table.num_lanes + table.num_slots - 1
            row = table.rows[table.row[rank, entry]].copy()
            used = np.flatnonzero(row != IDLE)
            now = used[int(where * len(used))]
            row[now] += -bit if (row[now] + table.base[rank, entry]) & bit else bit
            index = table.row.copy()
            index[rank, entry] = len(table.rows)
            return replace(table, row=index, rows=np.concatenate([table.rows, row[None]]))

        monkeypatch.setattr(ChunkTable, "from_loop", staticmethod(faulty))
        says = r"expected that rank \d+ receives by operation [01], but its table says [01]"
        with pytest.raises(VerificationError, match=says):
            check_program(program)


# The Pallas executor ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_race")
class TestKernel:
    """The interpreted kernel gives the same bits, without races."""

    @pytest.mark.parametrize(
        ("shape", "failed", "chunks"),
        [("3x1", "", 3), pytest.param(*HOLES, 12, marks=pytest.mark.slow)],
    )
    def test_sums_of_trees(self, shape, failed, chunks):
        schedule = tree_schedule(Topology.grid(shape, failed=failed), chunks)
        program = replace(lower(schedule), executor="pallas")
        shape = program.num_ranks, program.num_chunks, 8, 128
        held = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_array_equal(run_on_devices(program, held), run_schedule(schedule, held))

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "wire",
        [
            pytest.param(WireDtypes(), id="as they are"),
            pytest.param(WireDtypes(jnp.bfloat16, jnp.bfloat16), id="in 16 bits", marks=more),
        ],
    )
    def test_random_rounds(self, wire, monkeypatch):
        """In several pieces, the last of them shorter, and cast for the wire."""
        monkeypatch.setattr(pallas, "MAX_PIECE_BYTES", 4 * 4096)
        rng, size = np.random.default_rng(0), (3, 6)
        loops = (
            random_loop(rng, size, 11, (MIXED, MIXED), count=2),
            random_loop(rng, size, 3, (MIXED, COPY, ADD)),
            random_loop(rng, size, 3, (MIXED, MIXED), count=2, step=1),
        )
        program = replace(make_program((), size), reduce_scatter=loops)
        held = rng.normal(size=(*size, 40, 128)).astype(np.float32)
        mesh = Mesh(np.array(jax.devices()[: size[0]]), "data")

        def run_by(executor):
            def body(x):
                chosen = replace(program, executor=executor)
                return primitives.reduce_scatter(x[0], axis_name="data", program=chosen, wire=wire)[
                    None
                ]

            return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PER_RANK, out_specs=PER_RANK))(
                held
            )

        np.testing.assert_array_equal(run_by("pallas"), run_by("ppermute"))
