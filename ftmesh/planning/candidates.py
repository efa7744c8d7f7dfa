"""Candidates: one algorithm by one executor, for a topology and a payload: schedule and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ftmesh.algorithms import registry
from ftmesh.algorithms.rings import along_ring_order
from ftmesh.cost.executors import kernel_seconds, native_obstacle, native_ring_seconds
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import DATAFLOW, Simulator
from ftmesh.cost.wire_precision import FLOAT_FORMATS, accumulation_dtype, schedule_partial_dtype
from ftmesh.execute.lowering import EXECUTORS, PALLAS, PPERMUTE, XLA
from ftmesh.planning.plan_cache import cached_schedule, kernel_schedule, proof_of
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.verify import Proof, verify
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.routing import dimension_order
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology

# Cycles per byte of gradient to bring the shares of a schedule's owners into the order of the
# optimizer's state and back: what whole steps of BERT take more than with XLA's ring, compiled for
# v6e 16x16 less 2x2@2,2 (libtpu 0.0.51), in `flood` and in `ring`, which stands for all others.
# Since then `flood` numbers its shares along the mesh axis, and should take less.
_SHARD_CYCLES = {"flood": 0.038}
_OTHER_SHARD_CYCLES = 0.0114
_KERNEL_CLOCK = 1.75e9  # cycles per second of v5p and v6e


_FACTS: dict[str, Any] = {
    "algorithm": str,
    "rounds": int,
    "seconds": (int, float),
    "rejection": str,
    "partial_sum_dtype": str,
    "wires_seconds": (int, float, type(None)),
    "executor": str,
}


@dataclass(frozen=True)
class Candidate:
    """An algorithm and its simulated time, or the reason why it cannot serve."""

    algorithm: str
    rounds: int = 0
    seconds: float = math.inf
    rejection: str = ""
    partial_sum_dtype: str = "float32"
    wires_seconds: float | None = None  # on the links alone, if the network has a device model
    executor: str = PPERMUTE
    schedule: Schedule | None = field(default=None, repr=False, compare=False)

    @property
    def facts(self) -> dict[str, Any]:
        """All but the schedule, as JSON can hold it."""
        return {name: getattr(self, name) for name in _FACTS}

    @staticmethod
    def from_facts(facts: dict[str, Any]) -> Candidate:
        """Return the candidate with these facts; raises ValueError if they are of another kind."""
        is_known = facts.keys() == _FACTS.keys() and all(
            isinstance(facts[name], kind) for name, kind in _FACTS.items()
        )
        if not is_known or facts["algorithm"] not in registry.ALGORITHMS:
            raise ValueError(f"not the facts of a candidate: {facts!r:.200}")
        if facts["executor"] not in EXECUTORS or not facts["seconds"] >= 0:
            raise ValueError(f"not the facts of a candidate: {facts!r:.200}")
        return Candidate(**facts)

    @property
    def name(self) -> str:
        """The algorithm, and the executor unless that is permutations."""
        return self.algorithm if self.executor == PPERMUTE else f"{self.algorithm}, {self.executor}"


def cost_permutations(
    simulator: Simulator, payload_bytes: int, network: Network, wire_dtype: str
) -> Candidate:
    """Simulate a schedule for a payload whose partial sums travel in the dtype they need."""
    schedule = simulator.schedule
    seconds = simulator.wire_dtype_seconds(payload_bytes, network, wire_dtype)
    wires = None
    if network.device_model:
        wires = simulator.wire_dtype_seconds(payload_bytes, network.wires_only, wire_dtype)
    partials = schedule_partial_dtype(schedule, wire_dtype)
    return Candidate(
        schedule.algorithm, schedule.num_rounds, seconds, "", partials, wires, schedule=schedule
    )


def cost_native(
    topology: Topology, payload_bytes: int, network: Network, wire_dtype: str, reduce_scatter: bool
) -> Candidate:
    """XLA's own all-reduce along the ring; with `reduce_scatter`, and its all-gather after it."""
    order = ring_order(topology)
    if obstacle := native_obstacle(order):
        return Candidate("ring", rejection=obstacle, executor=XLA)
    added = accumulation_dtype(wire_dtype)
    num_bytes = (
        payload_bytes * FLOAT_FORMATS[added].num_bytes // FLOAT_FORMATS[wire_dtype].num_bytes
    )
    if isinstance(topology, TiledTopology):  # whose positions share links
        simulator, wires = Simulator(along_ring_order(topology)), network.wires_only
        summing = replace(wires, bandwidth=network.bandwidth * network.all_reduce_efficiency)
        seconds, gathering = (
            network.collective_launch + simulator.seconds(size, links, DATAFLOW)
            for size, links in ((num_bytes, summing), (payload_bytes // 2, wires))
        )
    else:
        seconds = native_ring_seconds(order, num_bytes, network)
        gathering = native_ring_seconds(order, payload_bytes, network, "all_gather")
    seconds += gathering if reduce_scatter else 0
    wires_seconds = None
    if network.device_model:
        bare = topology, payload_bytes, network.wires_only, wire_dtype, reduce_scatter
        wires_seconds = cost_native(*bare).seconds
    return Candidate("ring", 0, seconds, "", added, wires_seconds, XLA)


def cost_kernels(
    topology: Topology,
    payload_bytes: int,
    network: Network,
    wire_dtype: str,
    others: Sequence[Candidate],
    *,
    with_trees: bool,
) -> list[Candidate]:
    """Cost the kernel for the algorithms for which it was measured, as far as they can serve.

    Trees are planned only where they may take less time than all `others`.
    """
    assert network.kernel is not None
    schedules = {
        one.algorithm: one.schedule
        for one in others
        if one.schedule is not None and one.algorithm not in registry.CHUNKED_BY_PAYLOAD
    }
    for name in registry.CHUNKED_BY_PAYLOAD if with_trees else ():
        carried = carried_bytes(name, payload_bytes, wire_dtype)
        links = limits(topology).all_reduce_seconds(carried, network) / network.kernel.efficiency
        may_win = network.kernel.launch + links < min(one.seconds for one in others)
        if may_win and name in network.kernel.algorithms:
            schedules[name] = kernel_schedule(topology, name, carried, network)
    return [
        Candidate(
            name,
            schedule.num_rounds,
            kernel_seconds(schedule, payload_bytes, network, wire_dtype),
            partial_sum_dtype=schedule_partial_dtype(schedule, wire_dtype),
            executor=PALLAS,
            schedule=schedule,
        )
        for name, schedule in schedules.items()
        if name in network.kernel.algorithms
    ]


def shard_seconds(payload_bytes: int, network: Network) -> dict[str, float]:
    """Seconds to bring the shares of a sum into an optimizer's order and back, by algorithm."""
    if network.device_model is None and not network.has_kernel:
        return {}
    # Costs of a kernel are those of the wires alone, without a device model.
    clock = network.device_model.clock if network.device_model else _KERNEL_CLOCK
    seconds = payload_bytes / clock
    return {
        name: seconds * _SHARD_CYCLES.get(name, _OTHER_SHARD_CYCLES) for name in registry.ALGORITHMS
    }


def ranked(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Return the cheapest first; of equals, XLA's own."""
    return tuple(sorted(candidates, key=lambda one: (one.seconds, one.executor != XLA)))


def carried_bytes(algorithm: str, payload_bytes: int, wire_dtype: str) -> int:
    """The bytes that an algorithm splits; trees carry all in the dtype in which it is added."""
    if algorithm not in registry.CHUNKED_BY_PAYLOAD:
        return payload_bytes
    added = FLOAT_FORMATS[accumulation_dtype(wire_dtype)].num_bytes
    return payload_bytes * added // FLOAT_FORMATS[wire_dtype].num_bytes


def make_schedule(
    topology: Topology,
    algorithm: str,
    payload_bytes: int,
    wire_dtype: str,
    network: Network,
    *,
    executor: str,
) -> Schedule:
    """Plan `algorithm` for a payload; a kernel gets a schedule that does not wait for rounds."""
    if executor == XLA:
        return along_ring_order(topology)
    carried = carried_bytes(algorithm, payload_bytes, wire_dtype)
    if executor == PALLAS:
        return kernel_schedule(topology, algorithm, carried, network)
    return cached_schedule(topology, algorithm, carried, network)


def prove_schedule(schedule: Schedule, executor: str) -> Proof:
    """Prove a schedule; XLA's ring with the routes of a mesh that knows of no failure."""
    if executor == XLA:
        return verify(schedule, router=dimension_order)
    return proof_of(schedule)
