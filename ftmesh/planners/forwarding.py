"""How chips that are on no full ring get their contributions onto one, in time.

The paper's yellow chips. They stand in small groups, 2x2 where the damage is even; a group sums
each piece of the payload on its way to one of its exits, a link to a chip on a full ring. That chip
passes the piece on at a known round, so every piece has a deadline at every exit. `Forwarder` books
links greedily in the order of those deadlines and tells how much of a head start it needs over
the rings. Everything here is in coords; no link is ever booked twice in one round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import product

from ftmesh.notation import Coord
from ftmesh.topology import Link, Topology

Piece = tuple[int, int]  # which half of the payload, and which piece of that half


@dataclass
class Group:
    """Connected chips off the rings, and the links that lead from them onto a ring."""

    chips: set[Coord]
    exits: list[Link]

    def merge(self, other: Group) -> None:
        """Take over the chips and exits of `other`."""
        self.chips |= other.chips
        self.exits += other.exits


@dataclass(frozen=True)
class Booking:
    """One transfer: `piece` crosses `link` in `round`."""

    round: int
    link: Link
    piece: Piece


def form_groups(topology: Topology, loose: Collection[Coord], *, across: int) -> list[Group]:
    """Cut the `loose` chips into groups, each with two exits to other live chips if it can be.

    Columns of loose chips along the axis `across`, which crosses the rings, stay together, and two
    equal columns side by side make one group: a 2x2 block where a single pair of rings is broken.
    """
    columns = _columns(topology, loose, across)
    groups: list[Group] = []
    taken: set[Coord] = set()
    for column in columns:
        if column[0] in taken:
            continue
        beside = [_moved(coord, 1 - across, +1) for coord in column]
        whole = all(topology.is_link(a, b) for a, b in zip(column, beside, strict=True))
        pair = [column, beside] if whole and beside in columns else [column]
        chips = {coord for part in pair for coord in part}
        taken |= chips
        exits = [
            (end, _moved(end, across, step))
            for part in pair
            for end, step in ((part[0], -1), (part[-1], +1))
        ]
        on_ring = [(a, b) for a, b in exits if topology.is_link(a, b) and b not in loose]
        groups.append(Group(chips, on_ring))
    return _join_poor_groups(topology, groups)


def _moved(coord: Coord, axis: int, step: int) -> Coord:
    return (*coord[:axis], coord[axis] + step, *coord[axis + 1 :])


def _columns(topology: Topology, loose: Collection[Coord], across: int) -> list[list[Coord]]:
    """Unbroken runs of loose chips along the axis `across`, in the order of their place."""
    columns: list[list[Coord]] = []
    for coord in sorted(loose, key=lambda c: (c[1 - across], c[across])):
        if columns and coord == _moved(columns[-1][-1], across, +1):
            if topology.is_link(columns[-1][-1], coord):
                columns[-1].append(coord)
                continue
        columns.append([coord])
    return columns


def _join_poor_groups(topology: Topology, groups: list[Group]) -> list[Group]:
    """Merge groups with fewer than two exits into neighbours until none can be helped."""
    poor = [group for group in groups if len(group.exits) < 2]
    while poor:
        group = min(poor, key=lambda g: (len(g.exits), min(g.chips)))
        reach = {b for a in group.chips for b in topology.neighbours(a)} - group.chips
        hosts = [other for other in groups if other is not group and other.chips & reach]
        poor.remove(group)
        if hosts:
            host = min(hosts, key=lambda g: (len(g.chips), min(g.chips)))
            host.merge(group)
            groups.remove(group)
            if host not in poor and len(host.exits) < 2:
                poor.append(host)
    return groups


@dataclass
class Forwarder:
    """Books the links of one group so that every piece meets its ring before the ring moves on.

    ``leaves(chip, piece)`` is the round, counted from the rings' own start, in which the ring chip
    sends the piece on (or, at the piece's last stop, in which the phase is over).
    """

    topology: Topology
    group: Group
    leaves: Callable[[Coord, Piece], int]
    bookings: list[Booking] = field(default_factory=list)
    head_start: int = 0

    def book(self, pieces: Iterable[Piece]) -> None:
        """Book every piece, and set `head_start`: how many rounds later the rings must start."""
        pieces = list(pieces)
        trees = [
            (link, tree) for link in self.group.exits for tree in _trees(self.topology, self.group, link)
        ]
        due = {piece: max(self.leaves(b, piece) for _, b in self.group.exits) for piece in pieces}
        in_order = sorted(pieces, key=lambda piece: (due[piece], piece))
        lateness = 1
        while lateness > 0:
            lateness = self._attempt(in_order, trees)
            self.head_start += lateness

    def _attempt(self, pieces: list[Piece], trees: list[tuple[Link, list[Link]]]) -> int:
        """Book all pieces under the present head start; by how many rounds the worst is late."""
        busy: dict[Link, set[int]] = {}
        self.bookings = []
        worst = 0
        for piece in pieces:
            offers = []
            for (_, ring_chip), tree in trees:
                rounds = _earliest(tree, busy)
                late = rounds[-1] - (self.head_start + self.leaves(ring_chip, piece) - 1)
                offers.append((max(late, 0), rounds[-1], sum(rounds), tree, rounds))
            late, _, _, tree, rounds = min(offers)
            worst = max(worst, late)
            for link, when in zip(tree, rounds, strict=True):
                busy.setdefault(link, set()).add(when)
                self.bookings.append(Booking(when, link, piece))
        return worst


def _trees(topology: Topology, group: Group, way_out: Link) -> list[list[Link]]:
    """In-trees of a group that end in the link `way_out`, leaves first; one per order of turns."""
    found: list[list[Link]] = []
    for turn, start in product((1, -1), (0, 1)):
        order = [way_out]
        seen = {way_out[0]}
        for link in order:
            here = link[0]
            beside = sorted(topology.neighbours(here), key=lambda c: (c[start] == here[start], c))
            for there in beside[::turn]:
                if there in group.chips and there not in seen:
                    seen.add(there)
                    order.append((there, here))
        if order[::-1] not in found:
            found.append(order[::-1])
    return found


def _earliest(tree: list[Link], busy: dict[Link, set[int]]) -> list[int]:
    """The first free round of each link of `tree`, after everything it has to wait for."""
    ready: dict[Coord, int] = {}
    rounds = []
    for src, dst in tree:
        when = ready.get(src, 0)
        taken = busy.get((src, dst), ())
        while when in taken:
            when += 1
        rounds.append(when)
        ready[dst] = max(ready.get(dst, 0), when + 1)
    return rounds
