"""Drawings: small meshes literally, larger ones by what must be in the picture."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ftmesh.algorithms import rings, row_pair
from ftmesh.draw import (
    Arrow,
    Panel,
    draw_svg,
    draw_text,
    figure,
    phase_panel,
    routes_panel,
    schedule_panels,
)
from ftmesh.errors import ScheduleError, TopologyError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import SplitSchedule
from ftmesh.schedule.transfers import make_transfers
from ftmesh.topology.routing import around_failures, dimension_order
from ftmesh.topology.topology import Topology

SVG = "{http://www.w3.org/2000/svg}"
SCRIPT = Path(__file__).parents[2] / "scripts" / "figures"


def grid(shape, failed="", **more):
    return Topology.grid(shape, failed=failed, **more)


def chips_off_the_ring():
    """Two chips of a 2x2 mesh sum theirs, hand it up, and own nothing."""
    columns = make_transfers(
        round=[0, 0, 1, 2], lane=0, src=[2, 0, 3, 1], dst=[3, 1, 1, 0], chunk=[0, 1, 0, 0]
    )
    owner = np.array([0, 1], np.int32)
    phase = Phase("sum", columns)
    return SplitSchedule(grid("2x2"), "by hand", 2, (phase, phase.mirrored("spread")), owner, 3)


def folded(topology, line):
    """A ring over a line: out over every second chip, back over the others."""
    order = [*line[::2], *line[1::2][::-1]]
    return [dimension_order(topology, a, b) for a, b in pairwise([*order, order[0]])]


SCHEDULES = {
    "ring": lambda: rings.build_schedule(grid("6x4", "2x2@2,0")),
    "two_dim": lambda: rings.build_two_dim(grid("6x4")),
    "two_dim, wrapping": lambda: rings.build_two_dim(grid("4x4", wrap=True)),
    "row_pair": lambda: row_pair.build_schedule(grid("4x6")),
    "row_pair, damaged": lambda: row_pair.build_schedule(grid("6x6", "2x2@2,2")),
    "by hand": chips_off_the_ring,
}


@pytest.fixture(params=SCHEDULES)
def schedule(request):
    return SCHEDULES[request.param]()


class TestText:
    def check(self, panel, drawing):
        assert draw_text(panel) == drawing.strip("\n")

    def test_one_direction_of_a_ring(self):
        schedule = rings.build_schedule(Topology.from_drawing("..XX\n..XX\n....\n...."))
        self.check(
            phase_panel(schedule, 0, half=0),
            """
ring on 4x4 less 2x2@2,0: Hamiltonian ring, reduce-scatter
   0   1   2   3
0  o─→─o   X   X
   ↑   ↓
1  o   o   X   X
   ↑   ↓
2  o   o─→─o─→─o
   ↑           ↓
3  o─←─o─←─o─←─o
o live   X failed   → arrives
""",
        )

    def test_both_directions_of_a_ring_in_one_round(self):
        self.check(
            phase_panel(rings.build_schedule(grid("2x4")), 1, round=6),
            """
ring on 2x4: Hamiltonian ring, all-gather, round 6
   0   1
0  o─↔─o
   ↕   ↕
1  o   o
   ↕   ↕
2  o   o
   ↕   ↕
3  o─↔─o
o live   → arrives
""",
        )

    def test_messages_that_chips_forward(self):
        topology = Topology.from_drawing("....\n.XX.\n.XX.\n....")
        self.check(
            routes_panel(topology, [around_failures(topology, (1, 0), (2, 3))], title="around"),
            """
around
   0   1   2   3
0  o─⇠─o   o   o
   ⇣
1  o   X   X   o
   ⇣
2  o   X   X   o
   ⇣
3  o─⇢─o─→─o   o
o live   X failed   → arrives   ⇢ passes on
""",
        )

    def test_stopping_and_passing_on_one_link(self):
        across, down = grid("6x1"), grid("1x4")
        self.check(
            routes_panel(across, folded(across, [(x, 0) for x in range(6)]), title="folded"),
            """
folded
   0   1   2   3   4   5
0  o←─⇢o─↔─o⇠─⇢o─↔─o⇠─→o
o live   → arrives   ⇢ passes on
""",
        )
        self.check(
            routes_panel(down, folded(down, [(0, y) for y in range(4)]), title="folded"),
            """
folded
   0
0  o
   ⇣↑
1  o
   ↕
2  o
   ↓⇡
3  o
o live   → arrives   ⇢ passes on
""",
        )

    def test_links_over_the_edge_and_failed_links(self):
        topology = grid("4x3", wrap=True, failed_links="1,1-2,1;0,2-3,2")
        ends = [((3, 0), (0, 0)), ((2, 2), (2, 0))]
        self.check(
            routes_panel(
                topology, [dimension_order(topology, *pair) for pair in ends], title="4x3"
            ),
            """
4x3
      0   1   2   3
              ↓
0  ─→─o   o   o   o─→─

1     o   o ╳ o   o

2   ╳ o   o   o   o ╳
              ↓
o live   ╳ failed link   → arrives
""",
        )

    def test_chips_off_the_ring(self):
        self.check(
            phase_panel(chips_off_the_ring(), 0),
            """
by hand on 2x2: sum
   0   1
0  o─↔─o
       ↑
1  y─→─y
o live   y off the rings   → arrives
""",
        )

    def test_a_mesh_of_one_axis_is_a_row(self):
        topology = grid("3")
        self.check(
            routes_panel(topology, [((0,), (1,), (2,))]),
            """
3
   0   1   2
0  o─⇢─o─→─o
o live   → arrives   ⇢ passes on
""",
        )

    def test_colour_only_adds_codes(self):
        panel = phase_panel(chips_off_the_ring(), 0)
        coloured = draw_text(panel, colour=True)
        assert "\033[33m─→─\033[0m" in coloured
        plain = re.sub("\033\\[[0-9;]*m", "", coloured).splitlines()
        assert plain[:-1] == draw_text(panel).splitlines()
        assert plain[-1] == "off the rings   to or from a ring   full rings"


class TestPanels:
    def test_arrows_are_exactly_the_pairs_of_the_phase(self, schedule):
        coords = schedule.topology.coords
        for phase, panel in zip(schedule.phases, schedule_panels(schedule), strict=True):
            drawn = [(arrow.route[0], arrow.route[-1]) for arrow in panel.arrows]
            assert sorted(drawn) == sorted((coords[s], coords[d]) for s, d in phase.pairs)
            for arrow in panel.arrows:
                pair = (
                    schedule.topology.rank(arrow.route[0]),
                    schedule.topology.rank(arrow.route[-1]),
                )
                assert arrow.route == schedule.routes[pair]

    def test_rounds_lanes_and_halves_are_parts_of_the_phase(self, schedule):
        phase, whole = schedule.phases[0], set(phase_panel(schedule, 0).arrows)
        parts = {
            "round": range(phase.num_rounds),
            "lane": range(int(phase.transfers.lane.max()) + 1),
            "half": (0, 1),
        }
        for name, values in parts.items():
            arrows = [set(phase_panel(schedule, 0, **{name: value}).arrows) for value in values]
            assert set().union(*arrows) == whole

    def test_halves_of_a_ring_are_its_two_directions(self):
        schedule = rings.build_schedule(grid("6x6"))
        one, other = (
            {arrow.route for arrow in phase_panel(schedule, 0, half=half).arrows} for half in (0, 1)
        )
        assert len(one) == 36
        assert {route[::-1] for route in one} == other

    def test_adjacent_rings_differ_in_colour(self):
        schedule = row_pair.build_schedule(grid("6x8"))
        colour = {
            coord: arrow.colour
            for arrow in phase_panel(schedule, 0).arrows
            for coord in (arrow.route[0], arrow.route[-1])
        }
        for y in range(8):
            row = {colour[x, y] for x in range(6)}
            assert len(row) == 1
            if y % 2:
                assert row == {colour[0, y - 1]}
            elif y:
                assert row != {colour[0, y - 1]}

    def test_halves_on_different_rings_differ_in_colour(self):
        panel = phase_panel(rings.build_two_dim(grid("4x4")), 0)
        colours = {"red": 0, "blue": 1}
        for arrow in panel.arrows:
            moved = [a != b for a, b in zip(arrow.route[0], arrow.route[-1], strict=True)]
            assert moved.index(True) == colours[arrow.colour]
        assert [colour for colour, _ in panel.legend] == ["red", "blue"]

    def test_chips_off_the_rings_are_those_of_the_broken_rows(self):
        schedule = row_pair.build_schedule(grid("8x8", "2x2@2,2"))
        panel = phase_panel(schedule, 0)
        broken = {(x, y) for x in (0, 1, 4, 5, 6, 7) for y in (2, 3)}
        assert panel.off_ring == broken
        ends = {"blue": 0, "green": 1, "amber": 2}
        for arrow in panel.arrows:
            off = [end in broken for end in (arrow.route[0], arrow.route[-1])]
            assert sum(off) == ends[arrow.colour]
        assert {panel.role(coord) for coord in broken} == {"off_ring"}
        assert panel.role((2, 2)) == "failed"
        assert panel.role((0, 0)) == "live"

    def test_only_keeps_some_colours_and_their_meaning(self):
        panel = phase_panel(chips_off_the_ring(), 0).only("green", title="up")
        assert panel.title == "up"
        assert panel.arrows == (Arrow(((1, 1), (1, 0)), "green"),)
        assert [colour for colour, _ in panel.legend] == ["green"]

    def test_arrows_go_from_neighbour_to_neighbour(self):
        for b in ((2, 0), (1, 1), (3, 0), (0, 0)):
            with pytest.raises(TopologyError, match=r"no neighbour of \(0, 0\) on 4x4"):
                Panel(grid("4x4"), "", (Arrow(((0, 0), b)),))

    def test_arrows_to_a_layer_lead_to_the_next(self):
        for b in ((0, 0, 2), (1, 0, 1), (0, 0, 3)):
            with pytest.raises(TopologyError, match=r"no neighbour of \(0, 0, 0\) on 4x4x4"):
                Panel(grid("4x4x4"), "", (Arrow(((0, 0, 0), b)),))

    def test_unknown_phases_and_rounds_are_rejected(self):
        schedule = chips_off_the_ring()
        with pytest.raises(ScheduleError, match="phase 2 does not exist"):
            phase_panel(schedule, 2)
        with pytest.raises(ScheduleError, match="rounds 0 to 2"):
            phase_panel(schedule, 0, round=3)
        with pytest.raises(ScheduleError, match=r"lane 2 does not exist: .* has lanes 0 to 1"):
            phase_panel(rings.build_schedule(grid("2x2")), 0, lane=2)


class TestSvg:
    def count(self, panels):
        root = ElementTree.fromstring(draw_svg(panels))
        found = {}
        for group in root.iter(f"{SVG}g"):
            tag = "path" if group.get("class") == "arrows" else "rect"
            name = group.get("class", "")
            found[name] = found.get(name, 0) + len(group.findall(f"{SVG}{tag}"))
        return root, found

    def test_every_chip_and_arrow_is_drawn(self, schedule):
        panels = schedule_panels(schedule)
        root, found = self.count(panels)
        topology = schedule.topology
        off_ring = len(panels[0].off_ring)
        assert found["live"] == (topology.num_live - off_ring) * len(panels)
        assert found.get("off_ring", 0) == off_ring * len(panels)
        assert found.get("failed", 0) == len(topology.failed) * len(panels)
        assert found["arrows"] == sum(len(panel.arrows) for panel in panels)
        assert root.find(f"{SVG}title").text.startswith(panels[0].title)

    def test_the_same_panels_give_the_same_bytes(self):
        assert draw_svg(figure(9)) == draw_svg(figure(9))

    def test_a_large_mesh_stays_small(self):
        schedule = row_pair.build_schedule(grid("16x32", "4x2@6,14"))
        for panel in schedule_panels(schedule):
            assert len(draw_svg([panel])) < 200_000

    def test_titles_are_escaped(self):
        page = draw_svg([routes_panel(grid("2x2"), [], title="a < b & c")])
        assert ElementTree.fromstring(page).find(f"{SVG}title").text == "a < b & c"

    def test_a_title_for_screen_readers_can_be_given(self):
        page = draw_svg([routes_panel(grid("2x2"), [])], title="two by two")
        assert ElementTree.fromstring(page).find(f"{SVG}title").text == "two by two"

    def test_at_least_one_panel(self):
        with pytest.raises(ScheduleError, match="at least one panel"):
            draw_svg([])
