"""Lowering: a program has the transfers of its schedule, in few permutations."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftmesh
from ftmesh import Phase, Schedule, Topology
from ftmesh.algorithms import registry
from ftmesh.execute.check_lowered import LoopRounds
from ftmesh.execute.chunk_tables import ChunkTable
from ftmesh.execute.lowering import IDLE, Rule, Table, _find_rule, lower
from ftmesh.schedule.transfers import ADD, COPY, join_transfers, make_transfers
from ftmesh.topology.ranks import Ranks
from tests.support.numpy_executor import between_ranks, ranks_of_chips, run

MESHES = {
    "ring": Topology.grid("8x8", failed="2x2@2,2"),
    "row_pair": Topology.grid("8x8", failed="2x2@2,2"),
    "two_dim": Topology.grid("8x4", wrap=[True, False]),
}


def all_transfers(loop):
    return join_transfers(LoopRounds(**vars(loop)).rounds())


def rows(columns):
    names = ("round", "src", "dst", "chunk", "count", "op")
    return sorted(zip(*(getattr(columns, name).tolist() for name in names), strict=True))


@pytest.mark.parametrize("algorithm", MESHES)
def test_a_program_has_the_transfers_of_its_schedule(algorithm):
    schedule = registry.build_schedule(MESHES[algorithm], algorithm)
    program = lower(schedule)
    assert len(program.loops) == len(schedule.phases)
    for loop, phase in zip(program.loops, schedule.phases, strict=True):
        assert rows(all_transfers(loop)) == rows(between_ranks(phase.transfers, schedule.topology))
        for lane in loop.lanes:
            sources, targets = zip(*lane.permutation, strict=True)
            assert len(set(sources)) == len(set(targets)) == len(lane.permutation)


def test_rings_have_no_tables():
    program = lower(registry.build_schedule(Topology.grid("8x8", failed="2x2@2,2"), "ring"))
    for loop in program.loops:
        assert len(loop.lanes) == 2
        assert all(isinstance(lane.send, Rule) for lane in loop.lanes)
        assert all(lane.is_full for lane in loop.lanes)
    pairs = lower(registry.build_schedule(Topology.grid("8x8"), "row_pair"))
    assert isinstance(pairs.reduce_scatter[0].lanes[0].send, Rule)


@pytest.mark.parametrize(
    ("algorithm", "lanes"),
    [
        ("ring", [[1] * 2] * 2),
        ("row_pair", [[3] * 4, [1] * 4, [1] * 4, [3] * 4]),
        ("two_dim", [[4] * 6, [1] * 6, [1] * 6, [4] * 6]),
    ],
)
def test_lanes_of_split_schedules_have_one_operation(algorithm, lanes):
    """Their tables carry no operations."""
    program = lower(registry.build_schedule(MESHES[algorithm], algorithm))
    for loops, op in ((program.reduce_scatter, ADD), (program.all_gather, COPY)):
        assert {lane.op for loop in loops for lane in loop.lanes} == {op}
    assert [[lane.count for lane in loop.lanes] for loop in program.loops] == lanes
    for loop in program.loops:
        if not all(isinstance(lane.send, Rule) for lane in loop.lanes):
            assert not ChunkTable.from_loop(loop).has_ops


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_the_number_of_permutations_does_not_grow_with_the_mesh(algorithm):
    def lanes(shape, block):
        program = lower(registry.build_schedule(Topology.grid(shape, failed=block), algorithm))
        return [len(loop.lanes) for loop in program.loops]

    assert lanes("8x8", "2x2@2,2") == lanes("16x32", "4x2@6,14") == lanes("32x32", "4x2@14,14")
    assert max(lanes("8x8", "2x2@2,2")) == {"ring": 2, "row_pair": 4}[algorithm]


def test_ranks_that_do_the_same_share_a_row():
    """On 32x32 with a hole: one row per ring position, and those of the chips next to the hole."""
    topo = Topology.grid("32x32", failed="4x2@14,14")
    program = lower(registry.build_schedule(topo, "row_pair"), devices_per_chip=2)
    tables = [
        lane.send for loop in program.loops for lane in loop.lanes if isinstance(lane.send, Table)
    ]
    assert len(tables) == 8
    for table in tables:
        assert len(table.row) == 2032
        assert len(table.rows) <= 64 + 56
    assert sum(table.rows.size for table in tables) < 60_000


def test_a_rule_may_start_late_and_end_early():
    """Across row pairs every row starts later, or ends earlier, than the one before."""
    program = lower(registry.build_schedule(Topology.grid("16x16", failed="2x2@2,2"), "row_pair"))
    _, across, back, _ = program.loops
    for loop in (across, back):
        assert all(isinstance(lane.send, Rule) and not lane.is_full for lane in loop.lanes)
    assert max(lane.send.begin.max() for lane in across.lanes) == across.num_rounds - 1
    assert {1, 2, 3} < {*back.lanes[0].send.end.tolist()}


@given(
    st.integers(1, 3), st.integers(3, 8), st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1)
)
def test_a_rule_reproduces_its_rows(count, num_rounds, senders):
    """Rows that step up or down through a part of a circle, in a window of the rounds."""
    chunks = np.full((len(senders), num_rounds), IDLE, np.int32)
    for rank, (first, begin, length, direction) in enumerate(senders):
        begin %= num_rounds
        stop = min(begin + length % num_rounds + 1, num_rounds)
        steps = np.arange(begin, stop) * (1 if direction % 2 else -1) + 10
        chunks[rank, begin:stop] = first + count * steps
    rule = _find_rule(chunks, count, np.arange(len(senders)))
    assert rule is not None
    np.testing.assert_array_equal(rule.entries(num_rounds), chunks)
    assert [rule.entries_in(now).tolist() for now in range(num_rounds)] == chunks.T.tolist()


@pytest.mark.parametrize("change", ["a gap", "another step"])
def test_rows_that_follow_no_rule(change):
    rows = np.arange(24, dtype=np.int32).reshape(3, 8)
    assert _find_rule(rows, 1, np.arange(3)) is not None
    rows[1, 3] = IDLE if change == "a gap" else 5
    assert _find_rule(rows, 1, np.arange(3)) is None


@st.composite
def changing_lanes(draw):
    """Rounds whose permutations differ from round to round."""
    order = st.permutations(range(5))
    moves = [
        (now, lane, src, dst)
        for now in range(draw(st.integers(1, 4)))
        for lane in range(draw(st.integers(1, 2)))
        for src, dst in enumerate(draw(order))
        if src != dst
    ]
    return moves or [(0, 0, 0, 1)]


@given(changing_lanes(), st.integers(1, 2))
def test_changing_lanes_become_constant_with_as_few_as_possible(moves, num_ops):
    now, lane, src, dst = np.array(moves).T
    chunk = np.arange(len(moves))
    columns = make_transfers(
        round=now, lane=lane, src=src, dst=dst, chunk=chunk, op=chunk % num_ops
    )
    schedule = Schedule(Topology.grid("5x1"), "any", len(moves), (Phase("any", columns),))
    (loop,) = lower(schedule).loops
    assert rows(all_transfers(loop)) == rows(columns)
    pairs = {}
    for n, s, d in zip(now.tolist(), src.tolist(), dst.tolist(), strict=True):
        pairs[s, d, n] = pairs.get((s, d, n), 0) + 1
    most = {}
    for (s, d, _), repeats in pairs.items():
        most[s, d] = max(most.get((s, d), 0), repeats)
    degree = max(
        max(sum(m for pair, m in most.items() if pair[end] == rank) for rank in range(5))
        for end in (0, 1)
    )
    assert len(loop.lanes) <= max(degree, len(set(lane.tolist())))


def test_transfers_of_different_sizes_get_lanes_of_their_own():
    columns = make_transfers(round=0, lane=0, src=[0, 1], dst=[1, 0], chunk=[0, 3], count=[3, 1])
    schedule = Schedule(Topology.grid("2x1"), "any", 4, (Phase("any", columns),))
    (loop,) = lower(schedule).loops
    assert sorted(lane.count for lane in loop.lanes) == [1, 3]
    assert rows(all_transfers(loop)) == rows(columns)


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_two_devices_per_chip_share_the_payload(algorithm):
    schedule = registry.build_schedule(Topology.grid("6x6", failed="2x2@2,2"), algorithm)
    program = lower(schedule, devices_per_chip=2)
    assert (program.num_ranks, program.num_chunks) == (64, 2 * schedule.num_chunks)
    held = np.random.default_rng(0).integers(0, 100, (64, program.num_chunks))
    assert (run(program, held.copy()) == held.sum(axis=0)).all()
    owners = program.owner.reshape(2, -1)
    owning_chips = ranks_of_chips(schedule.topology)[schedule.owner]
    assert (owners == 2 * owning_chips + [[0], [1]]).all()


def test_idle_devices_have_the_last_ranks():
    topo = Topology.grid("4x4", failed="2x2@0,0")
    plan = ftmesh.plan(topo, "ring", with_idle=True)
    program = plan.program
    assert program.num_ranks == 16
    assert program.live.tolist() == list(range(12))
    idle = [f"chip {coord}" for coord in ((0, 0), (1, 0), (0, 1), (1, 1))]
    assert list(program.names[12:]) == idle
    held = np.random.default_rng(0).integers(0, 100, (16, program.num_chunks))
    after = run(program, held.copy())
    assert (after == held[program.live].sum(axis=0)).all()  # on idle ranks too


@pytest.mark.parametrize("executor", ["ppermute", "xla"])
def test_ranks_are_named_after_their_chips(executor):
    topology = Topology.grid("4x4", failed="2x2@0,0")
    program = ftmesh.plan(topology, "ring", executor=executor).program
    assert program.names == tuple(f"chip {coord}" for coord in Ranks(topology).coords)
    assert program.names != tuple(f"chip {coord}" for coord in topology.coords)


def test_owned_chunks_by_rank():
    program = lower(registry.build_schedule(Topology.grid("8x8", failed="2x2@2,2"), "row_pair"))
    assert not program.owns_evenly
    some = [row[row < program.num_chunks] for row in program.owned_chunks]
    assert sorted(np.concatenate(some).tolist()) == list(range(program.num_chunks))
    assert sum(len(row) == 0 for row in some) == 12  # the chips next to the hole
    assert lower(registry.build_schedule(Topology.grid("4x4"), "ring")).owns_evenly


def test_only_one_or_two_devices_per_chip():
    schedule = registry.build_schedule(Topology.grid("4x4"), "ring")
    with pytest.raises(ValueError, match="one or two devices, not 3"):
        lower(schedule, devices_per_chip=3)


def test_a_table_with_one_odd_entry_is_no_rule():
    schedule = registry.build_schedule(Topology.grid("4x4"), "ring")
    c = schedule.phases[0].transfers
    chunk = c.chunk.copy()
    chunk[5], chunk[6] = chunk[6], chunk[5]
    phase = Phase("swapped", c.replace(chunk=chunk))
    swapped = Schedule(schedule.topology, "swapped", 32, (phase,))
    (loop,) = lower(swapped).loops
    assert isinstance(loop.lanes[0].send, Table)
    assert rows(all_transfers(loop)) == rows(between_ranks(phase.transfers, swapped.topology))
