"""Drawings of meshes with three axes: their layers side by side."""

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from ftmesh import Topology
from ftmesh.algorithms import rings
from ftmesh.algorithms.registry import build_schedule
from ftmesh.cli.main import main
from ftmesh.draw import draw_svg, draw_text, phase_panel, routes_panel
from ftmesh.draw.panel import direction, layer_origins, page_size, position

SVG = "{http://www.w3.org/2000/svg}"
DAMAGED = Topology.grid("4x2x2", failed="2x2x1@0,0,0", failed_links="1,0,1-1,1,1;3,0,0-3,0,1")


def test_a_ring_through_two_layers():
    panel = phase_panel(rings.build_schedule(DAMAGED), 0, half=0)
    assert (
        draw_text(panel)
        == """
ring on 4x2x2 less 2x2x1@0,0,0 less links 1,0,1-1,1,1;3,0,0-3,0,1: Hamiltonian ring, reduce-scatter
   z=0                 z=1
   0   1   2   3       0   1   2   3
0  X   X   o─→─o       o─←─o─←─o─←─o
           ↑   ↓ ╳     ↓   ╳       ↑  ╳
1  X   X   o   o       o─→─o─→─o   o
                 ↗                ↙
o live   X failed   ╳ failed link   → arrives   ↗ to the next layer   ↙ to the layer before
""".strip()
    )


def test_layers_in_rows_and_wrap_links():
    topo = Topology.grid("3x2x10", wrap=(True, False, True))
    routes = [((2, 0, 0), (0, 0, 0)), ((1, 1, 0), (1, 1, 9)), ((0, 0, 5), (0, 0, 6), (1, 0, 6))]
    assert (
        draw_text(routes_panel(topo, routes, title="ten layers"))
        == """
ten layers
      z=0             z=1             z=2             z=3             z=4
      0   1   2       0   1   2       0   1   2       0   1   2       0   1   2
0  ─→─o   o   o─→─    o   o   o       o   o   o       o   o   o       o   o   o

1     o   o   o       o   o   o       o   o   o       o   o   o       o   o   o
             ↙
      z=5             z=6             z=7             z=8             z=9

0     o   o   o       o─→─o   o       o   o   o       o   o   o       o   o   o
        ⇗
1     o   o   o       o   o   o       o   o   o       o   o   o       o   o   o
o live   → arrives   ↗ to the next layer   ↙ to the layer before
""".strip()
    )


@pytest.mark.parametrize("shape", ["8", "4x4", "4x4x8", "2x3x5", "16x16x16", "30x2x3"])
def test_every_chip_has_its_own_position(shape):
    topo = Topology.grid(shape)
    places = [position(topo, coord) for coord in topo.all_coords()]
    assert len(set(places)) == topo.num_chips
    columns, rows = (max(line) + 1 for line in zip(*places, strict=True))
    assert (columns, rows) == page_size(topo)
    assert len(layer_origins(topo)) == (topo.shape[2] if len(topo.shape) > 2 else 1)


@pytest.mark.parametrize("name", ["ring", "two_dim", "multi_ring"])
def test_every_arrow_is_drawn_and_to_a_layer_in_two_pieces(name):
    schedule = build_schedule(Topology.grid("3x4x3", wrap=True), name)
    panel = phase_panel(schedule, 0)
    root = ElementTree.fromstring(draw_svg([panel]))
    arrows = [g for g in root.iter(f"{SVG}g") if g.get("class") == "arrows"]
    paths = [path.get("d") for group in arrows for path in group.findall(f"{SVG}path")]
    assert len(paths) == len(panel.arrows) == len(schedule.phases[0].pairs)
    topo = schedule.topology
    cut = 0
    for arrow in panel.arrows:
        ((a, b),) = pairwise(arrow.route)
        x, y = position(topo, a)
        dx, dy = direction(topo, a, b)
        cut += position(topo, b) != (x + dx, y + dy)
    assert sum(path.count("M") == 2 for path in paths) == cut
    names = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "layer"]
    assert names == ["z = 0", "z = 1", "z = 2"]


def test_failed_chips_and_links_are_drawn_and_explained():
    root = ElementTree.fromstring(draw_svg([routes_panel(DAMAGED, [])]))
    failed = [g for g in root.iter(f"{SVG}g") if g.get("class") == "failed"]
    assert len(failed[0].findall(f"{SVG}rect")) == 4
    dashed = [path for path in root.iter(f"{SVG}path") if path.get("stroke-dasharray")]
    assert dashed[0].get("d").count("M") == 3  # one within a layer, and one between two
    entries = [text.text for text in root.iter(f"{SVG}text")]
    assert entries[-4:] == ["live chip", "failed", "failed link", "up to the next layer"]


@pytest.mark.parametrize("name", ["two_dim", "multi_ring"])
def test_thirds_of_the_payload_differ_in_colour(name):
    schedule = build_schedule(Topology.grid("3x3x3", wrap=True), name)
    panel = phase_panel(schedule, 0)
    assert [colour for colour, _ in panel.legend] == ["red", "blue", "green"]
    cables = {}
    for arrow in panel.arrows:
        cables.setdefault(arrow.colour, set()).add(frozenset(arrow.route))
    assert [len(cables[colour]) for colour in ("red", "blue", "green")] == [27, 27, 27]


def test_the_command_draws_one_lane(capsys):
    main(
        ["draw", "3x3", "--wrap", "xy", "--algorithm", "multi_ring", "--phase", "0", "--lane", "2"]
    )
    title, *lines, _ = capsys.readouterr().out.splitlines()
    assert title.endswith("2 circuits, reduce-scatter, lane 2")
    assert 9 < sum(line.count(arrow) for line in lines for arrow in "←→↑↓") < 18  # some twice
    assert main(["draw", "3x3", "--lane", "2"]) == 2
    assert "--lane is counted within a phase" in capsys.readouterr().err


def test_the_command_draws_layers(capsys, tmp_path):
    mesh = ["4x4x4", "--failed", "2x2x1@0,0,0", "--failed-links", "3,3,1-3,3,2"]
    main(["draw", *mesh, "--algorithm", "ring", "--phase", "0"])
    shown = capsys.readouterr().out
    assert "z=3" in shown
    assert shown.count("X") == 5  # four chips, and what it means
    assert shown.count("╳") == 3
    page = tmp_path / "page.svg"
    main(["plan", *mesh, "--algorithm", "ring", "--svg", str(page)])
    assert page.read_text().count("z = 3") == 2
