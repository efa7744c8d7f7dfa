import numpy as np
import pytest

from ftmesh import Phase, Schedule, ScheduleError, SplitSchedule, Topology
from ftmesh.algorithms import rings, row_pair
from ftmesh.schedule.transfers import COPY, make_transfers

SQUARE = Topology.grid("2x2")


def one_round(**columns):
    swap = {"round": 0, "lane": 0, "src": [0, 1], "dst": [1, 0], "chunk": [0, 1]}
    return Phase("test", make_transfers(**(swap | columns)))


def build(**changes):
    fields = {
        "topology": SQUARE,
        "algorithm": "by hand",
        "num_chunks": 2,
        "phases": (one_round(), one_round(op=COPY)),
        "owner": np.array([0, 1], np.int32),
        "rounds_in_reduce_scatter": 1,
    }
    return SplitSchedule(**(fields | changes))


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"src": [0, 0], "dst": [1, 2]}, "round 0, lane 0: .* sends twice in one lane"),
        ({"src": [0, 2], "dst": [1, 1]}, "receives twice in one lane"),
        ({"src": [0, 1], "dst": [0, 2]}, "cannot send to itself"),
        ({"count": 0}, "one chunk or more"),
        ({"chunk": [-1, 0]}, "one chunk or more"),
        ({"op": 2}, "0 \\(add\\) or 1 \\(copy\\)"),
        ({"lane": -1}, "count from 0"),
        ({"round": -1}, "count from 0"),
        ({"src": [-1, 1]}, "ranks count from 0"),
        (
            {"lane": [0, 1], "src": [0, 2], "dst": [1, 1], "chunk": 5, "op": COPY},
            "rank 2 to rank 1, chunk 5: another transfer of the round writes the same chunk",
        ),
        (
            {"lane": [0, 1], "src": [0, 2], "dst": 1, "chunk": [4, 5], "count": 2, "op": [0, COPY]},
            "writes the same chunk",
        ),
    ],
)
def test_invalid_rounds_raise(columns, says):
    with pytest.raises(ScheduleError, match=says):
        one_round(**columns)


def test_several_additions_to_one_chunk_in_a_round():
    assert one_round(lane=[0, 1], src=[0, 2], dst=[1, 1], chunk=5).num_rounds == 1


def test_an_empty_phase_raises():
    with pytest.raises(ScheduleError, match="'test' has no transfers"):
        one_round(src=[], dst=[], chunk=[])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"phases": ()}, "at least one phase"),
        (
            {"phases": (one_round(src=[3, 4], dst=[4, 3]),)},
            "names rank 4, but 2x2 has ranks 0 to 3",
        ),
        ({"phases": (one_round(count=2),)}, "moves chunk 2 of a schedule of 2 chunks"),
        ({"owner": np.array([0], np.int32)}, "entry for each of 2 chunks; it has shape"),
        ({"owner": np.array([0, 4], np.int32)}, "values from 0 to 4"),
        ({"owner": np.array([0, -1], np.int32)}, "values from -1 to 0"),
        ({"rounds_in_reduce_scatter": 0}, "after 1 of 2 rounds, but rounds_in.* is 0"),
        ({"rounds_in_reduce_scatter": 2}, "after 1 of 2 rounds, but rounds_in.* is 2"),
        (
            {"phases": (one_round(round=[0, 1], op=[0, COPY]),)},
            "must end where a phase ends, after none of 2 rounds, .* use a Schedule",
        ),
    ],
)
def test_inconsistent_schedules_raise(changes, says):
    with pytest.raises(ScheduleError, match=says):
        build(**changes)


def test_transfers_and_owners_are_read_only():
    schedule = rings.build_schedule(SQUARE)
    with pytest.raises(ValueError, match="read-only"):
        schedule.phases[0].transfers.src[0] = 3
    with pytest.raises(ValueError, match="read-only"):
        schedule.owner[0] = 3


def test_the_mirror_of_a_phase_runs_backwards():
    phase = Phase("up", make_transfers(round=[0, 1], lane=0, src=[0, 1], dst=[1, 2], chunk=7))
    back = phase.mirrored("down").transfers
    assert [c.tolist() for c in (back.round, back.src, back.dst, back.op)] == [
        [0, 1], [2, 1], [1, 0], [COPY, COPY],
    ]  # fmt: skip


def test_str_has_a_line_per_phase():
    schedule = row_pair.build_schedule(Topology.grid("8x8", failed="2x2@2,2"))
    assert str(schedule).splitlines() == [
        "row_pair on 8x8 less 2x2@2,2: 60 live chips, 36 rounds, 96 chunks, with multi-hop routes",
        "  phase                                  rounds  lanes  chunks  busiest link carries",
        "  row-pair rings, reduce-scatter             16      4       3  0.4688 of the payload",
        "  across row pairs, reduce-scatter            2      4       1  0.1667 of the payload",
        "  across row pairs, all-gather                2      4       1  0.1667 of the payload",
        "  row-pair rings, all-gather                 16      4       3  0.4688 of the payload",
    ]
    assert "46.9 MB" in schedule.describe(100_000_000)


def test_describe_round():
    schedule = rings.build_schedule(SQUARE)
    assert schedule.describe_round(0).splitlines() == [
        "round 0 (Hamiltonian ring, reduce-scatter), 8 transfers",
        "  lane 0: (0, 0) -> (1, 0)  add chunk 0",
        "  lane 0: (1, 0) -> (1, 1)  add chunk 1",
        "  lane 0: (0, 1) -> (0, 0)  add chunk 3",
        "  lane 0: (1, 1) -> (0, 1)  add chunk 2",
        "  lane 1: (0, 0) -> (0, 1)  add chunk 7",
        "  lane 1: (1, 0) -> (0, 0)  add chunk 6",
        "  lane 1: (0, 1) -> (1, 1)  add chunk 4",
        "  lane 1: (1, 1) -> (1, 0)  add chunk 5",
    ]
    with pytest.raises(ScheduleError, match="rounds are 0 to 5"):
        schedule.describe_round(6)


def test_link_loads_follow_routes():
    topo = Topology.from_drawing("...\n.X.\n...")
    over = Phase("over", make_transfers(round=0, lane=0, src=1, dst=6, chunk=0, count=3))
    schedule = Schedule(topo, "by hand", 3, (over,))
    assert topo.coords[6] == (1, 2)
    assert schedule.link_loads(over) == {
        ((1, 0), (0, 0)): 3,
        ((0, 0), (0, 1)): 3,
        ((0, 1), (0, 2)): 3,
        ((0, 2), (1, 2)): 3,
    }
    assert not schedule.is_neighbour_only
    assert rings.build_schedule(SQUARE).is_neighbour_only
