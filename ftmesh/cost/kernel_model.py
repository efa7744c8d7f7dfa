"""The time of an all-reduce whose rounds all run in one Pallas kernel, by a model.

Nobody has measured this kernel, and the compiler estimates none. So the model counts only what the
kernel cannot avoid: its wires, on which nothing waits for a round to end, or its memory traffic,
whichever is slower; and packing, as without a kernel. A chip reads a byte for every one that it
sends; for every one that it receives it writes a byte, and reads one if it adds. The time to start
a copy or wait for one is unknown, and is counted as part of the latency of a hop.
"""

from __future__ import annotations

import numpy as np

from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.links import Network
from ftmesh.cost.simulate import DATAFLOW, Simulator
from ftmesh.cost.wire_precision import partial_sum_scale
from ftmesh.errors import ArgumentError
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import ADD


def kernel_seconds(
    schedule: Schedule, payload_bytes: int, network: Network, wire_dtype: str = "float32"
) -> float:
    """Estimate the time of `schedule` in the Pallas kernel, on the network of TPU v4, v5p or v6e.

    If partial sums travel in a wider dtype than `wire_dtype`, the reduce-scatter carries that, or
    all rounds do if the schedule is no reduce-scatter followed by an all-gather.

    >>> import ftmesh
    >>> from ftmesh.cost.links import NETWORKS
    >>> ring = ftmesh.plan(Topology.grid("16x16", failed="2x2@2,2"), "ring").schedule
    >>> round(1e3 * kernel_seconds(ring, 100_000_000, NETWORKS["v6e"]), 2)
    1.82
    """
    memory = network.memory_bandwidth
    if network.device_model is None or memory is None or not network.has_kernel:
        raise ArgumentError("the time of a kernel is known only for TPU v4, v5p and v6e")
    partial_bytes = partial_sum_scale(schedule, wire_dtype) * payload_bytes
    result_bytes = payload_bytes if isinstance(schedule, SplitSchedule) else partial_bytes
    simulator, traffic = Simulator(schedule), _memory_traffic(schedule, network.device_model)
    times = [
        max(simulator.seconds(size, network.wires_only, DATAFLOW), traffic * size / memory)
        for size in {partial_bytes, result_bytes}
    ]
    return sum(times) / len(times) + network.device_model.packing_seconds(result_bytes)


def _memory_traffic(schedule: Schedule, device_model: DeviceModel) -> float:
    """What the busiest chip reads and writes, as a multiple of the payload."""
    transfers, num_chips = schedule.transfers, schedule.topology.num_live
    received = np.where(transfers.op == ADD, 2, 1) * transfers.count
    sent = np.bincount(transfers.src, transfers.count, minlength=num_chips)
    busiest = (sent + np.bincount(transfers.dst, received, minlength=num_chips)).max()
    traffic = float(busiest) / schedule.num_chunks
    if device_model.for_topology(schedule.topology).devices == 2:
        traffic += (2 + 3) / 2  # the devices exchange halves to add, and then the sums
    return traffic
