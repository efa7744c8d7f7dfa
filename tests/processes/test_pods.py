"""Pods of real processes: their output, how they end, and that no process is left."""

import json
import os
import signal
import textwrap

import pytest

from ftmesh.elastic import reaper
from ftmesh.elastic.local_pod import Pod, run_pod
from tests.support.launching import (
    LINUX,
    TIMEOUT,
    FifoReader,
    OutputCollector,
    launch,
    launcher,
    next_line,
    program,
    python,
    stubborn_family,
)


@pytest.fixture
def output():
    return OutputCollector()


@pytest.fixture
def fifo(tmp_path):
    """A named pipe: while a process holds it open, its reader sees no end."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def fifos(tmp_path):
    """A folder with a named pipe for each of four processes."""
    for number in range(4):
        os.mkfifo(tmp_path / str(number))
    return tmp_path


@pytest.fixture
def alive(fifo):
    reader = FifoReader(fifo)
    yield reader
    reader.close()


class TestOutput:
    def test_no_line_is_lost_or_split(self):
        write = "for i in range(10_000):\n    print('line', i, 'x' * (i % 100))"
        status, out, err = launch("--hosts", "2", "--devices-per-host", "1", "--", *program(write))
        assert (status, err) == (0, b"")
        expected = [f"line {i} {'x' * (i % 100)}" for i in range(10_000)]
        lines = out.decode().splitlines()
        for process in range(2):
            prefix = f"[{process}] "
            assert [x.removeprefix(prefix) for x in lines if x.startswith(prefix)] == expected
        assert len(lines) == 20_000

    def test_streams_prefixes_and_bytes(self):
        write = r"os.write(1, b'\xff\nlast'); os.write(2, b'wrong\n')"
        status, out, err = launch("--hosts", "11", "--devices-per-host", "1", *program(write))
        assert status == 0
        numbers = [f"{i:2}".encode() for i in range(11)]
        assert sorted(out.splitlines()) == sorted(
            b"[%s] %s" % (number, line) for number in numbers for line in (b"\xff", b"last")
        )
        assert sorted(err.splitlines()) == [b"[%s] wrong" % number for number in numbers]

    def test_a_flood_of_output_starves_nobody(self, output):
        write = "while me == 0:\n    os.write(1, b'flood' * 1000)\nprint('output')\nwait()"
        with Pod(program(write), hosts=3, devices_per_host=1, on_output=output) as pod:
            assert pod.wait(TIMEOUT, until=output.has(b"output", 1, 2))

    def test_the_reader_of_the_output_is_gone(self):
        with launcher("--hosts", "2", "--devices-per-host", "1", "--", "yes") as started:
            assert next_line(started).endswith(b"] y\n")
            started.stdout.close()
            assert started.wait(TIMEOUT) == 128 + signal.SIGPIPE

    def test_a_reader_that_does_not_read_keeps_no_process_alive(self, fifo, alive):
        flood = f"""
            signal.alarm(40)  # in case a fault keeps it alive
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(os.open({str(fifo)!r}, os.O_WRONLY), b"1")
            while True:
                os.write(1, b"flood\\n" * 1000)"""
        pod = f"""
            import signal
            from ftmesh.elastic.local_pod import Pod
            from ftmesh.elastic.run_log import OutputPrinter
            signal.signal(signal.SIGTERM, lambda *_: pod.end())
            pod = Pod({program(flood)!r}, hosts=1, devices_per_host=1, kill_after=0.5,
                      on_output=OutputPrinter(1, lambda: pod.enforce()))
            with pod:
                pod.run()"""
        with python("-c", textwrap.dedent(pod)) as started:
            alive.wait_for(1)
            started.terminate()
            assert alive.all_exited()
            started.communicate(timeout=TIMEOUT)
        assert started.returncode == 0


class TestStatus:
    def test_success(self):
        with Pod(["true"], hosts=3, devices_per_host=1) as pod:
            pod.run()
        assert (pod.status, pod.first_failed) == (0, None)

    @pytest.mark.skipif(not LINUX, reason="elsewhere the order of exits is not known")
    @pytest.mark.parametrize(
        ("fail", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
    )
    def test_the_first_failure_counts_before_a_poll(self, fifos, fail, status):
        text = f"""
            os.read(os.open(f"{fifos}/{{me}}", os.O_RDONLY), 1)
            if me == 2:
                {fail}
            sys.exit(40 + me)"""
        with Pod(program(text), hosts=3, devices_per_host=1) as pod:
            for number in (2, 1, 0):
                os.close(os.open(fifos / str(number), os.O_WRONLY))
                os.waitid(os.P_PID, pod.processes[number].pid, os.WEXITED | os.WNOWAIT)
            pod.run()
        assert [process.status for process in pod.processes] == [40, 41, status]
        assert [process.sent_signal for process in pod.processes] == [None] * 3
        assert pod.first_failed is pod.processes[2]
        assert pod.status == status

    def test_the_command_says_who_failed_and_who_was_ended(self, fifos):
        text = f"""
            if me == 1:
                for other in (0, 2):
                    os.open(f"{fifos}/{{other}}", os.O_WRONLY)
                sys.exit(3)
            os.read(os.open(f"{fifos}/{{me}}", os.O_RDONLY), 1)
            wait()"""
        status, _, err = launch(
            "--hosts=3", "--devices-per-host=1", "--grace=0.1", "--", *program(text)
        )
        assert status == 3
        assert err.decode().splitlines() == [
            "ftmesh: process 1 failed with status 3; the others have 0.1 s to exit",
            "ftmesh: process 1 failed first, with status 3; had to end 0, 2",
        ]

    def test_timeout(self):
        status, _, err = launch(
            "--hosts=2", "--devices-per-host=1", "--timeout=0.2", "--", *program("wait()")
        )
        assert status == 124
        assert err == b"ftmesh: timed out after 0.2 s; had to end 0, 1\n"


class TestEnds:
    def test_grace_then_sigterm_then_sigkill(self, fifos, output):
        """Process 3 fails: 0 exits by itself, 1 on SIGTERM, 2 never."""
        text = f"""
            def on_sigterm(*_):
                print("saved")
                sys.exit(0)
            signal.signal(signal.SIGTERM, on_sigterm if me == 1 else signal.SIG_IGN)
            if me == 3:
                for other in (0, 1, 2):
                    os.open(f"{fifos}/{{other}}", os.O_WRONLY)
                sys.exit(1)
            os.read(os.open(f"{fifos}/{{me}}", os.O_RDONLY), 1)
            if me == 0:
                sys.exit(0)
            wait()"""
        with Pod(program(text), hosts=4, devices_per_host=1, on_output=output, kill_after=5) as pod:
            pod.run(grace=3)
        assert [process.status for process in pod.processes] == [0, 0, 137, 1]
        assert [process.sent_signal for process in pod.processes] == [
            None,
            *[signal.SIGTERM] * 2,
            None,
        ]
        assert output.text[1] == b"saved\n"

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signals_end_all_processes(self, signum, fifo, alive):
        worker = f"""
            os.fork()
            os.write(os.open({str(fifo)!r}, os.O_WRONLY), b"1")
            wait()"""
        arguments = ["--hosts", "2", "--devices-per-host", "1", "--", *program(worker)]
        with launcher(*arguments) as started:
            alive.wait_for(4)
            os.killpg(started.pid, signum)  # as a terminal does
            _, err = started.communicate(timeout=TIMEOUT)
        assert started.returncode == 128 + signum
        assert err.decode().splitlines()[-1] == f"ftmesh: ended by {signum.name}"
        assert alive.all_exited()

    def test_a_second_interrupt_kills_at_once(self):
        deaf = """
            signal.signal(signal.SIGINT, lambda *_: print("not now"))
            print("ready")
            wait()"""
        arguments = ["--hosts", "1", "--devices-per-host", "1", "--", *program(deaf)]
        with launcher(*arguments) as started:
            assert next_line(started) == b"[0] ready\n"
            started.send_signal(signal.SIGINT)
            assert next_line(started) == b"[0] not now\n"
            started.send_signal(signal.SIGINT)
            assert started.wait(12) == 130  # it would be killed after 15

    def test_a_launcher_that_is_killed_leaves_no_orphan(self, fifo, alive):
        arguments = ["--hosts", "2", "--devices-per-host", "1", "--", *stubborn_family(fifo)]
        with launcher(*arguments) as started:
            alive.wait_for(4)
            started.kill()
        assert alive.all_exited()

    @pytest.mark.skipif(not LINUX, reason="elsewhere only the first group of a session is known")
    def test_process_groups_end_with_their_process(self, fifo, alive):
        text = f"""
            os.open({str(fifo)!r}, os.O_WRONLY)
            ready, write = os.pipe()
            if os.fork() == 0:
                os.setpgid(0, 0)
                os.write(write, b"1")
                wait()
            os.read(ready, 1)"""
        results = run_pod(program(text), 2, 1, timeout=TIMEOUT)
        assert [result.status for result in results] == [0, 0]
        assert alive.all_exited()

    def test_a_stopped_process_can_still_save(self, output):
        text = """
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
            print("ready")
            wait()"""
        with Pod(program(text), hosts=1, devices_per_host=1, on_output=output) as pod:
            assert pod.wait(TIMEOUT, until=output.has(b"ready\n", 0))
            os.kill(pod.processes[0].pid, signal.SIGSTOP)
            pod.end()
            assert pod.wait(TIMEOUT)
        assert output.text[0] == b"ready\nsaved\n"
        assert pod.processes[0].status == 1

    def test_without_proc_and_pidfd(self, monkeypatch):
        monkeypatch.setattr(reaper, "PROC", "/no/such")
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        text = "if me:\n    sys.exit(3)\nos.fork()\nwait()"
        with Pod(program(text), hosts=2, devices_per_host=1) as pod:
            pod.run(grace=0.1)
        assert [process.status for process in pod.processes] == [128 + signal.SIGTERM, 3]
        assert pod.first_failed is pod.processes[1]

    def test_ended_before_it_started(self, tmp_path):
        pod = Pod(["touch", str(tmp_path / "ran")], hosts=2, devices_per_host=1)
        pod.end()
        with pod:
            pod.run()
        assert not (tmp_path / "ran").exists()
        assert pod.first_failed is None
        assert [process.sent_signal for process in pod.processes] == [signal.SIGKILL] * 2

    def test_leaving_a_pod_kills_it(self, fifo, alive):
        def fail_within():
            with Pod(stubborn_family(fifo), hosts=2, devices_per_host=1):
                alive.wait_for(4)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail_within()
        assert alive.all_exited()


class TestRunPod:
    def test_results(self):
        text = r"print(me, os.environ['A']); os.write(2, b'\xff'); sys.exit(me)"
        results = run_pod(program(text), 2, 1, env=[{"A": "x"}, {"A": "y"}])
        assert [(result.status, result.stdout) for result in results] == [
            (0, "0 x\n"),
            (1, "1 y\n"),
        ]
        assert results[0].stderr == "\\xff"

    def test_timeout(self, fifo, alive):
        command = ["sh", "-c", f"exec 3>{fifo}; echo stuck; exec sleep 40"]
        with pytest.raises(TimeoutError, match=r"longer than 4 s: .*stdout='stuck\\n'"):
            run_pod(command, 2, 1, timeout=4)
        assert alive.all_exited()

    def test_the_environment_arrives(self, monkeypatch):
        monkeypatch.setenv("SLURM_PROCID", "7")
        text = "import json\nprint(json.dumps(dict(os.environ)))\nprint(sys.stdin.read())"
        _, last = run_pod(program(text), 2, 3, "3x2")
        env = json.loads(last.stdout.splitlines()[0])
        assert env["FTMESH_PROCESS_ID"] == "1"
        assert env["FTMESH_NUM_PROCESSES"] == "2"
        assert env["FTMESH_MESH"] == "3x2"
        assert env["JAX_COORDINATOR_BIND_ADDRESS"] == env["FTMESH_COORDINATOR"]
        assert env["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=3")
        assert "SLURM_PROCID" not in env
