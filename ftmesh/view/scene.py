"""Scene: a mesh, what its algorithms planned, and their prices, as plain JSON for the page.

The page plans nothing and prices nothing: what it plays are the transfers listed here, and what it
plots are times that `ftmesh.cost` simulated. Fields:

- ``mesh``: shape, wrap, failed, failed_links, devices_per_chip, and its name in words.
- ``payloads`` (bytes), and for each, in ``limit_us``, the least time of any all-reduce.
- ``algorithms``: for each its name and, of one that was looked at, the ``refusal``, or rounds,
  ``us`` and ``phase_us`` (the time for each payload, and the end of each phase) and the
  ``schedule``. ``auto`` is the name that `ftmesh.plan` takes for ``payload_bytes``, and ``shown``
  the one that is shown first.
- A schedule is written by `ftmesh.view.encoding`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.planning.chunking import schedule_for
from ftmesh.planning.selection import AUTO, choose
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.notation import Coord, format_shape
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.view.encoding import write_mesh, write_schedule

FORMAT = "ftmesh.view/1"
ALL = "all"
MAX_CHIPS = 1024  # of a mesh that the page shows
_PAYLOADS = (4_000, 4_000_000_000, 25)  # from, to, and how many, evenly on a logarithmic scale


def scene(
    topology: Topology,
    algorithm: str = AUTO,
    *,
    payload_bytes: int = 100_000_000,
    on: Network = DEFAULT,
) -> dict[str, Any]:
    """What the page shows of `topology`: every algorithm's price, and proved schedules.

    With ``"auto"`` or a name the schedule of that one is there, and with ``"all"`` every one that
    can be; those that take long are looked at only if nothing else serves, if they are asked for,
    or if the network has an executor. A `PlanError` where no algorithm can serve the mesh, or not
    the one that was asked for.

    >>> made = scene(Topology.grid("8x8", failed="2x2@2,2"))
    >>> made["auto"], [each["rounds"] for each in made["algorithms"] if "schedule" in each]
    ('ring', [118])
    """
    check_fits(topology.shape)
    auto = choose(topology, payload_bytes, on).algorithm
    found = _outcomes(topology, algorithm, auto, payload_bytes, on)
    payloads = _payloads(payload_bytes)
    priced = _prices(found, payloads, on)
    shown = {AUTO: [auto], ALL: list(priced)}.get(algorithm, [algorithm])
    return {
        **_frame(topology, payload_bytes, payloads, on),
        "auto": auto,
        "shown": auto if algorithm == ALL else shown[0],
        "algorithms": _entries(found, priced, shown),
    }


def scene_of(
    schedule: Schedule, *, payload_bytes: int = 100_000_000, on: Network = DEFAULT
) -> dict[str, Any]:
    """What the page shows of a schedule that was made before, such as one from a file.

    Its ``auto`` is None: nothing else was looked at.
    """
    if isinstance(schedule.topology, TiledTopology):
        raise ArgumentError(
            f"the schedule is for tiles of {schedule.topology.chips}, and the page shows chips: "
            "see 'ftmesh draw'"
        )
    check_fits(schedule.topology.shape)
    found: dict[str, Schedule | PlanError] = {schedule.algorithm: schedule}
    payloads = _payloads(payload_bytes)
    return {
        **_frame(schedule.topology, payload_bytes, payloads, on),
        "auto": None,
        "shown": schedule.algorithm,
        "algorithms": _entries(found, _prices(found, payloads, on), [schedule.algorithm]),
    }


def _frame(
    topology: Topology, payload_bytes: int, payloads: list[int], on: Network
) -> dict[str, Any]:
    """What does not depend on algorithms."""
    least = limits(topology)
    return {
        "format": FORMAT,
        "mesh": write_mesh(topology),
        "network": str(on) + (", with the executor" if on.device_model else ""),
        "payload_bytes": payload_bytes,
        "payloads": payloads,
        "limit_us": [_us(least.all_reduce_seconds(size, on)) for size in payloads],
        "limit_why": least.why_all_reduce,
    }


def _entries(
    found: dict[str, Schedule | PlanError], priced: dict[str, Any], shown: list[str]
) -> list[dict[str, Any]]:
    entries = []
    for name in dict.fromkeys([*registry.PLANNERS, *found]):
        if name in registry.FOR_TORI and name not in found:
            continue  # the mesh is none
        outcome = found.get(name)
        entry: dict[str, Any] = {"algorithm": name}
        if isinstance(outcome, PlanError):
            entry["refusal"] = str(outcome)
        elif outcome is not None:
            entry |= priced[name]
            if name in shown:
                entry["schedule"] = write_schedule(outcome)
        entries.append(entry)
    return entries


def check_fits(shape: Coord) -> None:
    """Refuse meshes that are too large for the page."""
    if math.prod(shape) > MAX_CHIPS:
        raise ArgumentError(
            f"the page shows meshes of up to {MAX_CHIPS:,} chips, and {format_shape(shape)} has "
            f"{math.prod(shape):,}: give a smaller one, or see 'ftmesh plan' and 'ftmesh draw'"
        )


def _outcomes(
    topology: Topology, algorithm: str, auto: str, payload_bytes: int, on: Network
) -> dict[str, Schedule | PlanError]:
    """Schedules and refusals, by algorithm; those that take long only where they are wanted."""
    found = registry.outcomes(topology)
    wanted = [algorithm] if algorithm not in (AUTO, ALL) else []
    if algorithm == ALL:
        wanted += (*registry.LAST_RESORT, *registry.CUT_BY_SIZE)
    for name in dict.fromkeys([auto, *wanted]):
        if name not in found:
            found[name] = schedule_for(topology, name, payload_bytes, on)
    if algorithm not in (AUTO, ALL) and not isinstance(found.get(algorithm), Schedule):
        schedule_for(topology, algorithm, payload_bytes, on)  # says why not, and which one can
    return found


def _payloads(payload_bytes: int) -> list[int]:
    low, high, number = _PAYLOADS
    evenly = np.geomspace(low, high, number).round().astype(np.int64).tolist()
    return sorted({*evenly, payload_bytes})


def _prices(
    found: dict[str, Schedule | PlanError], payloads: list[int], on: Network
) -> dict[str, dict[str, Any]]:
    return {
        name: _price(outcome, payloads, on)
        for name, outcome in found.items()
        if isinstance(outcome, Schedule)
    }


def _price(schedule: Schedule, payloads: list[int], on: Network) -> dict[str, Any]:
    simulator = Simulator(schedule)
    times = [simulator.phase_ends(size, on) for size in payloads]
    return {
        "rounds": schedule.num_rounds,
        "cut_by_size": schedule.algorithm in registry.CUT_BY_SIZE,
        "us": [_us(seconds) for seconds, _ in times],
        "phase_us": [[_us(end) for end in ends] for _, ends in times],
    }


def _us(seconds: float) -> float:
    return float(f"{1e6 * seconds:.6g}")
