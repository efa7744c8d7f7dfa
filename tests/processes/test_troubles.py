"""What goes wrong in one process is a line in all of them, and an end within the limit."""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import ftmesh
from ftmesh.elastic.local_pod import Pod, run_pod
from tests.support.more import more

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))
LIMIT = 30  # seconds that processes wait for each other
END = 120  # seconds in which all must have ended: starting takes some, and leaving


def troubled(*argv, hosts=2, trouble=None, who=1, env=None):
    """The last line of ours that each process says, and its status; OWN are its own arguments."""
    base = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "LIBTPU_INIT_ARGS": ""}
    envs = [dict(base) for _ in range(hosts)]
    if trouble:
        envs[who]["TROUBLE"] = trouble
    envs[who] |= env or {}
    command = [sys.executable, str(HERE / "linear_train.py"), "--limit", str(LIMIT), *argv]
    command = ["sh", "-c", 'exec "$@" $OWN', "sh", *command]
    started = time.monotonic()
    done = run_pod(command, hosts, 4, f"4x{hosts}", env=envs, grace=END, timeout=END)
    assert time.monotonic() - started < END
    said = [[line for line in d.stderr.splitlines() if line.startswith("linear: ")] for d in done]
    return [lines[-1] if lines else "" for lines in said], [each.status for each in done]


def assert_all_say(pattern, lines, statuses, status=69):
    assert [bool(re.search(pattern, line)) for line in lines] == [True] * len(lines), lines
    assert statuses == [status] * len(lines)


def test_different_damage_in_the_environment():
    lines, statuses = troubled("--steps", "2", env={"FTMESH_FAILED": "2x2@2,0"})
    assert_all_say("failed chips: process 0 has none; process 1 has 2x2@2,0", lines, statuses)


@pytest.mark.slow
def test_different_plans():
    lines, statuses = troubled("--steps", "2", env={"OWN": "--algorithm row_pair"})
    assert_all_say("--algorithm: process 0 has auto; process 1 has row_pair", lines, statuses)


@pytest.mark.slow
def test_different_programs():
    lines, statuses = troubled("--steps", "2", trouble="another program")
    assert_all_say("the program of a step: process 0 has .*; process 1 has", lines, statuses)


@pytest.mark.slow
def test_different_options_of_the_compiler():
    lines, statuses = troubled("--steps", "2", env={"LIBTPU_INIT_ARGS": "--xla_b=2 --xla_a=1"})
    says = "LIBTPU_INIT_ARGS: process 0 has nothing; process 1 has --xla_a=1 --xla_b=2"
    assert_all_say(says, lines, statuses)


@pytest.mark.slow
def test_different_source_of_ftmesh(tmp_path):
    shutil.copytree(Path(ftmesh.__file__).parent, tmp_path / "ftmesh")
    with (tmp_path / "ftmesh" / "planners" / "ring.py").open("a") as file:
        file.write("# another version\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), PATHS])}
    lines, statuses = troubled("--steps", "2", env=env)
    assert_all_say("the source of ftmesh: process 0 has .*; process 1 has", lines, statuses)


@pytest.mark.slow  # the roll call is tested by itself
def test_a_process_that_is_missing():
    lines, statuses = troubled("--steps", "2", "--limit", "20", hosts=3, trouble="late")
    assert lines == ["linear: process 1 did not come within 20 s", "", lines[0]]
    assert statuses == [69, 0, 69]


@pytest.mark.slow
def test_a_bad_record_in_one_process():
    lines, statuses = troubled("--steps", "40", trouble="bad record")
    assert_all_say(r"process 1: point \d+ is damaged", lines, statuses)


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param(0, marks=more), 1])
def test_a_full_disk_in_one_process(tmp_path, who):
    argv = ("--steps", "40", "--checkpoint-dir", str(tmp_path), "--checkpoint-every", "2")
    lines, statuses = troubled(*argv, trouble="full disk", who=who)
    assert_all_say(f"process {who}: cannot write .*: File too large", lines, statuses)


@pytest.mark.slow
def test_different_weights_and_data():
    lines, statuses = troubled("--steps", "2", trouble="other weights")
    assert_all_say("what is put on the devices: process 0 has", lines, statuses)
    lines, statuses = troubled("--steps", "2", trouble="less data")
    assert_all_say("examples for training: process 0 has 48; process 1 has 47", lines, statuses)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=more)])
def test_a_process_that_is_told_to_end_in_mid_run(number):
    command = [sys.executable, str(HERE / "linear_train.py"), "--steps", "100000"]
    heard = [bytearray(), bytearray()]

    def hear(process, stream, piece):
        heard[process] += piece if stream == 2 or process == 0 else b""

    env = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with Pod(command, hosts=2, devices_per_host=4, mesh="4x2", env=env, on_output=hear) as pod:
        assert pod.wait(END, until=lambda: b"after step 9" in heard[0])
        os.kill(pod.processes[1].pid, number)
        assert pod.wait(30)
    assert [process.status for process in pod.processes] == [128 + number] * 2
    word = "told to end" if number == signal.SIGTERM else "interrupted"
    assert f"linear: process 1: {word}\n" in heard[1].decode()
    assert f"linear: process 0: process 1: {word}\n" in heard[0].decode()
