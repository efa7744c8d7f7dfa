"""Choose: price the algorithms on a topology, and take the fastest for the payload.

Trees, which serve every mesh, take long to plan, a second on 16x16 and more on larger meshes. So
``auto`` prices them where nothing else serves, on three axes where nothing else comes near the
limit, and where the network has a device model, as TPUs do; ``best`` wherever they could be faster. A
bound tells that before anything is planned.

>>> choice = choose(Topology.grid("8x8", failed="2x2@2,2"), 1_000_000)
>>> choice.algorithm
'row_pair'
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import Simulator
from ftmesh.cost.wire_precision import FLOATS, added_in, partial_sum_dtype, wire_named
from ftmesh.errors import PlanError
from ftmesh.planning.chunking import is_soon, least_seconds, schedule_for
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes, format_bytes, format_time

AUTO, BEST = "auto", "best"
CHOSEN = (AUTO, BEST)
NEAR = 1.1  # times the limit
ALGORITHMS = (*CHOSEN, *registry.PLANNERS)


@dataclass(frozen=True)
class Candidate:
    """An algorithm and its simulated time, or the reason why it cannot serve.

    Where the network has a device model, `wires_seconds` is the time on the wires alone.
    """

    algorithm: str
    rounds: int = 0
    seconds: float = math.inf
    refusal: str = ""
    partials: str = "float32"  # the dtype in which partial sums travel
    wires_seconds: float | None = None


@dataclass(frozen=True)
class Choice:
    """Every algorithm on one topology for one payload, the fastest first."""

    topology: Topology
    payload_bytes: int
    network: Network
    candidates: tuple[Candidate, ...]
    wire_dtype: str = "float32"

    @property
    def algorithm(self) -> str:
        """The fastest."""
        return self.candidates[0].algorithm

    def beside(self, schedule: Schedule) -> Choice:
        """The same, with this schedule as what its algorithm makes of the topology."""
        own = _priced(Simulator(schedule), self.payload_bytes, self.network, self.wire_dtype)
        others = (one for one in self.candidates if one.algorithm != own.algorithm)
        ranked = sorted([own, *others], key=lambda one: one.seconds)
        return replace(self, candidates=tuple(ranked))

    def __str__(self) -> str:
        least = limits(self.topology).all_reduce_seconds(self.payload_bytes, self.network)
        is_narrow = self.wire_dtype != "float32"
        device_model = self.network.device_model
        what = f" of {self.wire_dtype}" if is_narrow else ""
        lines = [
            f"{format_bytes(self.payload_bytes)}{what} on {self.topology}, {self.network}",
            f"  {'algorithm':<12}{'rounds':>7}{'simulated':>12}{'x limit':>9}"
            + f"{'wires alone':>13}" * bool(device_model)
            + "  partial sums travel as" * is_narrow,
        ]
        for one in self.candidates:
            if one.refusal:
                lines.append(f"  {one.algorithm:<12}cannot: {one.refusal}")
            else:
                lines.append(
                    f"  {one.algorithm:<12}{one.rounds:>7}{format_time(one.seconds):>12}"
                    f"{one.seconds / least:>9.2f}"
                    + ("" if one.wires_seconds is None else f"{format_time(one.wires_seconds):>13}")
                    + f"  {one.partials}" * is_narrow
                )
        if device_model:
            lines.append(f"  executor: {device_model}")
        return "\n".join([*lines, f"  no all-reduce can take less than {format_time(least)}"])


def choose(
    topology: Topology,
    payload_bytes: int,
    on: Network = DEFAULT,
    wire_dtype: str = "float32",
    *,
    halves: bool = False,
    best: bool = False,
    trees: bool = False,
) -> Choice:
    """Price the algorithms that can serve `topology`, in synchronous rounds, with the executor's.

    The payload has so many bytes in `wire_dtype`. Where partial sums may not travel in that, as
    `ftmesh.cost.wire_precision` tells, the first half of the schedule carries more, and is priced so.
    With `halves`, only algorithms that come as a reduce-scatter and an all-gather are looked at.
    Trees are priced where no other serves; with `best` or a device model, also where they could be
    faster; and with `trees`, in any case. A `PlanError` where no algorithm can. What was found is
    remembered for the next call with an equal topology, payload, network and dtype.
    """
    wire_named(wire_dtype)
    payload_bytes = check_bytes(payload_bytes)
    bare = topology.without_devices()
    return _choose(bare, payload_bytes, on, wire_dtype, halves, best, trees)


@lru_cache(maxsize=256)
def _choose(
    topology: Topology,
    payload_bytes: int,
    on: Network,
    wire_dtype: str,
    halves: bool,
    best: bool,
    trees: bool,
) -> Choice:
    candidates = [
        Candidate(name, refusal=each)
        if isinstance(each, str)
        else _priced(each, payload_bytes, on, wire_dtype)
        for name, each in _simulators(topology).items()
    ]
    asked = best or _asks_for_trees(topology, payload_bytes, on, candidates)
    if trees or (asked and not halves):
        fastest = min(one.seconds for one in candidates)
        for name in registry.CUT_BY_SIZE:
            carried = carried_bytes(name, payload_bytes, wire_dtype)
            least = least_seconds(topology, carried, on)
            if least < fastest or trees:
                simulator = Simulator(schedule_for(topology, name, carried, on))
                candidates.append(_priced(simulator, payload_bytes, on, wire_dtype))
            else:
                why = f"it could not take less than {format_time(least)}"
                candidates.append(Candidate(name, refusal=why))
    ranked = sorted(candidates, key=lambda one: one.seconds)
    if ranked[0].refusal:
        reasons = [f"{one.algorithm} cannot run on {topology}: {one.refusal}" for one in ranked]
        rest = f"the largest whole sub-mesh is {topology.largest_rectangle()}"
        raise PlanError("; ".join([*reasons, rest]))
    return Choice(topology, payload_bytes, on, tuple(ranked), wire_dtype)


def _asks_for_trees(
    topology: Topology, payload_bytes: int, on: Network, candidates: list[Candidate]
) -> bool:
    """Whether nothing else serves as well as it should, or comes near the limit on three axes.

    With an executor's costs rounds are dear, of which trees have few; they are looked at where
    they are planned in seconds.
    """
    if any(one.algorithm in registry.LAST_RESORT for one in candidates):
        return True
    if on.device_model and is_soon(topology, payload_bytes, on):
        return True
    if len(topology.shape) < 3:
        return False
    least = limits(topology).all_reduce_seconds(payload_bytes, on)
    on_wires = (one.wires_seconds or one.seconds for one in candidates)
    return min(on_wires) > NEAR * least


@lru_cache(maxsize=4)
def _simulators(topology: Topology) -> dict[str, Simulator | str]:
    """Each algorithm made ready to be priced, or the reason why it cannot serve."""
    return {
        name: str(outcome) if isinstance(outcome, PlanError) else Simulator(outcome)
        for name, outcome in registry.outcomes(topology).items()
    }


def _priced(simulator: Simulator, payload_bytes: int, on: Network, wire_dtype: str) -> Candidate:
    """An algorithm for a payload in `wire_dtype`, with what its partial sums take in theirs."""
    schedule = simulator.schedule
    wires = seconds_of(simulator, payload_bytes, on.wires, wire_dtype) if on.device_model else None
    return Candidate(
        algorithm=schedule.algorithm,
        rounds=schedule.num_rounds,
        seconds=seconds_of(simulator, payload_bytes, on, wire_dtype),
        partials=partials_of(schedule, wire_dtype),
        wires_seconds=wires,
    )


def seconds_of(simulator: Simulator, payload_bytes: int, on: Network, wire_dtype: str) -> float:
    """The time of a schedule alone."""
    times = partials_times(simulator.schedule, wire_dtype)
    if times == 1:
        return simulator.seconds(payload_bytes, on)
    first, _ = simulator.half_seconds(times * payload_bytes, on)
    _, second = simulator.half_seconds(payload_bytes, on)
    return first + second


def partials_times(schedule: Schedule, wire_dtype: str) -> int:
    """How many times the bytes of results those of partial sums are."""
    partials = partials_of(schedule, wire_dtype)
    return FLOATS[partials].num_bytes // FLOATS[wire_dtype].num_bytes


def partials_of(schedule: Schedule, wire_dtype: str) -> str:
    """The dtype in which partial sums of a payload travel.

    Without halves nothing tells them from results, and all travels as it is added.
    """
    if not isinstance(schedule, SplitSchedule):
        return added_in(wire_dtype)
    return partial_sum_dtype(wire_dtype, depth=depth_on_devices(schedule))


def carried_bytes(algorithm: str, payload_bytes: int, wire_dtype: str) -> int:
    """The bytes that an algorithm cuts of a payload in `wire_dtype`: without halves, as added."""
    if algorithm not in registry.CUT_BY_SIZE:
        return payload_bytes
    return payload_bytes * FLOATS[added_in(wire_dtype)].num_bytes // FLOATS[wire_dtype].num_bytes


def depth_on_devices(schedule: Schedule) -> int:
    """The longest chain of additions, with those between the devices of a chip."""
    return schedule.depth + schedule.topology.devices_per_chip - 1
