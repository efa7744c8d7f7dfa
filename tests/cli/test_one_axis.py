"""Commands accept one-dimensional meshes."""

import json

import pytest


@pytest.mark.parametrize("mesh", ["1x8", "8x1", "8"])
class TestLines:
    def test_plan_and_verify(self, run, tmp_path, mesh):
        out, svg = tmp_path / "a.npz", tmp_path / "a.svg"
        files = ("--out", str(out), "--svg", str(svg))
        status, text, _ = run("plan", mesh, "--algorithm", "chain", "--explain", *files)
        assert status == 0
        assert f"chain on {mesh}: 8 live chips, 14 rounds, 8 chunks, neighbour-only" in text
        assert svg.read_text().count('rx="5"') == 2 * 8  # a chip; a panel for each phase
        status, text, _ = run("verify", str(out))
        assert status == 0
        assert "8 ranks hold every contribution to 8 chunks exactly once after 14 rounds" in text

    def test_draw(self, run, mesh):
        status, text, _ = run("draw", mesh, "--phase", "0")
        assert status == 0
        if mesh == "1x8":
            assert [row[:1] for row in text.splitlines()[2:-1:2]] == list("01234567")
            assert text.count("↕") == 7
        else:
            assert "0  o─↔─o─↔─o─↔─o─↔─o─↔─o─↔─o─↔─o\n" in text

    def test_simulate(self, run, tmp_path, mesh):
        status, text, _ = run(
            "simulate", mesh, "--link", "100GB/s", "--latency", "1us", "--payload", "8MB", "--json"
        )
        tree, data = json.loads(text)
        assert status == 0
        assert (data["algorithm"], data["rounds"]) == ("chain", 14)
        assert (tree["algorithm"], tree["limit_us"]) == ("tree", data["limit_us"])
        assert tree["time_us"] < data["time_us"]
        assert data["time_us"] == pytest.approx(14 * (1 + 10))  # of 1 MB, 10 us on a link
        assert data["limit_us"] == pytest.approx(80)
        heat = tmp_path / "heat.svg"
        assert run("simulate", mesh, "--algorithm", "chain", "--heat-map", str(heat))[0] == 0
        assert heat.stat().st_size > 1000

    def test_limits(self, run, mesh):
        status, text, _ = run("limits", mesh, "--json")
        data = json.loads(text)
        assert status == 0
        assert (data["live"], data["links"], data["diameter"]) == (8, 7, 7)
        assert (data["all_gather_share"], data["all_reduce_share"]) == ("7/8", "1")

    def test_advise(self, run, mesh):
        status, text, _ = run("advise", mesh, "--runs", "1", "--json")
        data = json.loads(text)
        assert status == 0
        assert (data["boards"], data["spares"]) == (4, 1)
        block = {"1x8": "1x2@0,0", "8x1": "2x1@0,0", "8": "2@0"}[mesh]
        status, text, _ = run("advise", mesh, "--runs", "1", "--failed", block, "--json")
        assert status == 0
        speeds = json.loads(text)["at_hand"]["speeds"]
        assert speeds["fault-tolerant"] == pytest.approx(speeds["largest sub-mesh"], rel=1e-4)
        assert speeds["fault-tolerant"] > 0.7
