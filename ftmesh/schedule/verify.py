"""Proves that a schedule computes the sum, or says where it does not.

A `SplitSchedule` is three programs: all-reduce, reduce-scatter and all-gather. The all-gather is
proved from each chunk at its owner and any value elsewhere; together with the reduce-scatter, that
proves all three. Chunks of the usual form are proved by counting, all others with sets of
contributions. If ranks are tiles, each position is proved by itself, from the transfers of chips.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from ftmesh.errors import VerificationError
from ftmesh.schedule.phase import Phase, with_starts
from ftmesh.schedule.proofs import (
    Progress,
    all_gather_error,
    check_sets,
    uncounted_chunks,
    ungathered_chunks,
    unspanned_chunks,
)
from ftmesh.schedule.schedule import (
    AnyRankSchedule,
    RankSchedule,
    Schedule,
    SplitSchedule,
    check_schedule,
)
from ftmesh.schedule.transfers import ADD, COPY, Ints, Transfers
from ftmesh.topology.routing import Route, Router, around_failures, find_cycle
from ftmesh.topology.tiles import TiledTopology

PROGRAMS = ("all-reduce", "reduce-scatter", "all-gather")


@dataclass(frozen=True)
class Proof:
    """What `verify` counted in a correct schedule."""

    num_ranks: int
    num_positions: int  # positions of a tile, each proved by itself; 1 if ranks are chips
    num_chunks: int
    num_rounds: int
    num_transfers: int
    num_additions: int
    num_copies: int
    num_owners: int
    num_links: int
    longest_route: int
    depth: int  # the longest chain of additions that a value goes through
    programs: tuple[str, ...]  # what the schedule can be run as, each proved

    @property
    def is_neighbour_only(self) -> bool:
        return self.longest_route == 1

    def __str__(self) -> str:
        ranks = f"{self.num_ranks} ranks"
        if self.num_positions > 1:
            ranks += f", at each of {self.num_positions} positions,"
        programs = "an all-reduce only"
        if len(self.programs) > 1:
            programs = (
                f"{self.num_owners} ranks own chunks after the reduce-scatter, and the all-gather "
                "alone brings them to all"
            )
        return (
            f"verified: {ranks} hold every contribution to {self.num_chunks} chunks "
            f"exactly once after {self.num_rounds} rounds ({self.num_transfers} transfers, "
            f"{self.num_additions} additions and {self.num_copies} copies of a chunk); "
            f"{programs}; sums are up to {self.depth} additions deep; "
            f"{self.num_links} links used, routes of up to {self.longest_route} "
            f"{'hop' if self.is_neighbour_only else 'hops'}, no deadlock"
        )


def verify(
    schedule: Schedule, *, router: Router = around_failures, progress: Progress | None = None
) -> Proof:
    """Prove that `schedule` computes the sum on its topology.

    Args:
        schedule: the schedule to prove.
        router: tells which links a transfer crosses if its ends are not neighbours. Pass
            `ftmesh.topology.routing.dimension_order` to learn whether hardware that does not know
            of the failures would still deliver everything.
        progress: called with work done and work in all.

    Raises:
        VerificationError: names the round, the chips, the chunk, what was expected and what was
            found.

    >>> import ftmesh
    >>> proof = verify(ftmesh.plan(ftmesh.Topology.grid("8x8", failed="2x2@2,2"), "ring").schedule)
    >>> proof.num_ranks, proof.num_chunks
    (60, 120)
    """
    check_schedule(schedule)
    routes = _check_routes(schedule.on_chips, router)
    num_positions = 0
    for ranks in rank_schedules(schedule):
        prove(ranks, progress)
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


def prove(ranks: AnyRankSchedule, progress: Progress | None = None) -> None:
    """Prove every program of `ranks`, or raise `VerificationError`."""
    report = progress or (lambda done, total: None)
    if ranks.owner is None:
        unspanned = unspanned_chunks(ranks)
        if len(unspanned):
            check_sets(ranks, unspanned, progress)
        else:
            report(1, 1)
        return
    report(0, 3)
    uncounted = uncounted_chunks(ranks)
    report(1, 3)
    ungathered = ungathered_chunks(ranks)
    report(2, 3)
    check_sets(ranks, np.union1d(uncounted, ungathered))
    if len(ungathered):
        raise VerificationError(all_gather_error(ranks, int(ungathered[0])))
    report(3, 3)


def _check_routes(schedule: Schedule, router: Router) -> list[Route]:
    """Check that routes use only live links and cannot deadlock, and return them."""
    topology = schedule.topology
    coords = topology.coords
    if router is around_failures:
        routes = schedule.routes
    else:
        routes = {(s, d): router(topology, coords[s], coords[d]) for s, d in schedule.routes}
    for start, phase in with_starts(schedule.phases):
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
                t = phase.content if isinstance(phase.content, Transfers) else phase.first_round
                first = int(np.argmax((t.src == src) & (t.dst == dst)))
                dead = next((x for x in (b, a) if not topology.is_live(x)), None)
                obstacle = f"failed chip {dead}" if dead else f"failed link {a}-{b}"
                raise VerificationError(
                    f"round {start + t.round[first]} ({phase.name}), chunk {t.chunk[first]}: the "
                    f"route from chip {coords[src]} to chip {coords[dst]} crosses {obstacle}; "
                    f"expected live chips and links only, found {_path(route)}"
                )
    if cycle := find_cycle(routes.values()):
        raise VerificationError(
            "routes can deadlock: expected no cycle of links that wait for each other, found "
            + ", ".join(f"{a}->{b}" for a, b in cycle)
        )
    return list(routes.values())


def _path(route: Route) -> str:
    return " -> ".join(map(str, route))


def rank_schedules(schedule: Schedule) -> Iterator[AnyRankSchedule]:
    """Yield what to prove: one rank schedule, or one for each position of a tile."""
    tiles = schedule.topology
    whole: AnyRankSchedule = RankSchedule.from_schedule(schedule)
    if not isinstance(tiles, TiledTopology):
        yield whole
        return
    phases, num_chunks = schedule.on_chips.phases, schedule.num_chunks
    for phase in phases:
        _check_ends(phase, tiles)
    for core, ranks in product(range(tiles.chips.devices_per_chip), tiles.chip_ranks):
        tile = np.full(tiles.chips.num_live, -1, np.int32)
        tile[ranks] = np.arange(len(ranks))
        first = core * num_chunks
        yield replace(
            whole,
            phases=tuple(_PositionPhase(phase, tile, first, num_chunks) for phase in phases),
            names=tuple(f"chip {tiles.chips.coords[rank]}" for rank in ranks),
        )


def _check_ends(phase: Phase, tiles: TiledTopology) -> None:
    """Raise unless every transfer is between the same position of two live tiles."""
    coords = tiles.chips.coords
    position = np.full(len(coords), -1)
    position[tiles.chip_ranks] = np.arange(len(tiles.chip_ranks))[:, None]

    def describe(rank: int) -> str:
        return "a chip of no live tile" if position[rank] < 0 else f"position {position[rank]}"

    for src, dst in phase.pairs:
        if position[src] < 0 or position[src] != position[dst]:
            raise VerificationError(
                f"{phase.name}: chip {coords[src]} sends to chip {coords[dst]}; expected the same "
                f"position of two live tiles, found {describe(src)} and {describe(dst)}"
            )


@dataclass(frozen=True, eq=False)
class _PositionPhase:
    """The part of a phase over chips that one position runs, with tiles as ranks."""

    phase: Phase
    tile: Ints  # of each chip at the position; -1 for other chips
    first_chunk: int
    num_chunks: int

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def num_rounds(self) -> int:
        return self.phase.num_rounds

    def rounds(self) -> Iterator[Transfers]:
        return map(self._at_position, self.phase.rounds())

    def transfers_of_chunk(self, chunk: int) -> Transfers:
        return self._at_position(self.phase.transfers_of_chunk(self.first_chunk + chunk))

    def _at_position(self, t: Transfers) -> Transfers:
        chunk = t.chunk - np.int32(self.first_chunk)
        is_ours = (self.tile[t.src] >= 0) & (chunk >= 0) & (chunk + t.count <= self.num_chunks)
        ours = t.take(is_ours)
        return ours.replace(src=self.tile[ours.src], dst=self.tile[ours.dst], chunk=chunk[is_ours])
