"""`ring`: one Hamiltonian circuit through every live chip, run in both directions at once.

The paper's figures 3 and 8. A mesh of 2x2 tiles is joined by a comb: each row of tiles is a tooth,
the first column of tiles the spine. Walking round the comb, one hand on it, visits every chip once:
out and back along the teeth, and home along the outer column. Where failed tiles break a tooth,
its far part hangs on a neighbouring row instead and the walk folds around the hole.

On three axes, and on a torus where that does not do, the circuit is joined from short ones
(`ftmesh.algorithms.ring`).

Strips: a circuit through all live chips, joined from rings along an axis and strips of two rows.

A row that closes over the edge is a ring. Two rows side by side are a circuit wherever both are
whole, for two chips or more. If these together hold every live chip, they may be joined at squares
(`ftmesh.algorithms.circuits`). Rows may lie along any axis, with their pairs along any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, permutations, product

from ftmesh.algorithms.circuits import join_circuits, wrapping_axes
from ftmesh.algorithms.building_blocks import bidirectional_rings
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Link, Topology

Tile = tuple[int, int]


def build_schedule(topology: Topology) -> Schedule:
    """Both directions of the circuit, half of the payload each."""
    return bidirectional_rings(topology, [circuit(topology)], algorithm="ring", name="Hamiltonian ring")


def circuit(topology: Topology) -> list[Coord]:
    """The live chips in the order of a closed walk over neighbours."""
    if len(topology.shape) > 2:
        return circuit_of_strips(topology)
    try:
        return _in_plane(topology)
    except PlanError:
        if len(topology.shape) < 2 or min(topology.shape) < 2 or not wrapping_axes(topology):
            raise
        return circuit_of_strips(topology)


def _in_plane(topology: Topology) -> list[Coord]:
    _check(topology)
    walk = _walk(topology)
    if len(set(walk)) < topology.num_live:
        raise PlanError("its 2x2 squares are joined only over the edge, where the walk does not go")
    for a, b in pairwise([*walk, walk[0]]):
        if not topology.is_link(a, b):
            raise PlanError(
                f"its circuit crosses the failed link between {topology.noun}s {a} and {b}"
            )
    return walk


def _check(topology: Topology) -> None:
    if len(topology.shape) != 2 or min(topology.shape) < 2:
        raise PlanError(
            f"it works on meshes of two axes or three, of 2 {topology.noun}s or more each, not on "
            f"{topology.name}"
        )
    odd_sides = [n for n in topology.shape if n % 2]
    if len(odd_sides) == 2 and not topology.failed:
        raise PlanError(
            f"{topology.name} has an odd number of {topology.noun}s, so no circuit visits each once"
        )
    if odd_sides and topology.failed:
        raise PlanError(f"a damaged mesh must have even sides, and {topology.name} does not")
    partly = [coord for coord in topology.failed if not _tile_failed(topology, coord)]
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


def _tile_failed(topology: Topology, coord: Coord) -> bool:
    x, y = (c // 2 * 2 for c in coord)
    return all((x + dx, y + dy) in topology.failed for dx, dy in product((0, 1), repeat=2))


def _snake(width: int, height: int) -> list[Coord]:
    """Rows to and fro over all columns but the first, and back along that one."""
    walk: list[Coord] = []
    for y in range(height):
        row = [(x, y) for x in range(1, width)]
        walk += reversed(row) if y % 2 else row
    return [*walk, *((0, y) for y in reversed(range(height)))]


def _comb(topology: Topology) -> dict[Tile, set[Tile]]:
    """A spanning tree of the live tiles, along rows where it can, as tile -> joined tiles."""
    width, height = topology.shape
    tiles = [
        (i, j)
        for j in range(height // 2)
        for i in range(width // 2)
        if topology.is_live((2 * i, 2 * j))
    ]
    along_rows = [((i, j), (i + 1, j)) for i, j in tiles]
    along_columns = sorted((((i, j), (i, j + 1)) for i, j in tiles), key=lambda edge: edge[0])
    joined: dict[Tile, set[Tile]] = {tile: set() for tile in tiles}
    part = {tile: {tile} for tile in tiles}
    for a, b in along_rows + along_columns:
        if b in part and part[a] is not part[b]:
            joined[a].add(b)
            joined[b].add(a)
            part[a] |= part[b]
            for tile in part[b]:
                part[tile] = part[a]
    return joined


def _around_tree(joined: dict[Tile, set[Tile]]) -> list[Coord]:
    """The walk round a tree of 2x2 tiles, with the tree always on the right hand.

    At each of its four chips a tile either leads into the next tile, if one is joined there, or to
    the tile's own next chip.
    """
    # Clockwise with y down: a chip's place in its tile, and the way the walk leaves it.
    ways = {(0, 0): (0, -1), (1, 0): (1, 0), (1, 1): (0, 1), (0, 1): (-1, 0)}
    clockwise = {(0, 0): (1, 0), (1, 0): (1, 1), (1, 1): (0, 1), (0, 1): (0, 0)}
    start = min(joined, key=lambda tile: tile[::-1])
    here = (2 * start[0], 2 * start[1])
    walk: list[Coord] = []
    for _ in range(4 * len(joined)):
        walk.append(here)
        x, y = here
        tile, place = (x // 2, y // 2), (x % 2, y % 2)
        dx, dy = ways[place]
        if (tile[0] + dx, tile[1] + dy) in joined[tile]:
            here = (x + dx, y + dy)
        else:
            nx, ny = clockwise[place]
            here = (2 * tile[0] + nx, 2 * tile[1] + ny)
    return walk


TRIES = 5  # to join circuits where squares do not at once

Row = list[Coord]


def circuit_of_strips(topology: Topology) -> list[Coord]:
    """The live chips in the order of a closed walk over neighbours, on one to three axes."""
    _check_balance(topology)
    for links in _partitions(topology):
        try:
            return join_circuits(topology, [links], tries=TRIES)[0]
        except PlanError:
            continue
    raise PlanError(
        f"its live {topology.noun}s do not part into rings over the edge and strips of two rows "
        "that join to one circuit"
    )


def _check_balance(topology: Topology) -> None:
    """Refuse what has no circuit, as every hop leads from one kind of chip to the other."""
    if any(topology.shape[axis] % 2 for axis in wrapping_axes(topology)):
        return  # a hop over that edge does not
    kinds = Counter(sum(coord) % 2 for coord in topology.coords)
    if kinds[0] != kinds[1]:
        raise PlanError(
            f"no circuit visits each {topology.noun} once: hops lead from the {kinds[0]} whose "
            f"coords have an even sum to the {kinds[1]} others and back"
        )


def _partitions(topology: Topology) -> Iterator[list[Link]]:
    """The links of short circuits that visit every live chip, one way after another to find such.

    Where pairs of rows may close over the edge, the first row pairs with the second or the last.
    """
    for along, across in permutations(range(len(topology.shape)), 2):
        for first in (0, 1) if topology.wrap[across] else (0,):
            links = [
                link
                for rows in _planes(topology, along, across)
                for part in _parts(topology, rows[first:] + rows[:first])
                for link in part
            ]
            beside = Counter(chip for link in links for chip in link)
            if all(beside[coord] == 2 for coord in topology.coords):
                yield links


def _planes(topology: Topology, along: int, across: int) -> Iterator[list[Row]]:
    """The rows of every plane, live chips and failed ones."""
    others = [axis for axis in range(len(topology.shape)) if axis not in (along, across)]
    for rest in product(*(range(topology.shape[axis]) for axis in others)):
        place = dict(zip(others, rest, strict=True))
        yield [
            [
                tuple({**place, across: j, along: i}[axis] for axis in range(len(topology.shape)))
                for i in range(topology.shape[along])
            ]
            for j in range(topology.shape[across])
        ]


def _parts(topology: Topology, rows: list[Row]) -> Iterator[list[Link]]:
    """Short circuits of a plane: rings of whole rows, and strips of the others with the next."""
    left = iter(rows)
    for row in left:
        ring = list(pairwise([*row, row[0]]))
        if len(row) > 2 and all(topology.is_link(a, b) for a, b in ring):
            yield ring
        elif any(topology.is_live(chip) for chip in row):
            yield from _strips(topology, row, next(left, row))


def _strips(topology: Topology, row: Row, other: Row) -> Iterator[list[Link]]:
    """Circuits out along a row and back along the other, as long as both are whole."""
    rungs = list(zip(row, other, strict=True))
    goes_on = [
        topology.is_link(a, c) and topology.is_link(b, d)
        for (a, b), (c, d) in pairwise([*rungs, rungs[0]])
    ]
    start = goes_on.index(False) + 1 if False in goes_on else 0
    run: list[Link] = []
    for i in range(len(rungs)):
        at = (start + i) % len(rungs)
        run.append(rungs[at])
        if goes_on[at] and i + 1 < len(rungs):
            continue
        if len(run) > 1 and topology.is_link(*run[0]) and topology.is_link(*run[-1]):
            there, back = zip(*run, strict=True)
            yield list(pairwise([*there, *back[::-1], there[0]]))
        run = []
