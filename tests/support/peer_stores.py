"""Peer stores that run, for tests of what they hold."""

import os
import signal
import subprocess
from contextlib import contextmanager

from ftmesh.elastic.peer_store import CAPACITY, PeerStore, store_command

SECRET = "5ec2e7"


class StoreProcess:
    """The process of a peer store."""

    def __init__(self, capacity=CAPACITY):
        self.process = subprocess.Popen(
            store_command(capacity),
            env={"FTMESH_SECRET": SECRET},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.address = self.process.stdout.readline().decode().strip()

    def client(self, timeout=10.0):
        return PeerStore(self.address, SECRET, timeout)

    def names(self, prefix=""):
        with self.client() as store:
            return store.names(prefix)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)  # until all its threads have stopped

    def close(self):
        self.process.kill()
        self.process.communicate()


@contextmanager
def running_stores(hosts, capacity=CAPACITY):
    """A store for each of `hosts` hosts, by host."""
    stores = {}
    try:
        for host in range(hosts):
            stores[host] = StoreProcess(capacity)
        yield stores
    finally:
        for store in stores.values():
            store.close()
