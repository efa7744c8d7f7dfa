"""A problem in one process is one line in all of them, and all exit in time."""

import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import ftmesh
from ftmesh.checkpoint import Checkpoints
from ftmesh.elastic.local_pod import Pod, run_pod
from tests.support.more import more

HERE = Path(__file__).parent
PATHS = os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent.parent)))
TIMEOUT = 30  # seconds that processes wait for result other
END = 120  # seconds for all to exit, with the start


def run_with_trouble(*argv, hosts=2, trouble=None, who=1, env=None):
    """The last line of ftmesh in result process, and its status; OWN are its own arguments."""
    base = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "LIBTPU_INIT_ARGS": ""}
    envs = [dict(base) for _ in range(hosts)]
    if trouble:
        envs[who]["TROUBLE"] = trouble
    envs[who] |= env or {}
    command = [sys.executable, str(HERE / "linear_train.py"), "--limit", str(TIMEOUT), *argv]
    command = ["sh", "-c", 'exec "$@" $OWN', "sh", *command]
    started = time.monotonic()
    done = run_pod(command, hosts, 4, f"4x{hosts}", env=envs, grace=END, timeout=END)
    assert time.monotonic() - started < END
    lines = [[line for line in d.stderr.splitlines() if line.startswith("linear: ")] for d in done]
    return [own[-1] if own else "" for own in lines], [result.status for result in done]


def assert_all_print(pattern, lines, statuses, status=69):
    assert [bool(re.search(pattern, line)) for line in lines] == [True] * len(lines), lines
    assert statuses == [status] * len(lines)


def test_different_damage_in_the_environment():
    lines, statuses = run_with_trouble("--steps", "2", env={"FTMESH_FAILED": "2x2@2,0"})
    assert_all_print("failed chips: process 0 has none; process 1 has 2x2@2,0", lines, statuses)


@more
@pytest.mark.slow
def test_different_plans():
    lines, statuses = run_with_trouble("--steps", "2", env={"OWN": "--algorithm row_pair"})
    assert_all_print("--algorithm: process 0 has auto; process 1 has row_pair", lines, statuses)


@pytest.mark.slow
def test_different_programs():
    lines, statuses = run_with_trouble("--steps", "2", trouble="another program")
    assert_all_print("the program of a step: process 0 has .*; process 1 has", lines, statuses)


@more
@pytest.mark.slow
def test_different_options_of_the_compiler():
    lines, statuses = run_with_trouble(
        "--steps", "2", env={"LIBTPU_INIT_ARGS": "--xla_b=2 --xla_a=1"}
    )
    expected = "LIBTPU_INIT_ARGS: process 0 has nothing; process 1 has --xla_a=1 --xla_b=2"
    assert_all_print(expected, lines, statuses)


@pytest.mark.slow
def test_different_source_of_ftmesh(tmp_path):
    shutil.copytree(Path(ftmesh.__file__).parent, tmp_path / "ftmesh")
    with (tmp_path / "ftmesh" / "algorithms" / "ring.py").open("a") as file:
        file.write("# another version\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), PATHS])}
    lines, statuses = run_with_trouble("--steps", "2", env=env)
    assert_all_print("the source of ftmesh: process 0 has .*; process 1 has", lines, statuses)


@more  # the roll call is tested by itself
@pytest.mark.slow
def test_a_process_that_is_missing():
    lines, statuses = run_with_trouble("--steps", "2", "--limit", "20", hosts=3, trouble="late")
    assert lines == ["linear: process 1 did not connect within 20 s", "", lines[0]]
    assert statuses == [76, 0, 76]


@pytest.mark.slow
def test_a_bad_record_in_one_process():
    lines, statuses = run_with_trouble("--steps", "40", trouble="bad record")
    assert_all_print(r"process 1: point \d+ is damaged", lines, statuses)


@pytest.mark.slow
@pytest.mark.parametrize("who", [pytest.param(0, marks=more), 1])
def test_a_full_disk_in_one_process(tmp_path, who):
    argv = ("--steps", "40", "--checkpoint-dir", str(tmp_path), "--checkpoint-every", "2")
    lines, statuses = run_with_trouble(*argv, trouble="full disk", who=who)
    assert_all_print(f"process {who}: cannot write .*: File too large", lines, statuses)


@pytest.mark.slow
def test_different_weights_and_data():
    lines, statuses = run_with_trouble("--steps", "2", trouble="other weights")
    assert_all_print("the arrays placed on the devices: process 0 has", lines, statuses)
    lines, statuses = run_with_trouble("--steps", "2", trouble="less data")
    assert_all_print("examples for training: process 0 has 48; process 1 has 47", lines, statuses)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=more)])
def test_a_signal_in_the_middle_of_a_run(number):
    command = [sys.executable, str(HERE / "linear_train.py"), "--steps", "100000"]
    output = [bytearray(), bytearray()]

    def collect(process, stream, data):
        output[process] += data if stream == 2 or process == 0 else b""

    env = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with Pod(command, hosts=2, devices_per_host=4, mesh="4x2", env=env, on_output=collect) as pod:
        assert pod.wait(END, until=lambda: b"after step 9" in output[0])
        os.kill(pod.processes[1].pid, number)
        assert pod.wait(END), output
    assert [process.status for process in pod.processes] == [128 + number] * 2
    word = "received SIGTERM" if number == signal.SIGTERM else "interrupted"
    assert f"linear: process 1: {word}\n" in output[1].decode()
    assert f"linear: process 0: process 1: {word}\n" in output[0].decode()


@pytest.mark.slow
def test_sigterm_to_one_process_saves_a_checkpoint_of_all(tmp_path):
    command = [sys.executable, str(HERE / "linear_train.py"), "--steps", "100000"]
    command += ["--checkpoint-dir", str(tmp_path), "--checkpoint-every", "100000"]
    output = bytearray()

    def collect(process, stream, data):
        output.extend(data)

    env = {"PYTHONPATH": PATHS, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with Pod(command, hosts=2, devices_per_host=4, mesh="4x2", env=env, on_output=collect) as pod:
        assert pod.wait(END, until=lambda: b"after step 9" in output)
        os.kill(pod.processes[1].pid, signal.SIGTERM)
        assert pod.wait(END), output
    assert [process.status for process in pod.processes] == [128 + signal.SIGTERM] * 2, output
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.latest_step >= 9
