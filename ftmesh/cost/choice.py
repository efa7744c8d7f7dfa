"""Choose: price every algorithm on a topology, and take the fastest for the payload.

>>> choice = choose(Topology.grid("8x8", failed="2x2@2,2"), 1_000_000)
>>> choice.algorithm
'row_pair'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ftmesh import planners
from ftmesh.cost.limits import limits
from ftmesh.cost.network import DEFAULT, Network
from ftmesh.cost.rounding import FLOATS, partials_travel_in, wire_named
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import PlanError
from ftmesh.mesh.topology import Topology
from ftmesh.schedule.schedule import Schedule
from ftmesh.units import format_bytes, format_time

AUTO = "auto"
ALGORITHMS = (AUTO, *planners.PLANNERS)


@dataclass(frozen=True)
class Candidate:
    """An algorithm and its simulated time, or the reason why it cannot serve.

    Where the network has an executor, `wires_seconds` is the time on the wires alone.
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

    def __str__(self) -> str:
        least = limits(self.topology).all_reduce_seconds(self.payload_bytes, self.network)
        is_narrow = self.wire_dtype != "float32"
        executor = self.network.executor
        what = f" of {self.wire_dtype}" if is_narrow else ""
        lines = [
            f"{format_bytes(self.payload_bytes)}{what} on {self.topology}, {self.network}",
            f"  {'algorithm':<12}{'rounds':>7}{'simulated':>12}{'x limit':>9}"
            + f"{'wires alone':>13}" * bool(executor)
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
        if executor:
            lines.append(f"  executor: {executor}")
        return "\n".join([*lines, f"  no all-reduce can take less than {format_time(least)}"])


def choose(
    topology: Topology, payload_bytes: int, on: Network = DEFAULT, wire_dtype: str = "float32"
) -> Choice:
    """Price every algorithm that can serve `topology`, in synchronous rounds, with the executor's.

    The payload has so many bytes in `wire_dtype`. Where partial sums may not travel in that, as
    `ftmesh.cost.rounding` tells, the first half of the schedule carries more, and is priced so. A
    `PlanError` where no algorithm can. What was found is remembered for the next call with an equal
    topology, payload, network and dtype.
    """
    wire_named(wire_dtype)
    return _choose(topology.without_devices(), payload_bytes, on, wire_dtype)


@lru_cache(maxsize=256)
def _choose(topology: Topology, payload_bytes: int, on: Network, wire_dtype: str) -> Choice:
    candidates = [
        Candidate(name, refusal=found)
        if isinstance(found, str)
        else _priced(found, payload_bytes, on, wire_dtype)
        for name, found in _simulators(topology).items()
    ]
    ranked = sorted(candidates, key=lambda one: one.seconds)
    return Choice(topology, payload_bytes, on, tuple(ranked), wire_dtype)


@lru_cache(maxsize=4)
def _simulators(topology: Topology) -> dict[str, Simulator | str]:
    """Each algorithm made ready to be priced, or the reason why it cannot serve."""
    return {
        name: str(outcome) if isinstance(outcome, PlanError) else Simulator(outcome)
        for name, outcome in planners.outcomes(topology).items()
    }


def _priced(simulator: Simulator, payload_bytes: int, on: Network, wire_dtype: str) -> Candidate:
    """An algorithm for a payload in `wire_dtype`, with what its partial sums take in theirs."""
    schedule = simulator.schedule
    partials = partials_travel_in(wire_dtype, depth=depth_on_devices(schedule))
    times = FLOATS[partials].num_bytes // FLOATS[wire_dtype].num_bytes

    def seconds(on: Network) -> float:
        if times == 1:
            return simulator.seconds(payload_bytes, on)
        first, _ = simulator.half_seconds(times * payload_bytes, on)
        _, second = simulator.half_seconds(payload_bytes, on)
        return first + second

    return Candidate(
        algorithm=schedule.algorithm,
        rounds=schedule.num_rounds,
        seconds=seconds(on),
        partials=partials,
        wires_seconds=seconds(on.wires) if on.executor else None,
    )


def depth_on_devices(schedule: Schedule) -> int:
    """The longest chain of additions, with those between the devices of a chip."""
    return schedule.depth + schedule.topology.devices_per_chip - 1
