"""The commands, in this process; and once as users start them."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ftmesh
from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.draw.plots import COLOURS


def test_plan_describes_and_writes_the_schedule(run, tmp_path):
    out, svg = tmp_path / "a.npz", tmp_path / "a.svg"
    status, text, _ = run(
        "plan", "8x8", "--failed", "2x2@2,2", "--algorithm", "ring", "--out", str(out),
        "--svg", str(svg), "--round", "0",
    )  # fmt: skip
    assert status == 0
    assert "ring on 8x8 less 2x2@2,2: 60 live chips, 118 rounds, 120 chunks" in text
    assert "lane 0: (0, 0) -> (1, 0)  add chunk 0" in text
    assert "verified: 60 ranks hold every contribution" in text
    assert ftmesh.load(out).num_rounds == 118
    assert svg.read_text().startswith("<svg")


def test_plan_as_json(run):
    status, text, _ = run(
        "plan",
        "16x16",
        "--failed",
        "4x2@4,4",
        "--algorithm",
        "row_pair",
        "--payload",
        "64MB",
        "--json",
    )
    data = json.loads(text)
    assert status == 0
    assert data["algorithm"] == "row_pair"
    assert (data["live"], data["rounds"], data["verified"]) == (248, 76, True)
    assert data["payload_bytes"] == 64_000_000
    assert [phase["rounds"] for phase in data["phases"]] == [32, 6, 6, 32]
    assert data["phases"][0]["busiest_link_bytes"] == pytest.approx(64e6 * 31 / 64)


def test_failed_chips_from_the_environment(run, monkeypatch):
    monkeypatch.setenv("FTMESH_FAILED", "2x2@2,2")
    assert "60 live chips" in run("plan", "8x8")[1]
    assert "64 live chips" in run("plan", "8x8", "--failed", "")[1]


def test_wrap_and_failed_links(run):
    assert "8x8 (wrapping in x)" in run("plan", "8x8", "--wrap", "x")[1]
    assert "less links 0,0-1,0" in run("plan", "8x8", "--failed-links", "1,0-0,0")[1]


def test_verify_a_file(run, tmp_path):
    path = str(tmp_path / "a.npz")
    run("plan", "8x8", "--failed", "2x2@2,2", "--algorithm", "row_pair", "--out", path)
    status, text, _ = run("verify", path)
    assert (status, "verified: 60 ranks" in text) == (0, True)
    assert json.loads(run("verify", path, "--json")[1])["num_ranks"] == 60
    status, _, error = run("verify", path, "--router", "dimension_order")
    assert status == 65
    assert "crosses failed chip (2, 2)" in error


def test_plan_explains_its_choice(run):
    text = run("plan", "8x8", "--failed", "2x2@2,2", "--payload", "10kB", "--explain")[1]
    assert "tree on 8x8 less 2x2@2,2" in text
    assert "no all-reduce can take less than 7 us" in text
    slow = run("plan", "8x8", "--payload", "10MB", "--latency", "1ms", "--json")[1]
    assert json.loads(slow)["algorithm"] == "tree"


def test_simulate_every_algorithm(run):
    status, text, _ = run("simulate", "8x8", "--failed", "2x2@2,2", "--payload", "100MB")
    assert status == 0
    header, columns, *rows = text.splitlines()
    assert header == "100 MB on 8x8 less 2x2@2,2, links of 50 GB/s each way, 0.5 us a hop"
    assert columns.split()[:3] == ["algorithm", "rounds", "synchronous"]
    assert [row.split()[0] for row in rows[:4]] == ["tree", "ring", "row_pair", "two_dim"]
    assert rows[0].split()[2:4] == ["1.35", "ms"]
    assert rows[1].split()[1:7] == ["118", "2.03", "ms", "1.69", "0.51", "2.03"]
    assert "cannot: it needs every row" in rows[3]
    assert rows[5] == "by XLA itself:"
    assert rows[6].split() == ["lax.psum", "4", "ms", "3.33", "1.00"]
    assert rows[7].endswith("5 of its steps go over failed chips or links")
    assert rows[8].split() == ["lax.psum", "along", "the", "ring", "2", "ms", "1.66", "0.50"]
    assert rows[9] == "    all 60 steps of the ring are one hop"
    assert rows[10].split() == ["TACOS", "x2", "2.03", "ms", "1.69"]
    assert len(rows[10]) == columns.index("x limit") + len("x limit")
    assert rows[11].endswith("one chunk, at least 1.24 ms; along trees, 1.27 ms")
    assert rows[12] == "  no all-reduce can take less than 1.2 ms"
    assert rows[13].startswith("  ring, two_dim, row_pair: Kumar and Jouppi (2020)")
    assert "Won et al., MICRO 2024" in rows[14]


def test_simulate_as_json(run):
    argv = "simulate 8x8 --failed 2x2@2,2 --algorithm all --link 50GB/s --latency 0.5us --json"
    tree, ring, pairs = json.loads(run(*argv.split())[1])
    assert [result["algorithm"] for result in (tree, ring, pairs)] == ["tree", "ring", "row_pair"]
    assert 1.2 * tree["limit_us"] > tree["time_us"] > tree["dataflow_us"]
    assert ring["time_us"] == pytest.approx(2 * 59 * (0.5 + 1e8 / (120 * 5e4)))
    assert ring["limit_us"] == pairs["limit_us"] == pytest.approx(1200)
    assert 1200 < ring["all_reduce_rounds_us"] < ring["all_reduce_trees_us"] < tree["time_us"]
    assert ring["tacos_us"] == pytest.approx(2030)
    assert ring["low_us"] == ring["high_us"] == ring["time_us"]
    assert ring["lax_psum_us"] == pytest.approx(2 * ring["lax_psum_along_ring_us"], rel=0.01)
    assert ring["times_lax_psum"] == ring["time_us"] / ring["lax_psum_us"]
    assert pairs["dataflow_us"] < pairs["time_us"] == pairs["synchronous_us"]
    assert sum(phase["time_us"] for phase in pairs["phases"]) == pytest.approx(pairs["time_us"])
    (auto,) = json.loads(run("simulate", "4x4", "--algorithm", "auto", "--json")[1])
    assert auto["algorithm"] == "tree"


def test_simulate_one_algorithm_in_detail(run):
    status, text, _ = run(
        "simulate", "8x8", "--algorithm", "row_pair", "--tpu", "v3", "--mode", "dataflow"
    )
    assert status == 0
    assert "row_pair on 8x8: 100 MB in" in text
    assert "(dataflow)" in text
    assert "links of 82 GB/s each way, 1 us a hop" in text
    assert "times the limit" in text
    assert "times lax.psum, 1.77 ms: over all axes at once" in text


def test_simulate_with_another_rate_than_that_of_the_generation(run):
    argv = ["simulate", "v6e:4x4", "--link", "40GB/s", "--algorithm", "ring", "--json"]
    (ring,) = json.loads(run(*argv)[1])
    assert ring["low_us"] < ring["time_us"] < ring["high_us"]


def test_simulate_on_wires_has_no_kernel(run):
    _, text, _ = run("simulate", "v6e:4x4", "--wires-only", "--payload", "1MB")
    assert "by XLA itself:\n" in text
    assert "kernel" not in text


ADVISE = [
    "advise",
    "8x8",
    "--failed",
    "2x2@2,2",
    "--step",
    "20ms",
    "--runs",
    "3",
    "--horizon",
    "500d",
    "--mtbf",
    "100d",
]


def test_advise(run):
    status, text, _ = run(*ADVISE)
    assert status == 0
    assert "8x8, 16 boards, each failing every 100 d and repaired in 8 h" in text
    assert "route around the damage and continue on all 60 live chips" in " ".join(text.split())
    assert run(*ADVISE)[1] == text  # the seed determines it
    assert run(*ADVISE, "--seed", "1")[1] != text
    data = json.loads(run(*ADVISE, "--json")[1])
    assert data["at_hand"]["best"] == "fault-tolerant"
    assert [answer["answer"] for answer in data["answers"]] == [
        "wait for repair", "largest sub-mesh", "hot spares", "fault-tolerant",
    ]  # fmt: skip


def test_advise_without_failures_and_with_a_quick_repair(run):
    assert "over time, 'fault-tolerant' does the most work" in run(*ADVISE, "--failed", "")[1]
    text = run(*ADVISE, "--repair", "9min")[1]
    assert "too short to be worth a restart" in " ".join(text.split())


def test_advise_on_replicas(run):
    mesh = "advise", "8x8", "--failed", "2x2@2,2", "--model-bytes", "5GB"
    status, text, _ = run(*mesh, "--memory", "6GB", "--tpu", "v6e")
    assert status == 0
    assert "5 GB of float32 weights, 20 GB of state" in text
    assert "State: 16 bytes per weight" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("  2x2 "))
    assert row[:5] == ["2x2", "15", "0", "5", "GB"]
    assert row[5] == "yes"
    assert "Advice: replicas of 2x2, 5 GB of 6 GB on each chip." in text
    assert "Advice: give --memory" in run(*mesh)[1]
    text = run(*mesh, "--memory", "500MB")[1]
    assert "Advice: one replica over all 60 live chips" in text
    data = json.loads(run(*mesh, "--memory", "6GB", "--json")[1])
    assert data["best"] == "2x2"
    assert [one["fits"] for one in data["options"]] == [False, False, *[True] * 5]


def test_advise_on_one_chip(run):
    status, text, _ = run("advise", "1x1", "--runs", "1", "--json")
    assert (status, json.loads(text)["boards"]) == (0, 1)


def test_advise_is_fast_for_frequent_failures(run):
    start = time.process_time()
    status, text, _ = run("advise", "8x8", "--mtbf", "3d", "--runs", "5", "--json")
    assert (status, json.loads(text)["boards"]) == (0, 16)
    assert time.process_time() - start < 20  # seconds; a search at every failure took minutes


def test_every_algorithm_has_its_own_colour():
    assert set(COLOURS) == set(ALGORITHMS)
    assert len(set(COLOURS.values())) == len(COLOURS)


@pytest.mark.slow
def test_plots_are_written(run, tmp_path):
    curve, heat, shares = (str(tmp_path / name) for name in ("a.svg", "b.png", "c.pdf"))
    argv = ["simulate", "6x6", "--failed", "2x2@2,2", "--plot", curve, "--heat-map", heat]
    assert f"wrote {heat}" in run(*argv)[1]
    assert "row_pair" in Path(curve).read_text()
    assert run(*ADVISE, "--plot", shares)[0] == 0
    assert Path(shares).read_bytes().startswith(b"%PDF")
    assert "cannot write" in run("simulate", "6x6", "--plot", str(tmp_path / "a.doc"))[2]


def test_draw_on_the_terminal_and_as_svg(run, tmp_path):
    status, text, _ = run(
        "draw", "4x4", "--failed", "2x2@2,0", "--algorithm", "ring", "--phase", "0"
    )
    assert status == 0
    assert "o─↔─o   X   X" in text
    path = tmp_path / "figure.svg"
    assert run("draw", "--figure", "9", "--svg", str(path)) == (0, f"wrote {path}\n", "")
    assert "row_pair on 8x8 less 2x2@2,2" in path.read_text()
    plan = str(tmp_path / "a.npz")
    run("plan", "4x4", "--out", plan)
    assert run("draw", plan)[1] == run("draw", "4x4")[1]
    assert "round 1" in run("draw", "4x4", "--phase", "0", "--round", "1")[1]


@pytest.mark.parametrize("number", range(1, 11))
def test_every_figure_of_the_paper(run, number):
    status, text, _ = run("draw", "--figure", str(number))
    assert status == 0
    assert "8x8" in text or "1." in text


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"], ["verify", "-h"], ["draw", "-h"]])
def test_help_helps(run, argv):
    status, text, _ = run(*argv)
    assert status == 0
    assert "@" in text or "example" in text


def test_python_m_ftmesh():
    done = subprocess.run(
        [sys.executable, "-m", "ftmesh", "plan", "4x4"], capture_output=True, text=True, check=True
    )
    assert "tree on 4x4" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "ftmesh", "plan", "4y4"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(run, monkeypatch):
    monkeypatch.setenv("FTMESH_FAILED", "2x2@12,12")
    status, text, err = run("plan", "8x8")
    assert status == 0
    assert "on 8x8: 64 live chips" in text
    assert err.startswith("ftmesh: warning: the environment variable FTMESH_FAILED names 2x2@12,12")
    assert err.count("\n") == 1


def test_unknown_option_points_to_the_help_of_its_command(run):
    status, _, error = run("plan", "8x8", "--faild", "2x2@2,2")
    assert status == 2
    assert "unrecognized arguments: --faild 2x2@2,2" in error
    assert "ftmesh plan --help" in error
