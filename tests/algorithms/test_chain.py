"""Chips in a line: what `line` promises beyond the suite over every planner."""

from fractions import Fraction

import pytest

import ftmesh
from ftmesh import PlanError, Topology, VerificationError, verify
from ftmesh.algorithms import chain, registry
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import SplitSchedule


def proved(topo):
    schedule = registry.build_schedule(topo, "chain")
    verify(schedule)
    assert schedule.is_neighbour_only
    return schedule


@pytest.mark.parametrize("chips", [2, 3, 8, 13])
@pytest.mark.parametrize("shape", ["{}", "1x{}", "{}x1"])
def test_an_open_line_takes_a_round_less_than_chips_for_each_half(shape, chips):
    schedule = proved(Topology.grid(shape.format(chips)))
    assert [phase.num_rounds for phase in schedule.phases] == [chips - 1] * 2
    assert schedule.rounds_in_reduce_scatter == chips - 1
    assert schedule.owner.tolist() == list(range(chips))


@pytest.mark.parametrize("chips", [2, 3, 8, 13])
def test_an_open_line_is_at_the_limit_of_each_half(chips):
    """The chip at an end has one link, over which all but its own share must leave or come."""
    topo = Topology.grid((chips,))
    schedule = proved(topo)
    for phase in schedule.phases:
        busiest = max(schedule.link_loads(phase).values())
        assert Fraction(busiest, schedule.num_chunks) == Fraction(chips - 1, chips)
    assert ftmesh.limits(topo).all_gather == Fraction(chips - 1, chips)


def test_both_directions_of_every_link_are_used_from_the_first_round():
    schedule = proved(Topology.grid("4"))
    assert schedule.describe_round(0).splitlines()[1:] == [
        "  lane 0: (0,) -> (1,)  add chunk 3",
        "  lane 1: (3,) -> (2,)  add chunk 0",
    ]
    loads = schedule.link_loads(schedule.phases[0])
    assert loads == {
        ((0,), (1,)): 3, ((1,), (2,)): 2, ((2,), (3,)): 1,
        ((3,), (2,)): 3, ((2,), (1,)): 2, ((1,), (0,)): 1,
    }  # fmt: skip


@pytest.mark.parametrize("chips", [3, 8, 13])
def test_a_line_that_closes_runs_both_ways_with_half_of_the_payload_each(chips):
    schedule = proved(Topology.grid((1, chips), wrap=True))
    assert [phase.num_rounds for phase in schedule.phases] == [chips - 1] * 2
    for phase in schedule.phases:
        loads = schedule.link_loads(phase)
        assert len(loads) == 2 * chips
        assert set(loads.values()) == {chips - 1}  # of 2 * chips chunks
    assert schedule.num_chunks == 2 * chips


def test_two_chips_have_one_cable_whether_they_wrap_or_not():
    assert proved(Topology.grid("2", wrap=True)).num_rounds == 2


@pytest.mark.parametrize("damage", [{"failed": "1@3"}, {"failed_links": "3-4"}])
def test_a_closed_line_with_one_fault_is_an_open_one_in_the_order_of_the_walk(damage):
    topo = Topology.grid("8", wrap=True, **damage)
    order = [3, 2, 1, 0, 7, 6, 5, 4] if "failed_links" in damage else [2, 1, 0, 7, 6, 5, 4]
    assert chain.walk(topo) == [(x,) for x in order]
    schedule = proved(topo)
    assert schedule.num_rounds == 2 * (len(order) - 1)
    assert [topo.coords[rank] for rank in schedule.owner] == chain.walk(topo)


def test_damage_may_leave_a_line_of_any_mesh():
    bent = Topology.from_drawing("""
        ...X
        .X..
        .XX.
    """)
    assert chain.walk(bent) == [
        (0, 2), (0, 1), (0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (3, 2),
    ]  # fmt: skip
    assert proved(bent).phases[0].name == "line, reduce-scatter"
    around_a_hole = Topology.from_drawing("""
        ...
        .X.
        ...
    """)
    assert proved(around_a_hole).phases[0].name == "two-way ring, reduce-scatter"


def test_auto_takes_it():
    assert ftmesh.plan(Topology.grid("1x8")).algorithm == "chain"


@pytest.mark.parametrize(
    ("topo", "says"),
    [
        (
            Topology.grid("1x8", failed="1x1@0,3"),
            r"4 chips around \(0, 4\), 3 chips around \(0, 0\)",
        ),
        (Topology.grid("8", failed_links="3-4"), r"4 chips around \(0,\), 4 chips around \(4,\)"),
        (Topology.grid("8", wrap=True, failed="1@3;1@6"), "cut into 2 parts"),
        (Topology.grid("1"), "single live chip"),
    ],
)
def test_a_broken_line_is_refused_and_its_parts_are_named(topo, says):
    with pytest.raises(PlanError, match=says):
        registry.build_schedule(topo, "chain")


@pytest.mark.parametrize(
    ("topo", "says"),
    [
        (Topology.grid("3x3"), r"two neighbours at most, and chip \(1, 0\) has 3"),
        (Topology.grid("8", failed="1@3"), "its line ends after 3 of 7 chips"),
        (Topology.grid("1"), "nothing to sum"),
    ],
)
def test_the_planner_alone_refuses_what_is_not_a_line(topo, says):
    with pytest.raises(PlanError, match=says):
        chain.build_schedule(topo)


def test_a_round_that_is_left_out_is_found():
    good = proved(Topology.grid("1x5"))
    columns = good.phases[0].transfers
    broken = SplitSchedule(
        topology=good.topology,
        algorithm="chain",
        num_chunks=good.num_chunks,
        phases=(Phase("chain", columns.take(columns.round != 1)), good.phases[1]),
        owner=good.owner,
        rounds_in_reduce_scatter=good.rounds_in_reduce_scatter,
    )
    with pytest.raises(VerificationError):
        verify(broken)
