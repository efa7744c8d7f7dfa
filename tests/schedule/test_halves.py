"""The three programs of a schedule: each is proved alone, and counting proves what sets prove."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Phase, Schedule, SplitSchedule, Topology, VerificationError, verify
from ftmesh.algorithms import registry as algorithms
from ftmesh.algorithms import ring, row_pair, two_dim
from ftmesh.schedule.counting_proof import uncounted_chunks, ungathered_chunks
from ftmesh.schedule.rank_schedule import RankSchedule
from ftmesh.schedule.replay import replay
from ftmesh.schedule.ring_rule import RingRule
from ftmesh.schedule.set_proof import check_sets
from ftmesh.schedule.transfers import ADD, COPY, join, make_transfers
from ftmesh.schedule.verify import PROGRAMS

SQUARE = Topology.grid("2x2")
HOLE = Topology.grid("6x6", failed="2x2@2,2")


def by_hand(scatter, gather, owner, topology=SQUARE):
    """A schedule from rows of (round, lane, src, dst, chunk), and its owners."""
    phases = []
    for name, rows, op in (("sum", scatter, ADD), ("spread", gather, COPY)):
        now, lane, src, dst, chunk = np.array(rows).T
        phases.append(
            Phase(name, make_transfers(round=now, lane=lane, src=src, dst=dst, chunk=chunk, op=op))
        )
    half = phases[0].num_rounds
    return SplitSchedule(
        topology, "by hand", len(owner), tuple(phases), np.array(owner, np.int32), half
    )


def leaning_on_leftovers():
    """Right as an all-reduce, wrong as an all-gather: chip 1 hands on what only the sum left there.

    Both chips of each pair sum the pair's two chunks; every chip has the whole sum of chunk 0 or of
    chunk 1 after the first half, though one chip owns it, and others hand on from where it lies.
    """
    scatter = [
        (0, 0, 0, 1, 0), (0, 0, 1, 0, 0), (0, 0, 2, 3, 0), (0, 0, 3, 2, 0),
        (0, 1, 0, 1, 1), (0, 1, 1, 0, 1), (0, 1, 2, 3, 1), (0, 1, 3, 2, 1),
        (1, 0, 0, 2, 0), (1, 0, 2, 0, 0), (1, 0, 1, 3, 1), (1, 0, 3, 1, 1),
    ]  # fmt: skip
    gather = [(0, 0, 0, 1, 0), (0, 0, 2, 3, 0), (0, 0, 1, 0, 1), (0, 0, 3, 2, 1)]
    return by_hand(scatter, gather, owner=[0, 1])


def test_a_schedule_is_three_programs_or_one():
    assert verify(ring.build_schedule(HOLE)).programs == PROGRAMS
    assert "the all-gather half alone brings them to all" in str(verify(row_pair.build_schedule(HOLE)))
    whole = Schedule(HOLE, "ring", 64, ring.build_schedule(HOLE).phases)
    assert verify(whole).programs == ("all-reduce",)
    assert "without halves" in str(verify(whole))


def test_an_all_reduce_that_is_right_with_a_gather_that_is_not():
    schedule = leaning_on_leftovers()
    verify(Schedule(SQUARE, "by hand", 2, schedule.phases))  # right, as an all-reduce
    with pytest.raises(VerificationError) as caught:
        verify(schedule)
    says = str(caught.value)
    assert "the all-gather half alone does not bring chunk 0 to chip (0, 1)" in says
    assert "its owner, chip (0, 0)" in says


def test_a_gather_that_reads_what_is_not_owned():
    """The owner's neighbour hands on in the first round what it only gets in the second."""
    scatter = [(0, 0, 3, 1, 0), (0, 0, 2, 0, 0), (1, 0, 1, 0, 0)]
    gather = [(1, 0, 0, 1, 0), (1, 1, 0, 2, 0), (0, 0, 1, 3, 0)]
    with pytest.raises(VerificationError) as caught:
        verify(by_hand(scatter, gather, owner=[0]))
    assert "expected each of 4 contributions exactly once" in str(caught.value)  # wrong as a whole
    verify(by_hand(scatter, [(0, 0, 0, 1, 0), (0, 1, 0, 2, 0), (1, 0, 1, 3, 0)], owner=[0]))


@pytest.mark.parametrize("planner", [ring, row_pair])
def test_merged_phases_have_no_halves(planner):
    """A half that ends inside a phase could not be lowered."""
    made = planner.plan(HOLE)
    merged = Phase("all", made.transfers)
    with pytest.raises(ValueError, match="meet where a phase ends, after none of"):
        SplitSchedule(
            HOLE, "x", made.num_chunks, (merged,), made.owner, made.rounds_in_reduce_scatter
        )
    verify(Schedule(HOLE, "x", made.num_chunks, (merged,)))


# Counting and sets ------------------------------------------------------------------------------


def verdict(schedule):
    """Whether sets alone, over all chunks, find the schedule right."""
    try:
        check_sets(RankSchedule.from_schedule(schedule), np.arange(schedule.num_chunks))
    except VerificationError as error:
        return str(error)
    return None


def agree(schedule):
    """Counting accepts what sets accept, and says what sets say."""
    expected = verdict(schedule)
    if expected is None:
        script = RankSchedule.from_schedule(schedule)
        if len(ungathered_chunks(script)):
            with pytest.raises(VerificationError, match="the all-gather half alone"):
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


def planned():
    """What each algorithm makes of each mesh that it takes."""
    for shape, failed, wrap in MESHES:
        found = algorithms.try_algorithms(Topology.grid(shape, failed=failed, wrap=wrap))
        yield from (made for made in found.values() if isinstance(made, Schedule))


@pytest.mark.parametrize(
    "schedule", list(planned()), ids=lambda made: f"{made.algorithm} {made.topology}"
)
def test_what_planners_make_is_proved_by_counting_alone(schedule):
    script = RankSchedule.from_schedule(schedule)
    assert not len(uncounted_chunks(script))
    assert not len(ungathered_chunks(script))
    assert verdict(schedule) is None


@given(st.data())
def test_counting_and_sets_agree_on_broken_schedules(data):
    """Rows dropped, doubled, moved in time, sent astray or made copies: the same words."""
    name = data.draw(st.sampled_from(["ring", "row_pair"]))
    topology = Topology.grid("4x4", failed="2x2@0,0")
    made = algorithms.build_schedule(topology, name)
    number = data.draw(st.integers(0, len(made.phases) - 1))
    c = made.phases[number].transfers
    row = data.draw(st.integers(0, len(c) - 1))
    one = c.take(np.array([row]))
    rest = c.take(np.arange(len(c)) != row)
    last = made.phases[number].num_rounds - 1
    fault = data.draw(st.sampled_from(["drop", "double", "later", "astray", "other op", "chunk"]))
    changed = {
        "drop": rest,
        "double": join([c, one.replace(lane=np.array([9], np.int32))]),
        "later": join([rest, one.replace(round=np.array([last]), lane=np.array([9]))]),
        "astray": join([rest, one.replace(dst=(one.dst + 5) % 12, lane=np.array([9]))]),
        "other op": join([rest, one.replace(op=1 - one.op, lane=np.array([9], np.int32))]),
        "chunk": join([rest, one.replace(chunk=(one.chunk + one.count) % made.num_chunks)]),
    }[fault]
    try:
        phase = Phase(
            "bent", changed.replace(**{k: getattr(changed, k).astype(np.int32) for k in ("round",)})
        )
        phases = (*made.phases[:number], phase, *made.phases[number + 1 :])
        bent = SplitSchedule(
            topology, name, made.num_chunks, phases, made.owner, made.rounds_in_reduce_scatter
        )
    except ValueError:
        return  # no such rounds can be built at all
    agree(bent)


@st.composite
def random_halves(draw):
    """Any rounds at all on three chips and two chunks, with owners."""

    def rows(count, op):
        return [
            (now, 0, src, (src + draw(st.integers(1, 2))) % 3, draw(st.integers(0, 1)), op())
            for now in range(count)
            for src in [draw(st.integers(0, 2))]
        ]

    halves = []
    for name, usual in (("sum", ADD), ("spread", COPY)):
        kinds = st.sampled_from([usual, usual, usual, 1 - usual])
        some = rows(draw(st.integers(1, 6)), lambda kinds=kinds: draw(kinds))
        now, lane, src, dst, chunk, op = np.array(some).T
        halves.append(
            Phase(name, make_transfers(round=now, lane=lane, src=src, dst=dst, chunk=chunk, op=op))
        )
    owner = np.array([draw(st.integers(0, 2)), draw(st.integers(0, 2))], np.int32)
    topology = Topology.grid("3x1", wrap=True)
    return SplitSchedule(topology, "x", 2, tuple(halves), owner, halves[0].num_rounds)


@given(random_halves())
def test_counting_and_sets_agree_on_random_rounds(schedule):
    agree(schedule)


@given(random_halves())
def test_the_second_half_alone_from_any_leftovers(schedule):
    """What is said of the gather half is what happens, whatever the other buffers hold."""
    held = np.full((3, 2), -7)
    held[0], held[1, 0] = -11, -13
    held[schedule.owner, [0, 1]] = [100, 200]
    for phase in schedule.all_gather:
        for c in phase.rounds():
            read = held[c.src, c.chunk]
            for d, k, op, value in zip(c.dst, c.chunk, c.op, read, strict=True):
                held[d, k] = value if op == COPY else held[d, k] + value
    arrived = (held == [100, 200]).all(axis=0)
    assert np.flatnonzero(~arrived).tolist() == ungathered_chunks(RankSchedule.from_schedule(schedule)).tolist()


# Depth and rules --------------------------------------------------------------------------------


def test_depth_is_the_longest_chain_of_additions():
    assert ring.build_schedule(HOLE).depth == 31
    assert two_dim.build_schedule(Topology.grid("4x4")).depth == 6
    chain = by_hand([(0, 0, 0, 1, 0), (1, 0, 1, 3, 0), (2, 0, 3, 2, 0)],
                    [(0, 0, 2, 3, 0), (1, 0, 3, 1, 0), (2, 0, 1, 0, 0)], [2])  # fmt: skip
    assert (chain.depth, verify(chain).depth) == (3, 3)
    star = by_hand([(0, 0, 1, 0, 0), (0, 1, 2, 0, 0), (1, 0, 3, 0, 0)],
                   [(0, 0, 0, 1, 0), (0, 1, 0, 2, 0), (0, 2, 0, 3, 0)], [0])  # fmt: skip
    assert star.depth == 3


def test_rings_in_lockstep_are_the_rows_that_they_stand_for():
    rule = RingRule(np.array([[0, 1, 3], [2, 5, 4]], np.int32), np.array([0, 6], np.int32), 0, 2)
    phase = Phase("round", (rule,))
    rows = Phase("round", phase.transfers)
    for one, other in ((phase, rows), (phase.mirrored("m"), rows.mirrored("m"))):
        assert one.is_same(other)
        assert one.pairs == other.pairs
        assert one.traffic == other.traffic
        assert one.most == other.most == (5, 12)
        assert [one.chunks_moved(op) for op in (ADD, COPY)] == [
            other.chunks_moved(op) for op in (ADD, COPY)
        ]
        for chunk in (0, 5, 11):
            assert all(map(np.array_equal, one.transfers_of_chunk(chunk), other.transfers_of_chunk(chunk)))
    assert rule.ends.tolist() == [[2, 4, 0], [8, 10, 6]]


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
def test_rings_that_cannot_be(rings, says):
    made = tuple(
        RingRule(np.array(r, np.int32), np.array(f, np.int32), lane) for r, f, lane in rings
    )
    with pytest.raises(ValueError, match=says):
        Phase("bad", made)


def test_rings_that_would_write_the_same_chunks():
    one, other = (
        RingRule(np.array([order], np.int32), np.array([0], np.int32), lane, mirrored=True)
        for lane, order in enumerate(([0, 1, 2], [2, 1, 0]))
    )
    with pytest.raises(ValueError, match="write the same chunks"):
        Phase("bad", (one, other))


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
def test_copies_that_overlap_cannot_be_built(rows, bad):
    first, count, op = np.array(rows).T
    lanes = np.arange(len(rows))
    columns = make_transfers(round=0, lane=lanes, src=lanes + 1, dst=0, chunk=first, count=count, op=op)
    if bad:
        with pytest.raises(ValueError, match="writes the same chunk there"):
            Phase("p", columns)
    else:
        Phase("p", columns)


def test_a_whole_number_replay_is_still_the_last_word():
    schedule = leaning_on_leftovers()
    assert (replay(RankSchedule.from_schedule(schedule), 0, schedule.num_rounds).counts == 1).all()
