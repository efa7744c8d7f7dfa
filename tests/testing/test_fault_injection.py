"""Faults fire in real processes: as specified, once, and are reported."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import pytest

from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.errors import CheckpointError
from ftmesh.testing import fault_injection
from ftmesh.testing.fault_injection import recorded_processes

ROOT = Path(__file__).parents[2]
STEPS = """\
import os, threading, time
from ftmesh.testing import fault_injection

def beat():
    while True:
        os.write(1, b"beat\\n")
        time.sleep(0.02)

threading.Thread(target=beat, daemon=True).start()
fault_injection.inject("start")
fault_injection.inject("recovery")
for step in range(1, 5):
    start = time.monotonic()
    fault_injection.inject("step", step)
    fault_injection.inject("collective", step)
    took = round(time.monotonic() - start, 2)
    os.write(1, f"step {step} {took} {fault_injection.corrupts_gradient(step)}\\n".encode())
    time.sleep(float(os.environ.get("NAP", 0)) if step == 2 else 0)
"""


def environment(text, run_dir, host=1):
    own = {"FTMESH_FAULTS": text, "FTMESH_HOST": str(host), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own, **({"FTMESH_RUN_DIR": str(run_dir)} if run_dir else {})}


@contextlib.contextmanager
def running(text, run_dir=None, host=1):
    process = subprocess.Popen(
        [sys.executable, "-c", STEPS],
        env=environment(text, run_dir, host),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(text, run_dir=None, host=1):
    """Return the exit status, the lines of steps, and stderr."""
    with running(text, run_dir, host) as process:
        out, err = process.communicate(timeout=60)
    return process.returncode, [line for line in out.splitlines() if line != "beat"], err


def output_within(process, seconds):
    """Read what the process writes within `seconds`."""
    output, deadline = b"", time.monotonic() + seconds
    while select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))[0]:
        output += os.read(process.stdout.fileno(), 4096)
        if time.monotonic() > deadline:
            break
    return output


def beats(process, seconds):
    """True if another thread of the process writes within `seconds`."""
    return b"beat" in output_within(process, seconds)


def events(run_dir):
    return [json.loads(line) for line in (run_dir / "faults.jsonl").read_text().splitlines()]


def test_kill_fires_once_in_a_run(tmp_path):
    status, lines, err = run("kill@1:2", tmp_path)
    assert status == -signal.SIGKILL
    assert [line.split()[1] for line in lines] == ["1"]
    assert err == "fault: kill -9 of host 1 at step 2, before the step\n"
    (event,) = events(tmp_path)
    assert abs(event.pop("time") - time.time()) < 60
    assert event == {
        "event": "fault",
        "epoch": 1,
        "process": 1,
        "step": 2,
        "kind": "kill",
        "moment": "step",
        "text": "kill -9 of host 1 at step 2, before the step",
    }
    status, lines, err = run("kill@1:2", tmp_path)
    assert (status, len(lines), err) == (0, 4, "")
    assert len(events(tmp_path)) == 1


@pytest.mark.slow
def test_other_hosts_are_not_hit(tmp_path):
    status, lines, err = run("kill@1:2", tmp_path, host=0)
    assert (status, len(lines), err) == (0, 4, "")


def test_collective_fault_fires_after_a_delay(monkeypatch):
    monkeypatch.setenv("NAP", "50")
    status, lines, err = run("segv@*:2:collective,0.5")
    assert status == -signal.SIGSEGV
    assert [line.split()[1] for line in lines] == ["1", "2"]
    assert err.startswith("fault: segmentation fault of host 1 at step 2, in the collective\n")


def test_stop():
    with running("stop@1:1") as process:
        assert "is stopped at step 1" in process.stderr.readline()
        deadline = time.monotonic() + 30
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline


@pytest.mark.parametrize(("kind", "others_run"), [("hold", False), ("stuck", True)])
def test_other_threads(kind, others_run):
    with running(f"{kind}@1:1") as process:
        process.stderr.readline()  # it fires soon after
        assert any(beats(process, 1) == others_run for _ in range(30))
        process.send_signal(signal.SIGCHLD)  # ignored by default; it must not wake the holder
        if others_run:
            assert any(beats(process, 1) for _ in range(30))
        else:
            assert not beats(process, 0.3)
        assert process.poll() is None


def test_raise_before_joining():
    status, lines, err = run("raise@1:0:start")
    assert (status, lines) == (1, [])
    assert "InjectedError: a fault was injected here, in host 1" in err


def test_slow_steps_and_a_wrong_gradient(tmp_path):
    status, lines, err = run("slow@1:2,0.2,2; wrong@1:3", tmp_path)
    assert status == 0
    took = [float(line.split()[2]) for line in lines]
    assert [seconds >= 0.2 for seconds in took] == [False, True, True, False]
    assert [line.split()[3] for line in lines] == ["False", "False", "True", "False"]
    assert err == (
        "fault: slow steps of host 1 at step 2, before the step\n"
        "fault: a wrong gradient of host 1 at step 3, before the step\n"
    )


@pytest.mark.slow
def test_by_time(tmp_path):
    (tmp_path / "faults.json").write_text(
        json.dumps({"time": time.time() - 100, "faults": "kill@*:t=90:step"})
    )
    assert run("whatever@1:1;is=given", tmp_path)[0] == 1  # malformed text is still an error
    assert run("kill@*:t=90", tmp_path)[0] == -signal.SIGKILL


def test_recorded_faults_win_over_a_new_draw(tmp_path):
    (tmp_path / "faults.json").write_text(json.dumps({"time": 0, "faults": "kill@3:1:step"}))
    injector = fault_injection.FaultInjector("random:1", host=3, hosts=2, run_dir=tmp_path)
    assert [str(fault) for fault in injector.pending.values()] == ["kill@3:1:step,0.003,1"]


@contextlib.contextmanager
def recorded(run_dir, kind, host, env=None):
    """Start an idle process that is recorded as one of the run."""
    process = subprocess.Popen(
        ["sleep", "60"], env=environment("", run_dir) if env is None else env
    )
    (run_dir / "pids").mkdir(exist_ok=True)
    (run_dir / "pids" / f"{kind}-{host}.json").write_text(
        json.dumps({"kind": kind, "host": host, "pid": process.pid})
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("kind", "killed", "status"),
    [
        ("store", {"store-1"}, -signal.SIGKILL),
        ("service", {"service-0"}, 0),
        ("all", {"worker-0", "worker-2"}, -signal.SIGKILL),
    ],
)
def test_other_processes_of_the_run(tmp_path, kind, killed, status):
    names = ["store-0", "store-1", "service-0", "worker-0", "worker-2"]
    with contextlib.ExitStack() as stack:
        others = {}
        for name in names:
            process_kind, _, host = name.partition("-")
            others[name] = stack.enter_context(recorded(tmp_path, process_kind, int(host)))
        assert run(f"{kind}@1:1", tmp_path)[0] == status
        for name in killed:
            assert others[name].wait(timeout=30) == -signal.SIGKILL
        assert {name for name in names if others[name].poll() is not None} == killed


def test_processes_of_other_runs_are_not_killed(tmp_path):
    with recorded(tmp_path, "service", 0, env=dict(os.environ)) as other:
        assert recorded_processes(tmp_path) == []
        status, _, err = run("service@1:1", tmp_path)
        assert status == 0
        assert "has no such process of this run" in err
        assert other.poll() is None


class TestCheckpoints:
    STATE: ClassVar = {"a": jnp.arange(8.0), "b": jnp.ones(3)}

    def test_torn(self, tmp_path):
        with Checkpoints(tmp_path / "saved", process=0) as checkpoints:
            checkpoints.save(10, self.STATE)
            checkpoints.save(20, self.STATE)
        file = tmp_path / "saved" / "20" / "0.bin"
        code = "import sys, pathlib; from ftmesh.testing.fault_injection import after_write; "
        code += "file = pathlib.Path(sys.argv[1]); after_write(10, file); after_write(20, file)"
        done = subprocess.run(
            [sys.executable, "-c", code, str(file)],
            env=environment("torn@0:15", tmp_path, host=0),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL
        assert done.stderr.startswith("fault: a torn file and kill -9 of host 0 at step 20")
        assert file.stat().st_size == (8 + 3) * 4 // 2
        lines = []
        with Checkpoints(tmp_path / "saved", resume=True, log=lines.append) as checkpoints:
            assert checkpoints.restore(self.STATE)[0] == 10
        assert "skipped the checkpoint of step 20" in lines[0]

    def test_full(self, tmp_path, monkeypatch, capfd):
        monkeypatch.setenv("FTMESH_FAULTS", "full@0:15")
        monkeypatch.setenv("FTMESH_RUN_DIR", str(tmp_path))
        with Checkpoints(tmp_path / "saved", process=0) as checkpoints:
            checkpoints.save(10, self.STATE)
            checkpoints.save(20, self.STATE)
            with pytest.raises(CheckpointError, match=r"20/0\.bin: No space left on device"):
                checkpoints.finish()
            checkpoints.save(30, self.STATE)
        assert checkpoints.latest_step == 30
        assert [*(tmp_path / "saved" / "20").iterdir()] == []
        assert "fault: no disk space for host 0 at step 20" in capfd.readouterr().err


def test_without_faults_nothing_is_read(monkeypatch):
    monkeypatch.setattr(fault_injection, "_injector", None)
    fault_injection.inject("step", 1)
    assert fault_injection.corrupts_gradient(1) is False
    pieces = [1]
    assert fault_injection.limit_writes(1, pieces, Path("x")) is pieces
    fault_injection.after_write(1, Path("x"))


def test_processes_that_another_engine_has_started(monkeypatch):
    """They have none of the launcher's variables, and all counted as process 0."""
    for name in ("FTMESH_HOST", "FTMESH_PROCESS_ID", "FTMESH_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FTMESH_FAULTS", "raise@2:30")
    for process in (1, 2):
        joined = (process, 4)
        monkeypatch.setattr(fault_injection._compat, "process_id_and_count", lambda j=joined: j)
        if process == 2:
            with pytest.raises(RuntimeError):
                fault_injection.inject("step", 30)
        else:
            fault_injection.inject("step", 30)
