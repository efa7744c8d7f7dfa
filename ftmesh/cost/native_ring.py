"""The time of XLA's own collectives along a ring of devices, by a model of its wires.

On a mesh with failed chips XLA sums in one ring, both ways round at once, and streams: nothing
waits for a round to end, and no device time is counted besides. Every byte goes once around for
the reduce-scatter and once for the all-gather, so an all-reduce pays the latency of all hops of the
ring twice.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Literal

from ftmesh.cost.links import Network
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
