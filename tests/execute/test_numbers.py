"""The numbers that ranks read in each round, against what the lanes of a program say."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Topology, planners
from ftmesh.execute.lower import IDLE, Rule, lower
from ftmesh.execute.numbers import Numbers, _in_few_places, rounds_of


def brought(numbers, num_rounds):
    """``[rank, round, lane]``: the chunk that comes by each lane, from numbers in places."""
    rows = numbers.rows[numbers.row].reshape(len(numbers.row), num_rounds, -1)
    every = np.where(rows == IDLE, IDLE, rows + numbers.base[:, None])
    return every[..., : numbers.num_lanes], spread(every[..., numbers.num_lanes :], numbers)


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
    program = lower(planners.schedule(Topology.grid(shape, failed=failed), "row_pair"))
    for loop in program.loops:
        if all(isinstance(lane.send, Rule) for lane in loop.lanes):
            continue
        numbers = Numbers.of(loop)
        sent, received = brought(numbers, loop.num_rounds)
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
    loop = lower(planners.schedule(Topology.grid("4x4"), "ring")).loops[0]
    at_once, rounds = rounds_of(loop, 3)
    assert at_once == 1
    sent, arrivals = rounds(2, 1)[0].sent, rounds(2, 1)[0].arrivals
    assert [int(chunk) for chunk in sent] == [int(lane.send.at(2)[3]) for lane in loop.lanes]
    received = [int(lane.received(loop.num_rounds)[3, 2]) for lane in loop.lanes]
    assert [int(arrival.chunk) for arrival in arrivals] == received
