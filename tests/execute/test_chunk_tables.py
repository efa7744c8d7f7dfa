"""The tables that ranks read in each round, against the lanes of a program."""

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Phase, Schedule, Topology
from ftmesh.algorithms import registry
from ftmesh.errors import VerificationError
from ftmesh.execute import check_lowered, primitives
from ftmesh.execute.chunk_tables import ChunkTable, _merge_into_slots
from ftmesh.execute.lowering import IDLE, Rule, lower
from ftmesh.execute.ppermute import round_lookup
from ftmesh.schedule.transfers import ADD, COPY, join_transfers, make_transfers
from tests.support.more import more


def received_by_lane(slots, table):
    received = np.full((*slots.shape[:2], table.num_lanes), IDLE, np.int64)
    bits = table.num_lane_bits
    for slot, bit in itertools.product(range(table.num_slots), range(max(bits, 1))):
        lane = slot if bit == 0 else table.num_slots + bit - 1
        entry = slots[..., slot]
        arrives = (entry != IDLE) & (True if bits == 0 else (entry >> bit) % 2 == 1)
        assert (received[..., lane][arrives] == IDLE).all()
        received[..., lane][arrives] = (entry >> bits)[arrives]
    return received


@pytest.mark.parametrize(
    ("shape", "failed", "slots"),
    [("8x8", "2x2@2,2", 3), ("16x32", "4x2@6,14", 3), ("8x8", "2x2@2,2;2x2@6,6", 3)],
)
def test_ranks_read_what_lanes_say(shape, failed, slots):
    program = lower(registry.build_schedule(Topology.grid(shape, failed=failed), "row_pair"))
    for loop in program.loops:
        if all(isinstance(lane.send, Rule) for lane in loop.lanes):
            continue
        table = ChunkTable.from_loop(loop)
        sent, received = table.chunk_ids()
        for number, lane in enumerate(loop.lanes):
            np.testing.assert_array_equal(sent[..., number], lane.send.entries(loop.num_rounds))
            np.testing.assert_array_equal(
                received[..., number], lane.received_entries(loop.num_rounds)
            )
    assert ChunkTable.from_loop(program.loops[0]).num_slots == slots
    assert ChunkTable.from_loop(program.loops[0]).num_lanes == 4


ARRIVALS = st.lists(
    st.lists(st.sampled_from([IDLE, 0, 2, 4, 5]), min_size=4, max_size=4), min_size=1, max_size=6
)


@given(ARRIVALS)
def test_slots_keep_all_arrivals_in_the_order_of_lanes(rows):
    """Every arrival is in one slot, and the lanes of one chunk are in order."""
    received = np.array(rows, np.int32)[None]
    slots = _merge_into_slots(received, 1)
    table = ChunkTable(4, slots.shape[2], *np.zeros((3, 1, 1), np.int32))
    np.testing.assert_array_equal(received_by_lane(slots, table), received)
    assert slots.shape[2] <= 4
    bits = table.num_lane_bits
    for now, row in enumerate(rows):
        by_chunk = {}
        for slot, value in enumerate(slots[0, now].tolist()):
            lanes = (
                [slot]
                if bits == 0
                else [
                    slot if bit == 0 else slots.shape[2] + bit - 1
                    for bit in range(bits)
                    if value != IDLE and value >> bit & 1
                ]
            )
            if value != IDLE:
                by_chunk.setdefault(value >> bits, []).extend(lanes)
        for chunk, lanes in by_chunk.items():
            assert lanes == [lane for lane in range(4) if row[lane] == chunk]


def test_lanes_share_slots():
    """Two lanes with the same chunk share a slot; so do lanes that are never active at once."""
    received = np.array([[[0, IDLE, 0, IDLE], [IDLE, 3, IDLE, 5]]], np.int32)
    assert _merge_into_slots(received, 1).shape == (1, 2, 2)
    apart = np.array([[[0, IDLE, IDLE, IDLE], [IDLE, IDLE, 4, IDLE]]], np.int32)
    assert _merge_into_slots(apart, 1).shape == (1, 2, 1)


def test_overlapping_transfers_do_not_share_a_slot():
    """Transfers of two chunks each that have one in common must keep their order."""
    received = np.array([[[0, 1, IDLE]]], np.int32)
    assert _merge_into_slots(received, 2).shape == (1, 1, 2)
    crossed = np.array([[[IDLE, 1, 0], [4, IDLE, 8], [4, 6, 8]]], np.int32)
    np.testing.assert_array_equal(_merge_into_slots(crossed, 2), crossed)


def test_rules_are_computed():
    loop = lower(registry.build_schedule(Topology.grid("4x4"), "ring")).loops[0]
    at_once, lookup = round_lookup(loop, 3)
    assert at_once == 1
    (now,) = lookup(2, 1)
    assert [int(chunk) for chunk in now.sent] == [
        int(lane.send.entries_in(2)[3]) for lane in loop.lanes
    ]
    received = [int(lane.received_entries(loop.num_rounds)[3, 2]) for lane in loop.lanes]
    assert [int(arrival.chunk) for arrival in now.arrivals] == received


def test_lanes_without_room_for_their_bits_keep_their_slots():
    """With a bit for each of 19 lanes, chunk 8,191 does not fit in 32 bits."""
    received = np.full((1, 1, 19), IDLE, np.int32)
    received[..., 0] = 8191
    slots = _merge_into_slots(received, 1)
    assert slots.shape[2] > 1
    table = ChunkTable(19, slots.shape[2], *np.zeros((3, 1, 1), np.int32))
    np.testing.assert_array_equal(received_by_lane(slots, table), received)
    assert slots.dtype == np.int32


def sums(schedule):
    """What every rank ends with, and the expected sum."""
    program = lower(schedule)
    held = np.arange(program.num_ranks * program.num_chunks, dtype=np.int32)
    held = held.reshape(program.num_ranks, program.num_chunks, 1, 1)

    def run(x):
        return primitives.all_reduce_varying(x, axis_name="rank", program=program)

    return jax.vmap(run, axis_name="rank")(held), held.sum(axis=0)


@pytest.mark.slow
def test_a_lane_that_is_always_full_shares_a_slot():
    """Three ranks: a rule by which all send in all rounds, and a table with a gap."""
    ranks = range(3)
    rows = [
        make_transfers(round=now, lane=lane, src=rank, dst=to, chunk=3 * to + now, op=ADD)
        for now in range(3)
        for rank in ranks
        for lane, to in ((0, (rank + 1) % 3), (1, (rank - 1) % 3))
        if lane == 0 or now != 1
    ]
    rest = [
        make_transfers(round=0, lane=0, src=(to + 1) % 3, dst=to, chunk=3 * to + 1, op=ADD)
        for to in ranks
    ]
    around = [
        make_transfers(
            round=by - 1, lane=0, src=rank, dst=(rank + by) % 3, chunk=3 * rank, count=3, op=COPY
        )
        for by in (1, 2)
        for rank in ranks
    ]
    phases = tuple(
        Phase(f"phase {i}", join_transfers(part)) for i, part in enumerate((rows, rest, around))
    )
    schedule = Schedule(Topology.grid("3x1"), "by hand", 9, phases)
    loop = lower(schedule).loops[0]
    assert [lane.is_full for lane in loop.lanes] == [True, False]
    assert ChunkTable.from_loop(loop).num_slots == 1
    result, expected = sums(schedule)
    np.testing.assert_array_equal(result, np.broadcast_to(expected, result.shape))


@more
@pytest.mark.slow
def test_a_star_of_many_lanes():
    """All send to one rank at once, each by its own lane: more lanes than an entry has bits."""
    num_ranks, num_chunks = 34, 8
    into = [
        make_transfers(
            round=now, lane=rank - 1, src=rank, dst=0, chunk=3 * now % num_chunks, op=ADD
        )
        for now in range(num_chunks)
        for rank in range(1, num_ranks)
    ]
    out = [
        make_transfers(round=rank - 1, lane=0, src=0, dst=rank, chunk=0, count=num_chunks, op=COPY)
        for rank in range(1, num_ranks)
    ]
    phases = (Phase("in", join_transfers(into)), Phase("out", join_transfers(out)))
    result, expected = sums(Schedule(Topology.grid("34x1"), "star", num_chunks, phases))
    np.testing.assert_array_equal(result, np.broadcast_to(expected, result.shape))


@pytest.mark.parametrize("where", [0, 1])
def test_a_wrong_entry_is_detected_when_the_program_is_read_back(where, monkeypatch):
    program = lower(registry.build_schedule(Topology.grid("8x8", failed="2x2@2,2"), "row_pair"))
    check_lowered.check_program(program)
    from_loop = ChunkTable.from_loop

    def faulty(loop):
        table = from_loop(loop)
        rows = table.rows.copy()
        used = np.argwhere(rows != IDLE)
        rows[tuple(used[where * (len(used) - 1)])] += 8
        return replace(table, rows=rows)

    monkeypatch.setattr(ChunkTable, "from_loop", staticmethod(faulty))
    with pytest.raises(VerificationError, match=r"lane \d, round \d+: expected that rank \d+ "):
        check_lowered.check_program(program)
