"""Ahead: plans and programs for the likeliest next failures, each host alone, made in good time.

That runs beside the training, in a thread of its process, and must not hold it up. Where a ring
fits, a plan is made in no time and takes next to no memory; those go first. Plans for other damage
can take seconds each, and tens of megabytes: they are made as long as the time for that lasts, and
kept as long as there is room. What is not there when it is needed is planned then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

from ftmesh.algorithms import registry
from ftmesh.cost.links import network_of
from ftmesh.errors import FtmeshError
from ftmesh.planning.plan import Plan, plan
from ftmesh.topology.devices import process_of
from ftmesh.topology.topology import Topology

SECONDS = 60.0  # of the processor, for what is made ahead on one mesh
MOST_BYTES = 256 * 10**6  # of the plans that are remembered

_made: dict[Any, Plan] = {}
_latest = [0]  # the number of the latest `prepare`
_compiled: dict[tuple[str, Topology], tuple[str, Any]] = {}


def planned(topology: Topology, algorithm: str, **options: Any) -> Plan:
    """As `ftmesh.plan`, at once where it has been planned before, and there was room for it."""
    bare = topology.without_devices()
    key = (bare, network_of(topology), algorithm, *sorted(options.items()))
    found = _made.get(key)
    if found is None:
        found = plan(topology, algorithm, **options)
        if sum(each.schedule.num_bytes for each in [found, *_made.values()]) <= MOST_BYTES:
            _made[key] = found
    if found.topology != topology:  # the same chips, as other devices
        found = replace(found, schedule=replace(found.schedule, topology=topology))
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


def prepare(
    topology: Topology, do: Callable[[Topology], Any], *, seconds: float = SECONDS
) -> threading.Thread:
    """In the background, have something done for what is left when each host is lost.

    It is not begun again where it would likely take more than so many `seconds` of the processor,
    all together.
    """
    _latest[0] += 1
    own = _latest[0]

    def run() -> None:
        begin, longest = time.thread_time(), 0.0
        for left in _quick_ones_first(without_each_host(topology)):
            before = time.thread_time()
            if own != _latest[0] or before - begin + longest > seconds:
                return  # the mesh is another one by now, or the time is over
            try:
                do(left)
            except FtmeshError:
                continue  # not every damage has a plan
            longest = max(longest, time.thread_time() - before)

    thread = threading.Thread(target=run, name="ftmesh ahead", daemon=True)
    thread.start()
    return thread


def _quick_ones_first(every: Iterable[Topology]) -> Iterable[Topology]:
    """The same meshes; those that take long to plan for come last."""
    late = []

    def quick() -> Iterable[Topology]:
        for topology in every:
            if registry.is_quick(topology):
                yield topology
            else:
                late.append(topology)

    return chain(quick(), late)
