"""The choice of an algorithm by simulation, and its explanation."""

import pytest

import ftmesh
from ftmesh import ArgumentError, PlanError, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.links import DEFAULT, NETWORKS, Network
from ftmesh.cost.simulate import Simulator, simulate
from ftmesh.planning import selection
from ftmesh.planning.chunking import least_seconds, schedule_for
from ftmesh.planning.selection import Candidate

DAMAGED = Topology.grid("8x8", failed="2x2@2,2")


def test_small_payloads_want_few_rounds_and_large_ones_little_traffic():
    small, large = (selection.choose(DAMAGED, size) for size in (10_000, 100_000_000))
    assert [one.algorithm for one in small.candidates] == ["row_pair", "ring", "two_dim", "line"]
    assert [one.algorithm for one in large.candidates] == ["ring", "row_pair", "two_dim", "line"]
    for place in (2, 3):
        assert small.candidates[place].refusal == large.candidates[place].refusal != ""


def test_the_network_matters():
    slow, quick = Network(1e12, 1e-3), Network(1e9, 1e-9)
    assert selection.choose(DAMAGED, 10_000_000, slow).algorithm == "row_pair"
    assert selection.choose(DAMAGED, 10_000_000, quick).algorithm == "ring"
    plan = ftmesh.plan(DAMAGED, payload_bytes=10_000_000, link=slow)
    assert (plan.algorithm, plan.network) == ("row_pair", slow)
    assert ftmesh.plan(DAMAGED, link="v3").network is NETWORKS["v3"]


def test_prices_are_those_of_the_simulator():
    for one in selection.choose(DAMAGED, 3_000_000).candidates[:2]:
        schedule = registry.schedule(DAMAGED, one.algorithm)
        seconds = simulate(schedule, payload_bytes=3_000_000).seconds
        assert one == Candidate(one.algorithm, schedule.num_rounds, seconds)


def test_a_choice_is_made_once(monkeypatch):
    first = selection.choose(DAMAGED, 5_000_001)
    monkeypatch.setattr(registry, "outcomes", None)
    again = Topology.grid("8x8", failed="2x2@2,2")
    assert selection.choose(again, 5_000_001) is first


def test_a_plan_explains_itself():
    lines = str(ftmesh.plan(DAMAGED, payload_bytes=100_000_000).explain()).splitlines()
    assert lines[0] == "100 MB on 8x8 less 2x2@2,2, links of 50 GB/s each way, 0.5 us a hop"
    assert lines[2].split() == ["ring", "118", "2.03", "ms", "1.69"]
    assert lines[3].split()[:2] == ["row_pair", "36"]
    assert lines[4].startswith("  two_dim     cannot: it needs every row and column whole")
    assert lines[5].startswith("  line        cannot: it works on chips in a line")
    assert lines[6] == "  no all-reduce can take less than 1.2 ms"


def test_where_no_ring_fits_the_reasons_are_given_beside_what_does():
    lines = str(ftmesh.plan(Topology.from_drawing("X..\n...\n...")).explain()).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["tree", "flood"]
    assert [line.split()[:2] for line in lines[4:-1]] == [
        [name, "cannot:"] for name in ("two_dim", "row_pair", "ring", "line")
    ]


def able(topology, payload_bytes, **options):
    found = selection.choose(topology, payload_bytes, **options).candidates
    return [one.algorithm for one in found if not one.refusal]


def test_on_three_axes_trees_are_looked_at_where_rings_are_not_near_the_limit():
    torus, mesh = (Topology.grid("3x3x3", wrap=wrap) for wrap in (True, False))
    assert able(torus, 10**8) == ["two_dim", "colours", "ring"]
    assert able(torus, 10**4)[0] == "tree"
    assert able(mesh, 10**8) == ["tree", "two_dim"]
    assert able(mesh, 10**8, halves=True) == ["two_dim"]


def test_where_chips_have_links_to_spare_floods_and_trees_are_looked_at():
    torus = Topology.grid("6x6", failed="2x2@2,2", wrap=True)
    assert able(torus, 10**8) == ["tree", "flood", "ring", "row_pair"]
    assert able(torus, 10**8, halves=True) == ["flood", "ring", "row_pair"]
    mesh = Topology.grid("3x3x4", failed="1x1x2@1,1,1")
    assert able(mesh, 10**8)[:2] == ["tree", "flood"]
    assert able(mesh, 10**8, halves=True)[0] == "flood"


def test_where_nothing_fits_the_reason_is_given():
    with pytest.raises(PlanError, match="3x3 less 3x1@0,1 is cut into 2 parts"):
        ftmesh.plan(Topology.from_drawing("...\nXXX\n..."))


class TestHalfTheBytes:
    """Payloads of 16 bits, whose partial sums may travel in 32."""

    def test_without_halves_all_of_it_does(self):
        topology = Topology.from_drawing("X..\n...\n...")
        plan = ftmesh.plan(topology, "tree", payload_bytes=10**6, wire_dtype="bfloat16")
        (tree,) = [one for one in plan.explain().candidates if one.algorithm == "tree"]
        assert tree.partials == plan.partial_sum_dtype("bfloat16") == "float32"
        seconds = Simulator(plan.schedule).seconds(2 * 10**6)
        assert tree.seconds == pytest.approx(seconds)
        assert "sums of 16 bits travel as float32" in str(plan)

    def test_partial_sums_count_for_what_they_take(self):
        for one in selection.choose(DAMAGED, 3_000_000, wire_dtype="bfloat16").candidates[:2]:
            simulator = Simulator(registry.schedule(DAMAGED, one.algorithm))
            narrow, wide = (simulator.half_seconds(size) for size in (3_000_000, 6_000_000))
            assert one.partials == "float32"
            assert one.seconds == pytest.approx(wide[0] + narrow[1], rel=1e-12)
            assert sum(narrow) == pytest.approx(simulator.seconds(3_000_000), rel=1e-12)
            assert narrow[0] < wide[0]

    def test_not_where_the_plan_is_shallow(self):
        small = Topology.grid("2x2")
        (one, *_) = selection.choose(small, 3_000_000, wire_dtype="bfloat16").candidates
        (other, *_) = selection.choose(small, 3_000_000).candidates
        assert (one.partials, one.seconds) == ("bfloat16", other.seconds)

    def test_it_is_explained(self):
        plan = ftmesh.plan(DAMAGED, payload_bytes=100_000_000, wire_dtype="bfloat16")
        lines = str(plan.explain()).splitlines()
        assert lines[0].startswith("100 MB of bfloat16 on 8x8 less 2x2@2,2")
        assert lines[1].endswith("  partial sums travel as")
        assert [line.split()[-1] for line in lines[2:4]] == ["float32", "float32"]

    def test_only_what_travels_has_a_price(self):
        with pytest.raises(ArgumentError, match="wire_dtype is the name of a floating dtype"):
            ftmesh.plan(DAMAGED, wire_dtype="int8")


def test_topologies_do_not_share_a_choice():
    """Equal but for one thing each."""
    topologies = [
        DAMAGED,
        Topology.grid("8x8", failed="2x2@4,4"),
        Topology.grid("8x8", failed="2x2@2,2", wrap=True),
        Topology.grid("8x8"),
    ]
    for topology in topologies:
        assert selection.choose(topology, 12_345).topology == topology


class TestBest:
    """Trees are looked at wherever they could be faster."""

    SMALL = Topology.grid("4x6", failed="2x2@0,2")

    def test_where_they_win_they_are_taken(self):
        found = selection.choose(self.SMALL, 1_000_000, best=True)
        assert [one.algorithm for one in found.candidates[:3]] == ["tree", "ring", "row_pair"]
        assert found.candidates[0].seconds < 0.9 * found.candidates[1].seconds

    def test_where_they_cannot_nothing_is_planned(self, monkeypatch):
        monkeypatch.setattr(selection, "schedule_for", None)
        dear = Network(50e9, 0.5e-6, device_model=DeviceModel(0, 0, 1.0, packing=0.0, clock=1e9))
        found = selection.choose(DAMAGED, 10_000_000, dear, best=True)
        assert found.algorithm == "ring"
        (tree,) = [one for one in found.candidates if one.algorithm == "tree"]
        assert tree.refusal.startswith("it could not take less than 24")

    def test_a_plan_stays_with_it_for_all_sizes(self):
        plan = ftmesh.plan(self.SMALL, "best", payload_bytes=1_000_000)
        assert (plan.algorithm, plan.is_auto, plan.is_best) == ("tree", True, True)
        assert plan.for_payload(3000).algorithm == "tree"
        assert plan.explain().algorithm == "tree"
        assert plan.with_reduce_scatter.algorithm == "ring"
        assert ftmesh.plan(self.SMALL, payload_bytes=1_000_000).algorithm == "ring"

    @pytest.mark.parametrize("on", [DEFAULT, NETWORKS["v6e"], NETWORKS["v3"]])
    def test_no_plan_beats_the_bound_that_leaves_trees_out(self, on):
        topology = Topology.grid("4x4", failed="1x1@0,1")
        for size in (4_000, 1_000_000):
            seconds = Simulator(schedule_for(topology, "tree", size, on)).seconds(size, on)
            least = least_seconds(topology, size, on)
            assert least <= seconds < 3 * least
