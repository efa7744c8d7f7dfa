"""``--tile`` on the command line."""

import json

import pytest

import ftmesh
from ftmesh.cli.main import main

MESH = ("8x8", "--failed", "1x1@2,2", "--tile", "2x2")


@pytest.fixture
def run(capsys):
    def call(*argv):
        status = main(argv)
        out, err = capsys.readouterr()
        return status, out + err

    return call


def test_plan(run, tmp_path):
    path = tmp_path / "tiles.npz"
    status, text = run("plan", *MESH, "--algorithm", "row_pair", "--out", str(path))
    assert status == 0
    assert "row_pair on 8x8 less 1x1@2,2 in 4x4 tiles of 2x2: 15 live tiles" in text
    assert "4 positions per tile, each with its own payload; all are summed at once" in text
    assert "1 of 16 tiles lost, with 3 live chips in them: tile (1, 1) to chips 1x1@2,2" in text
    assert "verified: 15 ranks, at each of 4 positions, hold every contribution" in text
    assert ftmesh.load(path).topology.num_positions == 4
    assert run("verify", str(path))[1].count("at each of 4 positions") == 1


def test_plan_as_json(run):
    data = json.loads(run("plan", *MESH, "--json")[1])
    assert (data["mesh"], data["failed"], data["live"]) == ("8x8", [[2, 2]], 15)
    assert (data["tile"], data["positions"], data["wasted"]) == ([2, 2], 4, 3)
    assert data["failed_tiles"] == [[1, 1]]
    untiled = json.loads(run("plan", *MESH[:3], "--json")[1])
    assert (untiled["live"], "tile" in untiled) == (63, False)


def test_simulate(run):
    _, text = run("simulate", *MESH)
    assert "100 MB on 8x8 less 1x1@2,2 in 4x4 tiles of 2x2, links of 50 GB/s" in text
    assert "1 of 16 tiles lost" in text
    data = json.loads(run("simulate", *MESH, "--json")[1])
    assert {result["algorithm"] for result in data} == {"row_pair", "tree"}
    (data,) = [result for result in data if result["algorithm"] == "row_pair"]
    assert data["limit_us"] == pytest.approx(1.2 * 2000)
    chips = ftmesh.Topology.grid("8x8", failed="1x1@2,2")
    topology = ftmesh.TiledTopology.from_topology(chips, "2x2")
    plan = ftmesh.plan(topology, "row_pair")
    assert data["time_us"] == pytest.approx(1e6 * ftmesh.simulate(plan.schedule).seconds)


def test_limits_and_drawing(run):
    _, text = run("limits", *MESH)
    assert "tile (0, 0) hangs on 4 links shared by 4 positions" in text
    assert "1 of 16 tiles lost" in text
    assert json.loads(run("limits", *MESH, "--json")[1])["live"] == 15
    _, text = run("draw", *MESH, "--algorithm", "row_pair", "--phase", "0")
    assert text.splitlines()[0].startswith("row_pair on 8x8 less 1x1@2,2 in 4x4 tiles of 2x2:")
    assert len([line for line in text.splitlines() if line[:1].isdigit()]) == 4


def test_tiles_that_do_not_fit(run):
    status, text = run("plan", "8x8", "--tile", "3x2")
    assert (status, text.count("\n")) == (2, 1)
    assert "mesh 8x8 cannot be cut into tiles of 3x2" in text
    assert "a single live tile" in run("plan", "8x8", "--tile", "8x8")[1]
