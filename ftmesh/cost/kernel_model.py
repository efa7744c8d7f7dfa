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

from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.links import Network, network_of
from ftmesh.cost.simulate import DATAFLOW, Simulator
from ftmesh.errors import ArgumentError
from ftmesh.planning.selection import partials_times, seconds_of
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import ADD
from ftmesh.topology.topology import Topology


def kernel_seconds(
    schedule: Schedule, payload_bytes: int, on: Network, wire_dtype: str = "float32"
) -> float:
    """What `payload_bytes` in `wire_dtype` take in a kernel, on a network that has one.

    Where partial sums travel as something wider, half of the rounds carry that, or without halves
    all of them.

    >>> from ftmesh import Topology, planners
    >>> from ftmesh.cost.links import NETWORKS
    >>> ring = planners.schedule(Topology.grid("16x16", failed="2x2@2,2"), "ring")
    >>> round(1e3 * kernel_seconds(ring, 100_000_000, NETWORKS["v6e"]), 2)
    1.82
    """
    if on.device_model is None or on.memory is None or not on.has_kernel:
        raise ArgumentError("what a kernel takes is known for TPU v4, v5p and v6e alone")
    first = partials_times(schedule, wire_dtype) * payload_bytes
    second = payload_bytes if isinstance(schedule, SplitSchedule) else first
    simulator, moved = Simulator(schedule), _moved(schedule, on.device_model)
    rounds = [
        max(simulator.seconds(size, on.wires, DATAFLOW), moved * size / on.memory)
        for size in {first, second}
    ]
    return sum(rounds) / len(rounds) + on.device_model.packing_seconds(second)


def kernel_is_faster(
    schedule: Schedule, in_kernel: Schedule, payload_bytes: int, on: Network, wire_dtype: str
) -> bool:
    """Whether a schedule for a kernel takes less there than another in permutations."""
    seconds = seconds_of(Simulator(schedule), payload_bytes, on, wire_dtype)
    return kernel_seconds(in_kernel, payload_bytes, on, wire_dtype) < seconds


def may_have_kernel(topology: Topology, on: Network) -> bool:
    """Whether the devices of a topology are TPUs with a kernel, and both ways have a price."""
    kinds = {str(getattr(device, "platform", "")) for device in topology.devices}
    has_kernel = kinds == {"tpu"} and network_of(topology).has_kernel and on.has_kernel
    return has_kernel and on.device_model is not None and on.memory is not None


def _moved(schedule: Schedule, device_model: DeviceModel) -> float:
    """The payloads that the busiest chip reads and writes."""
    columns, chips = schedule.columns, schedule.topology.num_live
    received = np.where(columns.op == ADD, 2, 1) * columns.count
    sent = np.bincount(columns.src, columns.count, minlength=chips)
    most = (sent + np.bincount(columns.dst, received, minlength=chips)).max()
    found = float(most) / schedule.num_chunks
    if device_model.on(schedule.topology).devices == 2:
        found += (2 + 3) / 2  # they give each other halves to add to theirs, and then the sums
    return found
