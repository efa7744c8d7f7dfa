"""Keepers that run, for tests of what they hold."""

import os
import signal
import subprocess
from contextlib import contextmanager

from ftmesh.elastic.peer_store import LIMIT, Keeper, keeper_command

SECRET = "5ec2e7"


class Running:
    """A keeper's process."""

    def __init__(self, limit=LIMIT):
        self.process = subprocess.Popen(
            keeper_command(limit),
            env={"FTMESH_SECRET": SECRET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = self.process.stdout.readline().decode().strip()

    def ask(self, timeout=10.0):
        return Keeper(self.address, SECRET, timeout)

    def names(self, prefix=""):
        with self.ask() as keeper:
            return keeper.names(prefix)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # until all its threads have

    def close(self):
        self.process.kill()
        self.process.communicate()


@contextmanager
def running(number, limit=LIMIT):
    """So many of them, by the numbers of their hosts."""
    keepers = {}
    try:
        for host in range(number):
            keepers[host] = Running(limit)
        yield keepers
    finally:
        for keeper in keepers.values():
            keeper.close()
