"""Ahead: plans and programs for the likeliest next failures, each host alone, made in good time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from ftmesh.errors import FtmeshError
from ftmesh.mesh.devices import process_of
from ftmesh.mesh.topology import Topology
from ftmesh.plans import Plan, plan

_MOST = 256  # plans that are remembered
_made: dict[Any, Plan] = {}
_latest = [0]  # the number of the latest `prepare`
_compiled: dict[tuple[str, Topology], tuple[str, Any]] = {}


def planned(topology: Topology, algorithm: str, **options: Any) -> Plan:
    """As `ftmesh.plan`, at once where it has been planned before."""
    bare = topology.without_devices()
    key = (bare, algorithm, *sorted(options.items()))
    found = _made.get(key)
    if found is None:
        found = plan(topology, algorithm, **options)
        if len(_made) < _MOST:
            _made[key] = found
    return found


def keep_program(name: str, topology: Topology, digest: str, compiled: Any) -> None:
    """Remember a program that has been compiled for a mesh."""
    _compiled[name, topology] = digest, compiled


def program(name: str, topology: Topology) -> tuple[str, Any] | None:
    """The digest of such a program, and it; forgotten with that, as it takes memory."""
    found = _compiled.get((name, topology))
    _compiled.clear()
    return found


def without_each_host(topology: Topology) -> Iterable[Topology]:
    """What is left of a mesh when a host is lost, for each of its hosts."""
    hosts = {device: process_of(device) for device in topology.devices}
    for host in sorted(set(hosts.values())):
        gone = {topology.coord_of(device) for device, its in hosts.items() if its == host}
        if len(gone) < topology.num_live:
            left = topology.less(gone)
            yield left.less(coord for part in left.components()[1:] for coord in part)


def prepare(topology: Topology, do: Callable[[Topology], Any]) -> threading.Thread:
    """In the background, have something done for what is left when each host is lost."""
    _latest[0] += 1
    own = _latest[0]

    def run() -> None:
        for left in without_each_host(topology):
            if own != _latest[0]:
                return  # the mesh is another one by now
            try:
                do(left)
            except FtmeshError:
                continue  # not every damage has a plan

    thread = threading.Thread(target=run, name="ftmesh ahead", daemon=True)
    thread.start()
    return thread
