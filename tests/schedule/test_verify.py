"""Verification of broken schedules: each error is found, and the message names the place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import (
    Phase,
    Schedule,
    ScheduleError,
    SplitSchedule,
    Topology,
    VerificationError,
    verify,
)
from ftmesh.algorithms import rings, row_pair
from ftmesh.schedule import proofs
from ftmesh.schedule.proofs import replay
from ftmesh.schedule.schedule import RankSchedule
from ftmesh.schedule.transfers import ADD, COPY, Transfers, join_transfers, make_transfers
from ftmesh.topology.routing import dimension_order

TOPO = Topology.grid("6x6", failed="2x2@2,2")
SCHEDULES = {"ring": rings.build_schedule(TOPO), "row_pair": row_pair.build_schedule(TOPO)}


def with_transfers(schedule, phase, transfers):
    """The schedule with the transfers of one phase replaced."""
    phases = list(schedule.phases)
    phases[phase] = Phase(phases[phase].name, transfers)
    return SplitSchedule(
        schedule.topology,
        schedule.algorithm,
        schedule.num_chunks,
        tuple(phases),
        schedule.owner,
        schedule.rounds_in_reduce_scatter,
    )


def without(transfers, index):
    return transfers.take(np.arange(len(transfers)) != index)


def changed(transfers, index, **values):
    copies = {name: getattr(transfers, name).copy() for name in values}
    for name, value in values.items():
        copies[name][index] = value
    return transfers.replace(**copies)


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return SCHEDULES[request.param]


def test_a_proof_counts(schedule):
    proof = verify(schedule)
    assert proof.num_ranks == 32
    assert proof.num_rounds == schedule.num_rounds
    assert proof.num_additions == proof.num_copies == schedule.num_chunks * 31
    assert f"{schedule.num_chunks} chunks exactly once" in str(proof)


@pytest.mark.parametrize("phase", [0, -1])
@pytest.mark.parametrize("where", [0, 0.3, 0.8])
def test_a_dropped_transfer(schedule, phase, where):
    transfers = schedule.phases[phase].transfers
    index = int(where * len(transfers))
    with pytest.raises(VerificationError) as caught:
        verify(with_transfers(schedule, phase, without(transfers, index)))
    says = str(caught.value)
    assert f"chunk {transfers.chunk[index]} at chip" in says
    assert "missing" in says
    assert "expected each of 32 contributions exactly once, found" in says


def test_a_dropped_transfer_is_traced_to_its_round():
    schedule = SCHEDULES["ring"]
    transfers = schedule.phases[0].transfers
    index = len(transfers) // 2
    at, chunk = transfers.round[index], transfers.chunk[index]
    src = TOPO.coords[transfers.src[index]]
    with pytest.raises(VerificationError) as caught:
        verify(with_transfers(schedule, 0, without(transfers, index)))
    says = str(caught.value)
    assert f"chunk {chunk} " in says
    assert f"last moved in round {at - 1}, chip" in says
    assert f"to chip {src}" in says


def test_a_duplicated_addition(schedule):
    transfers = schedule.phases[0].transfers
    index = len(transfers) // 2
    at, chunk = transfers.round[index], transfers.chunk[index]
    twin = transfers.take(np.array([index])).replace(lane=np.array([9], np.int32))
    with pytest.raises(VerificationError) as caught:
        verify(with_transfers(schedule, 0, join_transfers([transfers, twin])))
    says = str(caught.value)
    assert f"chunk {chunk} at chip" in says
    assert "2 times" in says
    assert f"first doubled in round {at}, chip {TOPO.coords[transfers.src[index]]} to" in says


def test_a_transfer_to_the_wrong_chip(schedule):
    transfers = schedule.phases[0].transfers
    index = len(transfers) // 3
    same = (transfers.chunk == transfers.chunk[index]) & (transfers.round < transfers.round[index])
    behind = next(
        r for r in transfers.src[same] if r not in (transfers.src[index], transfers.dst[index])
    )
    misdirected = changed(transfers, index, dst=behind, lane=9)
    with pytest.raises(VerificationError, match=f"chunk {transfers.chunk[index]} at chip"):
        verify(with_transfers(schedule, 0, misdirected))


def test_a_wrong_chunk(schedule):
    transfers = schedule.phases[0].transfers
    index = len(transfers) // 2
    other = (transfers.chunk[index] + transfers.count[index]) % schedule.num_chunks
    with pytest.raises(VerificationError, match="at chip"):
        verify(with_transfers(schedule, 0, changed(transfers, index, chunk=other)))


def test_an_addition_in_place_of_a_copy(schedule):
    transfers = schedule.phases[-1].transfers
    with pytest.raises(VerificationError, match="times"):
        verify(with_transfers(schedule, -1, changed(transfers, 5, op=ADD)))


@pytest.mark.parametrize("phase", [0, -1])
def test_swapped_rounds(schedule, phase):
    transfers = schedule.phases[phase].transfers
    swap = {4: 5, 5: 4}
    round_ = np.array([swap.get(r, r) for r in transfers.round.tolist()], np.int32)
    with pytest.raises(VerificationError, match=r"after round .* at chip .* found"):
        verify(with_transfers(schedule, phase, transfers.replace(round=round_)))


def test_two_writers_of_a_chunk_raise(schedule):
    transfers = schedule.phases[-1].transfers
    twin = transfers.take(np.array([7])).replace(lane=np.array([9], np.int32))
    with pytest.raises(ScheduleError, match=f"round {transfers.round[7]}, lane .* same chunk"):
        with_transfers(schedule, -1, join_transfers([transfers, twin]))


def test_a_route_through_failed_chips():
    schedule = SCHEDULES["row_pair"]
    with pytest.raises(VerificationError) as caught:
        verify(schedule, router=dimension_order)
    says = str(caught.value)
    assert "round 12 (across row pairs, reduce-scatter), chunk " in says
    assert "from chip (2, 0) to chip (2, 4) crosses failed chip (2, 2)" in says
    assert "found (2, 0) -> (2, 1) -> (2, 2) -> (2, 3) -> (2, 4)" in says
    verify(SCHEDULES["ring"], router=dimension_order)  # neighbour-only: the router is not used


def test_a_failed_link():
    def straight(topology, src, dst):
        return (src, dst)

    broken = Topology.grid("2x2", failed_links="0,0-1,0")
    good = rings.build_schedule(Topology.grid("2x2"))
    schedule = SplitSchedule(broken, "ring", 8, good.phases, good.owner, 3)
    with pytest.raises(VerificationError, match=r"round 0 .*crosses failed link \(0, 0\)-\(1, 0\)"):
        verify(schedule, router=straight)


def test_a_router_with_wrong_routes():
    for lost in ((), ((0, 0),), ((0, 0), (1, 0))):
        with pytest.raises(VerificationError, match="expected a route from chip"):
            verify(SCHEDULES["ring"], router=lambda *_, lost=lost: lost)


def test_counts_do_not_overflow():
    """A contribution doubled 64 times is not back at zero."""
    moves = [(0, 1, ADD), (1, 0, ADD)] * 40 + [(0, 1, COPY)]
    with pytest.raises(VerificationError, match="more than once"):
        verify(by_hand(*moves))


def test_routes_that_can_deadlock():
    corner = make_transfers(round=0, lane=0, src=[0, 1, 3, 2], dst=[3, 2, 0, 1], chunk=0)
    topo = Topology.grid("2x2")
    schedule = Schedule(topo, "x", 1, (Phase("turn", corner),))
    routes = {
        ((0, 0), (1, 1)): ((0, 0), (1, 0), (1, 1)),
        ((1, 0), (0, 1)): ((1, 0), (1, 1), (0, 1)),
        ((1, 1), (0, 0)): ((1, 1), (0, 1), (0, 0)),
        ((0, 1), (1, 0)): ((0, 1), (0, 0), (1, 0)),
    }
    with pytest.raises(VerificationError, match=r"can deadlock: .* found \(.*\)->"):
        verify(schedule, router=lambda _, src, dst: routes[src, dst])


def test_an_owner_without_its_chunk():
    schedule = SCHEDULES["ring"]
    owner = np.roll(schedule.owner, 1)
    wrong = SplitSchedule(TOPO, "ring", 64, schedule.phases, owner, 31)
    with pytest.raises(VerificationError, match=r"after round 30, chunk 0 at chip .* missing"):
        verify(wrong)


def by_hand(*moves):
    """A schedule for two chips and one chunk: a (src, dst, op) per round."""
    src, dst, op = zip(*moves, strict=True)
    transfers = make_transfers(round=range(len(moves)), lane=0, src=src, dst=dst, chunk=0, op=op)
    return Schedule(Topology.grid("2x1"), "x", 1, (Phase("p", transfers),))


def test_a_wrong_sum_can_be_overwritten_by_a_correct_one():
    """Chip 0 gets its own contribution twice; a copy of the correct sum fixes that."""
    verify(by_hand((0, 1, ADD), (1, 0, COPY)))
    with pytest.raises(VerificationError, match=r"2 times \(first doubled in round 1, chip \(1, 0"):
        verify(by_hand((0, 1, ADD), (1, 0, ADD)))
    verify(by_hand((0, 1, ADD), (1, 0, ADD), (1, 0, COPY)))


def test_two_lanes_with_the_same_chunk_to_the_same_chip():
    """Both ends of a line of three send to the middle in one round and get the sum in another."""

    def to_the_middle(*src):
        count = len(src)
        transfers = make_transfers(
            round=[1] * count + [3, 3], lane=[*range(count), 0, 1], src=[*src, 1, 1],
            dst=[1] * count + [0, 2], chunk=0, op=[ADD] * count + [COPY] * 2,
        )  # fmt: skip
        return Schedule(Topology.grid("3x1"), "x", 1, (Phase("p", transfers),))

    assert verify(to_the_middle(0, 2)).num_additions == 2
    for src in ((0, 2, 0), (0, 0, 2), (0, 0)):
        with pytest.raises(VerificationError, match=r"such as chip \(0, 0\)'s 2 times"):
            verify(to_the_middle(*src))


def test_chunks_are_verified_in_batches_if_memory_is_short(monkeypatch):
    seen = []
    monkeypatch.setattr(proofs, "STATE_BYTES", 32 * 8 * 7)
    ranks = RankSchedule.from_schedule(Schedule(TOPO, "ring", 64, SCHEDULES["ring"].phases))
    proofs.check_sets(ranks, np.arange(64), lambda done, total: seen.append((done, total)))
    assert seen == [(batch, 10) for batch in range(11)]
    transfers = SCHEDULES["ring"].phases[0].transfers
    with pytest.raises(VerificationError, match=f"chunk {transfers.chunk[100]} at chip"):
        verify(with_transfers(SCHEDULES["ring"], 0, without(transfers, 100)))


@st.composite
def random_schedules(draw):
    """Any valid rounds on three chips; most are wrong as an all-reduce."""
    rounds = draw(st.integers(1, 5))
    rows = [
        (r, lane, src, (src + hop) % 3, 0, 1, draw(st.sampled_from([ADD, COPY])))
        for r in range(rounds)
        for lane, src, hop in [(0, draw(st.integers(0, 2)), draw(st.integers(1, 2)))]
    ]
    transfers = Transfers(*np.array(rows, np.int32).T)
    topo = Topology.grid("3x1", wrap=True)
    return Schedule(topo, "x", 1, (Phase("any", transfers),))


@given(random_schedules())
def test_verify_and_replay_agree(schedule):
    exact = replay(RankSchedule.from_schedule(schedule), 0, schedule.num_rounds)
    if (exact.counts == 1).all():
        assert verify(schedule).num_ranks == 3
    else:
        with pytest.raises(VerificationError):
            verify(schedule)
