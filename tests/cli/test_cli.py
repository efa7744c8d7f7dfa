"""The command line, in this process; and once as users start it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ftmesh
from ftmesh.cli import main
from ftmesh.draw.plots import COLOURS
from ftmesh.planners import PLANNERS


@pytest.fixture
def run(capsys):
    def call(*argv):
        try:
            status = main(argv)
        except SystemExit as stop:  # argparse
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_plan_says_what_it_planned_and_writes_it(run, tmp_path):
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
    found = json.loads(text)
    assert status == 0
    assert found["algorithm"] == "row_pair"
    assert (found["live"], found["rounds"], found["verified"]) == (248, 76, True)
    assert found["payload_bytes"] == 64_000_000
    assert [phase["rounds"] for phase in found["phases"]] == [32, 6, 6, 32]
    assert found["phases"][0]["busiest_link_bytes"] == pytest.approx(64e6 * 31 / 64)


def test_the_environment_tells_what_failed(run, monkeypatch):
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
    assert "row_pair on 8x8 less 2x2@2,2" in text
    assert "no all-reduce can take less than 7 us" in text
    slow = run("plan", "8x8", "--payload", "10MB", "--latency", "1ms", "--json")[1]
    assert json.loads(slow)["algorithm"] == "two_dim"


def test_simulate_every_algorithm(run):
    status, text, _ = run("simulate", "8x8", "--failed", "2x2@2,2", "--payload", "100MB")
    assert status == 0
    header, columns, *rows = text.splitlines()
    assert header == "100 MB on 8x8 less 2x2@2,2, links of 50 GB/s each way, 0.5 us a hop"
    assert columns.split()[:3] == ["algorithm", "rounds", "synchronous"]
    assert [row.split()[0] for row in rows[:4]] == ["tree", "ring", "row_pair", "two_dim"]
    assert rows[0].split()[2:4] == ["1.35", "ms"]
    assert rows[1].split()[1:7] == ["118", "2.03", "ms", "2.03", "ms", "1.69"]
    assert "cannot: it needs every row" in rows[3]
    assert rows[5].split() == ["TACOS", "x2", "2.03", "ms", "1.69"]
    assert rows[6].endswith("one chunk, at least 1.24 ms; along trees, 1.27 ms")
    assert rows[7] == "  no all-reduce can take less than 1.2 ms"
    assert rows[8].startswith("  ring, two_dim, row_pair: Kumar and Jouppi (2020)")
    assert "Won et al., MICRO 2024" in rows[9]


def test_simulate_as_json(run):
    argv = "simulate 8x8 --failed 2x2@2,2 --algorithm all --link 50GB/s --latency 0.5us --json"
    tree, ring, pairs = json.loads(run(*argv.split())[1])
    assert [each["algorithm"] for each in (tree, ring, pairs)] == ["tree", "ring", "row_pair"]
    assert 1.2 * tree["limit_us"] > tree["time_us"] > tree["dataflow_us"]
    assert ring["time_us"] == pytest.approx(2 * 59 * (0.5 + 1e8 / (120 * 5e4)))
    assert ring["limit_us"] == pairs["limit_us"] == pytest.approx(1200)
    assert 1200 < ring["all_reduce_rounds_us"] < ring["all_reduce_trees_us"] < tree["time_us"]
    assert ring["tacos_us"] == pytest.approx(2030)
    assert pairs["dataflow_us"] < pairs["time_us"] == pairs["synchronous_us"]
    assert sum(phase["time_us"] for phase in pairs["phases"]) == pytest.approx(pairs["time_us"])
    (auto,) = json.loads(run("simulate", "8x8", "--algorithm", "auto", "--json")[1])
    assert auto["algorithm"] == "two_dim"


def test_simulate_one_algorithm_in_detail(run):
    status, text, _ = run(
        "simulate", "8x8", "--algorithm", "row_pair", "--tpu", "v3", "--mode", "dataflow"
    )
    assert status == 0
    assert "row_pair on 8x8: 100 MB in" in text
    assert "(dataflow)" in text
    assert "links of 82 GB/s each way, 1 us a hop" in text
    assert "times the limit" in text


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
    assert "route around the damage and go on with all 60 live chips" in " ".join(text.split())
    assert run(*ADVISE)[1] == text  # the seed decides
    assert run(*ADVISE, "--seed", "1")[1] != text
    found = json.loads(run(*ADVISE, "--json")[1])
    assert found["at_hand"]["best"] == "fault-tolerant"
    assert [answer["answer"] for answer in found["answers"]] == [
        "wait for repair", "largest sub-mesh", "hot spares", "fault-tolerant",
    ]  # fmt: skip


def test_advise_before_anything_has_failed_and_when_repair_is_near(run):
    assert "over time, 'fault-tolerant' does most" in run(*ADVISE, "--failed", "")[1]
    text = run(*ADVISE, "--repair", "9min")[1]
    assert "too soon to be worth a restart" in " ".join(text.split())


def test_every_algorithm_has_a_colour_of_its_own():
    assert set(COLOURS) == set(PLANNERS)
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


REFUSED = {  # what is well-formed, and cannot be; all else is a command line that is wrong
    "plan 8x8 --failed 3x2@2,2 --algorithm ring": 69,
    "plan 8x8 --failed 2x2@2,2;2x2@3,2 --algorithm ring": 69,
    "plan 8x8 --failed 8x2@0,2": 69,
    "plan 1x8 --failed 1x1@0,3": 69,
    "plan 8 --failed-links 3-4": 69,
    "plan 1x8 --algorithm ring": 69,
    "plan 4x4x4 --algorithm row_pair": 69,
    "plan 8x8 --round 999": 69,
    "draw --figure 11": 69,
    "draw 8x8 --phase 9": 69,
    "verify missing.npz": 66,
    "plan 1000x1000": 69,
    "limits 1000x1000": 69,
}
DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("plan 8x8 --failed 2x2@7,7", "2x2@7,7 is not inside mesh 8x8"),
        ("plan 8x8 --failed 3x2@2,2 --algorithm ring", "only partly failed; use row_pair"),
        ("plan 8x8 --failed 2x2@2,2;2x2@3,2 --algorithm ring", "only partly failed"),
        ("plan 8x8 --failed 8x2@0,2", "32 chips around (0, 4), 16 chips around (0, 0)"),
        ("plan 1x8 --failed 1x1@0,3", "4 chips around (0, 4), 3 chips around (0, 0)"),
        ("plan 8 --failed-links 3-4", "4 chips around (0,), 4 chips around (4,)"),
        ("plan 1x8 --algorithm ring", "of 2 chips or more each, not on 1x8; use line"),
        ("plan 4x4 --failed 4x4@0,0", "all 16 chips of mesh 4x4 have failed"),
        ("plan 8by8", "'8by8' is not a mesh shape"),
        ("plan 8x8 --failed board", "'board' is not a block"),
        ("plan 8x8 --payload much", "'much' is not a size"),
        ("plan 8x8 --wrap z", "has no axis 'z'"),
        ("plan 8x8 --round 999", "round 999 does not exist"),
        ("plan 8x8 --algorithm fastest", "invalid choice: 'fastest'"),
        ("plan", "the following arguments are required: MESH"),
        ("fly", "invalid choice: 'fly'"),
        ("verify missing.npz", "missing.npz: there is no such file"),
        ("draw", "give a MESH such as 8x8"),
        ("draw 8x8 --figure 3", "give --figure alone"),
        ("draw --figure 3 --failed 2x2@0,0", "give --figure alone"),
        ("draw --figure 3 --round 1", "give --figure alone"),
        ("draw --figure 3 --lane 0", "give --figure alone"),
        ("draw --figure 3 --half 0", "give --figure alone"),
        ("draw --figure 3 --phase 0", "give --figure alone"),
        ("draw --figure 3 --wrap x", "give --figure alone"),
        ("draw --figure 3 --tile 2x2", "give --figure alone"),
        ("draw --figure 3 --failed-links 0,0-0,1", "give --figure alone"),
        ("draw --figure 3 --algorithm ring", "give --figure alone"),
        ("draw a.npz --algorithm ring", "leave the other options away"),
        ("plan 2x2x2x2", "one to three axes"),
        (
            "plan 4x4x4 --algorithm row_pair",
            "2 chips or more each, not on 4x4x4; use two_dim or ring",
        ),
        ("plan 9999x9999", "more than the 1,000,000 chips"),
        ("plan 4x4 --failed-links 4,0-4,1", "is not a neighbour"),
        ("plan 4x4 --failed-links 0-1", "is not a neighbour"),
        ("draw --figure 11", "the paper has no figure 11"),
        ("draw 8x8 --phase 9", "phase 9 does not exist"),
        ("draw 8x8 --round 1", "give --phase too"),
        ("plan 1000x1000", "1,000,000 live chips, and a schedule through all of them would take"),
        ("limits 1000x1000", "would take some 112 TB: plan for 16,384 at most"),
        ("plan 4x4 --link 50Gb/s", "'50Gb/s' reads as bits per second: write bytes"),
        ("plan 4x4 --link 50gb/s", "'50gb/s' reads as bits per second"),
        ("plan 4x4 --payload 100Mb", "'100Mb' reads as bits"),
        (f"plan {DIGITS}x2", "is not a mesh shape"),
        (f"plan 4x4 --failed 1x1@{DIGITS},0", "is not a block"),
        (f"plan 4x4 --failed-links {DIGITS}-1", "is not a link"),
        (f"plan 4x4 --payload {DIGITS}", "bytes at most, not '9999"),
        (f"plan 4x4 --latency {DIGITS}s", "the longest time taken"),
        (f"plan 4x4 --round {DIGITS}", "is not a whole number from 0 to 2,147,483,647"),
        ("draw 4x4 --phase -1", "-1 is not from 0 to"),
        ("advise 4x4 --seed -1", "-1 is not from 0 to 4,294,967,295"),
        ("advise 4x4 --runs 99999999999999", "is not a whole number from 1 to 10,000"),
        ("advise 8x8 --mtbf 1min", "failures in all, and 100,000 are played at most"),
        ("bench 4x4 --payloads 900TB", "would take about"),
        ("bench 4x4 --payloads 0", "each of --payloads must be a positive whole number, not 0"),
        ("bench 4x4 --payloads 4KB,,1MB", "'' is not a size"),
        ("plan ٤x٤", "'٤x٤' is not a mesh shape"),
        ("plan 4x4 --failed 1x1@٠,0", "is not a block"),
        ("plan 4x4 --payload ٣MB", "is not a size"),
        ("draw 4x4 --phase 0 --lane -1", "-1 is not from 0 to"),
        ("draw 4x4 --phase 0 --lane ٣", "is not a whole number"),
        ("draw 4x4 --half ١", "is not a whole number"),
        ("view 4x4 --serve 65536", "65536 is not from 0 to 65,535"),
        ("view 4x4 --serve ٣", "is not a whole number"),
        ("doctor --limit ٣", "is not a number from 0.001"),
        ("doctor --process-id -1", "-1 is not from 0 to"),
        ("bench 4x4 --payloads 900000GB", "would take about"),
        ("bench 4x4 --repeats 0", "0 is not from 1 to 1,000"),
    ],
)
def test_bad_input_gets_one_line_and_a_status(run, tmp_path, monkeypatch, argv, says):
    monkeypatch.chdir(tmp_path)
    outputs = ["--out", "a.npz", "--svg", "a.svg"] if argv.startswith("plan ") else []
    status, out, error = run(*argv.split(), *outputs)
    assert status == REFUSED.get(argv, 2)
    assert says in error
    assert error.count("\n") == 1
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_first(run, tmp_path):
    status, _, error = run("plan", "64x64", "--out", str(tmp_path / "no" / "a.npz"))
    assert (status, "there is no folder" in error) == (2, True)
    status, _, error = run("draw", "8x8", "--svg", str(tmp_path))
    assert (status, "it is a folder" in error) == (2, True)


def test_one_path_cannot_be_two_outputs(run, tmp_path):
    path = str(tmp_path / "a")
    status, _, error = run("plan", "4x4", "--out", path, "--svg", path)
    assert (status, "two outputs at once" in error) == (2, True)


def test_the_same_file_under_two_names_is_not_two_outputs(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, _, error = run("plan", "4x4", "--out", "same", "--svg", "./same")
    assert (status, "two outputs at once" in error) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_advice_where_there_is_nothing_to_sum(run):
    status, text, _ = run("advise", "1x1", "--runs", "1", "--json")
    assert (status, json.loads(text)["boards"]) == (0, 1)


def test_advice_on_boards_that_fail_often_is_quick(run):
    start = time.process_time()
    status, text, _ = run("advise", "8x8", "--mtbf", "3d", "--runs", "5", "--json")
    assert (status, json.loads(text)["boards"]) == (0, 16)
    assert time.process_time() - start < 20  # seconds; to search at each failure took minutes


def test_a_damaged_file_gets_one_line(run, tmp_path):
    path = tmp_path / "a.npz"
    run("plan", "4x4", "--out", str(path))
    path.write_bytes(path.read_bytes()[:500])
    status, _, error = run("verify", str(path))
    assert status == 69
    assert error.count("\n") == 1
    assert "cut short" in error


@pytest.mark.parametrize("argv", [["--help"], ["plan", "--help"], ["verify", "-h"], ["draw", "-h"]])
def test_help_helps(run, argv):
    status, text, _ = run(*argv)
    assert status == 0
    assert "@" in text or "example" in text


def test_python_m_ftmesh():
    done = subprocess.run(
        [sys.executable, "-m", "ftmesh", "plan", "4x4"], capture_output=True, text=True, check=True
    )
    assert "two_dim on 4x4" in done.stdout
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


@pytest.mark.parametrize("mesh", ["1x8", "8x1", "8"])
class TestLines:
    """A mesh of one side, through every command that takes a mesh."""

    def test_plan_and_verify(self, run, tmp_path, mesh):
        out, svg = tmp_path / "a.npz", tmp_path / "a.svg"
        status, text, _ = run("plan", mesh, "--explain", "--out", str(out), "--svg", str(svg))
        assert status == 0
        assert f"line on {mesh}: 8 live chips, 14 rounds, 8 chunks, neighbour-only" in text
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
        tree, found = json.loads(text)
        assert status == 0
        assert (found["algorithm"], found["rounds"]) == ("line", 14)
        assert (tree["algorithm"], tree["limit_us"]) == ("tree", found["limit_us"])
        assert tree["time_us"] < found["time_us"]
        assert found["time_us"] == pytest.approx(14 * (1 + 10))  # of 1 MB, 10 us on a link
        assert found["limit_us"] == pytest.approx(80)
        heat = tmp_path / "heat.svg"
        assert run("simulate", mesh, "--algorithm", "line", "--heat-map", str(heat))[0] == 0
        assert heat.stat().st_size > 1000

    def test_limits(self, run, mesh):
        status, text, _ = run("limits", mesh, "--json")
        found = json.loads(text)
        assert status == 0
        assert (found["live"], found["links"], found["diameter"]) == (8, 7, 7)
        assert (found["all_gather_share"], found["all_reduce_share"]) == ("7/8", "1")

    def test_advise(self, run, mesh):
        status, text, _ = run("advise", mesh, "--runs", "1", "--json")
        found = json.loads(text)
        assert status == 0
        assert (found["boards"], found["spares"]) == (4, 1)
        block = {"1x8": "1x2@0,0", "8x1": "2x1@0,0", "8": "2@0"}[mesh]
        status, text, _ = run("advise", mesh, "--runs", "1", "--failed", block, "--json")
        assert status == 0
        speeds = json.loads(text)["at_hand"]["speeds"]
        assert speeds["fault-tolerant"] == speeds["largest sub-mesh"] > 0.7
