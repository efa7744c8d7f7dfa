"""The choice of an algorithm by simulated cost, and how it is explained."""

import pytest

import ftmesh
from ftmesh import ArgumentError, PlanError, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.links import DEFAULT, NETWORKS, Network
from ftmesh.cost.simulate import Simulator, simulate
from ftmesh.planning import selection
from ftmesh.planning.candidates import Candidate
from ftmesh.planning.chunking import schedule_for, tree_lower_bound
from ftmesh.planning.selection import select_algorithm
from ftmesh.units import format_time

DAMAGED = Topology.grid("8x8", failed="2x2@2,2")


def names(selection):
    return [candidate.algorithm for candidate in selection.candidates]


def able(topology, payload_bytes, **options):
    """The algorithms that can serve `topology`, the cheapest first."""
    candidates = select_algorithm(topology, payload_bytes, **options).candidates
    return [candidate.algorithm for candidate in candidates if not candidate.rejection]


def test_small_payloads_need_few_rounds_and_large_ones_little_traffic():
    small, large = (
        select_algorithm(DAMAGED, size, trees="never") for size in (10_000, 100_000_000)
    )
    assert names(small) == ["row_pair", "ring", "two_dim", "chain"]
    assert names(large) == ["ring", "row_pair", "two_dim", "chain"]
    for place in (2, 3):
        assert small.candidates[place].rejection == large.candidates[place].rejection != ""


def test_a_reduce_scatter_leaves_every_chip_as_much():
    whole, damaged = (
        select_algorithm(topology, 10_000, reduce_scatter=True)
        for topology in (Topology.grid("8x8"), DAMAGED)
    )
    assert names(whole)[:3] == ["two_dim", "row_pair", "ring"]
    assert names(damaged) == ["ring", "two_dim", "row_pair", "chain"]
    assert [one.rejection for one in damaged.candidates if one.algorithm == "row_pair"] == [
        "its reduce-scatter leaves some chips more of the sum than others"
    ]
    assert able(DAMAGED, 10_000, reduce_scatter=True) == ["ring"]
    by_xla = select_algorithm(DAMAGED, 10_000, reduce_scatter=True, with_native=True)
    assert [one.name for one in by_xla.candidates if not one.rejection] == ["ring, xla", "ring"]


def test_the_network_matters():
    slow, quick = Network(1e12, 1e-3), Network(1e9, 1e-9)
    size = 10_000_000
    assert select_algorithm(DAMAGED, size, slow, trees="never").algorithm == "row_pair"
    assert select_algorithm(DAMAGED, size, quick, trees="never").algorithm == "ring"
    plan = ftmesh.plan(DAMAGED, link=slow, payload_bytes=size, executor="ppermute_unrolled")
    assert (plan.algorithm, plan.network) == ("row_pair", slow)
    assert ftmesh.plan(DAMAGED, link="v3").network is NETWORKS["v3"]


def test_costs_are_those_of_the_simulator():
    for candidate in select_algorithm(DAMAGED, 3_000_000, trees="never").candidates[:2]:
        schedule = registry.build_schedule(DAMAGED, candidate.algorithm)
        seconds = simulate(schedule, payload_bytes=3_000_000).seconds
        assert candidate == Candidate(candidate.algorithm, schedule.num_rounds, seconds)


def test_a_selection_is_remembered(monkeypatch):
    first = select_algorithm(DAMAGED, 5_000_001)
    monkeypatch.setattr(registry, "try_algorithms", None)
    equal = Topology.grid("8x8", failed="2x2@2,2")
    assert select_algorithm(equal, 5_000_001) is first


def test_a_plan_explains_itself():
    lines = str(ftmesh.plan(DAMAGED, payload_bytes=100_000_000).explain()).splitlines()
    assert lines[0] == "100 MB on 8x8 less 2x2@2,2, links of 50 GB/s each way, 0.5 us a hop"
    assert lines[2].split()[0] == "tree"
    assert lines[3] == "  ring, xla                     2 ms     1.66        0.50"
    assert lines[4].split() == ["ring", "118", "2.03", "ms", "1.69", "0.51"]
    assert lines[5].split()[:2] == ["row_pair", "36"]
    assert lines[6].startswith("  two_dim        cannot: ")
    assert lines[7].startswith("  chain          cannot: ")
    assert lines[8].split()[:5] == ["lax.psum", "4", "ms", "3.33", "1.00"]
    assert lines[8].endswith(
        "one ring, in the order of coordinates; 5 of its steps go over failed chips or links"
    )
    assert lines[9] == "  no all-reduce can take less than 1.2 ms"


def test_an_explanation_has_ranges_and_the_kernel_where_they_are_known():
    plan = ftmesh.plan(Topology.grid("4x4", failed="1x1@1,1"), link="v6e")
    selection, lines = plan.explain(), str(plan.explain()).splitlines()
    for one in (*selection.candidates, selection.kernel):
        if not one.rejection:
            low, high = selection.seconds_range(one)
            assert low <= one.seconds <= high
            (line,) = [line for line in lines if line.startswith(f"  {one.name} ")]
            assert f"{format_time(low)} to {format_time(high)}" in line
    assert selection.kernel.executor == "pallas"
    assert f"  {selection.kernel.name} " in str(selection)
    assert not selection.network.fastest.spread
    assert selection.network.slowest.slowest == selection.network.slowest
    no_kernel = ftmesh.plan(Topology.grid("4x4", failed="1x1@1,1"), link="v3").explain()
    assert no_kernel.kernel is None


def test_where_no_ring_fits_the_reasons_are_listed():
    lines = str(ftmesh.plan(Topology.from_drawing("X..\n...\n...")).explain()).splitlines()
    assert [line.split("  ")[1] for line in lines[2:5]] == ["tree", "ring, xla", "flood"]
    assert lines[-2].startswith("  lax.psum ")
    assert [line.split()[:2] for line in lines[5:-2]] == [
        [name, "cannot:"] for name in ("two_dim", "row_pair", "ring", "chain")
    ]


def test_on_a_whole_torus_rings_beat_trees_for_large_payloads():
    torus, mesh = (Topology.grid("3x3x3", wrap=wrap) for wrap in (True, False))
    assert able(torus, 10**8) == ["two_dim", "multi_ring", "tree", "ring"]
    assert able(torus, 10**4)[0] == "tree"
    assert able(mesh, 10**8) == ["tree", "two_dim"]
    assert able(mesh, 10**8, reduce_scatter=True) == ["two_dim"]


def test_floods_serve_where_chips_have_links_to_spare():
    torus = Topology.grid("6x6", failed="2x2@2,2", wrap=True)
    assert able(torus, 10**8) == ["tree", "flood", "ring", "row_pair"]
    assert able(torus, 10**8, reduce_scatter=True) == ["flood", "ring"]
    mesh = Topology.grid("3x3x4", failed="1x1x2@1,1,1")
    assert able(mesh, 10**8)[:2] == ["tree", "flood"]
    assert able(mesh, 10**8, reduce_scatter=True)[0] == "flood"


def test_where_nothing_fits_the_reason_is_given():
    with pytest.raises(PlanError, match="3x3 less 3x1@0,1 is cut into 2 parts"):
        ftmesh.plan(Topology.from_drawing("...\nXXX\n..."))


class Test16BitPayloads:
    """Partial sums of 16-bit payloads may travel in 32 bits."""

    def test_trees_carry_everything_in_32_bits(self):
        topology = Topology.from_drawing("X..\n...\n...")
        plan = ftmesh.plan(topology, "tree", payload_bytes=10**6, wire_dtype="bfloat16")
        (tree,) = [one for one in plan.explain().candidates if one.algorithm == "tree"]
        assert tree.partial_sum_dtype == plan.partial_sum_dtype("bfloat16") == "float32"
        seconds = Simulator(plan.schedule).seconds(2 * 10**6)
        assert tree.seconds == pytest.approx(seconds)
        assert "16-bit sums travel as float32" in str(plan)

    def test_partial_sums_cost_what_they_take(self):
        selection = select_algorithm(DAMAGED, 3_000_000, wire_dtype="bfloat16", trees="never")
        for candidate in selection.candidates[:2]:
            simulator = Simulator(registry.build_schedule(DAMAGED, candidate.algorithm))
            narrow, wide = (simulator.split_seconds(size) for size in (3_000_000, 6_000_000))
            assert candidate.partial_sum_dtype == "float32"
            assert candidate.seconds == pytest.approx(wide[0] + narrow[1], rel=1e-12)
            assert sum(narrow) == pytest.approx(simulator.seconds(3_000_000), rel=1e-12)
            assert narrow[0] < wide[0]

    def test_a_shallow_schedule_carries_16_bits(self):
        narrow, wide = (
            select_algorithm(Topology.grid("2x2"), 3_000_000, wire_dtype=dtype, reduce_scatter=True)
            for dtype in ("bfloat16", "float32")
        )
        candidate = narrow.candidates[0]
        assert candidate.partial_sum_dtype == "bfloat16"
        assert candidate.seconds == wide.candidates[0].seconds

    def test_it_is_explained(self):
        plan = ftmesh.plan(DAMAGED, payload_bytes=100_000_000, wire_dtype="bfloat16")
        lines = str(plan.explain()).splitlines()
        assert lines[0].startswith("100 MB of bfloat16 on 8x8 less 2x2@2,2")
        assert lines[1].endswith("  partial sums travel as")
        assert [line.split()[-1] for line in lines[2:4]] == ["float32", "float32"]

    def test_other_dtypes_are_rejected(self):
        with pytest.raises(ArgumentError, match="int8"):
            ftmesh.plan(DAMAGED, wire_dtype="int8")


def test_topologies_do_not_share_a_selection():
    """Equal but for one thing each."""
    topologies = [
        DAMAGED,
        Topology.grid("8x8", failed="2x2@4,4"),
        Topology.grid("8x8", failed="2x2@2,2", wrap=True),
        Topology.grid("8x8"),
    ]
    for topology in topologies:
        assert select_algorithm(topology, 12_345).topology == topology


class TestTrees:
    """Trees are planned wherever they could be the cheapest."""

    SMALL = Topology.grid("4x6", failed="2x2@0,2")

    def test_auto_takes_them_where_they_win(self):
        selection = select_algorithm(self.SMALL, 1_000_000)
        assert names(selection)[:3] == ["tree", "ring", "row_pair"]
        assert selection.candidates[0].seconds < 0.9 * selection.candidates[1].seconds
        large = ftmesh.plan(DAMAGED, payload_bytes=100_000_000)
        assert (large.algorithm, large.executor) == ("tree", "ppermute")

    def test_nothing_is_planned_where_they_cannot_win(self, monkeypatch):
        monkeypatch.setattr(selection, "cached_schedule", None)
        slow_devices = DeviceModel(0, 0, 1.0, packing=0.0, clock=1e9)
        result = select_algorithm(
            DAMAGED, 10_000_000, Network(50e9, 0.5e-6, device_model=slow_devices)
        )
        assert result.algorithm == "ring"
        (tree,) = [one for one in result.candidates if one.algorithm == "tree"]
        assert tree.rejection.startswith("it could not take less than 24")

    def test_a_plan_chooses_again_for_other_sizes(self):
        plan = ftmesh.plan(DAMAGED, payload_bytes=100_000_000)
        assert (plan.algorithm, plan.is_auto) == ("tree", True)
        small = plan.for_payload(3000)
        assert (small.algorithm, small.executor) == ("tree", "ppermute")
        assert plan.explain().algorithm == "tree"
        assert plan.with_reduce_scatter.algorithm == "ring"
        few = ftmesh.plan(self.SMALL, payload_bytes=1_000_000)
        assert (few.algorithm, few.executor) == ("ring", "xla")

    def test_there_is_no_best_next_to_auto(self):
        with pytest.raises(PlanError, match="no algorithm 'best'"):
            ftmesh.plan(self.SMALL, "best")

    @pytest.mark.parametrize("network", [DEFAULT, NETWORKS["v6e"], NETWORKS["v3"]])
    def test_no_plan_beats_the_bound_that_rules_trees_out(self, network):
        topology = Topology.grid("4x4", failed="1x1@0,1")
        for size in (4_000, 1_000_000):
            schedule = schedule_for(topology, "tree", size, network)
            seconds = Simulator(schedule).seconds(size, network)
            least = tree_lower_bound(topology, size, network)
            assert least <= seconds < 3 * least
