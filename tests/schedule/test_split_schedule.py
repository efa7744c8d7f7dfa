"""Split schedules: the proofs of their three programs, depth, and ring rules."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Phase, Schedule, SplitSchedule, Topology, VerificationError, verify
from ftmesh.algorithms import registry, rings, row_pair
from ftmesh.schedule.proofs import check_sets, replay, uncounted_chunks, ungathered_chunks
from ftmesh.schedule.schedule import RankSchedule
from ftmesh.schedule.transfers import ADD, COPY, RingRule, join_transfers, make_transfers
from ftmesh.schedule.verify import PROGRAMS

SQUARE = Topology.grid("2x2")
HOLE = Topology.grid("6x6", failed="2x2@2,2")


def by_hand(reduce_scatter, all_gather, owner, topology=SQUARE):
    """A schedule from rows of (round, lane, src, dst, chunk)."""
    phases = []
    for name, rows, op in (("sum", reduce_scatter, ADD), ("spread", all_gather, COPY)):
        index, lane, src, dst, chunk = np.array(rows).T
        phases.append(
            Phase(
                name, make_transfers(round=index, lane=lane, src=src, dst=dst, chunk=chunk, op=op)
            )
        )
    rounds = phases[0].num_rounds
    return SplitSchedule(
        topology, "by hand", len(owner), tuple(phases), np.array(owner, np.int32), rounds
    )


def reads_leftovers():
    """Correct as an all-reduce, wrong as an all-gather.

    After the reduce-scatter several chips have the sum of chunk 0 or 1, though one owns it. The
    all-gather reads it from chips that are not its owner.
    """
    reduce_scatter = [
        (0, 0, 0, 1, 0), (0, 0, 1, 0, 0), (0, 0, 2, 3, 0), (0, 0, 3, 2, 0),
        (0, 1, 0, 1, 1), (0, 1, 1, 0, 1), (0, 1, 2, 3, 1), (0, 1, 3, 2, 1),
        (1, 0, 0, 2, 0), (1, 0, 2, 0, 0), (1, 0, 1, 3, 1), (1, 0, 3, 1, 1),
    ]  # fmt: skip
    all_gather = [(0, 0, 0, 1, 0), (0, 0, 2, 3, 0), (0, 0, 1, 0, 1), (0, 0, 3, 2, 1)]
    return by_hand(reduce_scatter, all_gather, owner=[0, 1])


def test_a_schedule_is_three_programs_or_one():
    assert verify(rings.build_schedule(HOLE)).programs == PROGRAMS
    assert "the all-gather alone brings them to all" in str(verify(row_pair.build_schedule(HOLE)))
    all_reduce = Schedule(HOLE, "ring", 64, rings.build_schedule(HOLE).phases)
    assert verify(all_reduce).programs == ("all-reduce",)
    assert "an all-reduce only" in str(verify(all_reduce))


def test_a_correct_all_reduce_with_a_wrong_all_gather():
    schedule = reads_leftovers()
    verify(Schedule(SQUARE, "by hand", 2, schedule.phases))  # correct as an all-reduce
    with pytest.raises(VerificationError) as caught:
        verify(schedule)
    says = str(caught.value)
    assert "the all-gather alone does not bring chunk 0 to chip (0, 1)" in says
    assert "its owner, chip (0, 0)" in says


def test_an_all_gather_that_reads_too_early():
    """The owner's neighbour sends in the first round what it receives in the second."""
    reduce_scatter = [(0, 0, 3, 1, 0), (0, 0, 2, 0, 0), (1, 0, 1, 0, 0)]
    all_gather = [(1, 0, 0, 1, 0), (1, 1, 0, 2, 0), (0, 0, 1, 3, 0)]
    with pytest.raises(VerificationError) as caught:
        verify(by_hand(reduce_scatter, all_gather, owner=[0]))
    assert "expected each of 4 contributions exactly once" in str(
        caught.value
    )  # wrong as an all-reduce
    verify(by_hand(reduce_scatter, [(0, 0, 0, 1, 0), (0, 1, 0, 2, 0), (1, 0, 1, 3, 0)], owner=[0]))


@pytest.mark.parametrize("algorithm", [rings, row_pair])
def test_the_reduce_scatter_must_end_with_a_phase(algorithm):
    """One that ends inside a phase could not be lowered."""
    good = algorithm.build_schedule(HOLE)
    merged = Phase("all", good.transfers)
    with pytest.raises(ValueError, match="must end where a phase ends, after none of"):
        SplitSchedule(
            HOLE, "x", good.num_chunks, (merged,), good.owner, good.rounds_in_reduce_scatter
        )
    verify(Schedule(HOLE, "x", good.num_chunks, (merged,)))


# Counting and sets ------------------------------------------------------------------------------


def set_error(schedule):
    """The error that sets alone find in any chunk; None if there is none."""
    try:
        check_sets(RankSchedule.from_schedule(schedule), np.arange(schedule.num_chunks))
    except VerificationError as error:
        return str(error)
    return None


def check_agreement(schedule):
    """Counting and sets accept the same schedules and give the same errors."""
    expected = set_error(schedule)
    if expected is None:
        if len(ungathered_chunks(RankSchedule.from_schedule(schedule))):
            with pytest.raises(VerificationError, match="the all-gather alone"):
                verify(schedule)
        else:
            verify(schedule)
    else:
        with pytest.raises(VerificationError) as caught:
            verify(schedule)
        assert str(caught.value) == expected


MESHES = [
    ("4x4", "", False), ("4x4", "2x2@0,0", False), ("6x6", "2x2@2,2", False), ("8x4", "", True),
    ("6x8", "4x2@1,2", False), ("8x8", "2x2@2,2;2x2@4,6", False), ("6x6", "1x1@3,3", False),
    ("1x7", "", False), ("9", "1@4", True),
]  # fmt: skip


def all_schedules():
    """The schedules of all algorithms on all meshes."""
    for shape, failed, wrap in MESHES:
        results = registry.try_algorithms(Topology.grid(shape, failed=failed, wrap=wrap))
        yield from (result for result in results.values() if isinstance(result, Schedule))


@pytest.mark.parametrize(
    "schedule", list(all_schedules()), ids=lambda s: f"{s.algorithm} {s.topology}"
)
def test_schedules_of_all_algorithms_are_proved_by_counting_alone(schedule):
    ranks = RankSchedule.from_schedule(schedule)
    assert not len(uncounted_chunks(ranks))
    assert not len(ungathered_chunks(ranks))
    assert set_error(schedule) is None


@given(st.data())
def test_counting_and_sets_agree_on_broken_schedules(data):
    """A transfer is dropped, doubled, moved, misdirected or changed: both give the same error."""
    name = data.draw(st.sampled_from(["ring", "row_pair"]))
    topology = Topology.grid("4x4", failed="2x2@0,0")
    good = registry.build_schedule(topology, name)
    number = data.draw(st.integers(0, len(good.phases) - 1))
    transfers = good.phases[number].transfers
    row = data.draw(st.integers(0, len(transfers) - 1))
    bad = transfers.take(np.array([row]))
    rest = transfers.take(np.arange(len(transfers)) != row)
    last = np.array([good.phases[number].num_rounds - 1], np.int32)
    lane = np.array([9], np.int32)
    fault = data.draw(st.sampled_from(["drop", "double", "round", "dst", "op", "chunk"]))
    broken = {
        "drop": rest,
        "double": join_transfers([transfers, bad.replace(lane=lane)]),
        "round": join_transfers([rest, bad.replace(lane=lane, round=last)]),
        "dst": join_transfers([rest, bad.replace(lane=lane, dst=(bad.dst + 5) % 12)]),
        "op": join_transfers([rest, bad.replace(lane=lane, op=1 - bad.op)]),
        "chunk": join_transfers(
            [rest, bad.replace(chunk=(bad.chunk + bad.count) % good.num_chunks)]
        ),
    }[fault]
    try:
        phases = (*good.phases[:number], Phase("broken", broken), *good.phases[number + 1 :])
        schedule = SplitSchedule(
            topology, name, good.num_chunks, phases, good.owner, good.rounds_in_reduce_scatter
        )
    except ValueError:
        return  # such a phase cannot be built
    check_agreement(schedule)


@st.composite
def random_split_schedules(draw):
    """Any rounds on three chips and two chunks, with any owners."""

    def rows(count, op):
        return [
            (index, 0, src, (src + draw(st.integers(1, 2))) % 3, draw(st.integers(0, 1)), op())
            for index in range(count)
            for src in [draw(st.integers(0, 2))]
        ]

    phases = []
    for name, usual in (("sum", ADD), ("spread", COPY)):
        kinds = st.sampled_from([usual, usual, usual, 1 - usual])
        moves = rows(draw(st.integers(1, 6)), lambda kinds=kinds: draw(kinds))
        index, lane, src, dst, chunk, op = np.array(moves).T
        phases.append(
            Phase(
                name, make_transfers(round=index, lane=lane, src=src, dst=dst, chunk=chunk, op=op)
            )
        )
    owner = np.array([draw(st.integers(0, 2)), draw(st.integers(0, 2))], np.int32)
    topology = Topology.grid("3x1", wrap=True)
    return SplitSchedule(topology, "x", 2, tuple(phases), owner, phases[0].num_rounds)


@given(random_split_schedules())
def test_counting_and_sets_agree_on_random_rounds(schedule):
    check_agreement(schedule)


@given(random_split_schedules())
def test_ungathered_chunks_are_those_that_a_run_does_not_gather(schedule):
    """Run the all-gather alone, with other values wherever a rank is not the owner."""
    held = np.full((3, 2), -7)
    held[0], held[1, 0] = -11, -13
    held[schedule.owner, [0, 1]] = [100, 200]
    for phase in schedule.all_gather:
        for c in phase.rounds():
            read = held[c.src, c.chunk]
            for d, k, op, value in zip(c.dst, c.chunk, c.op, read, strict=True):
                held[d, k] = value if op == COPY else held[d, k] + value
    arrived = (held == [100, 200]).all(axis=0)
    assert (
        np.flatnonzero(~arrived).tolist()
        == ungathered_chunks(RankSchedule.from_schedule(schedule)).tolist()
    )


# Depth and rules --------------------------------------------------------------------------------


def test_depth_is_the_longest_chain_of_additions():
    assert rings.build_schedule(HOLE).depth == 31
    assert rings.build_two_dim(Topology.grid("4x4")).depth == 6
    chain = by_hand([(0, 0, 0, 1, 0), (1, 0, 1, 3, 0), (2, 0, 3, 2, 0)],
                    [(0, 0, 2, 3, 0), (1, 0, 3, 1, 0), (2, 0, 1, 0, 0)], [2])  # fmt: skip
    assert (chain.depth, verify(chain).depth) == (3, 3)
    star = by_hand([(0, 0, 1, 0, 0), (0, 1, 2, 0, 0), (1, 0, 3, 0, 0)],
                   [(0, 0, 0, 1, 0), (0, 1, 0, 2, 0), (0, 2, 0, 3, 0)], [0])  # fmt: skip
    assert star.depth == 3


def test_a_ring_rule_equals_its_transfers():
    rule = RingRule(np.array([[0, 1, 3], [2, 5, 4]], np.int32), np.array([0, 6], np.int32), 0, 2)
    phase = Phase("round", (rule,))
    rows = Phase("round", phase.transfers)
    for ring, same in ((phase, rows), (phase.mirrored("m"), rows.mirrored("m"))):
        assert ring.is_same(same)
        assert ring.pairs == same.pairs
        assert ring.traffic == same.traffic
        assert ring.extent == same.extent == (5, 12)
        assert [ring.chunks_moved(op) for op in (ADD, COPY)] == [
            same.chunks_moved(op) for op in (ADD, COPY)
        ]
        for chunk in (0, 5, 11):
            assert all(
                map(np.array_equal, ring.transfers_of_chunk(chunk), same.transfers_of_chunk(chunk))
            )
    assert rule.owned_chunks.tolist() == [[2, 4, 0], [8, 10, 6]]


@pytest.mark.parametrize(
    ("rings", "says"),
    [
        ((), "no transfers"),
        ((([[0, 1], [1, 2]], [0, 2], 0),), "a rank is on it twice"),
        ((([[0, 1]], [0], 0), ([[1, 2]], [2], 0)), "a rank is on it twice"),
        ((([[0, 1]], [0], 0), ([[2, 3, 4]], [2], 1)), "different lengths"),
        ((([[0, 1, 2]], [-1], 0),), "chunks and lanes count from 0"),
        ((([[0, 1, 2]], [0], -1),), "chunks and lanes count from 0"),
    ],
)
def test_invalid_rings_raise(rings, says):
    rules = tuple(
        RingRule(np.array(r, np.int32), np.array(f, np.int32), lane) for r, f, lane in rings
    )
    with pytest.raises(ValueError, match=says):
        Phase("bad", rules)


def test_rings_that_write_the_same_chunks_raise():
    rules = tuple(
        RingRule(np.array([order], np.int32), np.array([0], np.int32), lane, mirrored=True)
        for lane, order in enumerate(([0, 1, 2], [2, 1, 0]))
    )
    with pytest.raises(ValueError, match="write the same chunks"):
        Phase("bad", rules)


@pytest.mark.parametrize(
    ("rows", "bad"),
    [
        ([(0, 4, COPY), (4, 4, COPY)], False),
        ([(0, 5, COPY), (4, 4, COPY)], True),
        ([(0, 8, ADD), (1, 2, ADD), (6, 1, ADD)], False),
        ([(0, 8, ADD), (1, 2, ADD), (6, 1, COPY)], True),
        ([(0, 8, COPY), (1, 2, ADD)], True),
        ([(0, 2, COPY), (2, 6, ADD), (3, 1, ADD)], False),
    ],
)
def test_overlapping_copies_raise(rows, bad):
    first, count, op = np.array(rows).T
    lanes = np.arange(len(rows))
    transfers = make_transfers(
        round=0, lane=lanes, src=lanes + 1, dst=0, chunk=first, count=count, op=op
    )
    if bad:
        with pytest.raises(ValueError, match="writes the same chunk there"):
            Phase("p", transfers)
    else:
        Phase("p", transfers)


def test_a_replay_of_a_correct_all_reduce_counts_each_contribution_once():
    schedule = reads_leftovers()
    assert (replay(RankSchedule.from_schedule(schedule), 0, schedule.num_rounds).counts == 1).all()
