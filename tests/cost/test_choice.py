"""The choice of an algorithm by simulation, and its explanation."""

import pytest

import ftmesh
from ftmesh import PlanError, Topology, planners
from ftmesh.cost import choice
from ftmesh.cost.choice import Candidate
from ftmesh.cost.network import NETWORKS, Network
from ftmesh.cost.simulate import simulate

DAMAGED = Topology.grid("8x8", failed="2x2@2,2")


def test_small_payloads_want_few_rounds_and_large_ones_little_traffic():
    small, large = (choice.choose(DAMAGED, size) for size in (10_000, 100_000_000))
    assert [one.algorithm for one in small.candidates] == ["row_pair", "ring", "two_dim", "line"]
    assert [one.algorithm for one in large.candidates] == ["ring", "row_pair", "two_dim", "line"]
    for place in (2, 3):
        assert small.candidates[place].refusal == large.candidates[place].refusal != ""


def test_the_network_matters():
    slow, quick = Network(1e12, 1e-3), Network(1e9, 1e-9)
    assert choice.choose(DAMAGED, 10_000_000, slow).algorithm == "row_pair"
    assert choice.choose(DAMAGED, 10_000_000, quick).algorithm == "ring"
    plan = ftmesh.plan(DAMAGED, payload_bytes=10_000_000, link=slow)
    assert (plan.algorithm, plan.network) == ("row_pair", slow)
    assert ftmesh.plan(DAMAGED, link="v3").network is NETWORKS["v3"]


def test_prices_are_those_of_the_simulator():
    for one in choice.choose(DAMAGED, 3_000_000).candidates[:2]:
        schedule = planners.schedule(DAMAGED, one.algorithm)
        seconds = simulate(schedule, payload_bytes=3_000_000).seconds
        assert one == Candidate(one.algorithm, schedule.num_rounds, seconds)


def test_a_choice_is_made_once(monkeypatch):
    first = choice.choose(DAMAGED, 5_000_001)
    monkeypatch.setattr(planners, "outcomes", None)
    again = Topology.grid("8x8", failed="2x2@2,2")
    assert choice.choose(again, 5_000_001) is first


def test_a_plan_explains_itself():
    lines = str(ftmesh.plan(DAMAGED, payload_bytes=100_000_000).explain()).splitlines()
    assert lines[0] == "100 MB on 8x8 less 2x2@2,2, links of 50 GB/s each way, 0.5 us a hop"
    assert lines[2].split() == ["ring", "118", "2.03", "ms", "1.69"]
    assert lines[3].split()[:2] == ["row_pair", "36"]
    assert lines[4].startswith("  two_dim     cannot: it needs every row and column whole")
    assert lines[5].startswith("  line        cannot: it works on chips in a line")
    assert lines[6] == "  no all-reduce can take less than 1.2 ms"


def test_where_nothing_fits_the_reasons_are_given():
    with pytest.raises(PlanError, match="ring cannot run on 3x3 less 1x1@0,0"):
        ftmesh.plan(Topology.from_drawing("X..\n...\n..."))
