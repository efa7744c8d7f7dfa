"""Plans and programs for the likeliest next failures, made in the background.

A thread plans for the loss of each single host while the training runs. Plans along a ring take no
time and little memory, and come first; others may take seconds and tens of megabytes each, so there
is a limit on processor time and on memory.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ftmesh.algorithms import registry
from ftmesh.distributed.consensus import agree_on_program, program_digest
from ftmesh.elastic.elastic_group import ElasticGroup
from ftmesh.errors import FtmeshError
from ftmesh.planning.make_plan import plan
from ftmesh.planning.plan import Plan
from ftmesh.planning.profiles import LinkArgument, find_costs
from ftmesh.topology.devices import process_of
from ftmesh.topology.topology import Topology

CPU_SECONDS = 60.0  # of processor time per mesh
MAX_CACHED_BYTES = 256 * 10**6  # of plans
STEP = "the program of a step"

Rebuild = Callable[[Topology, ElasticGroup], tuple[Any, Sequence[Any]]]

_plans: dict[Any, Plan] = {}
_programs: dict[Topology, tuple[str, Any]] = {}  # mesh -> digest, compiled
_latest = [0]  # counts calls of `rebuild_for_host_loss`


def cached_plan(
    topology: Topology, algorithm: str, *, link: LinkArgument = None, **options: Any
) -> Plan:
    """Return `ftmesh.plan` of these arguments, from this process's cache if it is there."""
    network = find_costs(topology, link).network
    key = topology.without_devices(), network, algorithm, *sorted(options.items())
    cached = _plans.get(key)
    if cached is None:
        cached = plan(topology, algorithm, link=link, **options)
        if sum(p.schedule.num_bytes for p in [cached, *_plans.values()]) <= MAX_CACHED_BYTES:
            _plans[key] = cached
    if cached.topology != topology:  # the same chips with other devices
        cached = replace(cached, schedule=replace(cached.schedule, topology=topology))
    return cached


def agreed_program(
    group: ElasticGroup, jitted: Any, inputs: Sequence[Any], topology: Topology
) -> Any:
    """Check that `jitted` is the same program in all processes, and return what to call.

    Where workers may be lost, that is the program that was compiled ahead of time, or one that is
    compiled now.
    """
    if group.is_single_process:
        return jitted
    ahead = _programs.get(topology)
    _programs.clear()  # they take memory
    if ahead is not None:
        digest, compiled = ahead
        group.agree({STEP: digest})
        return compiled
    lowered = agree_on_program(group, STEP, jitted, inputs)
    return jitted if group.controller is None else lowered.compile()


def rebuild_for_host_loss(
    topology: Topology,
    group: ElasticGroup,
    rebuild: Rebuild,
    *,
    ahead: bool,
    cpu_seconds: float = CPU_SECONDS,
) -> threading.Thread:
    """Call `rebuild` in a thread with what is left of `topology` when each host is lost.

    With `ahead`, what it returns is compiled for `agreed_program`. Its `FtmeshError`s are ignored.
    Otherwise it stops when one more call would probably take the CPU time of all past
    `cpu_seconds`. A later call of this function stops the thread.
    """
    _latest[0] += 1
    own = _latest[0]

    def run() -> None:
        begin, longest = time.thread_time(), 0.0
        for left in _fast_first(topologies_without_a_host(topology)):
            before = time.thread_time()
            is_over = before - begin + longest > cpu_seconds and not ahead
            if own != _latest[0] or is_over:
                return
            with contextlib.suppress(FtmeshError):  # not every mesh has a plan
                jitted, inputs = rebuild(left, group)
                if ahead and group.process in {process_of(device) for device in left.devices}:
                    lowered = jitted.lower(*inputs)
                    _programs[left] = program_digest(lowered), lowered.compile()
                longest = max(longest, time.thread_time() - before)

    thread = threading.Thread(target=run, name="ftmesh precompile", daemon=True)
    thread.start()
    return thread


def _fast_first(topologies: Iterable[Topology]) -> Iterator[Topology]:
    """Yield meshes that are planned fast at once, and the others after them."""
    slow = []
    for topology in topologies:
        if registry.has_fast_algorithm(topology):
            yield topology
        else:
            slow.append(topology)
    yield from slow


def topologies_without_a_host(topology: Topology) -> Iterator[Topology]:
    """Yield, for each host, the largest component of the mesh without it."""
    hosts = {device: process_of(device) for device in topology.devices}
    for host in sorted(set(hosts.values())):
        lost = {topology.coord_of(device) for device, its in hosts.items() if its == host}
        if len(lost) < topology.num_live:
            left = topology.with_failed(lost)
            yield left.with_failed(coord for part in left.components()[1:] for coord in part)
