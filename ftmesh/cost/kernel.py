"""Kernel: what an all-reduce takes where one kernel runs all of its rounds, by a model.

The compiler estimates the cycles of permutations, not of kernels, and nobody has measured this one.
So what is counted is what it cannot do without: its wires, on which nothing waits for a round to
end, and its memory. Of every byte that it sends a chip reads one, and of every byte that it gets it
writes one, and reads one to add to. All that goes on at once, so the slower of the two counts, and
to pack and unpack comes on top, as it does without a kernel. What it takes to start a copy or wait
for one is not known, and counted with the latency of a hop.
"""

from __future__ import annotations

import numpy as np

from ftmesh.cost.network import Network
from ftmesh.cost.simulate import DATAFLOW, Simulator
from ftmesh.errors import ArgumentError
from ftmesh.mesh.topology import Topology
from ftmesh.schedule.columns import ADD
from ftmesh.schedule.schedule import Schedule


def kernel_seconds(schedule: Schedule, payload_bytes: int, on: Network) -> float:
    """What `payload_bytes` take in a kernel, on a network that has one.

    >>> from ftmesh import Topology, planners
    >>> from ftmesh.cost.network import NETWORKS
    >>> ring = planners.schedule(Topology.grid("16x16", failed="2x2@2,2"), "ring")
    >>> round(1e3 * kernel_seconds(ring, 100_000_000, NETWORKS["v6e"]), 2)
    1.82
    """
    if on.executor is None or on.memory is None or not on.has_kernel:
        raise ArgumentError("what a kernel takes is known for TPU v4, v5p and v6e alone")
    seconds = Simulator(schedule).seconds(payload_bytes, on.wires, DATAFLOW)
    moved = _most_moved(schedule) * payload_bytes / schedule.num_chunks / on.memory
    if on.executor.devices == 2:  # give each other halves to add to theirs, and then the sums
        moved += (2 + 3) / 2 * payload_bytes / on.memory
    return max(seconds, moved) + on.executor.packing_seconds(payload_bytes)


def kernel_is_faster(
    schedule: Schedule, in_kernel: Schedule, payload_bytes: int, on: Network
) -> bool:
    """Whether a schedule for a kernel takes less there than another in permutations."""
    seconds = Simulator(schedule).seconds(payload_bytes, on)
    return kernel_seconds(in_kernel, payload_bytes, on) < seconds


def may_have_kernel(topology: Topology, on: Network) -> bool:
    """Whether the devices of a topology are TPUs, and both ways have a price there."""
    kinds = {str(getattr(device, "platform", "")) for device in topology.devices}
    return kinds == {"tpu"} and on.has_kernel and on.executor is not None


def _most_moved(schedule: Schedule) -> int:
    """The chunks that the busiest chip reads and writes."""
    columns, chips = schedule.columns, schedule.topology.num_live
    received = np.where(columns.op == ADD, 2, 1) * columns.count
    sent = np.bincount(columns.src, columns.count, minlength=chips)
    return int((sent + np.bincount(columns.dst, received, minlength=chips)).max())
