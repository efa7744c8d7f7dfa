"""The time of an all-reduce that is not rounds of permutations: by XLA itself, or in a kernel.

XLA streams: nothing waits for a round to end, and no device time is counted. It pays to launch, to
pass data along the hops, and to move bytes, at the rate of links for an all-gather and at a
measured share of it for an all-reduce (`ftmesh.cost.links`). How it goes depends on the mesh:

- On a mesh with failed chips it sums in one ring, both ways round at once, in the order in which
  the devices stand in the JAX mesh. Every byte goes once around for the reduce-scatter and once for
  the all-gather.
- On a whole mesh every axis has its share of the payload at any time: one share goes first along x
  and then along y, another first along y and then along x.

Nobody has measured the Pallas kernel. Its model counts its launch; its wires, on which nothing
waits for a round to end, its instructions or its memory traffic, whichever is slowest; and packing,
as without a kernel. A chip reads a byte for every one that it sends; for every one that it receives
it writes a byte, and reads one if it adds. Instructions are the bundles that the compiler schedules
for a step, in which a rank sends and receives one piece on each lane; before a piece goes on, its
step has run. The time that a copy takes to start is counted as part of the latency of a hop.
Where a profile has measured it (`ftmesh.cost.profile`), a sum takes a launch and a multiple of the
time of its wires or memory, in which all else is contained.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from ftmesh.cost.device_model import DeviceModel, round_load
from ftmesh.cost.links import Network
from ftmesh.cost.simulate import DATAFLOW, Simulator
from ftmesh.cost.wire_precision import partial_sum_scale
from ftmesh.errors import ArgumentError
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import ADD, COPY, Transfers
from ftmesh.topology.ring_order import RingOrder, ring_order
from ftmesh.topology.routing import dimension_order
from ftmesh.topology.topology import Topology

LAX_PSUM, ALONG_RING = "lax.psum", "lax.psum along the ring"
OVER_AXES = "over all axes at once"

# Bundles of a step of the kernel if it takes every branch, besides its lanes and for each lane,
# fitted to `ftmesh compile` for v4, v5p, v6e and 7x (libtpu 0.0.51): within 25 % of their loops.
STEP_BUNDLES = 110
LANE_BUNDLES = {"added": 100, "copied": 50, "either": 155}
MAX_PIECE = 256 * 2**10  # bytes of a transfer between two ranks, as in `ftmesh.execute.pallas`
OVER_FAILED_LINKS = (
    "XLA sums over all axes of a slice that has all its chips, also over failed links: mark a chip "
    "at each as failed"
)
Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]


def lax_psum_seconds(topology: Topology, num_bytes: int, network: Network) -> float:
    """Estimate what `lax.psum` takes over ``Mesh(jax.devices(), "data")``, without ftmesh.

    On a damaged mesh that is a ring in the order of coordinates, which goes back along every row.
    Some of its steps go over failed chips: they are costed as if they could.
    """
    return native_ring_seconds(RingOrder(topology, topology.coords), num_bytes, network)


class NativeSum(NamedTuple):
    """An all-reduce by XLA itself, to compare a schedule with."""

    name: str
    seconds: float
    note: str


def lax_psum_peers(topology: Topology, num_bytes: int, network: Network) -> tuple[NativeSum, ...]:
    """What `lax.psum` takes without ftmesh, and along its ring; for tiles neither is known.

    On a whole mesh there is only the former.
    """
    if topology.num_positions > 1:
        return ()
    natural, along = RingOrder(topology, topology.coords), ring_order(topology)
    if sums_over_axes(natural):
        note = OVER_AXES + ", failed links included" * bool(topology.failed_links)
        return (NativeSum(LAX_PSUM, native_mesh_seconds(topology, num_bytes, network), note),)
    note = "one ring, in the order of coordinates"
    if natural.blocked:
        verb = "goes" if len(natural.blocked) == 1 else "go"
        note += f"; {len(natural.blocked)} of its steps {verb} over failed chips or links"
    return (
        NativeSum(LAX_PSUM, lax_psum_seconds(topology, num_bytes, network), note),
        NativeSum(ALONG_RING, native_ring_seconds(along, num_bytes, network), str(along)),
    )


def native_mesh_seconds(
    topology: Topology, num_bytes: int, network: Network, operation: Operation = "all_reduce"
) -> float:
    """Estimate the time of one of XLA's collectives on a whole mesh or torus.

    >>> from ftmesh.cost.links import NETWORKS
    >>> torus = Topology.grid("16x16", wrap=True)
    >>> round(1e3 * native_mesh_seconds(torus, 606_000_000, NETWORKS["v6e"]), 2)
    5.08
    """
    axes = [
        (size, wraps) for size, wraps in zip(topology.shape, topology.wrap, strict=True) if size > 1
    ]
    if not axes:
        return 0.0
    wires = 0.0
    for phase in range(len(axes)):
        slowest = 0.0
        for first in range(len(axes)):
            size, wraps = axes[(first + phase) % len(axes)]
            earlier = math.prod(axes[(first + n) % len(axes)][0] for n in range(phase))
            share = num_bytes / len(axes) / earlier * (size - 1) / size
            slowest = max(slowest, share / (2 if wraps and size > 2 else 1))
        wires += slowest / network.bandwidth
    hops = (max(n // 2, network.ring_share * (n - 1)) if wraps else n - 1 for n, wraps in axes)
    latency = network.latency * sum(hops)
    return _collective_seconds(latency, wires, network, operation)


def native_ring_seconds(
    order: RingOrder, num_bytes: int, network: Network, operation: Operation = "all_reduce"
) -> float:
    """Estimate the time of a collective whose whole payload has `num_bytes` at each rank.

    A link that several steps of the ring go over is shared between them. On a whole mesh XLA sums
    over all axes at once, whatever the order.

    >>> from ftmesh.cost.links import NETWORKS
    >>> order = ring_order(Topology.grid("16x16", failed="2x2@2,2"))
    >>> round(1e3 * native_ring_seconds(order, 100_000_000, NETWORKS["v6e"]), 2)
    1.92
    """
    num_ranks = len(order.coords)
    if num_ranks < 2:
        return 0.0
    if operation != "all_gather" and sums_over_axes(order):
        return native_mesh_seconds(order.topology, num_bytes, network, operation)
    return one_ring_seconds(order, num_bytes, network, operation)


def one_ring_seconds(
    order: RingOrder, num_bytes: int, network: Network, operation: Operation = "all_reduce"
) -> float:
    """Estimate the same where XLA sums in a ring for certain, as on part of a slice."""
    num_ranks = len(order.coords)
    if num_ranks < 2:
        return 0.0
    share = (num_ranks - 1) / num_ranks
    latency = network.ring_share * share * sum(order.hops) * network.latency
    wires = share * num_bytes / 2 * busiest_link(order) / network.bandwidth
    return _collective_seconds(latency, wires, network, operation)


def sums_over_axes(order: RingOrder) -> bool:
    """Whether XLA's all-reduce over these chips goes along the axes of a mesh, and not in a ring.

    That is what it compiles for all chips of a slice, in any order. It knows of no failed link.
    """
    topology = order.topology.physical
    return not topology.failed and len({*order.coords}) == topology.num_chips


def native_obstacle(order: RingOrder) -> str:
    """Why XLA cannot sum over these chips without crossing a failure; empty if it can."""
    if sums_over_axes(order):
        return OVER_FAILED_LINKS if order.topology.physical.failed_links else ""
    return str(order) if order.blocked else ""


def _collective_seconds(
    latency: float, wires: float, network: Network, operation: Operation
) -> float:
    """The time of a collective, given that of an all-gather's hops and bytes.

    On damaged meshes XLA compiles a reduce-scatter as an all-reduce, and it costs as much.
    """
    if operation == "all_gather":
        return network.collective_launch + latency + wires
    wires /= network.all_reduce_efficiency
    return network.collective_launch + 2 * (latency + wires)


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
    """Estimate the time of `schedule` in the Pallas kernel, on TPU v4, v5p, v6e, 7x or as measured.

    If partial sums travel in a wider dtype than `wire_dtype`, the reduce-scatter carries that, or
    all rounds do if the schedule is no reduce-scatter followed by an all-gather.

    >>> import ftmesh
    >>> from ftmesh.cost.links import NETWORKS
    >>> ring = ftmesh.plan(ftmesh.Topology.grid("16x16", failed="2x2@2,2"), "ring").schedule
    >>> round(1e3 * kernel_seconds(ring, 100_000_000, NETWORKS["v6e"]), 2)
    2.06
    """
    model, memory = network.device_model, network.memory_bandwidth
    if model is None or not (network.kernel or (memory and network.has_kernel)):
        raise ArgumentError("the time of a kernel is known only for TPU v4, v5p, v6e and 7x")
    partial_bytes = partial_sum_scale(schedule, wire_dtype) * payload_bytes
    result_bytes = payload_bytes if isinstance(schedule, SplitSchedule) else partial_bytes
    times = [
        kernel_traffic_seconds(schedule, size, network) for size in {partial_bytes, result_bytes}
    ]
    seconds = sum(times) / len(times)
    if network.kernel:
        return network.kernel.launch + seconds / network.kernel.efficiency
    return network.collective_launch + seconds + model.packing_seconds(result_bytes)


def kernel_traffic_seconds(schedule: Schedule, num_bytes: int, network: Network) -> float:
    """The time of a kernel's links, its memory or its instructions, whichever is slowest.

    Memory counts where its rate is known, and instructions where no measurement has them.
    """
    model, wires, instructions = network.device_model, network.wires_only, 0.0
    if model and network.has_kernel and network.kernel is None:
        steps = _kernel_steps(schedule, num_bytes, model)
        instructions = sum(number * seconds for number, seconds in steps)
        wires = replace(wires, overhead=wires.overhead + max(seconds for _, seconds in steps))
    seconds = max(Simulator(schedule).seconds(num_bytes, wires, DATAFLOW), instructions)
    if network.memory_bandwidth is None or model is None:
        return seconds
    return max(seconds, _memory_traffic(schedule, model) * num_bytes / network.memory_bandwidth)


def _kernel_steps(
    schedule: Schedule, payload_bytes: float, device_model: DeviceModel
) -> list[tuple[int, float]]:
    """For each phase, how many steps the kernel takes, and the seconds of the bundles of one."""
    model = device_model.for_topology(schedule.topology)
    steps = []
    for phase in schedule.phases:
        if isinstance(phase.content, Transfers):
            ops = set(np.unique(phase.content.op).tolist())
        else:
            ops = {COPY if rule.mirrored else ADD for rule in phase.content}
        kind = "either" if len(ops) > 1 else "added" if ADD in ops else "copied"
        load = round_load(phase)
        piece_bytes = payload_bytes / model.devices / schedule.num_chunks * max(phase.counts)
        pieces = max(
            1, math.ceil(piece_bytes / MAX_PIECE), min(4, int(4 * piece_bytes / MAX_PIECE))
        )
        bundles = STEP_BUNDLES + load.lanes * LANE_BUNDLES[kind]
        steps.append((phase.num_rounds * pieces, bundles / model.clock))
    return steps


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
