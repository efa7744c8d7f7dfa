"""The algorithms: one file each, from a topology to a schedule, knowing nothing of JAX.

A planner is a module with a function ``plan(topology)``, which returns a schedule or raises a
`PlanError` that says in a sentence why the algorithm cannot serve that mesh. One of `CHUNKED_BY_PAYLOAD`
takes the number of chunks, too.
"""

from __future__ import annotations

from typing import Protocol

from ftmesh.algorithms import chain, flood, multi_ring, ring, row_pair, tree, two_dim
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.topology.notation import format_failed
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes


class Planner(Protocol):
    """What each algorithm's module offers."""

    def build_schedule(self, topology: Topology) -> Schedule:
        """A schedule for `topology`, or a `PlanError` that says why not."""


ALGORITHMS: dict[str, Planner] = {
    "two_dim": two_dim,
    "row_pair": row_pair,
    "ring": ring,
    "multi_ring": multi_ring,
    "chain": chain,
    "flood": flood,
    "tree": tree,
}
FALLBACKS = ("flood",)  # serves every mesh that is not cut, and takes longer to plan
CHUNKED_BY_PAYLOAD = ("tree",)  # serves every such mesh, too, and has no halves
TORUS_ONLY = ("multi_ring",)  # not worth a word on a mesh that is none
RINGS = ("ring", "row_pair")  # use two links of a chip at a time
MAX_RANKS = 16_384
_BYTES_PER_PAIR = 112  # of ranks: four transfers of a ring, seven columns of four bytes each


def build_schedule(
    topology: Topology, algorithm: str, num_chunks: int | None = None, *, lag: int = 0
) -> Schedule:
    """The schedule of `algorithm`, or a `PlanError` that says why not and which one can.

    The payload is cut into `num_chunks`, and links are `lag` rounds late, for algorithms that ask.
    """
    if algorithm not in ALGORITHMS:
        raise PlanError(f"there is no algorithm {algorithm!r}: choose from {', '.join(ALGORITHMS)}")
    check_connected(topology)
    found = _outcome(topology, algorithm, num_chunks, lag)
    if isinstance(found, Schedule):
        return found
    able = [name for name, other in _quick(topology).items() if isinstance(other, Schedule)]
    able = able or [*FALLBACKS, *CHUNKED_BY_PAYLOAD]
    raise PlanError(f"{algorithm} cannot run on {topology}: {found}; use {' or '.join(able)}")


def try_algorithms(topology: Topology) -> dict[str, Schedule | PlanError]:
    """What the algorithms make of `topology`: schedules, one or more, or reasons.

    Those of `CHUNKED_BY_PAYLOAD` ask for a payload; those of `FALLBACKS` are left out where another has
    made a schedule with halves. Where every chip has three links or more, those of `RINGS` are not
    enough for that.
    """
    check_connected(topology)
    found = _quick(topology)
    able = {name for name, outcome in found.items() if isinstance(outcome, SplitSchedule)}
    if all(len(topology.neighbours(coord)) > 2 for coord in topology.coords):
        able.difference_update(RINGS)
    if not able:
        found |= {name: _outcome(topology, name) for name in FALLBACKS}
    return found


def has_fast_algorithm(topology: Topology) -> bool:
    """Whether an algorithm serves `topology` that is planned in next to no time."""
    return any(isinstance(outcome, Schedule) for outcome in _quick(topology).values())


def _quick(topology: Topology) -> dict[str, Schedule | PlanError]:
    left_out = {*FALLBACKS, *CHUNKED_BY_PAYLOAD}
    if not any(topology.wrap):
        left_out.update(TORUS_ONLY)
    return {name: _outcome(topology, name) for name in ALGORITHMS if name not in left_out}


def _outcome(
    topology: Topology, algorithm: str, num_chunks: int | None = None, lag: int = 0
) -> Schedule | PlanError:
    try:
        if algorithm in CHUNKED_BY_PAYLOAD and num_chunks is not None:
            return tree.build_schedule(topology, num_chunks, lag=lag)
        return ALGORITHMS[algorithm].build_schedule(topology)
    except PlanError as error:
        return error


def check_size(topology: Topology) -> None:
    """Refuse a mesh that is too large to be planned for, with what that would take."""
    if topology.num_live > MAX_RANKS:
        needed = _BYTES_PER_PAIR * topology.num_live**2
        raise PlanError(
            f"{topology} has {topology.num_live:,} live {topology.noun}s, and a schedule through "
            f"all of them would take some {format_bytes(needed)}: plan for {MAX_RANKS:,} at most, "
            "or in tiles"
        )


def check_connected(topology: Topology) -> None:
    """Refuse what no algorithm could serve."""
    check_size(topology)
    if topology.num_live < 2:
        raise PlanError(f"{topology} has a single live {topology.noun}: there is nothing to sum")
    parts = topology.components()
    if len(parts) > 1:
        sizes = ", ".join(f"{len(part)} {topology.noun}s around {part[0]}" for part in parts)
        raise PlanError(
            f"{topology} is cut into {len(parts)} parts that no link joins: {sizes}; "
            f"the largest whole sub-mesh is {topology.largest_rectangle()}{_largest_part(topology)}"
        )


def _largest_part(topology: Topology) -> str:
    """How to go on with most chips, in words."""
    if topology.physical is not topology:
        return ""  # tiles cannot be named as chips are
    others = {chip for part in topology.components()[1:] for chip in part}
    failed = format_failed(topology.failed | others)
    return f", the largest part what failed={failed!r} leaves"
