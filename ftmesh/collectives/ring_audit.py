"""Judge XLA's own collectives: the order of their chips, what they cost, and how they round.

XLA sends from each device of a replica group to the next, and from the last to the first. If these
are neighbouring chips, as on the mesh of a plan, every step is one hop over a link of its own. If
not, steps share links, and the network's routes, which know nothing of failures, may cross failed
chips.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby, permutations
from typing import Any

from ftmesh.cost.executors import (
    Operation,
    native_obstacle,
    native_ring_seconds,
    sums_over_axes,
)
from ftmesh.cost.links import Network, network_for
from ftmesh.cost.wire_precision import FLOAT_FORMATS, LARGEST_ERROR, worst_error
from ftmesh.errors import ArgumentError
from ftmesh.execute.hlo_text import Computations, Ids, Instruction
from ftmesh.topology.notation import Coord
from ftmesh.topology.ranks import HasTopology, Ranks
from ftmesh.topology.ring_order import RingOrder
from ftmesh.topology.routing import dimension_order
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology

REDUCTIONS = ("all-reduce", "reduce-scatter")
EXCHANGES = ("all-to-all", "ragged-all-to-all")
WRITTEN_EXCHANGES = ("all_to_all", "ragged_all_to_all")  # by the user; others are the compiler's
_OPERATIONS: dict[str, Operation] = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
}
_HLO_FLOATS = {
    "f64": "float64", "f32": "float32", "bf16": "bfloat16", "f16": "float16",
    "f8e5m2": "float8_e5m2", "f8e4m3": "float8_e4m3", "f8e4m3fn": "float8_e4m3fn",
}  # fmt: skip

ORDER = "make the mesh by plan.jax_mesh({axis!r}), whose devices stand along a ring of neighbours"
OVER_LINKS = (
    "mark a chip at each failed link as failed, so that XLA sums along a ring; or sum along "
    "{axis!r} by plan.value_and_grad, or by plan.psum in jax.shard_map, on a plan with "
    "executor='ppermute'"
)
NO_RING = (
    "no ring through these chips is clear of failures: sum along {axis!r} by plan.value_and_grad, "
    "or by plan.psum in jax.shard_map, on a plan with executor='ppermute'"
)
PERMUTATION = (
    "call plan.ppermute, or permute between neighbours on plan.jax_mesh({axis!r}): routes between "
    "others know nothing of failures"
)
EXCHANGE = "call plan.all_to_all, which goes around the ring, or exchange inside tiles"
OVER_AXES = "it goes over all axes, also over failed links"
BY_AXES = "run it along {axis!r}, and then inside tiles"
INSIDE = (
    "mark a chip at each failed link as failed, so that its tile takes no part; or cut tiles that "
    "no failed link is in"
)
RESHARDED = (
    "the compiler moves an array from one sharding to another here: hold activations to "
    "P({axis!r}) with jax.lax.with_sharding_constraint, and cut embeddings along the vocabulary"
)
ROUNDING = (
    "sum in float32: keep parameters in float32 and cast them in the loss, give dots "
    "preferred_element_type=jnp.float32, or call plan.psum in jax.shard_map, which adds in float32"
)


@dataclass(frozen=True, eq=False)
class CompiledCollective:
    """A collective of a compiled program; `groups` index the devices of its mesh."""

    kind: str  # the HLO operation, such as "all-reduce"
    instruction: Instruction
    groups: Sequence[Ids]
    num_bytes: int
    computations: Computations


@dataclass(frozen=True)
class RingVerdict:
    """What is wrong with a collective, what to do, and its cost; good if `problem` is empty."""

    problem: str = ""
    advice: str = ""
    seconds: float | None = None  # on the wires, each time it runs; None if routes are not live


@dataclass(frozen=True)
class NativeRing:
    """The chips behind the devices of a program, in the order of its mesh.

    Attributes:
        best: The ring of the plan, which others may not be longer than. Chips that the plan keeps
            idle count as live in its topology: they run the program.
        network: The links that costs are computed for.
        coords: The chip, or the tile, of each device.
        physical: The topology of chips, and `chips` has the one of each device.
    """

    best: RingOrder
    network: Network
    coords: tuple[Coord, ...]
    physical: Topology
    chips: tuple[Coord, ...]

    @staticmethod
    def for_devices(plan: HasTopology | Topology, devices: Sequence[Any]) -> NativeRing:
        """Find the chips of the devices of a mesh.

        Raises:
            ArgumentError: The plan was made without devices, or for others.
        """
        ranks = Ranks.from_plan(plan)
        topology = ranks.topology
        physical = topology.physical.without_devices()
        chip_of = _chips_of_devices(topology)
        if not chip_of:
            raise ArgumentError(
                f"the plan for {topology} was made without devices: make it for "
                "Topology.from_devices(jax.devices(), ...), so that the audit knows their chips"
            )
        missing = [device for device in devices if device not in chip_of]
        if missing:
            raise ArgumentError(
                f"the program runs on {missing[0]}, which is not among the devices of "
                f"{topology}: give the plan that its mesh was made for"
            )
        given = getattr(plan, "network", None)
        network = given if isinstance(given, Network) else network_for(topology)
        if ranks.with_idle:
            topology = replace(topology, failed=frozenset())
            physical = replace(physical, failed=frozenset())
        best = RingOrder(topology, ranks.coords)
        coords, chips = zip(*(chip_of[device] for device in devices), strict=True)
        return NativeRing(best, network, coords, physical, chips)

    @property
    def topology(self) -> Topology:
        return self.best.topology

    def judge(self, collective: CompiledCollective) -> RingVerdict:
        """Judge one collective, on the devices of this mesh."""
        kind, groups, noun = collective.kind, collective.groups, self.topology.noun
        used = {self.coords[i] for group in groups for i in group}
        if failed := sorted(used & self.topology.failed):
            return RingVerdict(f"it takes part on failed {noun}s, such as {failed[0]}", ORDER)
        is_inside = all(len({self.coords[i] for i in group}) == 1 for group in groups)
        is_damaged = self.topology.failed or self.topology.failed_links
        if kind in EXCHANGES and is_damaged and not is_inside:
            operation = collective.instruction.op_name.rpartition("/")[2]
            advice = EXCHANGE if operation in WRITTEN_EXCHANGES else RESHARDED
            return RingVerdict(
                f"it sends between all pairs of {noun}s, also across failed ones", advice
            )
        judge = _judge_rounding if is_inside else self._judge_on_ring
        verdict = judge(collective)
        return verdict if verdict.problem else self._judge_on_chips(kind, groups) or verdict

    def _judge_on_ring(self, collective: CompiledCollective) -> RingVerdict:
        """Judge a collective by the steps of its rings, from each rank to the next."""
        kind, groups, num_bytes = collective.kind, collective.groups, collective.num_bytes
        orders = [RingOrder(self.topology, walk) for walk in {*map(self._walk, groups)}]
        if kind == "collective-permute":
            return self._judge_permutation(orders, num_bytes)
        for order in orders:
            if kind in REDUCTIONS and sums_over_axes(order) and native_obstacle(order):
                return RingVerdict(OVER_AXES, OVER_LINKS)
            if order.blocked:
                advice = NO_RING if self.best.blocked else ORDER
                return RingVerdict(self._blocked(order.blocked), advice)
        seconds = max(self._seconds(kind, order, num_bytes) for order in orders)
        for order in orders:
            is_whole = {*order.coords} == {*self.best.coords}
            allowed = max(len(order.hops), sum(self.best.hops) if is_whole else 0)
            is_by_order = kind not in REDUCTIONS or not sums_over_axes(order)
            if is_by_order and sum(order.hops) > allowed:
                return RingVerdict(self._long(order.hops), ORDER, seconds)
        return _judge_rounding(collective, seconds)

    def _judge_on_chips(self, kind: str, groups: Sequence[Ids]) -> RingVerdict | None:
        """Judge a collective inside tiles, or over several positions of them, by its chips.

        None if nothing is wrong with its routes, or if it goes straight from tile to tile. Inside a
        tile none crosses a failed chip: its sides divide the axis, so the shorter way around one
        that wraps is inside the tile.
        """
        if not isinstance(self.topology, TiledTopology):
            return None
        for group in groups:
            is_inside = len({self.coords[i] for i in group}) == 1
            walk = _walk([self.chips[i] for i in group])
            positions = {tuple(map(operator.mod, chip, self.topology.tile)) for chip in walk}
            if len(positions) == 1 or (is_inside and not self.physical.failed_links):
                continue
            order = RingOrder(self.physical, walk)
            if kind in REDUCTIONS and sums_over_axes(order):
                if native_obstacle(order):
                    return RingVerdict(OVER_AXES, OVER_LINKS)
            elif pair := _first_blocked(order, kind):
                between = PERMUTATION if kind == "collective-permute" else BY_AXES
                route = f"its route from chip {pair[0]} to {pair[1]}"
                return RingVerdict(
                    f"{route} crosses failed chips or links", INSIDE if is_inside else between
                )
        return None

    def _judge_permutation(self, pairs: Sequence[RingOrder], num_bytes: int) -> RingVerdict:
        steps = [pair for pair in pairs if len(pair.coords) > 1]
        blocked = [step.steps[0] for step in steps if _crosses(self.topology, *step.coords)]
        if blocked:
            return RingVerdict(self._blocked(blocked), PERMUTATION)
        hops = [step.hops[0] for step in steps] or [0]
        network = self.network
        wires = self._num_streams * num_bytes / network.bandwidth
        seconds = network.overhead + max(hops) * network.latency + wires
        if network.device_model:
            seconds += network.device_model.launch
        of_ring = {frozenset(step) for step in self.best.steps}
        if any(step.hops[0] > 1 and frozenset(step.coords) not in of_ring for step in steps):
            return RingVerdict(self._long(hops), PERMUTATION, seconds)
        return RingVerdict(seconds=seconds)

    def _walk(self, group: Ids) -> tuple[Coord, ...]:
        return _walk([self.coords[i] for i in group])

    def _blocked(self, steps: Sequence[tuple[Coord, Coord]]) -> str:
        (a, b), *others = sorted(steps)
        more = f", and {len(others)} more do" if others else ""
        noun = self.topology.noun
        return f"its step from {noun} {a} to {b} crosses failed {noun}s or links{more}"

    def _long(self, hops: Sequence[int]) -> str:
        count = sum(number > 1 for number in hops)
        verb = "is" if count == 1 else "are"
        return (
            f"{count} of its {len(hops)} steps {verb} longer than a hop"
            f"{', the longest' if count > 1 else ','} {max(hops)} hops"
        )

    @property
    def _num_streams(self) -> int:
        """Chips of neighbouring tiles are a side apart, and as many streams share each link."""
        return max(self.topology.tile) if isinstance(self.topology, TiledTopology) else 1

    def _seconds(self, kind: str, order: RingOrder, num_bytes: int) -> float:
        operation = _OPERATIONS.get(kind, "all_gather")
        seconds = native_ring_seconds(order, num_bytes, self.network, operation)
        return self._num_streams * seconds


def _walk(coords: Sequence[Coord]) -> tuple[Coord, ...]:
    """The chips of devices in their order; devices side by side on a chip count once."""
    walk = [coord for coord, _ in groupby(coords)]
    return tuple(walk[:-1] if len(walk) > 1 and walk[0] == walk[-1] else walk)


@lru_cache(maxsize=4096)
def _first_blocked(order: RingOrder, kind: str) -> tuple[Coord, Coord] | None:
    """Two chips between which a collective crosses a failure, if there are any."""
    topology, chips = order.topology, dict.fromkeys(order.coords)
    if kind not in (*EXCHANGES, "collective-permute"):
        return next(iter(order.blocked), None)
    pairs: Iterable[tuple[Coord, Coord]] = order.steps[:1]
    if kind in EXCHANGES:  # those at a failed link are found at once
        of_links = (link for link in topology.failed_links if {*link} <= chips.keys())
        pairs = chain(of_links, permutations(chips, 2))
    return next((pair for pair in pairs if _crosses(topology, *pair)), None)


def _crosses(topology: Topology, source: Coord, destination: Coord) -> bool:
    """Whether the route of what is sent, which goes one way only, crosses a failed chip or link."""
    route = dimension_order(topology, source, destination)
    return not all(map(topology.is_link, route, route[1:]))


def _chips_of_devices(topology: Topology) -> dict[Any, tuple[Coord, Coord]]:
    """The rank's coordinates and the chip of every device.

    Those of failed chips are included where the topology has them.
    """
    per_rank = topology.devices_per_chip * topology.num_positions
    chips: dict[Any, tuple[Coord, Coord]] = {}

    def add(coords: Sequence[Coord], devices: Sequence[Any]) -> None:
        own = topology.chips_of(coords) if isinstance(topology, TiledTopology) else coords
        for i, device in enumerate(devices):
            chips[device] = coords[i // per_rank], own[i * len(own) // len(devices)]

    if len(topology.all_devices) == topology.num_chips * per_rank:
        add(tuple(topology.all_coords()), topology.all_devices)
    add(topology.coords, topology.devices)
    return chips


def _judge_rounding(collective: CompiledCollective, seconds: float | None = None) -> RingVerdict:
    """Judge the dtype of what is added, of a collective that is good otherwise."""
    if collective.kind in REDUCTIONS:
        num_summands = max(map(len, collective.groups))
        problem = _rounding_problem(collective.instruction, num_summands, collective.computations)
        if problem:
            return RingVerdict(problem, ROUNDING, seconds)
    return RingVerdict(seconds=seconds)


def _rounding_problem(
    instruction: Instruction, num_summands: int, computations: Computations
) -> str:
    """What is wrong with the dtype of a sum; empty for other reductions."""
    added = [x for name in instruction.calls for x in computations.get(name, ())]
    if not any(x.opcode == "add" for x in added):
        return ""
    for name in dict.fromkeys(re.findall(r"([a-z]\w*)\[", instruction.type)):
        dtype = _HLO_FLOATS.get(name)
        if dtype and worst_error(dtype, num_summands - 1) > LARGEST_ERROR:
            bits = 8 * FLOAT_FORMATS[dtype].num_bytes
            error = worst_error(dtype, num_summands - 1)
            return (
                f"it adds {num_summands} numbers in {bits} bits: a sum in {dtype} could be "
                f"{error:.1%} off, {LARGEST_ERROR:.0%} is the bound"
            )
    return ""
