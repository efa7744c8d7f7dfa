"""How chips that are on no full ring get their contributions onto one, in time.

The paper's yellow chips. They stand in small groups, 2x2 where the damage is even, and have exits:
links to chips on a full ring. Think of the gather half, which is easier to see: a ring chip gets
each piece of the result in a known round, and from then on may hand it across an exit; a group
spreads it over its own links until every chip has it. Run backwards, the same transfers sum
the group's contributions on their way to the ring, each before the ring moves on.

Each chip receives each piece once and no link carries two pieces in one round. Everything here is
in coords.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link, Topology

Piece = tuple[int, int]  # which half of the payload, and which piece of that half
Arrival = Callable[[Coord, Piece], int]  # the first round in which a ring chip can hand it on

RELUCTANCES = (3, math.inf)  # see `_spread`; the second is tried where the first is late


class Booking(NamedTuple):
    """One transfer of the gather half: `piece` crosses `link` in `round`."""

    round: int
    link: Link
    piece: Piece


@dataclass(frozen=True)
class Group:
    """Connected chips off the rings, and the links that lead to them from ring chips."""

    chips: frozenset[Coord]
    exits: tuple[Link, ...]


def form_groups(topology: Topology, loose: Collection[Coord], *, across: int) -> list[Group]:
    """Cut the `loose` chips into groups.

    Runs of loose chips along the axis `across`, which crosses the rings, stay together, and two
    equal runs side by side make one group: a 2x2 block where a single pair of rings is broken.
    """
    runs = _runs(topology, loose, across)
    groups: list[Group] = []
    taken: set[Coord] = set()
    for run in runs:
        if run[0] in taken:
            continue
        beside = [_moved(coord, 1 - across, +1) for coord in run]
        whole = all(topology.is_link(a, b) for a, b in zip(run, beside, strict=True))
        chips = {*run, *beside} if whole and beside in runs else set(run)
        taken |= chips
        exits = ((b, a) for a in sorted(chips) for b in topology.neighbours(a) if b not in loose)
        groups.append(Group(frozenset(chips), tuple(exits)))
    return groups


def book(
    topology: Topology, groups: list[Group], pieces: Collection[Piece], arrival: Arrival, *, by: int
) -> list[Booking]:
    """Bookings that bring every piece to every chip of every group, before round `by` if possible.

    A group that cannot make it alone is joined with those beside it and booked again.
    """
    waiting = list(groups)
    booked: list[tuple[Group, list[Booking]]] = []
    while waiting:
        group = waiting.pop()
        for reluctance in RELUCTANCES:
            bookings = _spread(topology, group, pieces, arrival, reluctance)
            in_time = group.exits and max(booking.round for booking in bookings) < by
            if in_time:
                break
        if not in_time:
            reach = {b for a in group.chips for b in topology.neighbours(a)} - group.chips
            beside = [other for other in waiting if other.chips & reach]
            beside += [other for other, _ in booked if other.chips & reach]
            if beside:
                waiting = [other for other in waiting if other not in beside]
                booked = [(other, done) for other, done in booked if other not in beside]
                waiting.append(_union([group, *beside]))
                continue
        booked.append((group, bookings))
    return [booking for _, bookings in booked for booking in bookings]


def _union(groups: list[Group]) -> Group:
    return Group(
        chips=frozenset(chip for group in groups for chip in group.chips),
        exits=tuple(link for group in groups for link in group.exits),
    )


def _spread(
    topology: Topology,
    group: Group,
    pieces: Collection[Piece],
    arrival: Arrival,
    reluctance: float,
) -> list[Booking]:
    """Book the links of `group`; pieces that the ring has last choose first, for they are urgent.

    A piece enters by the exit that is free first, and by another only where that saves more than
    `reluctance` rounds: exits are scarce, and what has entered can be passed on inside.
    """
    busy: defaultdict[Link, set[int]] = defaultdict(set)
    inside = {a: [b for b in topology.neighbours(a) if b in group.chips] for a in group.chips}

    def free(link: Link, start: int) -> int:
        taken = busy[link]
        while start in taken:
            start += 1
        return start

    def urgency(piece: Piece) -> tuple[int, Piece]:
        return -min((arrival(chip, piece) for chip, _ in group.exits), default=0), piece

    bookings = []
    for piece in sorted(pieces, key=urgency):
        entries = sorted((free(link, arrival(link[0], piece)), link) for link in group.exits)
        queue = [
            (start + reluctance * (i > 0), start, link) for i, (start, link) in enumerate(entries)
        ]
        reached: set[Coord] = set()
        while queue:
            key, start, link = heapq.heappop(queue)
            here = link[1]
            if here in reached:
                continue
            reached.add(here)
            busy[link].add(start)
            bookings.append(Booking(start, link, piece))
            for there in inside[here]:
                if there not in reached:
                    onward = free((here, there), start + 1)
                    heapq.heappush(queue, (key + onward - start, onward, (here, there)))
    return bookings


def _moved(coord: Coord, axis: int, step: int) -> Coord:
    return (*coord[:axis], coord[axis] + step, *coord[axis + 1 :])


def _runs(topology: Topology, loose: Collection[Coord], across: int) -> list[list[Coord]]:
    """Unbroken runs of loose chips along the axis `across`, in the order of their place."""
    runs: list[list[Coord]] = []
    for coord in sorted(loose, key=lambda c: (c[1 - across], c[across])):
        before = _moved(coord, across, -1)
        if runs and runs[-1][-1] == before and topology.is_link(before, coord):
            runs[-1].append(coord)
        else:
            runs.append([coord])
    return runs
