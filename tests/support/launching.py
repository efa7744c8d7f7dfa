"""Pods of small programs, started as users do, and pipes that show which of them live."""

import os
import select
import subprocess
import sys
import textwrap
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import ftmesh

TIMEOUT = 20  # seconds, for what takes a fraction of one
LINUX = sys.platform == "linux"
HEAD = """
import os, signal, sys
me = int(os.environ["FTMESH_PROCESS_ID"])
def wait():
    signal.alarm(40)  # in case a fault keeps it alive
    while True:
        signal.pause()
"""


def program(text):
    """A small Python program; `me` is its process index and `wait()` waits for ever."""
    return [sys.executable, "-S", "-c", HEAD + textwrap.dedent(text)]


@contextmanager
def python(*arguments):
    """Python with this ftmesh, in a process group of its own, as a shell starts it."""
    with subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(ftmesh.__file__).parent.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
        process_group=0,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def launcher(*arguments):
    """``ftmesh launch`` as users start it."""
    return python("-m", "ftmesh", "launch", *arguments)


def next_line(started):
    """The next line of a launcher's stdout."""
    assert select.select([started.stdout], [], [], TIMEOUT)[0], "nothing was written"
    return started.stdout.readline()


def launch(*arguments):
    """Run ``ftmesh launch``; return its status, stdout and stderr."""
    with launcher(*arguments) as started:
        out, err = started.communicate(timeout=TIMEOUT)
    return started.returncode, out, err


class OutputCollector:
    """Collects the output of a pod's processes."""

    def __init__(self):
        self.text = defaultdict(bytes)

    def __call__(self, process, stream, data):
        self.text[process] += data

    def has(self, word, *processes):
        return lambda: all(word in self.text[process] for process in processes)


class FifoReader:
    """Reads a named pipe that processes hold open while they live."""

    def __init__(self, path):
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for(self, number):
        """Wait for `number` bytes: each process that holds the pipe writes one."""
        while number:
            assert select.select([self._fd], [], [], TIMEOUT)[0], "no process wrote"
            number -= len(os.read(self._fd, number) or b"")

    def all_exited(self):
        """Whether the last process that holds the pipe exits soon."""
        ready = select.select([self._fd], [], [], TIMEOUT)[0]
        return bool(ready) and os.read(self._fd, 1) == b""

    def close(self):
        os.close(self._fd)


def stubborn_family(fifo):
    """A process and its child, which ignore signals and hold `fifo` open."""
    return program(
        f"""
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(signum, signal.SIG_IGN)
        os.fork()
        os.write(os.open({str(fifo)!r}, os.O_WRONLY), b"1")
        wait()"""
    )
