"""The time of an all-reduce that is not rounds of permutations: by XLA's ring, or in a kernel.

On a mesh with failed chips XLA sums in one ring, both ways round at once, and streams: nothing
waits for a round to end, and no device time is counted besides. Every byte goes once around for
the reduce-scatter and once for the all-gather, so an all-reduce pays the latency of all hops of the
ring twice.

Nobody has measured the Pallas kernel, and the compiler estimates none. So its model counts only
what the kernel cannot avoid: its wires, on which nothing waits for a round to end, or its memory
traffic, whichever is slower; and packing, as without a kernel. A chip reads a byte for every one
that it sends; for every one that it receives it writes a byte, and reads one if it adds. The time
to start a copy or wait for one is unknown, and is counted as part of the latency of a hop.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Literal

import numpy as np

from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.links import Network
from ftmesh.cost.simulate import DATAFLOW, Simulator
from ftmesh.cost.wire_precision import partial_sum_scale
from ftmesh.errors import ArgumentError
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import ADD
from ftmesh.topology.ring_order import RingOrder
from ftmesh.topology.routing import dimension_order

Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]


def native_ring_seconds(
    order: RingOrder, num_bytes: int, network: Network, operation: Operation = "all_reduce"
) -> float:
    """Estimate the time of a collective whose whole payload has `num_bytes` at each rank.

    XLA compiles a reduce-scatter on damaged meshes as an all-reduce, and it costs as much. A link
    that several steps of the ring go over is shared between them.

    >>> from ftmesh.cost.links import NETWORKS
    >>> from ftmesh.topology.ring_order import ring_order
    >>> from ftmesh.topology.topology import Topology
    >>> order = ring_order(Topology.grid("16x16", failed="2x2@2,2"))
    >>> round(1e3 * native_ring_seconds(order, 100_000_000, NETWORKS["v6e"]), 2)
    1.5
    """
    num_ranks = len(order.coords)
    if num_ranks < 2:
        return 0.0
    turns = (1 if operation == "all_gather" else 2) * (num_ranks - 1) / num_ranks
    latency = network.overhead + sum(order.hops) * network.latency
    wires = num_bytes / 2 * busiest_link(order) / network.bandwidth
    return turns * (latency + wires)


def busiest_link(order: RingOrder) -> int:
    """Return how many steps of the ring, of both directions, go over the busiest link."""
    loads: Counter[object] = Counter()
    for a, b in order.steps:
        for route in (
            dimension_order(order.topology, a, b),
            dimension_order(order.topology, b, a),
        ):
            loads.update(pairwise(route))
    return max(loads.values(), default=0)


def kernel_seconds(
    schedule: Schedule, payload_bytes: int, network: Network, wire_dtype: str = "float32"
) -> float:
    """Estimate the time of `schedule` in the Pallas kernel, on the network of TPU v4, v5p or v6e.

    If partial sums travel in a wider dtype than `wire_dtype`, the reduce-scatter carries that, or
    all rounds do if the schedule is no reduce-scatter followed by an all-gather.

    >>> import ftmesh
    >>> from ftmesh.cost.links import NETWORKS
    >>> ring = ftmesh.plan(ftmesh.Topology.grid("16x16", failed="2x2@2,2"), "ring").schedule
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
