"""The numbers that ranks read in each round, against what the lanes of a program say."""

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
from ftmesh.execute.chunk_tables import Numbers, _in_few_places, rounds_of
from ftmesh.execute.lowering import IDLE, Rule, lower
from ftmesh.schedule.transfers import ADD, COPY, join, transfers
from tests.support.more import more


def spread(places, numbers):
    found = np.full((*places.shape[:2], numbers.num_lanes), IDLE, np.int64)
    bits = numbers.num_bits
    for place, number in itertools.product(range(numbers.num_places), range(max(bits, 1))):
        lane = place if number == 0 else numbers.num_places + number - 1
        value = places[..., place]
        comes = (value != IDLE) & (True if bits == 0 else (value >> number) % 2 == 1)
        assert (found[..., lane][comes] == IDLE).all()
        found[..., lane][comes] = (value >> bits)[comes]
    return found


@pytest.mark.parametrize(
    ("shape", "failed", "places"),
    [("8x8", "2x2@2,2", 3), ("16x32", "4x2@6,14", 3), ("8x8", "2x2@2,2;2x2@6,6", 3)],
)
def test_what_is_read_is_what_lanes_say(shape, failed, places):
    program = lower(registry.schedule(Topology.grid(shape, failed=failed), "row_pair"))
    for loop in program.loops:
        if all(isinstance(lane.send, Rule) for lane in loop.lanes):
            continue
        numbers = Numbers.of(loop)
        sent, received = numbers.chunks()
        for number, lane in enumerate(loop.lanes):
            np.testing.assert_array_equal(sent[..., number], lane.send.chunks(loop.num_rounds))
            np.testing.assert_array_equal(received[..., number], lane.received(loop.num_rounds))
    assert Numbers.of(program.loops[0]).num_places == places
    assert Numbers.of(program.loops[0]).num_lanes == 4


ARRIVALS = st.lists(
    st.lists(st.sampled_from([IDLE, 0, 2, 4, 5]), min_size=4, max_size=4), min_size=1, max_size=6
)


@given(ARRIVALS)
def test_nothing_is_lost_and_sums_keep_their_order(rows):
    """In every round each lane's chunk is there once, and the lanes of one chunk in order."""
    received = np.array(rows, np.int32)[None]
    found = _in_few_places(received, 1)
    numbers = Numbers(4, found.shape[2], *np.zeros((3, 1, 1), np.int32))
    np.testing.assert_array_equal(spread(found, numbers), received)
    assert found.shape[2] <= 4
    bits = numbers.num_bits
    for now, row in enumerate(rows):
        by_chunk = {}
        for place, value in enumerate(found[0, now].tolist()):
            lanes = (
                [place]
                if bits == 0
                else [
                    place if bit == 0 else found.shape[2] + bit - 1
                    for bit in range(bits)
                    if value != IDLE and value >> bit & 1
                ]
            )
            if value != IDLE:
                by_chunk.setdefault(value >> bits, []).extend(lanes)
        for chunk, lanes in by_chunk.items():
            assert lanes == [lane for lane in range(4) if row[lane] == chunk]


def test_as_few_places_as_chunks_at_a_time():
    """Two lanes that bring the same chunk share a place; so do lanes that never bring at once."""
    received = np.array([[[0, IDLE, 0, IDLE], [IDLE, 3, IDLE, 5]]], np.int32)
    assert _in_few_places(received, 1).shape == (1, 2, 2)
    apart = np.array([[[0, IDLE, IDLE, IDLE], [IDLE, IDLE, 4, IDLE]]], np.int32)
    assert _in_few_places(apart, 1).shape == (1, 2, 1)


def test_chunks_that_lie_over_one_another_stay_apart():
    """Transfers of two chunks each that share one of them must not change places."""
    received = np.array([[[0, 1, IDLE]]], np.int32)
    assert _in_few_places(received, 2).shape == (1, 1, 2)
    crossed = np.array([[[IDLE, 1, 0], [4, IDLE, 8], [4, 6, 8]]], np.int32)
    np.testing.assert_array_equal(_in_few_places(crossed, 2), crossed)


def test_rules_need_no_reading():
    loop = lower(registry.schedule(Topology.grid("4x4"), "ring")).loops[0]
    at_once, rounds = rounds_of(loop, 3)
    assert at_once == 1
    sent, arrivals = rounds(2, 1)[0].sent, rounds(2, 1)[0].arrivals
    assert [int(chunk) for chunk in sent] == [int(lane.send.at(2)[3]) for lane in loop.lanes]
    received = [int(lane.received(loop.num_rounds)[3, 2]) for lane in loop.lanes]
    assert [int(arrival.chunk) for arrival in arrivals] == received


def test_more_lanes_than_bits_stay_as_they_are():
    """A place for 19 lanes would have chunks of 8,192 that do not fit a number."""
    received = np.full((1, 1, 19), IDLE, np.int32)
    received[..., 0] = 8191
    assert _in_few_places(received, 1).shape[2] > 1
    found = _in_few_places(received, 1)
    numbers = Numbers(19, found.shape[2], *np.zeros((3, 1, 1), np.int32))
    np.testing.assert_array_equal(spread(found, numbers), received)
    assert found.dtype == np.int32


def sums(schedule):
    """What every rank ends with, and what it should."""
    program = lower(schedule)
    held = np.arange(program.num_ranks * program.num_chunks, dtype=np.int32)
    held = held.reshape(program.num_ranks, program.num_chunks, 1, 1)

    def run(x):
        return primitives.sum_varying(x, axis_name="rank", program=program)

    return jax.vmap(run, axis_name="rank")(held), held.sum(axis=0)


@pytest.mark.slow
def test_a_lane_that_is_always_full_shares_a_place():
    """Three ranks: a rule by which all send in all rounds, and a table beside it with a gap."""
    ranks = range(3)
    rows = [
        transfers(round=now, lane=lane, src=rank, dst=to, chunk=3 * to + now, op=ADD)
        for now in range(3)
        for rank in ranks
        for lane, to in ((0, (rank + 1) % 3), (1, (rank - 1) % 3))
        if lane == 0 or now != 1
    ]
    rest = [
        transfers(round=0, lane=0, src=(to + 1) % 3, dst=to, chunk=3 * to + 1, op=ADD)
        for to in ranks
    ]
    around = [
        transfers(
            round=by - 1, lane=0, src=rank, dst=(rank + by) % 3, chunk=3 * rank, count=3, op=COPY
        )
        for by in (1, 2)
        for rank in ranks
    ]
    phases = tuple(Phase(f"phase {i}", join(each)) for i, each in enumerate((rows, rest, around)))
    schedule = Schedule(Topology.grid("3x1"), "by hand", 9, phases)
    loop = lower(schedule).loops[0]
    assert [lane.is_full for lane in loop.lanes] == [True, False]
    assert Numbers.of(loop).num_places == 1
    found, expected = sums(schedule)
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


@more
@pytest.mark.slow
def test_a_star_of_many_lanes():
    """All send to one rank at once, by a lane each: more of them than a number has bits."""
    num_ranks, num_chunks = 34, 8
    into = [
        transfers(round=now, lane=rank - 1, src=rank, dst=0, chunk=3 * now % num_chunks, op=ADD)
        for now in range(num_chunks)
        for rank in range(1, num_ranks)
    ]
    out = [
        transfers(round=rank - 1, lane=0, src=0, dst=rank, chunk=0, count=num_chunks, op=COPY)
        for rank in range(1, num_ranks)
    ]
    phases = (Phase("in", join(into)), Phase("out", join(out)))
    found, expected = sums(Schedule(Topology.grid("34x1"), "star", num_chunks, phases))
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


@pytest.mark.parametrize("half", [0, 1])
def test_a_wrong_number_is_found_when_the_program_is_read_back(half, monkeypatch):
    program = lower(registry.schedule(Topology.grid("8x8", failed="2x2@2,2"), "row_pair"))
    check_lowered.check_program(program)
    made = Numbers.of

    def bent(loop):
        numbers = made(loop)
        rows = numbers.rows.copy()
        used = np.argwhere(rows != IDLE)
        rows[tuple(used[half * (len(used) - 1)])] += 8
        return replace(numbers, rows=rows)

    monkeypatch.setattr(Numbers, "of", staticmethod(bent))
    with pytest.raises(VerificationError, match=r"lane \d, round \d+: expected that rank \d+ "):
        check_lowered.check_program(program)
