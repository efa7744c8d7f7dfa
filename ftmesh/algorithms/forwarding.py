"""Forwards the contributions of chips that are not on a full ring to chips that are.

These are the yellow chips of the paper. They form small groups, 2x2 where the damage is even, with
links (*exits*) to chips on a full ring. Everything here describes the all-gather: a ring chip gets
each piece of the result in a known round and can then send it across an exit, and the group spreads
it over its own links, each of which carries one piece per round. Run backwards, the same transfers
sum the contributions of the group on their way to the ring, each before the ring needs it.
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
Arrival = Callable[[Coord, Piece], int]  # the first round in which a ring chip can send a piece

SECOND_EXIT_COSTS = (3, math.inf)  # rounds, see `_spread`; the second is tried if the first is late


class Booking(NamedTuple):
    """One transfer of the all-gather: `piece` crosses `link` in `round`."""

    round: int
    link: Link
    piece: Piece


@dataclass(frozen=True)
class Group:
    """Connected chips that are not on rings, and the links to them from ring chips."""

    chips: frozenset[Coord]
    exits: tuple[Link, ...]


def form_groups(topology: Topology, off_ring: Collection[Coord], *, across: int) -> list[Group]:
    """Divide the chips that are not on rings into groups.

    Runs of such chips along the axis `across`, which crosses the rings, stay together, and two
    equal neighbouring runs form one group: a 2x2 block where a single pair of rows is broken.
    """
    runs = _runs(topology, off_ring, across)
    groups: list[Group] = []
    taken: set[Coord] = set()
    for run in runs:
        if run[0] in taken:
            continue
        next_run = [_moved(coord, 1 - across, +1) for coord in run]
        is_linked = all(topology.is_link(a, b) for a, b in zip(run, next_run, strict=True))
        chips = {*run, *next_run} if is_linked and next_run in runs else set(run)
        taken |= chips
        exits = ((b, a) for a in sorted(chips) for b in topology.neighbours(a) if b not in off_ring)
        groups.append(Group(frozenset(chips), tuple(exits)))
    return groups


def book(
    topology: Topology, groups: list[Group], pieces: Collection[Piece], arrival: Arrival, *, by: int
) -> list[Booking]:
    """Return bookings that bring every piece to every chip of every group.

    A group that is not done before round `by` is merged with its neighbours and booked again.
    """
    waiting = list(groups)
    booked: list[tuple[Group, list[Booking]]] = []
    while waiting:
        group = waiting.pop()
        for exit_cost in SECOND_EXIT_COSTS:
            bookings = _spread(topology, group, pieces, arrival, exit_cost)
            in_time = group.exits and max(booking.round for booking in bookings) < by
            if in_time:
                break
        if not in_time:
            reach = {b for a in group.chips for b in topology.neighbours(a)} - group.chips
            adjacent = [other for other in waiting if other.chips & reach]
            adjacent += [other for other, _ in booked if other.chips & reach]
            if adjacent:
                waiting = [other for other in waiting if other not in adjacent]
                booked = [(other, done) for other, done in booked if other not in adjacent]
                merged = [group, *adjacent]
                chips = frozenset(chip for part in merged for chip in part.chips)
                exits = tuple(link for part in merged for link in part.exits)
                waiting.append(Group(chips, exits))
                continue
        booked.append((group, bookings))
    return [booking for _, bookings in booked for booking in bookings]


def _spread(
    topology: Topology, group: Group, pieces: Collection[Piece], arrival: Arrival, exit_cost: float
) -> list[Booking]:
    """Book the links of `group`, starting with the pieces that the ring gets last.

    A piece enters by the exit that is free first, and by a second one only if that saves more than
    `exit_cost` rounds: exits are scarce, and inside the group the piece can be passed on.
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
            (start + exit_cost * (i > 0), start, link) for i, (start, link) in enumerate(entries)
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


def _runs(topology: Topology, off_ring: Collection[Coord], across: int) -> list[list[Coord]]:
    """Unbroken runs of chips along the axis `across`, in order of their coords."""
    runs: list[list[Coord]] = []
    for coord in sorted(off_ring, key=lambda c: (c[1 - across], c[across])):
        before = _moved(coord, across, -1)
        if runs and runs[-1][-1] == before and topology.is_link(before, coord):
            runs[-1].append(coord)
        else:
            runs.append([coord])
    return runs
