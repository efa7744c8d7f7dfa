"""Circuits: closed walks through every chip, joined from short ones at squares of links.

Cables have a colour, or are free. Those of a colour form closed walks, which together visit every
chip. Where two opposite sides of a square have one colour, and the other two another or none, the
pairs may be swapped: every chip keeps two cables of each colour. If the sides were of two walks,
these become one. If they were of one, it stays whole where it ran along both in the same direction,
and falls in two where it did not. So swaps are looked for that leave fewer walks, until there is
one of each colour. That there always are enough is not proved; on tori of all sides that were tried
there are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from typing import NamedTuple

from ftmesh.errors import PlanError
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link, Topology

FREE = -1
STIRRED = 8  # swaps at once, where none is better than another
TRIES = 400  # how often that is done before giving up; a torus of 4x64 takes 168

Corners = tuple[Coord, Coord, Coord, Coord]  # in the order of a walk round


class _Square(NamedTuple):
    """Four chips, and the numbers of the cables from each to the next."""

    corners: Corners
    sides: tuple[int, ...]


def join_circuits(
    topology: Topology, colours: Iterable[Iterable[Link]], *, tries: int = TRIES
) -> list[list[Coord]]:
    """A closed walk through all live chips for each of `multi_ring`, no two of which share a cable.

    The cables of a colour must form closed walks that together visit every live chip.

    >>> torus = Topology.grid("3x4", wrap=True)
    >>> [len(walk) for walk in join_circuits(torus, [along(torus, axis) for axis in (0, 1)])]
    [12, 12]
    """
    joining = _Joining(topology, [_Walks(topology, links) for links in colours], tries)
    joining.join()
    return [walks.in_order() for walks in joining.walks]


def along(topology: Topology, axis: int) -> list[Link]:
    """The links that lead up along an axis; where it wraps, over the edge as well."""
    ahead = ((a, _ahead(topology, a, axis)) for a in topology.coords)
    return [(a, b) for a, b in ahead if topology.is_link(a, b)]


def wrapping_axes(topology: Topology) -> list[int]:
    """The axes along which chips form rings: those that wrap, of three chips or more."""
    sides = zip(topology.shape, topology.wrap, strict=True)
    return [axis for axis, (size, wraps) in enumerate(sides) if wraps and size > 2]


class _Walks:
    """The closed walks of one colour, numbered."""

    def __init__(self, topology: Topology, links: Iterable[Link]) -> None:
        self.beside: dict[Coord, list[Coord]] = {coord: [] for coord in topology.coords}
        for a, b in links:
            self.beside[a].append(b)
            self.beside[b].append(a)
        self._look()

    def _look(self) -> None:
        """Go along every walk: which chips are on it, and in which direction it runs."""
        self.number: dict[Coord, int] = {}
        self.next: dict[Coord, Coord] = {}
        self.members: list[list[Coord]] = []
        for start in self.beside:
            if start in self.number:
                continue
            members = []
            before, here = start, start
            while here not in self.number:
                self.number[here] = len(self.members)
                members.append(here)
                one, other = self.beside[here]
                before, here = here, other if one == before else one
                self.next[before] = here
            self.members.append(members)
        self.count = len(self.members)
        self._is_in_order = True

    def in_order(self) -> list[Coord]:
        """The chips of the first walk as it goes."""
        if not self._is_in_order:
            self._look()
        return self.members[0]

    def joins(self, a: Coord, b: Coord, c: Coord, d: Coord) -> bool:
        """Whether giving a-b and c-d for b-c and d-a makes one walk of two."""
        return self.number[a] != self.number[d]

    def more(self, a: Coord, b: Coord, c: Coord, d: Coord) -> int:
        """How many more walks there are if a-b and c-d are given for b-c and d-a."""
        if self.joins(a, b, c, d):
            return -1
        if not self._is_in_order:
            self._look()
        return 0 if (self.next[a] == b) == (self.next[d] == c) else 1

    def swap(self, a: Coord, b: Coord, c: Coord, d: Coord) -> None:
        """Give a-b and c-d for b-c and d-a."""
        joins = self.joins(a, b, c, d)
        for chip, old, new in ((a, b, d), (b, a, c), (c, d, b), (d, c, a)):
            beside = self.beside[chip]
            beside[beside.index(old)] = new
        if not joins:
            self._look()
            return
        few, many = sorted((self.number[a], self.number[d]), key=lambda n: len(self.members[n]))
        self.number.update(dict.fromkeys(self.members[few], many))
        self.members[many] += self.members[few]
        self.count -= 1
        self._is_in_order = False


class _Joining:
    """A mesh whose cables have colours, and the search for swaps."""

    def __init__(self, topology: Topology, walks: list[_Walks], tries: int) -> None:
        self.noun = topology.noun
        self.walks = walks
        number: dict[Link, int] = {}
        for a, b in topology.links:
            number[a, b] = number.get((b, a), len(number))
        self.colour = [FREE] * len(number)
        for colour, each in enumerate(walks):
            for link in ((a, b) for a, beside in each.beside.items() for b in beside):
                self.colour[number[link]] = colour
        self.squares = [
            _Square(corners, tuple(number[side] for side in pairwise([*corners, corners[0]])))
            for corners in _corners(topology)
        ]
        self.tries = tries
        self.pick = random.Random(0)

    @property
    def _too_many(self) -> int:
        return sum(walks.count - 1 for walks in self.walks)

    def join(self) -> None:
        """Swap until there is one walk of each colour."""
        while before := self._too_many:
            for is_better in (self._joins, lambda square: self._more(square) < 0):
                for square in self.squares:
                    if is_better(square):
                        self._swap(square)
            if self._too_many == before:
                self._stir()

    def _stir(self) -> None:
        """Make some swaps that leave as many walks: there may be better ones behind them."""
        self.tries -= 1
        able = [square for square in self.squares if self._more(square) == 0]
        if not able or self.tries < 0:
            raise PlanError(
                f"its circuits are joined from shorter ones at squares of four {self.noun}s, and "
                f"{self._too_many + len(self.walks)} are left that no square joins"
            )
        for square in self.pick.sample(able, min(len(able), STIRRED)):
            if self._more(square) == 0:
                self._swap(square)

    def _parts(self, square: _Square) -> list[tuple[int, Corners]]:
        """The two colours of a square, each with its sides first; none where sides do not pair."""
        one, other, same, too = (self.colour[side] for side in square.sides)
        if (one, other) != (same, too) or one == other:
            return []
        a, b, c, d = square.corners
        return [(one, square.corners), (other, (b, c, d, a))]

    def _joins(self, square: _Square) -> bool:
        """Whether a swap joins two walks of each colour of a square."""
        parts = self._parts(square)
        coloured = [(colour, corners) for colour, corners in parts if colour != FREE]
        return bool(parts) and all(self.walks[colour].joins(*c) for colour, c in coloured)

    def _more(self, square: _Square) -> int:
        """How many more walks a swap leaves; too many where there is none to be had."""
        parts = self._parts(square)
        coloured = [(colour, corners) for colour, corners in parts if colour != FREE]
        return sum(self.walks[colour].more(*c) for colour, c in coloured) if parts else 3

    def _swap(self, square: _Square) -> None:
        for colour, corners in self._parts(square):
            if colour != FREE:
                self.walks[colour].swap(*corners)
        one, other, _, _ = (self.colour[side] for side in square.sides)
        for side, colour in zip(square.sides, (other, one, other, one), strict=True):
            self.colour[side] = colour


def _corners(topology: Topology) -> Iterator[Corners]:
    """The chips of every square of live links; rings of four chips are not taken for squares."""
    for a in topology.coords:
        for i, j in combinations(range(len(topology.shape)), 2):
            b, d = _ahead(topology, a, i), _ahead(topology, a, j)
            c = _ahead(topology, b, j)
            if all(topology.is_link(*side) for side in ((a, b), (b, c), (c, d), (d, a))):
                yield a, b, c, d


def _ahead(topology: Topology, coord: Coord, axis: int) -> Coord:
    """The place next along an axis; from the last, the first."""
    place = (coord[axis] + 1) % topology.shape[axis]
    return (*coord[:axis], place, *coord[axis + 1 :])
