"""`chain` on chips in a line."""

from fractions import Fraction

import pytest

import ftmesh
from ftmesh import PlanError, Topology, VerificationError, verify
from ftmesh.algorithms import registry, rings
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import SplitSchedule


def check(topo):
    schedule = registry.build_schedule(topo, "chain")
    verify(schedule)
    assert schedule.is_neighbour_only
    return schedule


@pytest.mark.parametrize("chips", [2, 3, 8, 13])
@pytest.mark.parametrize("shape", ["{}", "1x{}", "{}x1"])
def test_an_open_line_takes_one_round_less_than_chips_for_each_part(shape, chips):
    schedule = check(Topology.grid(shape.format(chips)))
    assert [phase.num_rounds for phase in schedule.phases] == [chips - 1] * 2
    assert schedule.rounds_in_reduce_scatter == chips - 1
    assert schedule.owner.tolist() == list(range(chips))


@pytest.mark.parametrize("chips", [2, 3, 8, 13])
def test_an_open_line_meets_the_lower_bound(chips):
    """The chip at an end has one link, which everything but its own share must cross."""
    topo = Topology.grid((chips,))
    schedule = check(topo)
    for phase in schedule.phases:
        busiest = max(schedule.link_loads(phase).values())
        assert Fraction(busiest, schedule.num_chunks) == Fraction(chips - 1, chips)
    assert ftmesh.limits(topo).all_gather == Fraction(chips - 1, chips)


def test_both_directions_of_every_link_are_used_from_the_first_round():
    schedule = check(Topology.grid("4"))
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
def test_a_closed_line_sends_half_of_the_payload_each_way(chips):
    schedule = check(Topology.grid((1, chips), wrap=True))
    assert [phase.num_rounds for phase in schedule.phases] == [chips - 1] * 2
    for phase in schedule.phases:
        loads = schedule.link_loads(phase)
        assert len(loads) == 2 * chips
        assert set(loads.values()) == {chips - 1}  # of 2 * chips chunks
    assert schedule.num_chunks == 2 * chips


def test_two_chips_that_wrap_have_one_cable():
    assert check(Topology.grid("2", wrap=True)).num_rounds == 2


@pytest.mark.parametrize("damage", [{"failed": "1@3"}, {"failed_links": "3-4"}])
def test_a_closed_line_with_one_failure_is_an_open_line(damage):
    topo = Topology.grid("8", wrap=True, **damage)
    order = [3, 2, 1, 0, 7, 6, 5, 4] if "failed_links" in damage else [2, 1, 0, 7, 6, 5, 4]
    assert rings.line_order(topo) == [(x,) for x in order]
    schedule = check(topo)
    assert schedule.num_rounds == 2 * (len(order) - 1)
    assert [topo.coords[rank] for rank in schedule.owner] == rings.line_order(topo)


def test_lines_left_by_damage_on_any_mesh():
    bent = Topology.from_drawing("""
        ...X
        .X..
        .XX.
    """)
    assert rings.line_order(bent) == [
        (0, 2), (0, 1), (0, 0), (1, 0), (2, 0), (2, 1), (3, 1), (3, 2),
    ]  # fmt: skip
    assert check(bent).phases[0].name == "chain, reduce-scatter"
    around_a_hole = Topology.from_drawing("""
        ...
        .X.
        ...
    """)
    assert check(around_a_hole).phases[0].name == "two-way ring, reduce-scatter"


def test_auto_chooses_it():
    assert ftmesh.plan(Topology.grid("1x8"), reduce_scatter=True).algorithm == "chain"


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
def test_the_error_for_a_broken_line_names_its_parts(topo, says):
    with pytest.raises(PlanError, match=says):
        registry.build_schedule(topo, "chain")


@pytest.mark.parametrize(
    ("topo", "says"),
    [
        (Topology.grid("3x3"), r"at most two neighbours, and chip \(1, 0\) has 3"),
        (Topology.grid("8", failed="1@3"), "its line ends after 3 of 7 chips"),
        (Topology.grid("1"), "nothing to sum"),
    ],
)
def test_meshes_that_are_not_a_line_raise(topo, says):
    with pytest.raises(PlanError, match=says):
        rings.build_chain(topo)


def test_a_missing_round_is_found():
    good = check(Topology.grid("1x5"))
    transfers = good.phases[0].transfers
    broken = SplitSchedule(
        topology=good.topology,
        algorithm="chain",
        num_chunks=good.num_chunks,
        phases=(Phase("chain", transfers.take(transfers.round != 1)), good.phases[1]),
        owner=good.owner,
        rounds_in_reduce_scatter=good.rounds_in_reduce_scatter,
    )
    with pytest.raises(VerificationError):
        verify(broken)
