"""Map a schedule from chips to the devices of a mesh axis.

A chip has one device or two. Two devices first exchange halves of the payload; then each runs the
schedule on its half. The axis may include the devices of failed chips, idle: they contribute
nothing to a sum, and live neighbours send them every result during the all-gather, so that all
devices end with the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from ftmesh.algorithms.building_blocks import Group, book
from ftmesh.errors import PlanError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import RankSchedule, Schedule, SplitSchedule
from ftmesh.schedule.transfers import ADD, COPY, Ints, Transfers, join_transfers, make_transfers
from ftmesh.topology.notation import Coord
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.topology import Topology

_NEVER = 2**31 - 1
_MAX_PARTS = 4  # of the exchange between cores: a part in flight takes memory


def schedule_for_devices(
    schedule: Schedule, *, devices_per_chip: int = 1, with_idle: bool = False
) -> RankSchedule[Phase]:
    """Map a schedule to ranks that are devices, in the order of `Ranks`.

    Args:
        schedule: The schedule over chips.
        devices_per_chip: 1 or 2. Rank ``2 * chip + core`` is core `core` of a chip with two.
        with_idle: The axis includes the devices of failed chips, after all others.
    """
    if devices_per_chip not in (1, 2):
        raise ValueError(f"chips have one or two devices, not {devices_per_chip}")
    topology = schedule.topology
    axis = Ranks(topology, with_idle)
    phases = [_renumber(phase, axis.position) for phase in schedule.phases]
    num_first, owner = 0, None
    if isinstance(schedule, SplitSchedule):
        num_first, owner = len(schedule.reduce_scatter), axis.position[schedule.owner]
    if with_idle and topology.failed:
        phases[num_first:] = _with_deliveries(axis, phases[num_first:], schedule.num_chunks)
    names = tuple(f"{topology.noun} {coord}" for coord in axis.coords)
    live = np.arange(topology.num_live, dtype=np.int32)
    ranks = RankSchedule(schedule.num_chunks, tuple(phases), names, live, num_first, owner)
    return ranks if devices_per_chip == 1 else _on_two_cores(ranks)


def _renumber(phase: Phase, position: Ints) -> Phase:
    """Replace every rank of a phase by its position."""
    if isinstance(phase.content, Transfers):
        c = phase.content
        return Phase(phase.name, c.replace(src=position[c.src], dst=position[c.dst]))
    return Phase(phase.name, tuple(replace(r, rings=position[r.rings]) for r in phase.content))


# Idle chips -------------------------------------------------------------------------------------


def _with_deliveries(axis: Ranks, phases: Sequence[Phase], num_chunks: int) -> list[Phase]:
    """The all-gather phases, with transfers from live chips to their idle neighbours.

    Pieces are those of the last phase. A piece is forwarded once the live neighbour has it; what
    does not fit next to the last phase follows in a phase of its own.
    """
    *before, last = phases
    topology, rank = axis.topology, {coord: i for i, coord in enumerate(axis.coords)}
    full = Topology(topology.shape, topology.wrap, failed_links=topology.failed_links)
    size = last.counts[0]
    if len(last.counts) > 1 or num_chunks % size:
        size = 1
    ready = _arrival_rounds(phases, len(rank), num_chunks, topology.num_live)
    ready = ready.reshape(len(rank), -1, size).max(axis=2)
    start = sum(phase.num_rounds for phase in before)

    def arrival(chip: Coord, piece: tuple[int, int]) -> int:
        return max(0, int(ready[rank[chip], piece[1]]) + 1 - start)

    pieces = [(0, index) for index in range(num_chunks // size)]
    bookings = book(full, _idle_groups(full, topology.failed), pieces, arrival, by=_NEVER)
    rows = [(b.round, *map(rank.__getitem__, b.link), b.piece[1]) for b in bookings]
    when, src, dst, piece = np.array(sorted(rows), np.int32).T
    lane = _free_lanes(last, zip(src.tolist(), dst.tolist(), strict=True))
    deliveries = make_transfers(
        round=when, lane=lane, src=src, dst=dst, chunk=piece * size, count=size, op=COPY
    )
    during = when < last.num_rounds
    result = [*before, Phase(last.name, join_transfers([last.transfers, deliveries.take(during)]))]
    if not during.all():
        rest = deliveries.take(~during).shifted(rounds=-last.num_rounds)
        result.append(Phase("to idle devices, all-gather", rest))
    return result


def _arrival_rounds(
    phases: Sequence[Phase], num_ranks: int, num_chunks: int, num_live: int
) -> Ints:
    """The round, of all phases, in which each rank last receives each chunk.

    It is -1 if a live rank has the chunk from the start. For idle ranks it is never.
    """
    ready = np.full((num_ranks, num_chunks), _NEVER - 1, np.int32)
    ready[:num_live] = -1
    start = 0
    for phase in phases:
        for now, c in enumerate(phase.rounds()):
            row, chunk = c.expanded()
            ready[c.dst[row], chunk] = start + now
        start += phase.num_rounds
    return ready


def _idle_groups(full: Topology, idle: frozenset[Coord]) -> list[Group]:
    """Connected groups of idle chips, with the links that lead into them from live ones."""
    groups, left = [], set(idle)
    while left:
        chips, frontier = set(), {min(left)}
        while frontier:
            chips |= frontier
            frontier = {b for a in frontier for b in full.neighbours(a)} & idle - chips
        exits = tuple((b, a) for a in sorted(chips) for b in full.neighbours(a) if b not in idle)
        if not exits:
            raise PlanError(
                f"no live link leads to the idle chip {min(chips)}: nothing can be sent there"
            )
        groups.append(Group(frozenset(chips), exits))
        left -= chips
    return groups


def _free_lanes(phase: Phase, hops: Iterable[tuple[int, int]]) -> list[int]:
    """A lane for each hop: one that has it already, or whose permutation has room for it.

    Rings in lockstep are left alone, so that they stay a rule.
    """
    taken: dict[int, tuple[dict[int, int], dict[int, int]]] = {}
    if isinstance(phase.content, Transfers):
        c = phase.content
        for lane, src, dst in set(zip(*(k.tolist() for k in (c.lane, c.src, c.dst)), strict=True)):
            dst_of, src_of = taken.setdefault(lane, ({}, {}))
            dst_of[src], src_of[dst] = dst, src
    free = max(phase.lanes) + 1
    lanes = []
    for src, dst in hops:
        for lane in (*sorted(taken), free + len(taken)):
            dst_of, src_of = taken.get(lane, ({}, {}))
            if dst_of.get(src, dst) == dst and src_of.get(dst, src) == src:
                break
        dst_of, src_of = taken.setdefault(lane, ({}, {}))
        dst_of[src], src_of[dst] = dst, src
        lanes.append(lane)
    return lanes


# Two devices per chip ---------------------------------------------------------------------------


def _on_two_cores(chips: RankSchedule[Phase]) -> RankSchedule[Phase]:
    """Run the schedule on both cores of every chip, each with half of the payload."""
    num_chunks = chips.num_chunks
    num_parts = max(parts for parts in range(1, _MAX_PARTS + 1) if num_chunks % parts == 0)
    count = num_chunks // num_parts

    def exchange(ranks: Ints, op: int) -> Transfers:
        """Each core sends its partner the partner's half, or afterwards its own, part by part."""
        first_chunk = [num_chunks, 0] if op == ADD else [0, num_chunks]
        return join_transfers(
            make_transfers(
                round=part,
                lane=0,
                src=2 * ranks + core,
                dst=2 * ranks + 1 - core,
                chunk=first_chunk[core] + part * count,
                count=count,
                op=op,
            )
            for part in range(num_parts)
            for core in (0, 1)
        )

    phases = [_on_both_cores(phase, num_chunks) for phase in chips.phases]
    all_chips = np.arange(chips.num_ranks, dtype=np.int32)
    add = Phase("between cores, reduce-scatter", exchange(chips.contributors, ADD))
    copy = Phase("between cores, all-gather", exchange(all_chips, COPY))
    owner = chips.owner
    if owner is not None:
        owner = np.concatenate([2 * owner, 2 * owner + 1]).astype(np.int32)
    live = np.repeat(2 * chips.contributors, 2)
    live[1::2] += 1
    num_first = chips.num_reduce_scatter_phases
    return RankSchedule(
        num_chunks=2 * num_chunks,
        phases=(add, *phases, copy),
        names=tuple(f"core {core} of {name}" for name in chips.names for core in (0, 1)),
        contributors=live,
        num_reduce_scatter_phases=num_first + 1 if num_first else 0,
        owner=owner,
    )


def _on_both_cores(phase: Phase, num_chunks: int) -> Phase:
    if isinstance(phase.content, Transfers):
        c = phase.content
        both = (
            c.replace(
                src=2 * c.src + core,
                dst=2 * c.dst + core,
                chunk=c.chunk + np.int32(core * num_chunks),
            )
            for core in (0, 1)
        )
        return Phase(phase.name, join_transfers(both))
    rules = []
    for rule in phase.content:
        rings = np.concatenate([2 * rule.rings, 2 * rule.rings + 1]).astype(np.int32)
        first = np.concatenate([rule.first_chunk, rule.first_chunk + num_chunks]).astype(np.int32)
        rules.append(replace(rule, rings=rings, first_chunk=first))
    return Phase(phase.name, tuple(rules))
