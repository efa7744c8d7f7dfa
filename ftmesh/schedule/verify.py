"""Verify: prove that a schedule keeps its promises, or say exactly where it does not.

Contributions are counted, not flagged. While no chunk has been added twice every count is 0 or 1,
so sets of contributions are kept as bits and an addition checks that the sets are disjoint; a chunk
in which they are not is replayed with whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import VerificationError
from ftmesh.mesh.routing import Route, Router, around, find_cycle
from ftmesh.schedule.replay import replay
from ftmesh.schedule.schedule import ADD, Ints, Phase, Schedule

_STATE_BYTES = 256 * 2**20  # bits kept at a time; more chunks than fit are verified in turns
_BATCH = 2**18  # moves of a chunk that are worked out at a time, in whole rounds

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
    `ftmesh.mesh.routing.dimension_order` to learn whether hardware that does not know of the damage
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
    cells = held.reshape(-1, held.shape[2])
    scratch = np.empty(len(cells), np.int32)
    for now in (now for phase in schedule.phases for now in _rounds(phase, chunks)):
        _run_round(cells, now, scratch, suspects)
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


class _Round(NamedTuple):
    """A row for each chunk that moves in one round, lane after lane: cells are (rank, chunk)."""

    lane: NDArray[np.int32]
    chunk: NDArray[np.intp]
    src: NDArray[np.intp]
    dst: NDArray[np.intp]
    adds: NDArray[np.bool_]


def _rounds(phase: Phase, chunks: range) -> Iterator[_Round]:
    """The rounds of a phase, as far as these chunks move in them."""
    bounds = phase.bounds
    moved_before = np.cumsum(np.concatenate(([0], phase.columns.count)))[bounds[:-1]]
    _, first_round = np.unique(moved_before // _BATCH, return_index=True)
    for low, high in pairwise([*first_round.tolist(), phase.num_rounds]):
        c = phase.columns.take(slice(bounds[low], bounds[high]))
        row, chunk = c.expanded()
        inside = (chunk >= chunks.start) & (chunk < chunks.stop)
        if not inside.all():
            row, chunk = row[inside], chunk[inside]
        place = chunk - chunks.start
        src, dst = (ranks[row] * len(chunks) + place for ranks in (c.src, c.dst))
        rows: tuple[Any, ...] = (c.lane[row], chunk, src, dst, c.op[row] == ADD)
        ends = np.searchsorted(c.round[row], np.arange(low, high + 1))
        for start, stop in pairwise(ends.tolist()):
            yield _Round(*(column[start:stop] for column in rows))


def _run_round(cells: Bits, now: _Round, scratch: Ints, suspects: set[int]) -> None:
    """Move the sets of one round: all reads, then the writes lane after lane.

    `scratch` has a number for each cell, which one does not matter.
    """
    moved = cells.take(now.src, axis=0)
    for lane in _in_turn(now, scratch):
        before = cells.take(now.dst[lane], axis=0)
        if not now.adds[lane].all():
            before[~now.adds[lane]] = 0
        twice = before & moved[lane]
        if twice.any():
            suspects.update(now.chunk[lane][twice.any(axis=1)].tolist())
        before |= moved[lane]
        cells[now.dst[lane]] = before


def _in_turn(now: _Round, scratch: Ints) -> list[slice]:
    """What may be written at once: all of it, or one lane, where lanes bring the same chunk."""
    row = np.arange(len(now.dst), dtype=scratch.dtype)
    scratch[now.dst] = row  # one of those for the same cell remains
    if (scratch[now.dst] == row).all():
        return [slice(None)]
    ends = np.flatnonzero(now.lane[1:] != now.lane[:-1]) + 1
    return [slice(start, stop) for start, stop in pairwise([0, *ends.tolist(), len(now.lane)])]


def _path(route: Route) -> str:
    return " -> ".join(map(str, route))
