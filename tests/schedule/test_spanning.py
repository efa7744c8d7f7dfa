"""Sums along trees are proved by counting, which accepts and refuses what sets do."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Phase, Schedule, Topology, VerificationError
from ftmesh.algorithms import ring, tree
from ftmesh.schedule.counting_proof import unspanned_chunks
from ftmesh.schedule.rank_schedule import RankSchedule
from ftmesh.schedule.set_proof import check_sets
from ftmesh.schedule.transfers import ADD, COPY, join, make_transfers


def complaint(script, chunks):
    """What sets say of some chunks; None if they are right."""
    try:
        check_sets(script, chunks)
    except VerificationError as error:
        return str(error)
    return None


def test_rings_are_trees_too_where_nobody_asks_for_halves():
    made = ring.build_schedule(Topology.grid("4x4", failed="2x2@0,0"))
    whole = Schedule(made.topology, "ring", made.num_chunks, made.phases)
    assert not len(unspanned_chunks(RankSchedule.from_schedule(whole)))


@given(st.data())
def test_counting_and_sets_agree_on_broken_trees(data):
    """Rows dropped, doubled, moved in time, sent astray or of another kind: the same words."""
    topology = Topology.grid("3x4", failed="1x1@1,1", failed_links="0,3-1,3")
    made = tree.build_schedule(topology, 6, lag=data.draw(st.integers(0, 1)))
    c = made.phases[0].transfers
    row = data.draw(st.integers(0, len(c) - 1))
    one = c.take(np.array([row]))
    rest = c.take(np.arange(len(c)) != row)
    lane = np.array([9], np.int32)
    now = np.array([data.draw(st.integers(0, made.num_rounds))], np.int32)
    fault = data.draw(st.sampled_from(["none", "drop", "double", "moved", "astray", "op", "chunk"]))
    bent = {
        "none": c,
        "drop": rest,
        "double": join([c, one.replace(lane=lane)]),
        "moved": join([rest, one.replace(lane=lane, round=now)]),
        "astray": join([rest, one.replace(lane=lane, dst=(one.dst + 5) % 11)]),
        "op": join([rest, one.replace(lane=lane, op=1 - one.op)]),
        "chunk": join([rest, one.replace(lane=lane, chunk=(one.chunk + 1) % 6)]),
    }[fault]
    try:
        schedule = Schedule(topology, "tree", 6, (Phase("bent", bent),))
    except ValueError:
        return  # no such rounds can be built at all
    script = RankSchedule.from_schedule(schedule)
    expected = complaint(script, np.arange(6))
    odd = unspanned_chunks(script)
    if fault == "none":
        assert not len(odd)
    assert complaint(script, odd) == expected


def test_a_circle_of_pairs_spans_nothing():
    """Two pairs of a line of three may be right, and three pairs of a circle never are."""
    rows = [(0, 0, 1, ADD), (1, 2, 1, ADD), (2, 1, 0, COPY), (3, 1, 2, COPY)]
    circle = [(0, 0, 1, ADD), (0, 1, 2, ADD), (0, 2, 0, ADD)]
    circle += [(1, 1, 0, COPY), (1, 2, 1, COPY), (1, 0, 2, COPY)]
    lone = [(0, 0, 1, ADD), (1, 1, 0, COPY), (0, 2, 2, ADD), (1, 2, 2, COPY)]
    for moves, odd in ((rows, []), (circle, [0]), (rows[:2], [0]), (lone, [0])):
        now, src, dst, op = np.array(moves).T
        columns = make_transfers(round=now, lane=src, src=src, dst=dst, chunk=0, op=op)
        phase = SimpleNamespace(rounds=lambda c=columns: [c.take(c.round == n) for n in range(4)])
        script = RankSchedule(1, (phase,), ("a", "b", "c"), np.arange(3, dtype=np.int32))
        assert unspanned_chunks(script).tolist() == odd
