"""Hosts on one machine: Linux network namespaces with names and addresses, which can fail."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HUB = "hub"
Names = Callable[["Hosts", int | str], list[str]]


def can_make_hosts() -> bool:
    """Return True for root, where the kernel and iproute2 allow network namespaces."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "unshare"))):
        return False
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made.returncode == 0


class Hosts:
    """Hosts h0, h1 and so on at 10.66.0.1 and on, and a hub that connects them at 10.66.0.254.

    Args:
        number: How many hosts, without the hub.
        names: Returns the lines of a host's table of names.
    """

    def __init__(self, number: int, names: Names) -> None:
        self.number, self._names, self._id = number, names, f"t{os.getpid()}"

    def address(self, host: int | str) -> str:
        """Return the address of a host or of the hub."""
        return f"10.66.0.{254 if host == HUB else int(host) + 1}"

    def name(self, host: int | str) -> str:
        """Return the name of a host or of the hub."""
        return HUB if host == HUB else f"h{host}"

    def command(self, host: int | str, *command: str) -> list[str]:
        """Return the command line that runs a command on a host, under the host's name."""
        script = 'hostname "$0"; exec "$@"'
        enter = ["ip", "netns", "exec", self._space(host), "unshare", "--uts"]
        return [*enter, "sh", "-c", script, self.name(host), *command]

    def cut(self, host: int) -> None:
        """Take the link of a host away."""
        self._ip("-n", self._space(HUB), "link", "set", f"p{host}", "down")

    def mend(self, host: int) -> None:
        """Give a host its link back."""
        self._ip("-n", self._space(HUB), "link", "set", f"p{host}", "up")

    def running(self, host: int | str) -> list[int]:
        """Return the pids of all processes on a host."""
        command = ["ip", "netns", "pids", self._space(host)]
        listed = subprocess.run(command, check=True, capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill_all(self, host: int | str) -> None:
        """Kill all processes on a host."""
        for pid in self.running(host):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def power_off(self, host: int) -> None:
        """Cut a host, and kill all that runs there."""
        self.cut(host)
        self.kill_all(host)

    def set_up(self) -> None:
        """Make the hosts."""
        hub = self._space(HUB)
        for host in (HUB, *range(self.number)):
            space = self._space(host)
            self._ip("netns", "add", space)
            files = Path("/etc/netns") / space
            files.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *self._names(self, host)]
            (files / "hosts").write_text("\n".join(lines) + "\n")
            (files / "resolv.conf").write_text("")
            device = "bridge0" if host == HUB else "eth0"
            if host == HUB:
                self._ip("-n", hub, "link", "add", device, "type", "bridge")
            else:
                peer = ("peer", "name", f"p{host}", "netns", hub)
                self._ip("-n", space, "link", "add", device, "type", "veth", *peer)
                self._ip("-n", hub, "link", "set", f"p{host}", "master", "bridge0", "up")
            self._ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", device)
            for link in ("lo", device):
                self._ip("-n", space, "link", "set", link, "up")

    def tear_down(self) -> None:
        """Remove the hosts, whose processes must have ended."""
        for host in (*range(self.number), HUB):
            subprocess.run(["ip", "netns", "delete", self._space(host)], check=False)
            shutil.rmtree(Path("/etc/netns") / self._space(host), ignore_errors=True)

    def _space(self, host: int | str) -> str:
        return f"{self._id}-{host}"

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)


def all_names(hosts: Hosts, host: int | str) -> list[str]:
    """Return the names of all hosts, as a cluster's table has them."""
    every: Sequence[int | str] = (HUB, *range(hosts.number))
    return [f"{hosts.address(other)} {hosts.name(other)}" for other in every]


@contextmanager
def network(number: int, names: Names = all_names) -> Iterator[Hosts]:
    """Make hosts, and remove them in the end; end what runs on them first."""
    hosts = Hosts(number, names)
    try:
        hosts.set_up()
        yield hosts
    finally:
        hosts.tear_down()
