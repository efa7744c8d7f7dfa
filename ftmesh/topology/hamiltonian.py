"""Hamiltonian circuits by construction: closed walks over neighbours that visit every live chip.

On two axes, the walk around a comb, as in the paper's figures 3 and 8. The mesh is divided into 2x2
squares, which a spanning tree joins like a comb: each row of squares is a tooth, the first column
of squares the spine. Walking around the comb visits every chip once: out and back along the teeth,
and home along the outer column. Where failed squares break a tooth, its far part is joined to a
neighbouring row instead, and the walk folds around the hole.

On three axes, and on a torus where this does not work, the circuit is joined at squares from short
ones that together visit every live chip: rows that close over the edge, and *strips* of two
neighbouring rows, wherever both are live. Rows may lie along any axis, and pair along any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise, permutations, product

from ftmesh.errors import PlanError
from ftmesh.topology.join_circuits import join_circuits, wrapping_axes
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link, Topology

MAX_TRIES = 5  # random changes when joining strips

Square = tuple[int, int]
Row = list[Coord]


def find_circuit(topology: Topology) -> list[Coord]:
    """Return the live chips in the order of a closed walk over neighbours."""
    return list(_circuit(topology.without_devices()))


@lru_cache(maxsize=16)
def _circuit(topology: Topology) -> list[Coord]:
    if len(topology.shape) > 2:
        return circuit_of_strips(topology)
    try:
        return _circuit_around_comb(topology)
    except PlanError:
        if len(topology.shape) < 2 or min(topology.shape) < 2 or not wrapping_axes(topology):
            raise
        return circuit_of_strips(topology)


def _circuit_around_comb(topology: Topology) -> list[Coord]:
    _check_squares(topology)
    walk = _walk(topology)
    if len(set(walk)) < topology.num_live:
        raise PlanError("its 2x2 squares are joined only over the edge, which the walk cannot use")
    for a, b in pairwise([*walk, walk[0]]):
        if not topology.is_link(a, b):
            raise PlanError(
                f"its circuit crosses the failed link between {topology.noun}s {a} and {b}"
            )
    return walk


def _check_squares(topology: Topology) -> None:
    if len(topology.shape) != 2 or min(topology.shape) < 2:
        raise PlanError(
            f"it needs two or three axes, of 2 {topology.noun}s or more each, not {topology.name}"
        )
    odd_sides = [n for n in topology.shape if n % 2]
    if len(odd_sides) == 2 and not topology.failed:
        raise PlanError(
            f"{topology.name} has an odd number of {topology.noun}s, so no circuit visits each once"
        )
    if odd_sides and topology.failed:
        raise PlanError(f"a damaged mesh must have even sides, and {topology.name} does not")
    partly = [coord for coord in topology.failed if not _is_square_failed(topology, coord)]
    if partly:
        raise PlanError(
            f"failed {topology.noun}s must form even blocks at even coordinates, and the 2x2 "
            f"square of {topology.noun} {min(partly)} is only partly failed"
        )


def _walk(topology: Topology) -> list[Coord]:
    width, height = topology.shape
    if height % 2:
        flipped = Topology(shape=(height, width), wrap=topology.wrap[::-1])
        return [coord[::-1] for coord in _walk(flipped)]
    if width % 2:
        return _snake(width, height)
    return _around_tree(_comb(topology))


def _is_square_failed(topology: Topology, coord: Coord) -> bool:
    x, y = (c // 2 * 2 for c in coord)
    return all((x + dx, y + dy) in topology.failed for dx, dy in product((0, 1), repeat=2))


def _snake(width: int, height: int) -> list[Coord]:
    """Rows in alternating directions without the first column, and back along that column."""
    walk: list[Coord] = []
    for y in range(height):
        row = [(x, y) for x in range(1, width)]
        walk += reversed(row) if y % 2 else row
    return [*walk, *((0, y) for y in reversed(range(height)))]


def _comb(topology: Topology) -> dict[Square, set[Square]]:
    """A spanning tree of the live squares, along rows where possible, as square -> neighbours."""
    width, height = topology.shape
    squares = [
        (i, j)
        for j in range(height // 2)
        for i in range(width // 2)
        if topology.is_live((2 * i, 2 * j))
    ]
    along_rows = [((i, j), (i + 1, j)) for i, j in squares]
    along_columns = sorted((((i, j), (i, j + 1)) for i, j in squares), key=lambda edge: edge[0])
    joined: dict[Square, set[Square]] = {square: set() for square in squares}
    component = {square: {square} for square in squares}
    for a, b in along_rows + along_columns:
        if b in component and component[a] is not component[b]:
            joined[a].add(b)
            joined[b].add(a)
            component[a] |= component[b]
            for square in component[b]:
                component[square] = component[a]
    return joined


def _around_tree(joined: dict[Square, set[Square]]) -> list[Coord]:
    """The walk around a tree of 2x2 squares, with the tree always on the right hand.

    From each of its four chips the walk goes to the neighbouring square, if that is joined there,
    else to the next chip of the same square.
    """
    # Clockwise with y down: position of a chip in its square, and the direction out of the square.
    outwards = {(0, 0): (0, -1), (1, 0): (1, 0), (1, 1): (0, 1), (0, 1): (-1, 0)}
    clockwise = {(0, 0): (1, 0), (1, 0): (1, 1), (1, 1): (0, 1), (0, 1): (0, 0)}
    start = min(joined, key=lambda square: square[::-1])
    here = (2 * start[0], 2 * start[1])
    walk: list[Coord] = []
    for _ in range(4 * len(joined)):
        walk.append(here)
        x, y = here
        square, corner = (x // 2, y // 2), (x % 2, y % 2)
        dx, dy = outwards[corner]
        if (square[0] + dx, square[1] + dy) in joined[square]:
            here = (x + dx, y + dy)
        else:
            nx, ny = clockwise[corner]
            here = (2 * square[0] + nx, 2 * square[1] + ny)
    return walk


def circuit_of_strips(topology: Topology) -> list[Coord]:
    """Return a circuit joined from rings and strips, on one to three axes."""
    _check_parity(topology)
    for links in _partitions(topology):
        try:
            return join_circuits(topology, [links], max_tries=MAX_TRIES)[0]
        except PlanError:
            continue
    raise PlanError(
        f"its live {topology.noun}s do not divide into wrapping rings and strips of two rows that "
        "join to one circuit"
    )


def _check_parity(topology: Topology) -> None:
    """Raise if there can be no circuit because hops alternate between even and odd coords."""
    if any(topology.shape[axis] % 2 for axis in wrapping_axes(topology)):
        return  # a wrapping hop along that axis does not alternate
    parities = Counter(sum(coord) % 2 for coord in topology.coords)
    if parities[0] != parities[1]:
        raise PlanError(
            f"no circuit visits each {topology.noun} once: hops lead from the {parities[0]} whose "
            f"coords have an even sum to the {parities[1]} others and back"
        )


def _partitions(topology: Topology) -> Iterator[list[Link]]:
    """Yield the links of sets of short circuits that together visit every live chip.

    If pairs of rows can close over the edge, the first row pairs with the second or with the last.
    """
    for along, across in permutations(range(len(topology.shape)), 2):
        for first in (0, 1) if topology.wrap[across] else (0,):
            links = [
                link
                for rows in _planes(topology, along, across)
                for part in _parts(topology, rows[first:] + rows[:first])
                for link in part
            ]
            degree = Counter(chip for link in links for chip in link)
            if all(degree[coord] == 2 for coord in topology.coords):
                yield links


def _planes(topology: Topology, along: int, across: int) -> Iterator[list[Row]]:
    """The rows of every plane, with live and failed chips."""
    others = [axis for axis in range(len(topology.shape)) if axis not in (along, across)]
    for rest in product(*(range(topology.shape[axis]) for axis in others)):
        fixed = dict(zip(others, rest, strict=True))
        yield [
            [
                tuple({**fixed, across: j, along: i}[axis] for axis in range(len(topology.shape)))
                for i in range(topology.shape[along])
            ]
            for j in range(topology.shape[across])
        ]


def _parts(topology: Topology, rows: list[Row]) -> Iterator[list[Link]]:
    """Short circuits of a plane: rows that are rings, and strips of other rows with the next."""
    remaining = iter(rows)
    for row in remaining:
        ring = list(pairwise([*row, row[0]]))
        if len(row) > 2 and all(topology.is_link(a, b) for a, b in ring):
            yield ring
        elif any(topology.is_live(chip) for chip in row):
            yield from _strips(topology, row, next(remaining, row))


def _strips(topology: Topology, row: Row, other: Row) -> Iterator[list[Link]]:
    """Circuits out along a row and back along the other, wherever both are live."""
    rungs = list(zip(row, other, strict=True))
    is_joined = [
        topology.is_link(a, c) and topology.is_link(b, d)
        for (a, b), (c, d) in pairwise([*rungs, rungs[0]])
    ]
    start = is_joined.index(False) + 1 if False in is_joined else 0
    run: list[Link] = []
    for i in range(len(rungs)):
        index = (start + i) % len(rungs)
        run.append(rungs[index])
        if is_joined[index] and i + 1 < len(rungs):
            continue
        if len(run) > 1 and topology.is_link(*run[0]) and topology.is_link(*run[-1]):
            there, back = zip(*run, strict=True)
            yield list(pairwise([*there, *back[::-1], there[0]]))
        run = []
