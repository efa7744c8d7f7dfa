"""Lanes of which some transfers are added and some copied: trees, against NumPy, bit for bit."""

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
from ftmesh.execute import device_schedule as devices
from ftmesh.execute import pallas, primitives
from ftmesh.execute.check_lowered import LoopRounds, check_program
from ftmesh.execute.chunk_tables import Numbers, _in_few_places
from ftmesh.execute.context import Setting, Wire
from ftmesh.execute.lowering import IDLE, MIXED, Table, lower
from ftmesh.execute.ppermute import run_loop
from ftmesh.schedule.transfers import ADD, COPY, join
from ftmesh.testing import cpu_grid
from tests.support.more import more
from tests.support.numpy_executor import run, run_phases
from tests.support.on_devices import EACH, per_rank
from tests.support.pallas_programs import in_numpy, on_devices, program_of, random_loop
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
    """A schedule, the script of its devices, and its program."""
    shape, failed, devices_per_chip, num_lanes = CASES[request.param]
    schedule = tree_schedule(Topology.grid(shape, failed=failed), 12)
    script = devices.on_devices(schedule, devices_per_chip=devices_per_chip)
    return script, lower(schedule, devices_per_chip=devices_per_chip), num_lanes


def numbers(program, dtype=np.float32, *, size=3):
    shape = program.num_ranks, program.num_chunks, 1, size
    rng = np.random.default_rng(0)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-1000, 1000, shape, dtype)
    return rng.normal(size=shape).astype(dtype)


def emulated(program, held, **options):
    def body(x):
        return primitives.sum_varying(x, axis_name="rank", program=program, **options)

    return np.asarray(jax.jit(jax.vmap(body, axis_name="rank"))(held))


def trees_of(program):
    """The loop whose lanes are mixed."""
    return next(loop for loop in program.loops if loop.name == "trees")


# What they are lowered to -----------------------------------------------------------------------


def test_a_lane_for_each_direction_whatever_its_transfers_are(case):
    script, program, num_lanes = case
    loop = trees_of(program)
    assert [(lane.op, lane.count) for lane in loop.lanes] == [(MIXED, 1)] * num_lanes
    check_program(program)
    phase = next(phase for phase in script.phases if phase.name == "trees")
    names = ("round", "lane", "src", "dst", "chunk", "op")
    found, expected = (
        sorted(zip(*(getattr(c, name).tolist() for name in names), strict=True))
        for c in (join(LoopRounds(loop).rounds()), phase.columns)
    )
    assert found == expected


def test_lanes_that_all_add_keep_their_operation():
    """In the first rounds nothing is copied yet."""
    schedule = tree_schedule(Topology.grid("4x4"), 6)
    c = schedule.phases[0].columns
    first = int(c.round[c.op == COPY].min())
    early = ftmesh.Phase("early", c.take(c.round < first))
    bare = ftmesh.Schedule(schedule.topology, "early", 6, (early,))
    assert {lane.op for lane in lower(bare).loops[0].lanes} == {ADD}


def test_idle_devices_get_the_sums_of_trees():
    schedule = tree_schedule(Topology.grid(HOLES[0], failed=HOLES[1]), 6)
    program = lower(schedule, with_idle=True)
    check_program(program)
    held = np.random.default_rng(0).integers(0, 99, (16, program.num_chunks))
    assert (run(program, held.copy()) == held[program.live].sum(axis=0)).all()


# What they compute ------------------------------------------------------------------------------


def test_sums_have_the_bits_of_numpy(case):
    script, program, _ = case
    held = numbers(program)
    expected = run_phases(script.phases, held.copy())
    assert (expected == expected[0]).all()
    np.testing.assert_array_equal(emulated(program, held), expected)


def test_integers_are_exact():
    program = lower(tree_schedule(Topology.grid("3x3", failed="1x1@1,1"), 5), devices_per_chip=2)
    held = numbers(program, np.int32, size=1)
    expected = np.broadcast_to(held.sum(axis=0), held.shape)
    np.testing.assert_array_equal(emulated(program, held), expected)


def test_rounds_written_out_have_the_same_bits():
    schedule = tree_schedule(Topology.grid("3x1"), 3)
    program = replace(lower(schedule), unrolled=True)
    held = numbers(program)
    np.testing.assert_array_equal(emulated(program, held), run_phases(schedule.phases, held.copy()))


def test_results_of_16_bits_are_rounded_once_at_the_end():
    """Nothing tells partial sums from results on a lane that has both: they travel as summed."""
    schedule = tree_schedule(Topology.grid("3x2"), 4)
    program = lower(schedule)
    held = numbers(program)
    expected = run_phases(schedule.phases, held.copy()).astype(jnp.bfloat16).astype(np.float32)
    wire = Wire(jnp.bfloat16, jnp.bfloat16)
    np.testing.assert_array_equal(emulated(program, held, wire=wire), expected)


def test_a_mixed_lane_travels_in_what_partial_sums_need():
    schedule = tree_schedule(Topology.grid("3x2"), 4)
    (loop,) = lower(schedule).loops
    setting = Setting("rank", 6, Wire(None, jnp.bfloat16), emulated=True)
    held = numbers(lower(schedule))
    found = jax.jit(jax.vmap(lambda x: run_loop(x, loop, setting), axis_name="rank"))(held)
    np.testing.assert_array_equal(found, run_phases(schedule.phases, held.copy()))


def test_on_devices_and_through_the_collectives():
    topology = cpu_grid(HOLES[0], failed=HOLES[1])
    schedule = tree_schedule(topology.without_devices(), 12)
    plan = ftmesh.plan(topology, schedule=schedule)
    held = numbers(plan.program)
    found = per_rank(plan, lambda x: plan.psum(x, "data"), held)
    np.testing.assert_array_equal(found, run_phases(schedule.phases, held.copy()))


def test_what_is_not_wanted_leaves_no_trace():
    """Rounds that sum nothing in particular: NaN and infinities are overwritten, or left alone."""
    rng = np.random.default_rng(0)
    size = 5, 8
    loops = [
        random_loop(rng, size, 4, (MIXED, MIXED), count=2, step=1),
        random_loop(rng, size, 4, (MIXED, ADD, COPY)),
        random_loop(rng, size, 2, (MIXED, MIXED, MIXED, MIXED)),
    ]
    program = replace(program_of(loops, size), executor="ppermute")
    held = rng.integers(-9, 9, (*size, 1, 50)).astype(np.float32)
    for odd in (np.nan, np.inf, -np.inf):
        held[rng.random(held.shape) < 0.05] = odd
    with np.errstate(invalid="ignore"):
        expected = in_numpy(program, held)
    assert 0.1 < np.isfinite(expected).mean() < 0.9
    np.testing.assert_array_equal(emulated(program, held), expected)


# The numbers that ranks read --------------------------------------------------------------------

ARRIVALS = st.lists(
    st.lists(st.sampled_from([IDLE, 0, 1, 4, 5, 6]), min_size=4, max_size=4),
    min_size=1, max_size=6,
)  # fmt: skip


@given(ARRIVALS, st.integers(1, 2))
def test_operations_are_told_apart_in_few_places(rows, count):
    """Numbers are twice the chunk, and 1 more for a copy."""
    received = np.array(rows, np.int32)[None]
    places = _in_few_places(received, count, has_ops=True)
    sent = np.full_like(received, IDLE)
    every = np.concatenate([sent, places], axis=2)[0].T
    row = np.arange(len(every), dtype=np.int32)[None]
    found = Numbers(4, places.shape[2], np.zeros_like(row), row, every, has_ops=True)
    np.testing.assert_array_equal(found.chunks()[1], received >> 1)
    np.testing.assert_array_equal(found.ops(), np.where(received == IDLE, IDLE, received & 1))


def test_the_operation_rides_in_a_number_that_is_read_anyway(case):
    _, program, num_lanes = case
    found = Numbers.of(trees_of(program))
    assert found.has_ops
    assert found.num_places < num_lanes  # no chip here has links in all directions at once
    assert found.base.shape[1] == num_lanes + found.num_places


def test_who_receives_shares_the_row_of_who_sends():
    """Of 25 chips and 8 numbers each there are as many rows as links, and one with nothing."""
    program = lower(tree_schedule(Topology.grid("5x5"), 24), devices_per_chip=2)
    found = Numbers.of(trees_of(program))
    assert found.row.shape == (50, 8)
    assert len(found.rows) == 80 + 1


# Faults -----------------------------------------------------------------------------------------


def with_table(program, lane, **changes):
    """The program with the table of a lane changed."""
    (loop,) = program.loops
    lanes = list(loop.lanes)
    lanes[lane] = replace(lanes[lane], send=replace(lanes[lane].send, **changes))
    return replace(program, gather=(replace(loop, lanes=tuple(lanes)),))


@pytest.fixture(scope="module")
def program():
    program = lower(tree_schedule(Topology.grid(HOLES[0], failed=HOLES[1]), 12))
    check_program(program)
    return program


class TestFaults:
    """One bit that is not as it was, and the program is refused by name."""

    @pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
    @pytest.mark.parametrize("lane", [0, 3])
    def test_an_operation_in_a_table(self, program, lane, where):
        send = program.loops[0].lanes[lane].send
        assert isinstance(send, Table)
        rows = send.rows.copy()
        used = np.argwhere(rows != IDLE)
        rank, now = used[int(where * len(used))]
        whole = rows[rank, now] + send.base[send.row == rank][0]
        rows[rank, now] += 1 if whole % 2 == ADD else -1
        with pytest.raises(VerificationError, match=r"lowered program, read back: .*chunk \d+ "):
            check_program(with_table(program, lane, rows=rows))

    @pytest.mark.parametrize("op", [ADD, COPY])
    def test_one_operation_for_all_of_a_lane(self, program, op):
        (loop,) = program.loops
        first, *others = loop.lanes
        numbers = first.send.chunks(loop.num_rounds)
        plain = replace(first, op=op, send=Table.of(first.chunks(numbers)))
        bent = replace(program, gather=(replace(loop, lanes=(plain, *others)),))
        with pytest.raises(VerificationError, match=r"read back: .*chunk \d+ "):
            check_program(bent)

    @pytest.mark.parametrize("where", [0.2, 0.8])
    def test_an_operation_in_the_numbers_of_a_rank(self, program, where, monkeypatch):
        made = Numbers.of

        def bent(loop):
            found = made(loop)
            bit = 1 << found.num_bits
            rank, number = 7, found.num_lanes + found.num_places - 1
            row = found.rows[found.row[rank, number]].copy()
            used = np.flatnonzero(row != IDLE)
            now = used[int(where * len(used))]
            row[now] += -bit if (row[now] + found.base[rank, number]) & bit else bit
            at = found.row.copy()
            at[rank, number] = len(found.rows)
            return replace(found, row=at, rows=np.concatenate([found.rows, row[None]]))

        monkeypatch.setattr(Numbers, "of", staticmethod(bent))
        says = r"lane \d, round \d+: expected that rank \d+ receives by operation [01], found [01]"
        with pytest.raises(VerificationError, match=says):
            check_program(program)


# The other executor -----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_race")
class TestKernel:
    """The same bits by the Pallas executor, interpreted, and no race."""

    @pytest.mark.parametrize(
        ("shape", "failed", "chunks"),
        [("3x1", "", 3), pytest.param(*HOLES, 12, marks=pytest.mark.slow)],
    )
    def test_sums_of_trees(self, shape, failed, chunks):
        schedule = tree_schedule(Topology.grid(shape, failed=failed), chunks)
        program = replace(lower(schedule), executor="pallas")
        shape = program.num_ranks, program.num_chunks, 8, 128
        held = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        np.testing.assert_array_equal(
            on_devices(program, held), run_phases(schedule.phases, held.copy())
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "wire",
        [
            pytest.param(Wire(), id="as they are"),
            pytest.param(Wire(jnp.bfloat16, jnp.bfloat16), id="in 16 bits", marks=more),
        ],
    )
    def test_rounds_that_sum_nothing_in_particular(self, wire, monkeypatch):
        """In several pieces, of which the last is shorter, and cast on their way."""
        monkeypatch.setattr(pallas, "PIECE_BYTES", 4 * 4096)
        rng, size = np.random.default_rng(0), (3, 6)
        loops = (
            random_loop(rng, size, 11, (MIXED, MIXED), count=2),
            random_loop(rng, size, 3, (MIXED, COPY, ADD)),
            random_loop(rng, size, 3, (MIXED, MIXED), count=2, step=1),
        )
        program = replace(program_of((), size), scatter=loops)
        held = rng.normal(size=(*size, 40, 128)).astype(np.float32)
        mesh = Mesh(np.array(jax.devices()[: size[0]]), "data")

        def run_by(executor):
            def body(x):
                by = replace(program, executor=executor)
                return primitives.reduce_scatter(x[0], axis_name="data", program=by, wire=wire)[
                    None
                ]

            return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=EACH, out_specs=EACH))(held)

        np.testing.assert_array_equal(run_by("pallas"), run_by("ppermute"))
