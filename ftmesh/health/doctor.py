"""Doctor: have every chip compute and every link carry what is known, and say who does not.

    findings = examine(Topology.from_devices(jax.devices()))
    print(findings)

Chips that do not answer with a single number are left out of what follows. A program that never
ends holds its process: the links that it would have tried next are left untried, and said so.
"""

from __future__ import annotations

import time

from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.health.examination import Look, Progress
from ftmesh.health.findings import Findings
from ftmesh.health.probe_chips import call, compute
from ftmesh.health.probe_links import cables, carry
from ftmesh.health.probe_programs import Probes
from ftmesh.testing.unhealthy import Sick
from ftmesh.topology.devices import platform_of
from ftmesh.topology.topology import Topology

LIMIT = 60.0  # seconds for a chip or a link to answer


def examine(
    topology: Topology,
    *,
    cluster: Cluster = ALONE,
    limit: float = LIMIT,
    slow: float = 3.0,
    probes: Probes | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Findings:
    """Look at every live chip and link of a mesh; the same findings in all processes of `cluster`.

    What does not answer within `limit` seconds, compiling apart, is silent. What takes more than
    `slow` times as long as the median of its peers, each time that it is tried, is slow.
    """
    topology = topology.wires
    if not topology.devices:
        raise TopologyError(f"{topology} has no devices to look at: use Topology.from_devices")
    if not limit > 0 or not slow > 1:
        raise ArgumentError(
            f"a limit of {limit:g} s and a factor of {slow:g}: give more than 0, and more than 1"
        )
    start = time.monotonic()
    if probes is None:
        sick = Sick.from_environment(topology)
        probes = Probes.of(platform_of(topology.devices[0]), sick)
    look = Look(topology, cluster.on(topology), probes, limit, slow, progress)
    every = cables(topology)
    steps = len(every) + 2
    progress(0, steps, "who answers")
    call(look)
    progress(1, steps, "what they compute")
    compute(look)
    carry(look, every, lambda done: progress(done + 2, steps, "what links carry"))
    progress(steps, steps, "")
    found = sorted(look.found, key=lambda one: (len(one.chips), one.chips, one.kind))
    seconds = time.monotonic() - start
    return Findings(topology, tuple(found), len(every), tuple(look.untried), seconds)
