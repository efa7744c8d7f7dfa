"""``ftmesh run``: what it rejects, and one host that runs a command."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ftmesh
from ftmesh.cli.main import main
from ftmesh.elastic.local_pod import TIMED_OUT
from ftmesh.elastic.rpc import PORTS, ChannelClosed, Listener, free_port

TIMEOUT = 180  # seconds for what takes one or two
SECRET = "5ec2e7" * 4
ENGINES = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE", "FTMESH_", "TPU_", "JOB_", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """No engine has started the tests, as far as they know."""
    for name in [name for name in os.environ if name.startswith(ENGINES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FTMESH_SECRET", SECRET)


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        (["--join", "10.0.0.1:2000"], {}, "the number of hosts is not known"),
        (["--host-index", "1"], {}, "give --hosts N"),
        (["--controller-only"], {}, "give --hosts N"),
        ([], {"FTMESH_NUM_PROCESSES": "4"}, "give --hosts N"),
        ([], {"FTMESH_HOSTS": "4"}, "JOB_COMPLETION_INDEX is not set"),
        (["--hosts", "4", "--host-index", "4"], {}, "--host-index 4 of 4 hosts: give 0 to 3"),
        (["--hosts", "4", "--host-index", "0", "--min-hosts", "5"], {}, "give 4 at most"),
        (["--hosts", "4", "--host-index", "0"], {}, "the address of host 0 of 4 is not known"),
        (["--mesh", "4x4", "--devices-per-host", "3"], {}, "do not fill mesh 4x4"),
        (["--host-shape", "2x2"], {}, "--host-shape has no effect without --mesh"),
        (
            ["--hosts", "2", "--join", "a"],
            {},
            "not the address of a controller: give --join HOST:PORT",
        ),
        (["--hosts", "2", "--join", "a:99999"], {}, "a:99999 is not the address of a controller"),
        (
            [],
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "JAX_COORDINATOR_PORT": "70000"},
            "a:70000 is not the address of a controller",
        ),
    ],
)
def test_half_a_cluster_is_a_mistake(options, env, message, monkeypatch, capsys):
    """Every host would run alone, or wait for five minutes."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main(["run", *options, "--", "true"]) == 2
    assert message in capsys.readouterr().err


def run(*words, stdin=None, stderr=subprocess.PIPE, **env):
    root = str(Path(ftmesh.__file__).parent.parent)
    # A command that starts itself again and again must find an end.
    limited = ["sh", "-c", 'ulimit -t 20; exec "$@"', "sh", sys.executable, "-m", "ftmesh", "run"]
    return subprocess.run(
        [*limited, *words],
        env={**os.environ, "PYTHONPATH": root, **env},
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--hosts", "1"],
        ["launch", "--hosts", "1", "--devices-per-host", "1", "--mesh", "1x1", "--failures", "1"],
        pytest.param(["launch", "--hosts", "1", "--devices-per-host", "1"], marks=pytest.mark.slow),
    ],
)
def test_a_signal_while_nobody_reads_the_output(words, tmp_path):
    root, file = str(Path(ftmesh.__file__).parent.parent), tmp_path / "full"
    words = [*words, "--join", f"127.0.0.1:{free_port()}"] if words[0] == "run" else words
    # It writes as much as the pipes hold, and more.
    code = (
        "import os, pathlib; os.set_blocking(1, False)\n"
        "try:\n    while True: os.write(1, b'y' * 999 + b'\\n')\n"
        f"except BlockingIOError: pathlib.Path({str(file)!r}).touch()\n"
        "os.set_blocking(1, True)\nwhile True: os.write(1, b'y')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "ftmesh", *words, "--", sys.executable, "-S", "-c", code],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as launched:
        until = time.monotonic() + TIMEOUT
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.02)
        launched.terminate()
        try:
            assert launched.wait(TIMEOUT) == 128 + signal.SIGTERM
        finally:
            launched.kill()


def test_a_command_without_dashes_before_it():
    done = run("--hosts", "1", "--join", f"127.0.0.1:{free_port()}", "echo", "hello", "--", "you")
    assert (done.returncode, done.stdout) == (0, "hello -- you\n"), done.stderr


def test_one_host_takes_a_free_port():
    """Other runs on this machine may have the first of the ports."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # it is taken
            stack.enter_context(socket.create_server(("127.0.0.1", PORTS[0])))
        done = run("--hosts", "1", "--", "true")
    assert done.returncode == 0, done.stderr


def test_one_process_of_a_job_may_run_alone(tmp_path):
    """In the shell of a batch job; with real devices, whose number follows from the mesh."""
    words = ["--join", f"127.0.0.1:{free_port()}", "--mesh", "2x3", "--run-dir", str(tmp_path)]
    code = "import os; print(os.environ['FTMESH_BLOCKS']); os.kill(os.getpid(), 9)"
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "FTMESH_NUM_PROCESSES": "1"}
    command = [sys.executable, "-S", "-c", code]
    done = run(*words, "--failures", "0", "--", *command, **job)
    assert done.returncode == 137
    assert done.stdout == "2x3@0,0\n"  # though the worker has not flushed it


def test_a_controller_that_is_there_already_is_used():
    """One that `--controller-only` has started at the same host."""
    hellos = []
    with Listener(lambda channel: _serve(channel, hellos), secret=SECRET) as listener:
        done = run("--hosts", "1", "--join", listener.address, "--node-name", "a", "--", "true")
    assert (done.returncode, hellos) == (3, ["a"]), done.stderr


def _serve(channel, hellos):
    with channel, contextlib.suppress(ChannelClosed):
        while frame := channel.receive():
            if "agent" in frame[0]:
                hellos.append(frame[0]["agent"])
                channel.send({"host": 0})
                channel.send({"over": 3})


def test_a_controller_that_ends_before_its_agent():
    """Its thread that waits for the end of the agent must not be in the way of its exit."""
    words = ["--controller-only", "--hosts", "2", "--join", f"127.0.0.1:{free_port()}"]
    read, write = os.pipe()
    done = run(*words, "--timeout", "0.1", stdin=read, FTMESH_CONTROLLER_OF_AGENT="1")
    os.close(read)
    os.close(write)
    assert done.returncode == TIMED_OUT, done.stderr
    assert done.stderr.count("\n") == 1  # that not all hosts have come


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_failure_while_the_disk_of_the_log_is_full(tmp_path):
    fails_once = f"[ -e {tmp_path}/failed ] || {{ touch {tmp_path}/failed; exit 3; }}; echo done"
    with open("/dev/full", "w") as full:
        done = run("--hosts", "1", "--backoff", "0", "--", "sh", "-c", fails_once, stderr=full)
    assert (done.returncode, done.stdout) == (0, "done\n")
