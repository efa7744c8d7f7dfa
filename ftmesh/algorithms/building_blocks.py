"""What algorithms share: reduce-scatters along rings and lines, all-reduces of them, forwarding.

Forwarding brings the contributions of chips that are not on a full ring to chips that are. These
are the yellow chips of the paper. They form small groups, 2x2 where the damage is even, with links
(*exits*) to chips on a full ring. `book` describes the all-gather: a ring chip gets each piece of
the result in a known round and can then send it across an exit, and the group spreads it over its
own links, each of which carries one piece per round. Run backwards, the same transfers sum the
contributions of the group on their way to the ring, each before the ring needs it.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ftmesh.errors import PlanError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import SplitSchedule
from ftmesh.schedule.transfers import Ints, RingRule, Transfers, join_transfers, make_transfers
from ftmesh.topology.notation import Coord, step_along
from ftmesh.topology.topology import Link, Topology


def reduce_scatter_rings(
    rings: ArrayLike, *, lane: int, first_chunk: ArrayLike, count: int = 1, rounds_per_step: int = 1
) -> tuple[Transfers, Ints]:
    """Reduce-scatter along rings of equal length, all at once.

    In step s, slot p sends piece p - s to slot p + 1, which adds it. After ``length - 1`` steps
    slot p holds the sum of piece p + 1.

    Returns the transfers, and the first chunk that each slot ends with, shaped like `rings`.

    Args:
        rings: ``rings[j, p]`` is the rank in slot p of ring j.
        lane: the lane of all transfers.
        first_chunk: the first chunk of each ring, or of all; a ring has ``length * count`` chunks.
        count: chunks in a piece.
        rounds_per_step: rounds that each step is spread over, each moving an equal part of a piece.
    """
    ranks, base, part, size = _prepare(rings, first_chunk, count, rounds_per_step)
    length = ranks.shape[1]
    slot = np.arange(length)
    step = np.arange(length - 1)[:, None, None, None]
    transfers = make_transfers(
        round=step * rounds_per_step + part,
        lane=lane,
        src=ranks,
        dst=np.roll(ranks, -1, axis=1),
        chunk=base + (slot - step) % length * count + part * size,
        count=size,
    )
    return transfers, base + (slot + 1) % length * count


def reduce_scatter_lines(
    lines: ArrayLike, *, lane: int, first_chunk: ArrayLike, count: int = 1, rounds_per_step: int = 1
) -> tuple[Transfers, Ints]:
    """Reduce-scatter along lines of equal length: sums flow from both ends to their owner.

    Slot p ends with the sum of piece p. The pieces with the farthest to go leave first, so that
    everything arrives after ``length - 1`` steps of single hops, and no link is used twice in a
    round. Parameters and results are those of `reduce_scatter_rings`; `lane` is for transfers up
    the line, and ``lane + 1`` for those down.
    """
    ranks, base, part, size = _prepare(lines, first_chunk, count, rounds_per_step)
    length = ranks.shape[1]
    slot, owner = np.triu_indices(length, k=1)
    directions = []
    for is_down in (0, 1):
        line = ranks[:, ::-1] if is_down else ranks
        piece = length - 1 - owner if is_down else owner
        directions.append(
            make_transfers(
                round=(length - 1 - owner + slot) * rounds_per_step + part,
                lane=lane + is_down,
                src=line[:, slot],
                dst=line[:, slot + 1],
                chunk=base + piece * count + part * size,
                count=size,
            )
        )
    return join_transfers(directions), base + np.arange(length) * count


def check_one_part(topology: Topology) -> None:
    """Raise PlanError unless there are two live chips or more, all joined by links."""
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    if len(topology.components()) > 1:
        raise PlanError(f"no link joins some of its {topology.noun}s to the others")


def bidirectional_rings(
    topology: Topology, circuits: Sequence[list[Coord]], *, algorithm: str, name: str
) -> SplitSchedule:
    """Return an all-reduce along closed circuits, with equal parts of the payload each way round.

    Each circuit visits all live chips, and no two share a link. `name` is that of the phases.
    """
    live = topology.num_live
    rings = [np.array([[topology.rank(coord) for coord in walk]], np.int32) for walk in circuits]
    directed = [ring for both in rings for ring in (both, both[:, ::-1])]
    rules = tuple(
        RingRule(np.ascontiguousarray(ring), np.array([lane * live], np.int32), lane)
        for lane, ring in enumerate(directed)
    )
    owner = np.empty(len(rules) * live, np.int32)
    for rule in rules:
        owner[rule.owned_chunks] = rule.rings
    return mirrored_all_reduce(topology, algorithm, len(owner), [(name, rules)], owner)


def mirrored_all_reduce(
    topology: Topology,
    algorithm: str,
    num_chunks: int,
    phases: Sequence[tuple[str, Transfers | tuple[RingRule, ...]]],
    owner: Ints,
) -> SplitSchedule:
    """Return the schedule of a reduce-scatter followed by its mirror image as all-gather.

    `phases` has the name and the content of each phase of the reduce-scatter, and `owner` the rank
    that has the sum of each chunk after it.
    """
    scatter = [Phase(f"{name}, reduce-scatter", content) for name, content in phases]
    gather = [
        phase.mirrored(f"{name}, all-gather")
        for phase, (name, _) in zip(reversed(scatter), reversed(phases), strict=True)
    ]
    return SplitSchedule(
        topology=topology,
        algorithm=algorithm,
        num_chunks=num_chunks,
        phases=(*scatter, *gather),
        owner=owner,
        rounds_in_reduce_scatter=sum(phase.num_rounds for phase in scatter),
    )


def _prepare(
    rows: ArrayLike, first_chunk: ArrayLike, count: int, rounds_per_step: int
) -> tuple[Ints, Ints, NDArray[np.intp], int]:
    """The ranks, the first chunk of each row, the parts of a step, and chunks in a part."""
    ranks = np.asarray(rows, np.int32)
    base = np.broadcast_to(np.asarray(first_chunk, np.int32), ranks.shape[:1])[:, None]
    return ranks, base, np.arange(rounds_per_step)[:, None, None], count // rounds_per_step


# Forwarding -------------------------------------------------------------------------------------

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
        next_run = [step_along(coord, 1 - across, +1) for coord in run]
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


def _runs(topology: Topology, off_ring: Collection[Coord], across: int) -> list[list[Coord]]:
    """Unbroken runs of chips along the axis `across`, in order of their coords."""
    runs: list[list[Coord]] = []
    for coord in sorted(off_ring, key=lambda c: (c[1 - across], c[across])):
        before = step_along(coord, across, -1)
        if runs and runs[-1][-1] == before and topology.is_link(before, coord):
            runs[-1].append(coord)
        else:
            runs.append([coord])
    return runs
