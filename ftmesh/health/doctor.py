"""Examines a mesh: every chip computes a known result, every link carries a known pattern.

Chips that do not respond at all are left out of the later tests. A program that never ends blocks
its process; the links that process would have tested next are reported as untried.
"""

from __future__ import annotations

import time

from ftmesh.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.health.examination import Examination, Progress
from ftmesh.health.findings import Findings
from ftmesh.health.probe_chips import check_responses, check_results
from ftmesh.health.probe_links import check_links, undirected_links
from ftmesh.health.probe_programs import Probes
from ftmesh.topology.topology import Topology

TIMEOUT = 60.0  # seconds for a chip or a link to respond


def examine(
    topology: Topology,
    *,
    group: ProcessGroup = SINGLE_PROCESS,
    timeout: float = TIMEOUT,
    slow: float = 3.0,
    probes: Probes | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Findings:
    """Test every live chip and link of a mesh with devices.

    Args:
        topology: The mesh.
        group: The processes that take part. All must call this, and all get the same findings.
        timeout: What does not respond within this many seconds, compilation excluded, is silent.
        slow: What takes more than `slow` times the median of its peers, in every repetition, is
            slow.
        probes: How much to compute and transfer; by default what suits the platform.
        progress: Called with the steps done, the total, and what comes next.

    Raises:
        TopologyError: The topology has no devices.
        ArgumentError: `timeout` is not positive, or `slow` is not more than 1.
    """
    topology = topology.physical
    if not topology.devices:
        raise TopologyError(f"{topology} has no devices to test: use Topology.from_devices")
    if not timeout > 0 or not slow > 1:
        rule = "give a timeout of more than 0 seconds and a factor of more than 1"
        raise ArgumentError(f"timeout={timeout:g} and slow={slow:g}: {rule}")
    start = time.monotonic()
    if probes is None:
        probes = Probes.for_topology(topology)
    exam = Examination(topology, group.for_topology(topology), probes, timeout, slow)
    links = undirected_links(topology)
    num_steps = len(links) + 2
    progress(0, num_steps, "testing which chips respond")
    check_responses(exam)
    progress(1, num_steps, "testing what chips compute")
    check_results(exam)
    check_links(exam, links, lambda done: progress(done + 2, num_steps, "testing links"))
    progress(num_steps, num_steps, "")
    entries = sorted(exam.findings, key=lambda entry: (len(entry.chips), entry.chips, entry.kind))
    seconds = time.monotonic() - start
    return Findings(topology, tuple(entries), len(links), tuple(exam.untried), seconds)
