"""Proofs of sums along trees: counting and sets agree."""

from types import SimpleNamespace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Phase, Schedule, Topology, VerificationError
from ftmesh.algorithms import rings, tree
from ftmesh.schedule.proofs import check_sets, unspanned_chunks
from ftmesh.schedule.schedule import RankSchedule
from ftmesh.schedule.transfers import ADD, COPY, join_transfers, make_transfers


def set_error(ranks, chunks):
    """The error that sets find in some chunks; None if there is none."""
    try:
        check_sets(ranks, chunks)
    except VerificationError as error:
        return str(error)
    return None


def test_rings_without_a_reduce_scatter_are_trees():
    ring = rings.build_schedule(Topology.grid("4x4", failed="2x2@0,0"))
    schedule = Schedule(ring.topology, "ring", ring.num_chunks, ring.phases)
    assert not len(unspanned_chunks(RankSchedule.from_schedule(schedule)))


@given(st.data())
def test_counting_and_sets_agree_on_broken_trees(data):
    """A transfer is dropped, doubled, moved, misdirected or changed: both give the same error."""
    topology = Topology.grid("3x4", failed="1x1@1,1", failed_links="0,3-1,3")
    good = tree.build_schedule(topology, 6, lag=data.draw(st.integers(0, 1)))
    transfers = good.phases[0].transfers
    row = data.draw(st.integers(0, len(transfers) - 1))
    bad = transfers.take(np.array([row]))
    rest = transfers.take(np.arange(len(transfers)) != row)
    lane = np.array([9], np.int32)
    other_round = np.array([data.draw(st.integers(0, good.num_rounds))], np.int32)
    fault = data.draw(st.sampled_from(["none", "drop", "double", "round", "dst", "op", "chunk"]))
    broken = {
        "none": transfers,
        "drop": rest,
        "double": join_transfers([transfers, bad.replace(lane=lane)]),
        "round": join_transfers([rest, bad.replace(lane=lane, round=other_round)]),
        "dst": join_transfers([rest, bad.replace(lane=lane, dst=(bad.dst + 5) % 11)]),
        "op": join_transfers([rest, bad.replace(lane=lane, op=1 - bad.op)]),
        "chunk": join_transfers([rest, bad.replace(lane=lane, chunk=(bad.chunk + 1) % 6)]),
    }[fault]
    try:
        schedule = Schedule(topology, "tree", 6, (Phase("broken", broken),))
    except ValueError:
        return  # such a phase cannot be built
    ranks = RankSchedule.from_schedule(schedule)
    expected = set_error(ranks, np.arange(6))
    unproved = unspanned_chunks(ranks)
    if fault == "none":
        assert not len(unproved)
    assert set_error(ranks, unproved) == expected


def test_a_cycle_of_pairs_is_not_a_tree():
    """Two pairs on three ranks can be a tree; three pairs are a cycle."""
    tree_moves = [(0, 0, 1, ADD), (1, 2, 1, ADD), (2, 1, 0, COPY), (3, 1, 2, COPY)]
    cycle = [(0, 0, 1, ADD), (0, 1, 2, ADD), (0, 2, 0, ADD)]
    cycle += [(1, 1, 0, COPY), (1, 2, 1, COPY), (1, 0, 2, COPY)]
    to_itself = [(0, 0, 1, ADD), (1, 1, 0, COPY), (0, 2, 2, ADD), (1, 2, 2, COPY)]
    cases = ((tree_moves, []), (cycle, [0]), (tree_moves[:2], [0]), (to_itself, [0]))
    for moves, unproved in cases:
        index, src, dst, op = np.array(moves).T
        transfers = make_transfers(round=index, lane=src, src=src, dst=dst, chunk=0, op=op)
        phase = SimpleNamespace(rounds=lambda t=transfers: [t.take(t.round == n) for n in range(4)])
        ranks = RankSchedule(1, (phase,), ("a", "b", "c"), np.arange(3, dtype=np.int32))
        assert unspanned_chunks(ranks).tolist() == unproved
