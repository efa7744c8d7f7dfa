"""Verify: prove that a schedule keeps its promises, or say exactly where it does not.

Contributions are counted, not flagged. While no chunk has been added twice every count is 0 or 1,
so sets of contributions are kept as bits and an addition checks that the sets are disjoint; a chunk
in which they are not is replayed with whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import VerificationError
from ftmesh.replay import replay
from ftmesh.routing import Route, Router, around, find_cycle
from ftmesh.schedule import ADD, Columns, Schedule

_STATE_BYTES = 256 * 2**20  # bits kept at a time; more chunks than fit are verified in turns

Bits = NDArray[np.uint64]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Proof:
    """What `verify` counted in a schedule that keeps its promises."""

    num_ranks: int
    num_chunks: int
    num_rounds: int
    num_transfers: int
    num_additions: int
    num_copies: int
    num_owners: int
    num_links: int
    longest_route: int

    @property
    def is_neighbour_only(self) -> bool:
        """Whether every transfer was a single hop."""
        return self.longest_route == 1

    def __str__(self) -> str:
        return (
            f"verified: {self.num_ranks} ranks hold every contribution to {self.num_chunks} chunks "
            f"exactly once after {self.num_rounds} rounds ({self.num_transfers} transfers, "
            f"{self.num_additions} additions and {self.num_copies} copies of a chunk); "
            f"{self.num_owners} ranks own chunks after the reduce-scatter half; "
            f"{self.num_links} links used, routes of up to {self.longest_route} "
            f"{'hop' if self.is_neighbour_only else 'hops'}, no deadlock"
        )


def verify(
    schedule: Schedule, *, router: Router = around, progress: Progress | None = None
) -> Proof:
    """Prove `schedule` right on its topology, or raise `VerificationError` naming the place.

    `router` tells which links a transfer crosses when its ends are not neighbours; pass
    `ftmesh.routing.dimension_order` to learn whether hardware that does not know of the damage
    would still deliver everything. `progress` is called with work done and work in all.
    """
    routes = _check_routes(schedule, router)
    turns = _turns(schedule)
    for turn, chunks in enumerate(turns):
        if progress:
            progress(turn, len(turns))
        _check_contributions(schedule, chunks)
    if progress:
        progress(len(turns), len(turns))
    c = schedule.columns
    added = int(c.count[c.op == ADD].sum())
    return Proof(
        num_ranks=schedule.topology.num_live,
        num_chunks=schedule.num_chunks,
        num_rounds=schedule.num_rounds,
        num_transfers=len(c.src),
        num_additions=added,
        num_copies=int(c.count.sum()) - added,
        num_owners=len(set(schedule.owner[schedule.owner >= 0].tolist())),
        num_links=len({link for route in routes for link in pairwise(route)}),
        longest_route=max(len(route) for route in routes) - 1,
    )


def _check_routes(schedule: Schedule, router: Router) -> list[Route]:
    """Promises 3 and 4: only live links, and no deadlock."""
    topology = schedule.topology
    coords = topology.coords
    if router is around:
        routes = schedule.routes
    else:
        routes = {(s, d): router(topology, coords[s], coords[d]) for s, d in schedule.routes}
    start = 0
    for phase in schedule.phases:
        for src, dst in phase.pairs:
            route = routes[src, dst]
            if len(route) < 2 or (route[0], route[-1]) != (coords[src], coords[dst]):
                raise VerificationError(
                    f"{phase.name}: expected a route from chip {coords[src]} to chip "
                    f"{coords[dst]}, found {_path(route) or 'none'}"
                )
            for a, b in pairwise(route):
                if topology.is_link(a, b):
                    continue
                c = phase.columns
                first = int(np.argmax((c.src == src) & (c.dst == dst)))
                dead = next((x for x in (b, a) if not topology.is_live(x)), None)
                what = f"failed chip {dead}" if dead else f"failed link {a}-{b}"
                raise VerificationError(
                    f"round {start + c.round[first]} ({phase.name}), chunk {c.chunk[first]}: the "
                    f"route from chip {coords[src]} to chip {coords[dst]} crosses {what}; "
                    f"expected live chips and links only, found {_path(route)}"
                )
        start += phase.num_rounds
    cycle = find_cycle(routes.values())
    if cycle:
        links = ", ".join(f"{a}->{b}" for a, b in cycle)
        raise VerificationError(
            "routes can deadlock: expected no cycle of links that wait for each other, found "
            f"{links}"
        )
    return list(routes.values())


def _turns(schedule: Schedule) -> list[range]:
    """Ranges of chunks whose state fits the memory set aside for it."""
    ranks = schedule.topology.num_live
    per_chunk = ranks * 8 * -(-ranks // 64)
    size = max(1, min(schedule.num_chunks, _STATE_BYTES // per_chunk))
    return [
        range(low, min(low + size, schedule.num_chunks))
        for low in range(0, schedule.num_chunks, size)
    ]


def _check_contributions(schedule: Schedule, chunks: range) -> None:
    """Promises 1 and 2 for some of the chunks."""
    ranks = schedule.topology.num_live
    alone = _singletons(ranks)
    full = np.bitwise_or.reduce(alone, axis=0)
    held = np.repeat(alone[:, None], len(chunks), axis=1)
    suspects: set[int] = set()
    owner = schedule.owner[chunks.start : chunks.stop]
    finished = 0
    for columns in (columns for phase in schedule.phases for columns in phase.rounds()):
        _run_round(held, columns, chunks, suspects)
        finished += 1
        if finished == schedule.rounds_in_reduce_scatter:
            place = np.flatnonzero(owner >= 0)
            incomplete = place[(held[owner[place], place] != full).any(axis=1)]
            for chunk in [*(chunks.start + incomplete[:1]), *sorted(suspects)]:
                owning = schedule.owner[chunk : chunk + 1]
                _recount(schedule, int(chunk), finished, owning[owning >= 0].tolist())
    incomplete = np.argwhere((held != full).any(axis=2))[:1, 1]
    for chunk in [*(chunks.start + incomplete), *sorted(suspects)]:
        _recount(schedule, int(chunk), finished, list(range(ranks)))


def _recount(schedule: Schedule, chunk: int, num_rounds: int, ranks: list[int]) -> None:
    """Raise unless each of `ranks` holds every contribution to `chunk` once."""
    exact = replay(schedule, chunk, num_rounds)
    for rank in ranks:
        complaint = exact.complaint(rank)
        if complaint:
            raise VerificationError(complaint)


def _singletons(ranks: int) -> Bits:
    """Row r has bit r set and no other."""
    bits = np.zeros((ranks, -(-ranks // 64)), np.uint64)
    rank = np.arange(ranks)
    bits[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
    return bits


def _run_round(held: Bits, columns: Columns, chunks: range, suspects: set[int]) -> None:
    """Move the sets of one round: all reads, then the writes lane after lane."""
    row, chunk = columns.expanded()
    inside = (chunk >= chunks.start) & (chunk < chunks.stop)
    if not inside.all():
        row, chunk = row[inside], chunk[inside]
    place = chunk - chunks.start
    cells = held.reshape(-1, held.shape[2])
    moved = cells.take(columns.src[row] * len(chunks) + place, axis=0)
    there = columns.dst[row] * len(chunks) + place
    adds = columns.op[row] == ADD
    lanes = columns.lane[row]
    ends = np.flatnonzero(lanes[1:] != lanes[:-1]) + 1
    for start, stop in pairwise([0, *ends.tolist(), len(row)]):
        lane = slice(start, stop)
        before = cells.take(there[lane], axis=0)
        if not adds[lane].all():
            before[~adds[lane]] = 0
        twice = before & moved[lane]
        if twice.any():
            suspects.update(chunk[lane][twice.any(axis=1)].tolist())
        cells[there[lane]] = before | moved[lane]


def _path(route: Route) -> str:
    return " -> ".join(map(str, route))
