"""The self-test finds what is planted in its workers, by name, and goes on with the rest."""

import json
import subprocess
import sys

import pytest

from ftmesh.elastic.local_pod import run_pod
from tests.support.more import more
from tests.support.planting import HANG, KILL, SWAP, VANISH, WRONG, environment

COMMAND = [sys.executable, "-m", "ftmesh", "selftest"]
RING = "right: ppermute ring"


def selftest(folder, *arguments, env):
    """Run the command; return its status, the results by check, and the report."""
    folder.mkdir(exist_ok=True)
    command = [*COMMAND, *arguments, "--out", str(folder / "out"), "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    return done.returncode, checks, (folder / "out" / "report.md").read_text()


def problems(check):
    return [problem["text"] for problem in check["problems"]]


def statuses(checks):
    return {name: check["status"] for name, check in checks.items()}


def test_a_wrong_executor_and_a_dead_worker(tmp_path):
    only = "right: xla,right: ppermute flood,right: ppermute tree"
    status, checks, report = selftest(
        tmp_path, "2x2", "--only", only, env=environment(tmp_path, WRONG, KILL)
    )
    assert status == 1
    assert statuses(checks) == {
        "right: xla ring": "passed",
        "right: ppermute flood": "died",
        "right: ppermute tree": "failed",
    }
    (death,) = problems(checks["right: ppermute flood"])
    assert death == (
        "the process died while it ran this check: it was killed by SIGKILL; its last lines: "
        "about to be killed"
    )
    wrong = problems(checks["right: ppermute tree"])
    assert any(
        text.startswith("psum of int32 is wrong: rank 2 (chip 1,1, ") and " at element 3" in text
        for text in wrong
    )
    assert report.startswith("# Self-test of ftmesh: ")
    assert "**right: ppermute tree** (failed): psum of " in report
    assert "do not plan with executor='ppermute' and algorithm 'tree' on this mesh" in report


@pytest.mark.slow
def test_what_is_wrong_is_not_timed(tmp_path):
    arguments = ("2x2", "--only", "right: ppermute tree,topology,speed", "--payloads", "64B,64KB")
    status, checks, _ = selftest(tmp_path, *arguments, env=environment(tmp_path, WRONG))
    assert status == 1
    timed = {timing["contender"]: 0 for timing in checks["speed"]["data"]["timings"]}
    assert list(timed) == [
        "lax.psum",
        "lax.psum on the ring",
        "two_dim",
        "row_pair",
        "ring",
        "chain",
        "flood",
    ]
    assert not (tmp_path / "out" / "profile.json").exists()


@more
@pytest.mark.slow
def test_a_profile_of_all_algorithms(tmp_path):
    arguments = ("2x2", "--only", "right: ppermute tree,topology,speed", "--payloads", "64B,64KB")
    status, _, _ = selftest(tmp_path, *arguments, env=environment(tmp_path))
    assert status == 0
    profile = json.loads((tmp_path / "out" / "profile.json").read_text())
    assert {(one["executor"], one["algorithm"]) for one in profile["sums"]} == {
        ("xla", "ring"), ("ppermute", "two_dim"), ("ppermute", "row_pair"), ("ppermute", "ring"),
        ("ppermute", "chain"), ("ppermute", "flood"), ("ppermute", "tree"),
    }  # fmt: skip
    assert (profile["shape"], profile["num_processes"]) == ([2, 2], 1)


@pytest.mark.slow
def test_a_hang_is_killed_and_the_rest_goes_on(tmp_path):
    only = f"{RING},right: xla,value"
    status, checks, report = selftest(
        tmp_path, "2x2", "--only", only, "--timeout", "8", env=environment(tmp_path, HANG)
    )
    assert status == 1
    assert statuses(checks) == {
        "right: xla ring": "passed",
        RING: "hung",
        "value_and_grad": "passed",
    }
    assert problems(checks[RING]) == ["it did not end within 8 s and was killed"]
    assert "run `ftmesh doctor`" in report
    assert "do not plan with executor='ppermute' and 'ring'" in report


@pytest.mark.slow
def test_a_wrong_order_and_a_slow_link(tmp_path):
    env = environment(tmp_path, SWAP, FTMESH_SICK="link-slow@0,0-1,0")
    status, checks, report = selftest(
        tmp_path, "4x2", "--only", "topology,chips,ring", "--failed", "2x1@2,0", env=env
    )
    assert status == 1
    assert statuses(checks) == {
        "topology": "passed", "chips and links": "failed", "ring order": "failed",
    }  # fmt: skip
    (slow,) = problems(checks["chips and links"])
    assert slow.startswith("link 0,0-1,0 is slow: ")
    order = problems(checks["ring order"])
    assert order[0].startswith("rank 1 of plan.jax_mesh is on chip ")
    assert "is no link, it takes 2 hops" in order[0]
    assert "**ring order** (failed): rank 1 of plan.jax_mesh" in report
    assert "--failed-links" in report


@pytest.mark.slow
def test_a_silent_link_is_excluded_from_the_rest(tmp_path):
    env = environment(tmp_path, FTMESH_SICK="link-silent@0,0-1,0")
    only = "topology,chips,right: ppermute ring"
    status, checks, report = selftest(tmp_path, "4x2", "--only", only, "--timeout", "16", env=env)
    assert status == 1
    assert statuses(checks)["chips and links"] == "failed"
    assert "link 0,0-1,0 is silent: no data arrived within 4 s" in problems(
        checks["chips and links"]
    )
    assert "all later checks leave out --failed '1x1@0,0'" in report
    assert statuses(checks)[RING] in ("passed", "left out")


def test_nothing_fits_into_no_time(tmp_path):
    status, checks, report = selftest(tmp_path, "2x2", "--limit", "1", env=environment(tmp_path))
    assert status == 1
    assert all(check["status"] == "left out" for check in checks.values())
    assert report.startswith("# Self-test of ftmesh: 0 problems; it did not come to its end")
    assert "**The test ended early: no time left.**" in report


@pytest.mark.slow
def test_one_device_and_a_numbered_folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "report.md").write_text("of another run")
    command = [*COMMAND, "--only", "topology,hops,ring,right: xla,speed", "--payloads", "64B"]
    done = subprocess.run(
        [*command, "--out", "out"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("self-test: all right (2 passed, 4 left out; ")
    assert done.stdout.splitlines()[1] == "see out-2/report.md"
    assert (tmp_path / "out" / "report.md").read_text() == "of another run"
    assert not (tmp_path / "out-2" / "profile.json").exists()
    assert "No `profile.json`: " in (tmp_path / "out-2" / "report.md").read_text()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["2x2", "--only", "nothing"], "--only nothing begins no name of a check: topology, "),
        (["2x2", "--wrap", "z"], "mesh 2x2 has no axis 'z'"),
        (["2x2", "--num-processes", "2"], "MESH emulates devices in one process"),
        (["2x2", "--payloads", "big"], "'big' is not a size"),
        (["--timeout", "0"], "argument --timeout"),
    ],
)
def test_bad_arguments(tmp_path, argv, says):
    done = subprocess.run(
        [*COMMAND, *argv, "--out", "out"],
        env=environment(tmp_path), capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def pod(folder, *arguments, env, hosts=2, devices=2, mesh="2x2"):
    """Run the command on several hosts; return all statuses, the results and the report."""
    command = [*COMMAND, *arguments, "--out", str(folder / "out"), "--json"]
    kept = {k: v for k, v in env.items() if k in ("PYTHONPATH", "FTMESH_CACHE_DIR", "FTMESH_SICK")}
    results = run_pod(command, hosts, devices, mesh, env=kept, timeout=400, grace=200)
    printed = results[0].stdout
    assert "{" in printed, [result.stderr for result in results]
    checks = {c["name"]: c for c in json.loads("{" + printed.partition("{")[2])["checks"]}
    report = (folder / "out" / "report.md").read_text()
    return [result.status for result in results], checks, report


@more
@pytest.mark.slow
def test_two_processes_of_which_one_is_killed(tmp_path):
    only = f"{RING},right: ppermute flood,right: ppermute tree"
    status, checks, report = pod(
        tmp_path, "--only", only, "--timeout", "30", env=environment(tmp_path, WRONG, KILL)
    )
    assert status == [1, 1]
    assert statuses(checks) == {
        RING: "passed", "right: ppermute flood": "died", "right: ppermute tree": "failed",
    }  # fmt: skip
    (death,) = problems(checks["right: ppermute flood"])
    assert death.startswith("process 1 died while it ran this check: it was killed by SIGKILL")
    assert any(
        text.startswith("process 1: psum of int32 is wrong: rank 2")
        for text in problems(checks["right: ppermute tree"])
    )
    assert "**right: ppermute flood** (died): process 1 died" in report


@more
@pytest.mark.slow
def test_four_processes_hang_together_and_go_on(tmp_path):
    only = f"topology,chips,{RING},right: ppermute tree"
    status, checks, _ = pod(
        tmp_path, "--only", only, "--timeout", "30",
        env=environment(tmp_path, HANG, WRONG, FTMESH_SICK="link-slow@0,0-1,0"),
        hosts=4, devices=4, mesh="4x4",
    )  # fmt: skip
    assert status == [1, 1, 1, 1]
    assert statuses(checks) == {
        "topology": "passed", "chips and links": "failed", RING: "hung",
        "right: ppermute tree": "failed",
    }  # fmt: skip
    (hung,) = problems(checks[RING])
    assert hung.startswith("it did not end within 30 s and was killed, in process")
    assert problems(checks["chips and links"])[0].startswith("link 0,0-1,0 is slow: ")


@more
@pytest.mark.slow
def test_a_process_that_vanishes_is_missed(tmp_path):
    only = "right: xla,right: ppermute flood,right: ppermute tree"
    status, checks, report = pod(
        tmp_path, "--only", only, "--timeout", "10", env=environment(tmp_path, VANISH)
    )
    assert status == [1, 128 + 9]
    assert statuses(checks)["right: xla ring"] == "passed"
    assert statuses(checks)["right: ppermute flood"] in ("hung", "left out")
    assert statuses(checks)["right: ppermute tree"] == "left out"
    assert "**The test ended early: process 1 did not connect within " in report
