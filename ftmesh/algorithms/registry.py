"""The algorithms by name, and which of them work on a mesh.

An algorithm is a function from a topology to a schedule. It raises a `PlanError` that says in one
sentence why if it does not work on that mesh. Those in `CHUNKED_BY_PAYLOAD` also take the number of
chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftmesh.algorithms import flood, rings, row_pair, tree
from ftmesh.errors import PlanError
from ftmesh.schedule.files import RENAMED_ALGORITHMS
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.topology.notation import format_failed
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes

ALGORITHMS: dict[str, Callable[[Topology], Schedule]] = {
    "two_dim": rings.build_two_dim,
    "row_pair": row_pair.build_schedule,
    "ring": rings.build_schedule,
    "multi_ring": rings.build_multi_ring,
    "chain": rings.build_chain,
    "flood": flood.build_schedule,
    "tree": tree.build_schedule,
}
FALLBACKS = ("flood",)  # work on every connected mesh, but take longer to build
CHUNKED_BY_PAYLOAD = ("tree",)  # work on every connected mesh, without a reduce-scatter
TORUS_ONLY = ("multi_ring",)  # not mentioned on meshes that do not wrap
RING_ALGORITHMS = ("ring", "row_pair")  # use two links of a chip at a time
MAX_RANKS = 16_384
_BYTES_PER_PAIR = 112  # of ranks: four transfers of a ring, seven columns of four bytes each


def current_name(algorithm: str) -> str:
    """Return the name that `algorithm` has today; old names are still accepted."""
    return RENAMED_ALGORITHMS.get(algorithm, algorithm)


def build_schedule(
    topology: Topology, algorithm: str, num_chunks: int | None = None, *, lag: int = 0
) -> Schedule:
    """Build the schedule of `algorithm`; raises a `PlanError` if it does not work on this mesh.

    For `CHUNKED_BY_PAYLOAD`, `num_chunks` is the parts that the payload is cut into, and `lag` the
    extra rounds that a transfer is under way.
    """
    name = current_name(algorithm)
    if name not in ALGORITHMS:
        raise PlanError(f"there is no algorithm {name!r}: choose from {', '.join(ALGORITHMS)}")
    check_connected(topology)
    outcome = _try_algorithm(topology, name, num_chunks, lag)
    if isinstance(outcome, Schedule):
        return outcome
    working = [name for name, other in _try_fast(topology).items() if isinstance(other, Schedule)]
    working = working or [*FALLBACKS, *CHUNKED_BY_PAYLOAD]
    raise PlanError(f"{name} cannot run on {topology}: {outcome}; use {' or '.join(working)}")


def try_algorithms(
    topology: Topology, *, fallbacks: bool = True
) -> dict[str, Schedule | PlanError]:
    """Return, by name, the schedules of the algorithms on `topology`, or their errors.

    `CHUNKED_BY_PAYLOAD` are left out, since they need a payload. `FALLBACKS` are left out without
    `fallbacks`, and if another algorithm has a reduce-scatter; where every chip has three links or
    more, `RING_ALGORITHMS` do not count for that. Raises a `PlanError` if none can work on this
    mesh.
    """
    check_connected(topology)
    outcomes = _try_fast(topology)
    if fallbacks and needs_fallbacks(topology, outcomes):
        outcomes |= {name: _try_algorithm(topology, name) for name in FALLBACKS}
    return outcomes


def needs_fallbacks(topology: Topology, outcomes: Mapping[str, object]) -> bool:
    """Return whether no other algorithm has a good reduce-scatter; see `try_algorithms`."""
    split = {name for name, outcome in outcomes.items() if isinstance(outcome, SplitSchedule)}
    if all(len(topology.neighbours(coord)) > 2 for coord in topology.coords):
        split.difference_update(RING_ALGORITHMS)
    return not split


def has_fast_algorithm(topology: Topology) -> bool:
    """Return whether an algorithm that is built in almost no time works on `topology`."""
    return any(isinstance(outcome, Schedule) for outcome in _try_fast(topology).values())


def check_size(topology: Topology) -> None:
    if topology.num_live > MAX_RANKS:
        needed = _BYTES_PER_PAIR * topology.num_live**2
        raise PlanError(
            f"{topology} has {topology.num_live:,} live {topology.noun}s, and a schedule for all "
            f"of them would take about {format_bytes(needed)}: the limit is {MAX_RANKS:,}; use "
            "tiles"
        )


def check_connected(topology: Topology) -> None:
    """Raise PlanError if no algorithm can work: too large, a single chip, or disconnected."""
    check_size(topology)
    if topology.num_live < 2:
        raise PlanError(
            f"{topology} has a single live {topology.noun}: there is nothing to sum; "
            "for its mesh, use ftmesh.jax_mesh, which needs no plan"
        )
    parts = topology.components()
    if len(parts) > 1:
        sizes = ", ".join(f"{len(part)} {topology.noun}s around {part[0]}" for part in parts)
        remedy = ""
        if topology.physical is topology:  # tiles cannot be named as failed chips
            failed = format_failed(topology.failed.union(*parts[1:]))
            remedy = f"; failed={failed!r} leaves the largest part"
        raise PlanError(
            f"{topology} is cut into {len(parts)} parts that no link joins: {sizes}; "
            f"the largest whole sub-mesh is {topology.largest_rectangle()}{remedy}"
        )


def _try_fast(topology: Topology) -> dict[str, Schedule | PlanError]:
    skipped = {*FALLBACKS, *CHUNKED_BY_PAYLOAD}
    if not any(topology.wrap):
        skipped.update(TORUS_ONLY)
    return {name: _try_algorithm(topology, name) for name in ALGORITHMS if name not in skipped}


def _try_algorithm(
    topology: Topology, algorithm: str, num_chunks: int | None = None, lag: int = 0
) -> Schedule | PlanError:
    try:
        if algorithm in CHUNKED_BY_PAYLOAD and num_chunks is not None:
            return tree.build_schedule(topology, num_chunks, lag=lag)
        return ALGORITHMS[algorithm](topology)
    except PlanError as error:
        return error
