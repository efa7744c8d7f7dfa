"""The paper's figures, and the tracks that arrows keep to in them."""

import re
import subprocess
import sys
from itertools import pairwise
from math import dist
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ftmesh.draw import draw_svg, draw_text, figure, routes_panel
from ftmesh.draw.svg import HALF, PITCH, arrow_paths
from ftmesh.errors import FtmeshError
from ftmesh.topology.routing import dimension_order
from ftmesh.topology.topology import Topology

SCRIPT = Path(__file__).parents[2] / "scripts" / "figures"


class TestTracks:
    def corners(self, path):
        return [
            [tuple(map(float, pair.split())) for pair in re.findall(r"-?[\d.]+ -?[\d.]+", piece)]
            for piece in path.split("M")[1:]
        ]

    def along(self, path):
        """Points about a unit apart."""
        for corners in self.corners(path):
            for a, b in pairwise(corners):
                steps = int(dist(a, b)) + 1
                for i in range(steps + 1):
                    yield tuple(p + (q - p) * i / steps for p, q in zip(a, b, strict=True))

    @pytest.mark.parametrize("number", range(1, 11))
    def test_arrows_touch_no_chip_on_their_way(self, number):
        for panel in figure(number):
            for path in arrow_paths(panel):
                for x, y in self.along(path):
                    beside = (abs((p + PITCH / 2) % PITCH - PITCH / 2) for p in (x, y))
                    assert max(beside) > HALF

    def test_an_arrow_is_in_the_middle_if_alone_and_else_on_the_right(self):
        one, other = ((0, 0), (1, 0)), ((1, 0), (0, 0))
        topology = Topology.grid("2x2")
        (path,) = arrow_paths(routes_panel(topology, [one]))
        assert {y for _, y in self.along(path)} == {0.0}
        east, west = arrow_paths(routes_panel(topology, [one, other]))
        assert all(y > 0 for _, y in self.along(east))
        assert all(y < 0 for _, y in self.along(west))

    def test_arrows_that_pass_the_same_chips_do_not_share_a_track(self):
        topology = Topology.grid("1x6")
        routes = [dimension_order(topology, (0, y), (0, y + 3)) for y in range(3)]
        paths = arrow_paths(routes_panel(topology, routes))
        assert len({min(x for x, _ in self.along(path)) for path in paths}) == 3

    def test_an_arrow_over_the_edge_is_in_two_pieces(self):
        topology = Topology.grid("4x4", wrap=True)
        (path,) = arrow_paths(routes_panel(topology, [((3, 0), (0, 0))]))
        out, back = self.corners(path)
        assert out[-1] == (3.5 * PITCH, 0)
        assert back[0] == (-0.5 * PITCH, 0)


class TestFigures:
    @pytest.mark.parametrize("number", range(1, 11))
    def test_text_and_svg_of_every_figure(self, number):
        panels = figure(number)
        ElementTree.fromstring(draw_svg(panels))
        for panel in panels:
            assert panel.arrows
            assert draw_text(panel).startswith(f"{panel.title}\n")

    def test_figures_with_a_hole_have_it_where_the_paper_has(self):
        for number in range(1, 11):
            failed = {(2, 2), (3, 2), (2, 3), (3, 3)} if number in (2, 8, 9, 10) else set()
            assert all(panel.topology.failed == failed for panel in figure(number))

    def test_routes_go_around_the_hole_only_where_they_must(self):
        (straight,), (damaged,) = figure(1), figure(2)
        failed = damaged.topology.failed
        pairs = list(zip(straight.arrows, damaged.arrows, strict=True))
        assert any(a != b for a, b in pairs)
        for a, b in pairs:
            assert (a == b) == failed.isdisjoint(a.route)
            assert failed.isdisjoint(b.route)

    def test_steps_are_numbered(self):
        for number, steps in ((5, 4), (10, 8)):
            titles = [panel.title for panel in figure(number)]
            assert [title.split(". ")[0] for title in titles] == [str(i + 1) for i in range(steps)]

    def test_steps_of_the_forwarding_scheme_together_are_its_phases(self):
        (whole,) = figure(9)
        steps = figure(10)
        assert {arrow for panel in steps[:3] for arrow in panel.arrows} == set(whole.arrows)
        for there, back in zip(steps[:3], reversed(steps[5:]), strict=True):
            assert {arrow.route for arrow in there.arrows} == {
                arrow.route[::-1] for arrow in back.arrows
            }

    @pytest.mark.parametrize("number", [0, 11, -1])
    def test_other_figures_do_not_exist(self, number):
        with pytest.raises(FtmeshError, match=f"no figure {number}: choose from 1 to 10"):
            figure(number)

    def test_the_script_writes_files(self, tmp_path):
        command = [sys.executable, str(SCRIPT), "--out", str(tmp_path)]
        subprocess.run([*command, "3", "8"], check=True, capture_output=True)
        assert (tmp_path / "figure-8.svg").read_text(encoding="utf-8") == draw_svg(figure(8))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["figure-3.svg", "figure-8.svg"]
        wrong = subprocess.run([*command, "11"], capture_output=True, text=True, check=False)
        assert wrong.returncode == 2
        assert "no figure 11" in wrong.stderr
