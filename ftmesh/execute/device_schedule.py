"""On devices: the script of a schedule, played by the devices of a mesh axis and not by chips.

A chip has one device or two. With two, they first share out the payload, half each, and then each
runs the schedule with its half. A mesh axis may have the devices of failed chips too, idle: they
bring nothing to a sum, and every result goes on to them from live chips beside them, while the
gather half runs, so that no device ends with anything else than the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ftmesh.algorithms.forwarding import Group, book
from ftmesh.errors import PlanError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.rank_schedule import Script
from ftmesh.schedule.ring_rule import Circling
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import ADD, COPY, Columns, Ints, join, transfers
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology

_NEVER = 2**31 - 1
_PARTS = 4  # at most, in which cores exchange halves: what is under way takes memory


def on_devices(
    schedule: Schedule, *, devices_per_chip: int = 1, with_idle: bool = False
) -> Script[Phase]:
    """The script of a schedule for one or two devices on each chip.

    Device ``2 * rank + core`` is core `core` of chip `rank`. `with_idle` is for an axis that has
    the devices of failed chips too, every chip in its place with x fastest.
    """
    if devices_per_chip not in (1, 2):
        raise ValueError(f"chips have one or two devices, not {devices_per_chip}")
    topology = schedule.topology
    coords = topology.coords
    place = np.arange(len(coords), dtype=np.int32)
    phases = list(schedule.phases)
    num_scatter = len(schedule.scatter) if isinstance(schedule, SplitSchedule) else 0
    owner = schedule.owner if isinstance(schedule, SplitSchedule) else None
    if with_idle and topology.failed:
        coords = tuple(topology.every_coord())
        place = np.array([topology.place(coord) for coord in topology.coords], np.int32)
        phases = [_renamed(phase, place) for phase in phases]
        phases[num_scatter:] = _with_deliveries(
            topology, phases[num_scatter:], schedule.num_chunks, place
        )
        owner = None if owner is None else place[owner]
    names = tuple(f"{topology.noun} {coord}" for coord in coords)
    script = Script(schedule.num_chunks, tuple(phases), names, place, num_scatter, owner)
    return script if devices_per_chip == 1 else _on_two_cores(script)


def _renamed(phase: Phase, place: Ints) -> Phase:
    """The phase with every rank exchanged for its place."""
    if isinstance(phase.what, Columns):
        c = phase.what
        return Phase(phase.name, c.replace(src=place[c.src], dst=place[c.dst]))
    return Phase(
        phase.name,
        tuple(
            Circling(place[each.rings], each.first_chunk, each.lane, each.count, each.mirrored)
            for each in phase.what
        ),
    )


# Idle chips -------------------------------------------------------------------------------------


def _with_deliveries(
    topology: Topology, phases: Sequence[Phase], num_chunks: int, place: Ints
) -> list[Phase]:
    """The phases of a gather, in which idle chips get every chunk from live ones beside them.

    Pieces are those of the last phase. A piece goes on as soon as the chip beside has it; what does
    not fit beside the last phase follows in one of its own.
    """
    *before, last = phases
    whole = Topology(topology.shape, topology.wrap, failed_links=topology.failed_links)
    size = last.counts[0]
    if len(last.counts) > 1 or num_chunks % size:
        size = 1
    ready = _arrivals(phases, len(whole.coords), num_chunks, place)
    ready = ready.reshape(len(whole.coords), -1, size).max(axis=2)
    begun = sum(phase.num_rounds for phase in before)

    def arrival(chip: Coord, piece: tuple[int, int]) -> int:
        return max(0, int(ready[whole.place(chip), piece[1]]) + 1 - begun)

    pieces = [(0, index) for index in range(num_chunks // size)]
    bookings = book(whole, _idle_groups(whole, topology.failed), pieces, arrival, by=_NEVER)
    rows = [(b.round, whole.place(b.link[0]), whole.place(b.link[1]), b.piece[1]) for b in bookings]
    when, src, dst, piece = np.array(sorted(rows), np.int32).T
    extra = transfers(
        round=when,
        lane=_free_lanes(last, zip(src.tolist(), dst.tolist(), strict=True)),
        src=src,
        dst=dst,
        chunk=piece * size,
        count=size,
        op=COPY,
    )
    during = when < last.num_rounds
    found = [*before, Phase(last.name, join([last.columns, extra.take(during)]))]
    if not during.all():
        rest = extra.take(~during).shifted(rounds=-last.num_rounds)
        found.append(Phase("to idle devices, all-gather", rest))
    return found


def _arrivals(phases: Sequence[Phase], num_ranks: int, num_chunks: int, place: Ints) -> Ints:
    """The round, of all, in which each rank gets each chunk for the last time; -1 where it has it.

    Ranks that take no part never get it.
    """
    ready = np.full((num_ranks, num_chunks), _NEVER - 1, np.int32)
    ready[place] = -1
    start = 0
    for phase in phases:
        for now, c in enumerate(phase.rounds()):
            row, chunk = c.expanded()
            ready[c.dst[row], chunk] = start + now
        start += phase.num_rounds
    return ready


def _idle_groups(whole: Topology, idle: frozenset[Coord]) -> list[Group]:
    """Connected idle chips, and the links that lead to them from live ones."""
    groups, left = [], set(idle)
    while left:
        chips, frontier = set(), {min(left)}
        while frontier:
            chips |= frontier
            frontier = {b for a in frontier for b in whole.neighbours(a)} & idle - chips
        exits = tuple((b, a) for a in sorted(chips) for b in whole.neighbours(a) if b not in idle)
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
    if isinstance(phase.what, Columns):
        c = phase.what
        for lane, src, dst in set(zip(*(k.tolist() for k in (c.lane, c.src, c.dst)), strict=True)):
            to, of = taken.setdefault(lane, ({}, {}))
            to[src], of[dst] = dst, src
    free = max(phase.lanes) + 1
    lanes = []
    for src, dst in hops:
        for lane in (*sorted(taken), free + len(taken)):
            to, of = taken.get(lane, ({}, {}))
            if to.get(src, dst) == dst and of.get(dst, src) == src:
                break
        to, of = taken.setdefault(lane, ({}, {}))
        to[src], of[dst] = dst, src
        lanes.append(lane)
    return lanes


# Two devices on a chip --------------------------------------------------------------------------


def _on_two_cores(script: Script[Phase]) -> Script[Phase]:
    """Both cores of every chip at the script, each with its half of the payload."""
    chunks = script.num_chunks
    everyone = np.arange(script.num_ranks, dtype=np.int32)

    num_parts = max(parts for parts in range(1, _PARTS + 1) if chunks % parts == 0)
    count = chunks // num_parts

    def exchange(chips: Ints, op: int) -> Columns:
        """Each core gives its partner the partner's half, or afterwards its own, part by part."""
        given = [chunks, 0] if op == ADD else [0, chunks]
        return join(
            transfers(
                round=part,
                lane=0,
                src=2 * chips + core,
                dst=2 * chips + 1 - core,
                chunk=given[core] + part * count,
                count=count,
                op=op,
            )
            for part in range(num_parts)
            for core in (0, 1)
        )

    phases = [_both_cores(phase, chunks) for phase in script.phases]
    add = Phase("between cores, reduce-scatter", exchange(script.contributors, ADD))
    copy = Phase("between cores, all-gather", exchange(everyone, COPY))
    owner = script.owner
    if owner is not None:
        owner = np.concatenate([2 * owner, 2 * owner + 1]).astype(np.int32)
    live = np.repeat(2 * script.contributors, 2)
    live[1::2] += 1
    return Script(
        num_chunks=2 * chunks,
        phases=(add, *phases, copy),
        names=tuple(f"core {core} of {name}" for name in script.names for core in (0, 1)),
        contributors=live,
        num_scatter=script.num_scatter + 1 if script.num_scatter else 0,
        owner=owner,
    )


def _both_cores(phase: Phase, chunks: int) -> Phase:
    if isinstance(phase.what, Columns):
        c = phase.what
        return Phase(
            phase.name,
            join(
                c.replace(
                    src=2 * c.src + core,
                    dst=2 * c.dst + core,
                    chunk=c.chunk + np.int32(core * chunks),
                )
                for core in (0, 1)
            ),
        )
    return Phase(
        phase.name,
        tuple(
            Circling(
                np.concatenate([2 * each.rings, 2 * each.rings + 1]).astype(np.int32),
                np.concatenate([each.first_chunk, each.first_chunk + chunks]).astype(np.int32),
                each.lane,
                each.count,
                each.mirrored,
            )
            for each in phase.what
        ),
    )
