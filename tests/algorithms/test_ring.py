"""`ring`: its circuit on meshes, tori and three axes."""

from itertools import pairwise

import numpy as np
import pytest

from ftmesh import PlanError, Topology
from ftmesh.algorithms import rings
from tests.support.proving import check


class TestRing:
    def test_the_snake_of_figure_3(self):
        assert rings.find_circuit(Topology.grid("4x4")) == [
            (0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1),
            (1, 2), (2, 2), (3, 2), (3, 3), (2, 3), (1, 3), (0, 3), (0, 2), (0, 1),
        ]  # fmt: skip

    def test_every_link_of_the_circuit_is_used_both_ways_in_every_round(self):
        schedule = rings.build_schedule(Topology.grid("6x6", failed="2x2@2,2"))
        first = schedule.phases[0]
        assert set(schedule.link_loads(first).values()) == {31}
        assert len(schedule.link_loads(first)) == 2 * 32

    @pytest.mark.parametrize(
        ("topo", "says"),
        [
            (Topology.grid("5x5"), "odd number of chips"),
            (Topology.grid("6x5", failed="2x2@2,2"), "even sides"),
            (
                Topology.grid("8x8", failed="3x2@2,2"),
                r"square of chip \(4, 2\) is only partly failed",
            ),
            (Topology.grid("8x8", failed="2x2@1,2"), "even blocks at even coordinates"),
            (Topology.grid("8x8", failed="2x2@2,2;2x2@3,2"), "only partly failed"),
            (Topology.grid("8x8", failed_links="2,0-3,0"), "failed link between chips"),
            (Topology.grid("3x3x3"), "from the 14 whose coords have an even sum to the 13 others"),
            (Topology.grid("8"), "it needs two or three axes"),
            (Topology.grid("1x8", wrap=True), "of 2 chips or more each"),
            (Topology.grid("4x4", failed="1x1@0,0", wrap=True), "from the 7 .* to the 8 others"),
            (Topology.grid("5x5", failed="1x1@2,2", wrap=True), "wrapping rings and strips"),
        ],
    )
    def test_meshes_it_does_not_work_on_raise(self, topo, says):
        with pytest.raises(PlanError, match=says):
            rings.build_schedule(topo)

    def test_a_failed_link_that_is_not_on_the_circuit(self):
        check(Topology.grid("8x8", failed_links="2,1-2,2"), "ring")

    @pytest.mark.parametrize(
        ("shape", "wrap", "failed"),
        [
            ("5x5", (True, False), ""),  # an odd number of chips
            ("7x3", True, ""),
            ("5x7", True, "2x2@1,1"),  # an odd side, and damage
            ("8x8", True, "8x2@0,2;2x2@0,6"),  # parts joined by wrapping links
            ("6x6", True, "3x2@1,2"),
        ],
        ids=str,
    )
    def test_circuits_with_wrapping_links_on_tori(self, shape, wrap, failed):
        topo = Topology.grid(shape, wrap=wrap, failed=failed)
        check(topo, "ring")
        walk = rings.find_circuit(topo)
        steps = [max(map(abs, np.subtract(a, b))) for a, b in pairwise([*walk, walk[0]])]
        assert max(steps) > 1

    @pytest.mark.parametrize(
        ("shape", "wrap", "failed", "links"),
        [
            ("2x2x2", False, "", ""),
            ("3x3x4", False, "", ""),
            ("3x3x3", (False, False, True), "", ""),
            ("4x3x5", True, "", "0,0,0-1,0,0"),
            ("4x4x4", False, "2x2x1@0,0,0", ""),
            ("4x4x4", False, "2x2x2@1,0,2", "3,1,0-3,1,1"),
            ("4x5x4", False, "2x1x2@1,2,0;4x1x2@0,0,2", ""),
        ],
        ids=str,
    )
    def test_on_three_axes(self, shape, wrap, failed, links):
        check(Topology.grid(shape, wrap=wrap, failed=failed, failed_links=links), "ring")
