"""Pods of small programs, started as users do, and what tells that none of them lives."""

import os
import select
import subprocess
import sys
import textwrap
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import ftmesh

SECONDS = 20  # for what takes a fraction of one
LINUX = sys.platform == "linux"
HEAD = """
import os, signal, sys
me = int(os.environ["FTMESH_PROCESS_ID"])
def wait():
    signal.alarm(40)  # where a fault keeps it alive
    while True:
        signal.pause()
"""


def program(text):
    """A small Python program, which has its number, `me`, and can `wait` for ever."""
    return [sys.executable, "-S", "-c", HEAD + textwrap.dedent(text)]


@contextmanager
def python(*arguments):
    """A Python that finds this ftmesh, in a process group of its own, as a shell would start it."""
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
    """The command as users start it."""
    return python("-m", "ftmesh", "launch", *arguments)


def next_line(started):
    """The next line of a launcher's stdout."""
    assert select.select([started.stdout], [], [], SECONDS)[0], "nothing was written"
    return started.stdout.readline()


def launch(*arguments):
    """Its status, stdout and stderr."""
    with launcher(*arguments) as started:
        out, err = started.communicate(timeout=SECONDS)
    return started.returncode, out, err


class Heard:
    """What a pod's processes have written so far."""

    def __init__(self):
        self.text = defaultdict(bytes)

    def __call__(self, process, stream, piece):
        self.text[process] += piece

    def has(self, word, *processes):
        return lambda: all(word in self.text[process] for process in processes)


class Living:
    """The reader of a pipe that processes hold open while they live."""

    def __init__(self, path):
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for(self, number):
        """Until so many bytes have come: each process that holds the pipe writes one."""
        while number:
            assert select.select([self._fd], [], [], SECONDS)[0], "nobody wrote"
            number -= len(os.read(self._fd, number) or b"")

    def are_gone(self):
        """Whether the last of them ends before long."""
        ready = select.select([self._fd], [], [], SECONDS)[0]
        return bool(ready) and os.read(self._fd, 1) == b""

    def close(self):
        os.close(self._fd)


def stubborn_family(fifo):
    """A process and one of its own, both deaf to what can be ignored, both holding `fifo`."""
    return program(
        f"""
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(each, signal.SIG_IGN)
        os.fork()
        os.write(os.open({str(fifo)!r}, os.O_WRONLY), b"1")
        wait()"""
    )
