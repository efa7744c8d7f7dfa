"""Verify: prove that a schedule keeps its promises, or say exactly where it does not.

A schedule with halves is three programs: all-reduce, reduce-scatter and all-gather. The second half
is proved from each chunk at its owner and anything elsewhere; with the first half, that proves all
three. Where a chunk's sum has the usual form it is counted (`ftmesh.schedule.counting_proof`), and where
it has not, or something looks wrong, sets of contributions decide (`ftmesh.schedule.set_proof`).

Positions: what is to be proved of a schedule, one script for each position of a tile.

The script of a position is read off the transfers of chips, and not off those of tiles: a transfer
that leads to another position, or to a chip of none, is found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ftmesh.errors import VerificationError
from ftmesh.schedule.counting_proof import uncounted_chunks, ungathered_chunks, unspanned_chunks
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.rank_schedule import AnyRankSchedule, RankSchedule
from ftmesh.schedule.replay import all_gather_error
from ftmesh.schedule.schedule import Schedule, SplitSchedule, check_schedule
from ftmesh.schedule.set_proof import Progress, check_sets
from ftmesh.schedule.transfers import ADD, COPY, Transfers, Ints
from ftmesh.topology.routing import Route, Router, around, find_cycle
from ftmesh.topology.tiles import TiledTopology

PROGRAMS = ("all-reduce", "reduce-scatter", "all-gather")


@dataclass(frozen=True)
class Proof:
    """What `verify` counted in a schedule that keeps its promises."""

    num_ranks: int
    num_positions: int  # of a tile, each proved by itself; 1 where a rank is a chip
    num_chunks: int
    num_rounds: int
    num_transfers: int
    num_additions: int
    num_copies: int
    num_owners: int
    num_links: int
    longest_route: int
    depth: int  # the longest chain of additions that a value goes through
    programs: tuple[str, ...]  # what the schedule can be run for, each proved by itself

    @property
    def is_neighbour_only(self) -> bool:
        """Whether every transfer was a single hop."""
        return self.longest_route == 1

    @property
    def _who(self) -> str:
        if self.num_positions == 1:
            return f"{self.num_ranks} ranks"
        return f"{self.num_ranks} ranks, at each of {self.num_positions} positions,"

    @property
    def _halves(self) -> str:
        if len(self.programs) == 1:
            return "an all-reduce alone, without halves"
        return (
            f"{self.num_owners} ranks own chunks after the reduce-scatter half, and the all-gather "
            "half alone brings them to all"
        )

    def __str__(self) -> str:
        return (
            f"verified: {self._who} hold every contribution to {self.num_chunks} chunks "
            f"exactly once after {self.num_rounds} rounds ({self.num_transfers} transfers, "
            f"{self.num_additions} additions and {self.num_copies} copies of a chunk); "
            f"{self._halves}; sums are up to {self.depth} additions deep; "
            f"{self.num_links} links used, routes of up to {self.longest_route} "
            f"{'hop' if self.is_neighbour_only else 'hops'}, no deadlock"
        )


def verify(
    schedule: Schedule, *, router: Router = around, progress: Progress | None = None
) -> Proof:
    """Prove `schedule` right on its topology, or raise `VerificationError` naming the place.

    `router` tells which links a transfer crosses when its ends are not neighbours; pass
    `ftmesh.topology.routing.dimension_order` to learn whether hardware that does not know of the damage
    would still deliver everything. `progress` is called with work done and work in all.

    >>> import ftmesh
    >>> proof = verify(ftmesh.plan(ftmesh.Topology.grid("8x8", failed="2x2@2,2"), "ring").schedule)
    >>> proof.num_ranks, proof.num_chunks
    (60, 120)
    """
    check_schedule(schedule)
    routes = _check_routes(schedule.on_chips, router)
    num_positions = 0
    for script in scripts(schedule):
        prove(script, progress)
        num_positions += 1
    owners = np.unique(schedule.owner) if isinstance(schedule, SplitSchedule) else ()
    return Proof(
        num_ranks=schedule.topology.num_live,
        num_positions=num_positions,
        num_chunks=schedule.num_chunks,
        num_rounds=schedule.num_rounds,
        num_transfers=sum(phase.num_transfers for phase in schedule.phases),
        num_additions=sum(phase.chunks_moved(ADD) for phase in schedule.phases),
        num_copies=sum(phase.chunks_moved(COPY) for phase in schedule.phases),
        num_owners=len(owners),
        num_links=len({link for route in routes for link in pairwise(route)}),
        longest_route=max(len(route) for route in routes) - 1,
        depth=schedule.depth,
        programs=PROGRAMS if len(owners) else PROGRAMS[:1],
    )


def prove(script: AnyRankSchedule, progress: Progress | None = None) -> None:
    """Prove every program of a script, or raise `VerificationError` naming the place."""
    report = progress or (lambda done, total: None)
    if script.owner is None:
        unspanned = unspanned_chunks(script)
        if len(unspanned):
            check_sets(script, unspanned, progress)
        else:
            report(1, 1)
        return
    report(0, 3)
    uncounted = uncounted_chunks(script)
    report(1, 3)
    ungathered = ungathered_chunks(script)
    report(2, 3)
    check_sets(script, np.union1d(uncounted, ungathered))
    if len(ungathered):
        raise VerificationError(all_gather_error(script, int(ungathered[0])))
    report(3, 3)


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
                c = phase.content if isinstance(phase.content, Transfers) else phase.first_round
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


def _path(route: Route) -> str:
    return " -> ".join(map(str, route))


def scripts(schedule: Schedule) -> Iterator[AnyRankSchedule]:
    """The script of each position; that of all chips, where there are no tiles."""
    tiles = schedule.topology
    if not isinstance(tiles, TiledTopology):
        yield RankSchedule.from_schedule(schedule)
        return
    phases = schedule.on_chips.phases
    for phase in phases:
        _check_ends(phase, tiles)
    halves = schedule if isinstance(schedule, SplitSchedule) else None
    for core in range(tiles.chips.devices_per_chip):
        for ranks in tiles.chip_ranks:
            tile = np.full(tiles.chips.num_live, -1, np.int32)
            tile[ranks] = np.arange(len(ranks))
            first = core * schedule.num_chunks
            yield RankSchedule(
                num_chunks=schedule.num_chunks,
                phases=tuple(
                    _AtPosition(each, tile, first, schedule.num_chunks) for each in phases
                ),
                names=tuple(f"chip {tiles.chips.coords[rank]}" for rank in ranks),
                contributors=np.arange(len(ranks), dtype=np.int32),
                num_reduce_scatter_phases=len(halves.reduce_scatter) if halves else 0,
                owner=halves.owner if halves else None,
            )


def _check_ends(phase: Phase, tiles: TiledTopology) -> None:
    """Refuse a transfer whose ends are not the same place of two live tiles."""
    coords = tiles.chips.coords
    place = np.full(len(coords), -1)
    place[tiles.chip_ranks] = np.arange(len(tiles.chip_ranks))[:, None]
    for src, dst in phase.pairs:
        if place[src] < 0 or place[src] != place[dst]:
            raise VerificationError(
                f"{phase.name}: chip {coords[src]} sends to chip {coords[dst]}; expected the same "
                f"place of two live tiles, found {_places(place[src])} and {_places(place[dst])}"
            )


def _places(place: int) -> str:
    return "a chip of no live tile" if place < 0 else f"place {place}"


@dataclass(frozen=True, eq=False)
class _AtPosition:
    """The rounds of a phase over chips, as far as they are those of one position."""

    phase: Phase
    tile: Ints  # of the position's chips; -1 for others
    first_chunk: int
    num_chunks: int

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def num_rounds(self) -> int:
        return self.phase.num_rounds

    def rounds(self) -> Iterator[Transfers]:
        return map(self._own, self.phase.rounds())

    def transfers_of_chunk(self, chunk: int) -> Transfers:
        return self._own(self.phase.transfers_of_chunk(self.first_chunk + chunk))

    def _own(self, c: Transfers) -> Transfers:
        """The transfers of this position, between tiles and with its own chunks."""
        chunk = c.chunk - np.int32(self.first_chunk)
        mine = (self.tile[c.src] >= 0) & (chunk >= 0) & (chunk + c.count <= self.num_chunks)
        own = c.take(mine)
        return own.replace(src=self.tile[own.src], dst=self.tile[own.dst], chunk=chunk[mine])
