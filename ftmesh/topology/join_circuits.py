"""Joins short closed walks into Hamiltonian circuits by swapping cables at squares.

Each cable belongs to one circuit-to-be, its *colour*, or is free. The cables of a colour form
closed walks that together visit every chip. Where two opposite sides of a square have one colour
and the other two have another or none, the pairs can be swapped. If the two sides were on different
walks, these become one. If they were on the same walk, it stays whole if it ran along both in the
same direction, and splits if not. The search makes swaps that leave fewer walks until each colour
has one. That there always are enough swaps is not proved; on all tori that were tried there are.
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
RANDOM_SWAPS = 8  # swaps at once when no swap leaves fewer walks
MAX_TRIES = 400  # how often that is done before giving up; a torus of 4x64 takes 168

Corners = tuple[Coord, Coord, Coord, Coord]  # in the order of a walk around the square


class _Square(NamedTuple):
    corners: Corners
    sides: tuple[int, ...]  # the index of the cable from each corner to the next


def join_circuits(
    topology: Topology, colours: Iterable[Iterable[Link]], *, max_tries: int = MAX_TRIES
) -> list[list[Coord]]:
    """Return a circuit through all live chips for each colour; no two share a cable.

    `colours` has the cables of each colour, which must form closed walks that together visit every
    live chip. Raises a `PlanError` after `max_tries` random changes.
    """
    search = _SwapSearch(topology, [_Walks(topology, links) for links in colours], max_tries)
    search.run()
    return [walks.in_order() for walks in search.walks]


def axis_links(topology: Topology, axis: int) -> list[Link]:
    """Return the live links that lead up `axis`, the wrapping ones included."""
    links = ((a, _next_along(topology, a, axis)) for a in topology.coords)
    return [(a, b) for a, b in links if topology.is_link(a, b)]


def wrapping_axes(topology: Topology) -> list[int]:
    """Return the axes that wrap and have three chips or more."""
    axes = zip(topology.shape, topology.wrap, strict=True)
    return [axis for axis, (size, wraps) in enumerate(axes) if wraps and size > 2]


class _Walks:
    def __init__(self, topology: Topology, links: Iterable[Link]) -> None:
        self.neighbours: dict[Coord, list[Coord]] = {coord: [] for coord in topology.coords}
        for a, b in links:
            self.neighbours[a].append(b)
            self.neighbours[b].append(a)
        self._traverse()

    def _traverse(self) -> None:
        self.number: dict[Coord, int] = {}
        self.next: dict[Coord, Coord] = {}
        self.members: list[list[Coord]] = []
        for start in self.neighbours:
            if start in self.number:
                continue
            members = []
            before, here = start, start
            while here not in self.number:
                self.number[here] = len(self.members)
                members.append(here)
                a, b = self.neighbours[here]
                before, here = here, b if a == before else a
                self.next[before] = here
            self.members.append(members)
        self.count = len(self.members)
        self._is_in_order = True

    def in_order(self) -> list[Coord]:
        self._traverse()
        return self.members[0]

    def joins(self, a: Coord, b: Coord, c: Coord, d: Coord) -> bool:
        """Whether swapping a-b and c-d for b-c and d-a joins two walks."""
        return self.number[a] != self.number[d]

    def added_walks(self, a: Coord, b: Coord, c: Coord, d: Coord) -> int:
        """How many walks swapping a-b and c-d for b-c and d-a adds: -1, 0 or 1."""
        if self.joins(a, b, c, d):
            return -1
        if not self._is_in_order:
            self._traverse()
        return 0 if (self.next[a] == b) == (self.next[d] == c) else 1

    def swap(self, a: Coord, b: Coord, c: Coord, d: Coord) -> None:
        joins = self.joins(a, b, c, d)
        for chip, old, new in ((a, b, d), (b, a, c), (c, d, b), (d, c, a)):
            ends = self.neighbours[chip]
            ends[ends.index(old)] = new
        if not joins:
            self._traverse()
            return
        small, large = sorted((self.number[a], self.number[d]), key=lambda n: len(self.members[n]))
        self.number.update(dict.fromkeys(self.members[small], large))
        self.members[large] += self.members[small]
        self.count -= 1
        self._is_in_order = False


class _SwapSearch:
    def __init__(self, topology: Topology, walks: list[_Walks], max_tries: int) -> None:
        self.noun = topology.noun
        self.walks = walks
        cable: dict[Link, int] = {}
        for a, b in topology.links:
            cable[a, b] = cable.get((b, a), len(cable))
        self.colour = [FREE] * len(cable)
        for colour, own in enumerate(walks):
            for link in ((a, b) for a, ends in own.neighbours.items() for b in ends):
                self.colour[cable[link]] = colour
        self.squares = [
            _Square(corners, tuple(cable[side] for side in pairwise([*corners, corners[0]])))
            for corners in _corners(topology)
        ]
        self.tries_left = max_tries
        self.rng = random.Random(0)

    @property
    def _num_excess(self) -> int:
        return sum(walks.count - 1 for walks in self.walks)

    def run(self) -> None:
        while before := self._num_excess:
            for is_better in (self._joins, lambda square: self._added_walks(square) < 0):
                for square in self.squares:
                    if is_better(square):
                        self._swap(square)
            if self._num_excess == before:
                self._swap_at_random()

    def _swap_at_random(self) -> None:
        """Make swaps that leave as many walks, since better swaps may follow."""
        self.tries_left -= 1
        neutral = [square for square in self.squares if self._added_walks(square) == 0]
        if not neutral or self.tries_left < 0:
            raise PlanError(
                f"its circuits are joined from shorter ones at squares of four {self.noun}s, and "
                f"{self._num_excess + len(self.walks)} are left that no square joins"
            )
        for square in self.rng.sample(neutral, min(len(neutral), RANDOM_SWAPS)):
            if self._added_walks(square) == 0:
                self._swap(square)

    def _colour_corners(self, square: _Square) -> list[tuple[int, Corners]]:
        """The two colours of a square, each with its own sides first; none if it cannot swap."""
        first, second, third, fourth = (self.colour[side] for side in square.sides)
        if (first, second) != (third, fourth) or first == second:
            return []
        a, b, c, d = square.corners
        return [(first, square.corners), (second, (b, c, d, a))]

    def _joins(self, square: _Square) -> bool:
        both = self._colour_corners(square)
        return bool(both) and all(
            self.walks[colour].joins(*corners) for colour, corners in both if colour != FREE
        )

    def _added_walks(self, square: _Square) -> int:
        """How many walks a swap adds; 3, which is more than any swap, if it cannot swap."""
        both = self._colour_corners(square)
        added = (
            self.walks[colour].added_walks(*corners) for colour, corners in both if colour != FREE
        )
        return sum(added) if both else 3

    def _swap(self, square: _Square) -> None:
        for colour, corners in self._colour_corners(square):
            if colour != FREE:
                self.walks[colour].swap(*corners)
        first, second, _, _ = (self.colour[side] for side in square.sides)
        for side, colour in zip(square.sides, (second, first, second, first), strict=True):
            self.colour[side] = colour


def _corners(topology: Topology) -> Iterator[Corners]:
    """The corners of every square of live links; rings of four chips do not count as squares."""
    for a in topology.coords:
        for i, j in combinations(range(len(topology.shape)), 2):
            b, d = _next_along(topology, a, i), _next_along(topology, a, j)
            c = _next_along(topology, b, j)
            if all(topology.is_link(*side) for side in ((a, b), (b, c), (c, d), (d, a))):
                yield a, b, c, d


def _next_along(topology: Topology, coord: Coord, axis: int) -> Coord:
    index = (coord[axis] + 1) % topology.shape[axis]
    return (*coord[:axis], index, *coord[axis + 1 :])
