"""Pods of real processes: what they write, how they end, and that nothing is left of them."""

import json
import os
import signal
import textwrap

import pytest

from ftmesh.elastic import reaper
from ftmesh.elastic.local_pod import Pod, run_pod
from tests.support.launching import (
    LINUX,
    SECONDS,
    Heard,
    Living,
    launch,
    launcher,
    next_line,
    program,
    python,
    stubborn_family,
)


@pytest.fixture
def heard():
    return Heard()


@pytest.fixture
def fifo(tmp_path):
    """A pipe with a name: as long as one process has it open, its reader finds no end."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture
def fifos(tmp_path):
    """A folder with such a pipe for each of four processes."""
    for number in range(4):
        os.mkfifo(tmp_path / str(number))
    return tmp_path


@pytest.fixture
def living(fifo):
    reader = Living(fifo)
    yield reader
    reader.close()


class TestOutput:
    def test_no_line_is_lost_or_torn(self):
        write = "for i in range(10_000):\n    print('line', i, 'x' * (i % 100))"
        status, out, err = launch("--hosts", "2", "--devices-per-host", "1", "--", *program(write))
        assert (status, err) == (0, b"")
        expected = [f"line {i} {'x' * (i % 100)}" for i in range(10_000)]
        lines = out.decode().splitlines()
        for process in range(2):
            prefix = f"[{process}] "
            assert [x.removeprefix(prefix) for x in lines if x.startswith(prefix)] == expected
        assert len(lines) == 20_000

    def test_streams_numbers_and_bytes(self):
        write = r"os.write(1, b'\xff\nlast'); os.write(2, b'wrong\n')"
        status, out, err = launch("--hosts", "11", "--devices-per-host", "1", *program(write))
        assert status == 0
        numbers = [f"{i:2}".encode() for i in range(11)]
        assert sorted(out.splitlines()) == sorted(
            b"[%s] %s" % (number, line) for number in numbers for line in (b"\xff", b"last")
        )
        assert sorted(err.splitlines()) == [b"[%s] wrong" % number for number in numbers]

    def test_one_that_floods_starves_nobody(self, heard):
        write = "while me == 0:\n    os.write(1, b'flood' * 1000)\nprint('heard')\nwait()"
        with Pod(program(write), hosts=3, devices_per_host=1, on_output=heard) as pod:
            assert pod.wait(SECONDS, until=heard.has(b"heard", 1, 2))

    def test_nothing_is_held_for_a_reader_that_has_gone(self):
        with launcher("--hosts", "2", "--devices-per-host", "1", "--", "yes") as started:
            assert next_line(started).endswith(b"] y\n")
            started.stdout.close()
            assert started.wait(SECONDS) == 128 + signal.SIGPIPE

    def test_a_reader_that_does_not_read_keeps_nothing_alive(self, fifo, living):
        flood = f"""
            signal.alarm(40)  # where a fault keeps it alive
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(os.open({str(fifo)!r}, os.O_WRONLY), b"1")
            while True:
                os.write(1, b"flood\\n" * 1000)"""
        pod = f"""
            import signal
            from ftmesh.elastic.local_pod import Pod
            from ftmesh.elastic.output_lines import Printer
            signal.signal(signal.SIGTERM, lambda *_: pod.end())
            pod = Pod({program(flood)!r}, hosts=1, devices_per_host=1, kill_after=0.5,
                      on_output=Printer(1, idle=lambda: pod.enforce()))
            with pod:
                pod.see_out()"""
        with python("-c", textwrap.dedent(pod)) as started:
            living.wait_for(1)
            started.terminate()
            assert living.are_gone()
            started.communicate(timeout=SECONDS)
        assert started.returncode == 0


class TestStatus:
    def test_all_well(self):
        with Pod(["true"], hosts=3, devices_per_host=1) as pod:
            pod.see_out()
        assert (pod.status, pod.first_failed) == (0, None)

    @pytest.mark.skipif(not LINUX, reason="elsewhere those that end together have no order")
    @pytest.mark.parametrize(
        ("fail", "status"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
    )
    def test_that_of_the_first_though_others_follow_before_anyone_looks(self, fifos, fail, status):
        text = f"""
            os.read(os.open(f"{fifos}/{{me}}", os.O_RDONLY), 1)
            if me == 2:
                {fail}
            sys.exit(40 + me)"""
        with Pod(program(text), hosts=3, devices_per_host=1) as pod:
            for number in (2, 1, 0):
                os.close(os.open(fifos / str(number), os.O_WRONLY))
                os.waitid(os.P_PID, pod.processes[number].pid, os.WEXITED | os.WNOWAIT)
            pod.see_out()
        assert [process.status for process in pod.processes] == [40, 41, status]
        assert [process.told for process in pod.processes] == [None] * 3
        assert pod.first_failed is pod.processes[2]
        assert pod.status == status

    def test_the_command_names_who_failed_and_who_had_to_be_ended(self, fifos):
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
            "ftmesh: process 1 failed with status 3; the others have 0.1 s to end",
            "ftmesh: process 1 failed first, with status 3; had to end 0, 2",
        ]

    def test_time_is_up(self):
        status, _, err = launch(
            "--hosts=2", "--devices-per-host=1", "--timeout=0.2", "--", *program("wait()")
        )
        assert status == 124
        assert err == b"ftmesh: time was up after 0.2 s; had to end 0, 1\n"


class TestEnds:
    def test_grace_then_sigterm_then_sigkill(self, fifos, heard):
        """Process 3 fails: 0 ends by itself, 1 when told, 2 never."""
        text = f"""
            def told(*_):
                print("saved")
                sys.exit(0)
            signal.signal(signal.SIGTERM, told if me == 1 else signal.SIG_IGN)
            if me == 3:
                for other in (0, 1, 2):
                    os.open(f"{fifos}/{{other}}", os.O_WRONLY)
                sys.exit(1)
            os.read(os.open(f"{fifos}/{{me}}", os.O_RDONLY), 1)
            if me == 0:
                sys.exit(0)
            wait()"""
        with Pod(program(text), hosts=4, devices_per_host=1, on_output=heard, kill_after=5) as pod:
            pod.see_out(grace=3)
        assert [process.status for process in pod.processes] == [0, 0, 137, 1]
        assert [process.told for process in pod.processes] == [None, *[signal.SIGTERM] * 2, None]
        assert heard.text[1] == b"saved\n"

    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_signals_of_the_launcher_end_all(self, signum, fifo, living):
        worker = f"""
            os.fork()
            os.write(os.open({str(fifo)!r}, os.O_WRONLY), b"1")
            wait()"""
        arguments = ["--hosts", "2", "--devices-per-host", "1", "--", *program(worker)]
        with launcher(*arguments) as started:
            living.wait_for(4)
            os.killpg(started.pid, signum)  # as a terminal does
            _, err = started.communicate(timeout=SECONDS)
        assert started.returncode == 128 + signum
        assert err.decode().splitlines()[-1] == f"ftmesh: ended by {signum.name}"
        assert living.are_gone()

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

    def test_a_launcher_that_is_killed_leaves_no_orphan(self, fifo, living):
        arguments = ["--hosts", "2", "--devices-per-host", "1", "--", *stubborn_family(fifo)]
        with launcher(*arguments) as started:
            living.wait_for(4)
            started.kill()
        assert living.are_gone()

    @pytest.mark.skipif(not LINUX, reason="elsewhere only the first group of a session is found")
    def test_jobs_in_groups_of_their_own_end_with_their_process(self, fifo, living):
        text = f"""
            os.open({str(fifo)!r}, os.O_WRONLY)
            ready, write = os.pipe()
            if os.fork() == 0:
                os.setpgid(0, 0)
                os.write(write, b"1")
                wait()
            os.read(ready, 1)"""
        results = run_pod(program(text), 2, 1, timeout=SECONDS)
        assert [result.status for result in results] == [0, 0]
        assert living.are_gone()

    def test_what_is_stopped_can_still_save(self, heard):
        text = """
            signal.signal(signal.SIGTERM, lambda *_: sys.exit("saved"))
            print("ready")
            wait()"""
        with Pod(program(text), hosts=1, devices_per_host=1, on_output=heard) as pod:
            assert pod.wait(SECONDS, until=heard.has(b"ready\n", 0))
            os.kill(pod.processes[0].pid, signal.SIGSTOP)
            pod.end()
            assert pod.wait(SECONDS)
        assert heard.text[0] == b"ready\nsaved\n"
        assert pod.processes[0].status == 1

    def test_where_nothing_says_that_a_process_has_ended(self, monkeypatch):
        monkeypatch.setattr(reaper, "PROC", "/no/such")
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        text = "if me:\n    sys.exit(3)\nos.fork()\nwait()"
        with Pod(program(text), hosts=2, devices_per_host=1) as pod:
            pod.see_out(grace=0.1)
        assert [process.status for process in pod.processes] == [128 + signal.SIGTERM, 3]
        assert pod.first_failed is pod.processes[1]

    def test_told_to_end_before_it_started(self, tmp_path):
        pod = Pod(["touch", str(tmp_path / "ran")], hosts=2, devices_per_host=1)
        pod.end()
        with pod:
            pod.see_out()
        assert not (tmp_path / "ran").exists()
        assert pod.first_failed is None
        assert [process.told for process in pod.processes] == [signal.SIGKILL] * 2

    def test_leaving_a_pod_kills_it(self, fifo, living):
        def fail_within():
            with Pod(stubborn_family(fifo), hosts=2, devices_per_host=1):
                living.wait_for(4)
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail_within()
        assert living.are_gone()


class TestRunPod:
    def test_what_came_of_each(self):
        text = r"print(me, os.environ['A']); os.write(2, b'\xff'); sys.exit(me)"
        results = run_pod(program(text), 2, 1, env=[{"A": "x"}, {"A": "y"}])
        assert [(result.status, result.stdout) for result in results] == [
            (0, "0 x\n"),
            (1, "1 y\n"),
        ]
        assert results[0].stderr == "\\xff"

    def test_time_is_up(self, fifo, living):
        command = ["sh", "-c", f"exec 3>{fifo}; echo stuck; exec sleep 40"]
        with pytest.raises(TimeoutError, match=r"longer than 4 s: .*stdout='stuck\\n'"):
            run_pod(command, 2, 1, timeout=4)
        assert living.are_gone()

    def test_the_environment_arrives(self, monkeypatch):
        monkeypatch.setenv("SLURM_PROCID", "7")
        text = "import json\nprint(json.dumps(dict(os.environ)))\nprint(sys.stdin.read())"
        _, last = run_pod(program(text), 2, 3, "3x2")
        found = json.loads(last.stdout.splitlines()[0])
        assert found["FTMESH_PROCESS_ID"] == "1"
        assert found["FTMESH_NUM_PROCESSES"] == "2"
        assert found["FTMESH_MESH"] == "3x2"
        assert found["JAX_COORDINATOR_BIND_ADDRESS"] == found["FTMESH_COORDINATOR"]
        assert found["XLA_FLAGS"].endswith("--xla_force_host_platform_device_count=3")
        assert "SLURM_PROCID" not in found
