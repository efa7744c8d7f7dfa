"""The order of ranks along a mesh axis: a ring through all live chips, by single hops if possible.

XLA sums along a mesh axis in a ring, in the order in which the devices stand. Along a closed walk
over neighbours every step of that ring is one link, and nothing goes near a failed chip. Where no
such walk exists, as with an odd number of chips on a mesh without wraps, or a chip on a single
link, a few steps take two hops or more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from ftmesh.errors import PlanError, VerificationError
from ftmesh.topology.circuit_search import longest_cycle
from ftmesh.topology.damage import biconnected_blocks
from ftmesh.topology.hamiltonian import find_circuit
from ftmesh.topology.notation import Block, Coord
from ftmesh.topology.routing import Route, dimension_order
from ftmesh.topology.topology import Topology

_BLOCKED = 1_000  # hops: more than any route has
_MAX_TURNED = 100_000  # chips of all paths that are tried for a long step, a fraction of a second
_MAX_SEARCHED = 300  # chips: larger meshes are searched as a whole only if nothing else serves


@dataclass(frozen=True)
class RingOrder:
    """The live chips of a topology in the order of a ring.

    A step of more than one hop goes along x, then y, then z, as a TPU mesh routes, and back by that
    rule too, which may be by other chips.

    >>> print(ring_order(Topology.grid("4x4", failed="2x2@2,2")))
    all 12 steps of the ring are one hop
    >>> print(ring_order(Topology.grid("4x4", failed="1x1@2,2")))
    14 of 15 steps of the ring are one hop, 1 is two
    """

    topology: Topology
    coords: tuple[Coord, ...]

    @property
    def steps(self) -> tuple[tuple[Coord, Coord], ...]:
        """The pairs of chips that exchange data, each with the next and the last with the first."""
        closed = (*self.coords, self.coords[0])
        return tuple(pairwise(closed)) if len(self.coords) > 1 else ()

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """The number of links on the way of each step."""
        return tuple(len(dimension_order(self.topology, a, b)) - 1 for a, b in self.steps)

    @property
    def is_circuit(self) -> bool:
        """Whether every step is over one live link."""
        return all(self.topology.is_link(a, b) for a, b in self.steps)

    @cached_property
    def blocked(self) -> tuple[tuple[Coord, Coord], ...]:
        """The steps whose route, there or back, goes over a failed chip or link."""
        return tuple(
            step
            for step in self.steps
            if any(_obstacle(self.topology, route) for route in _both_routes(self.topology, *step))
        )

    def prove(self) -> None:
        """Check that every live chip is on the ring once, and that its routes are live.

        Raises:
            VerificationError: Naming the chip or the step.
        """
        counts = Counter(self.coords)
        for coord in self.topology.coords:
            if counts.pop(coord, 0) != 1:
                raise VerificationError(f"expected {coord} once on the ring of {self.topology}")
        if counts:
            raise VerificationError(f"{min(counts)} on the ring is no live chip of {self.topology}")
        for a, b in self.steps:
            for route in _both_routes(self.topology, a, b):
                if obstacle := _obstacle(self.topology, route):
                    raise VerificationError(
                        f"the step of the ring from {route[0]} to {route[-1]} goes over {obstacle}"
                    )

    def __str__(self) -> str:
        counts = sorted(Counter(self.hops).items())
        if [hops for hops, _ in counts] in ([], [1]):
            return f"all {len(self.hops)} steps of the ring are one hop"
        (hops, count), *others = counts
        unit = "hop" if hops == 1 else "hops"
        parts = [f"{count} of {len(self.hops)} steps of the ring are {_number(hops)} {unit}"]
        parts += [f"{n} {'is' if n == 1 else 'are'} {_number(hops)}" for hops, n in others]
        text = ", ".join(parts)
        if self.blocked:
            verb = "has" if len(self.blocked) == 1 else "have"
            text += f"; {len(self.blocked)} {verb} no route clear of failures"
        return text


def _number(hops: int) -> str:
    return {1: "one", 2: "two", 3: "three"}.get(hops, str(hops))


def ring_order(topology: Topology) -> RingOrder:
    """Return the ring that ranks stand along: by single hops wherever the search finds such a one.

    It starts at the first live chip in grid order. The same topology always gives the same ring.
    """
    return _ring_order(topology.without_devices())


@lru_cache(maxsize=64)
def _ring_order(topology: Topology) -> RingOrder:
    walk = _constructed(topology) or _around_boxes(topology)
    is_circuit = bool(walk) and RingOrder(topology, tuple(walk)).is_circuit
    if not walk or (not is_circuit and topology.num_live <= _MAX_SEARCHED):
        rings = [_ring_of_part(topology, part) for part in topology.components()]
        searched = [coord for ring in rings for coord in ring]
        both = [candidate for candidate in (searched, walk) if candidate]
        walk = min(both, key=lambda ring: _ring_length(topology, ring))
    return RingOrder(topology, tuple(_from_first(walk, topology)))


def _constructed(topology: Topology) -> list[Coord]:
    try:
        return find_circuit(topology)
    except PlanError:
        return []


def _from_first(walk: list[Coord], topology: Topology) -> list[Coord]:
    """The same ring, from the first chip in grid order: over a link, and to the lower of two."""
    first = topology.coords[0]
    start = walk.index(first)
    walk = walk[start:] + walk[:start]

    def preference(coord: Coord) -> tuple[bool, int]:
        return not topology.is_link(first, coord), topology.rank(coord)

    if len(walk) > 2 and preference(walk[-1]) < preference(walk[1]):
        walk = [first, *reversed(walk[1:])]
    return walk


# Large meshes -----------------------------------------------------------------------------------


def _around_boxes(topology: Topology) -> list[Coord]:
    """A ring that is searched for only in boxes around the damage; empty if there is none.

    Outside of the boxes a circuit is constructed, and each box's own ring is joined to it where
    the two run side by side.
    """
    # Of tiles, the grid alone: parts of it may have no tile that is live.
    topology = Topology(topology.shape, topology.wrap, topology.failed, topology.failed_links)
    boxes = _boxes_around_damage(topology)
    inside = [[coord for coord in box.coords() if topology.is_live(coord)] for box in boxes]
    everything = {coord for box in boxes for coord in box.coords()}
    if not boxes or 2 * len(everything) > topology.num_chips:
        return []
    outside = topology.with_failed(everything)
    ring = [] if len(outside.components()) > 1 else _constructed(outside)
    for part in inside:
        chips = set(part)
        alone = topology.with_failed(coord for coord in topology.coords if coord not in chips)
        if len(alone.components()) > 1 or not ring:
            return []
        ring = _side_by_side(topology, ring, _ring_of_part(alone, alone.coords))
    return ring


def _boxes_around_damage(topology: Topology) -> list[Block]:
    """Boxes with even corners around failed chips and links, so large that a ring fits around."""
    ends = (coord for link in topology.failed_links for coord in link)
    spans = [(coord, coord) for coord in sorted({*topology.failed, *ends})]
    boxes: list[tuple[Coord, Coord]] = []  # the lowest and the highest coord of each
    for low, high in spans:
        low = tuple(max(0, x // 2 * 2 - 2) for x in low)
        high = tuple(min(n - 1, x // 2 * 2 + 3) for x, n in zip(high, topology.shape, strict=True))
        while near := next((box for box in boxes if _overlap(box, (low, high))), None):
            boxes.remove(near)
            low, high = tuple(map(min, low, near[0])), tuple(map(max, high, near[1]))
        boxes.append((low, high))
    return [
        Block(tuple(b - a + 1 for a, b in zip(low, high, strict=True)), low) for low, high in boxes
    ]


def _overlap(box: tuple[Coord, Coord], other: tuple[Coord, Coord]) -> bool:
    axes = zip(*box, *other, strict=True)
    return all(a <= d and c <= b for a, b, c, d in axes)


def _side_by_side(topology: Topology, ring: list[Coord], other: list[Coord]) -> list[Coord]:
    """One ring from two: two steps that run side by side are replaced by those between them."""
    step_of = {a: (i, b) for i, (a, b) in enumerate(pairwise([*other, other[0]]))}
    for at, (a, b) in enumerate(pairwise([*ring, ring[0]])):
        for c in topology.neighbours(a):
            for d in topology.neighbours(b):
                for first, last in ((c, d), (d, c)):
                    i, end = step_of.get(first, (0, None))
                    if end == last and topology.is_link(c, d):
                        rest = other[i + 1 :] + other[: i + 1]  # from `last` round to `first`
                        part = rest if last == c else rest[::-1]
                        return ring[: at + 1] + part + ring[at + 1 :]
    return []


# Rings with longer steps ------------------------------------------------------------------------


def _ring_length(topology: Topology, ring: Sequence[Coord]) -> int:
    """The hops of a ring; blocked routes count as very long."""
    return sum(_distance(topology, a, b) for a, b in pairwise([*ring, ring[0]]))


def _ring_of_part(topology: Topology, part: Sequence[Coord]) -> list[Coord]:
    """A ring through the chips of a connected part, with few steps of more than one hop.

    Chips whose loss would divide the part belong to several blocks. The rings of two blocks that
    share a chip are joined there, which makes one step of two hops.
    """
    graph = {a: topology.neighbours(a) for a in part}
    ring: list[Coord] = []
    for block in biconnected_blocks(graph):
        own = _ring_of_block(topology, block)
        ring = _joined(topology, ring, own) if ring else own
    return _shortened(topology, ring or list(part))


def _ring_of_block(topology: Topology, block: Sequence[Coord]) -> list[Coord]:
    """The longest cycle that is found in a block, with its other chips put in between."""
    chips = _swept(topology, block)
    number = {coord: i for i, coord in enumerate(chips)}
    links = [
        (number[a], number[b])
        for a in chips
        for b in topology.neighbours(a)
        if b in number and number[a] < number[b]
    ]
    at_most = _longest_possible(topology, chips)
    ring = [chips[i] for i in longest_cycle(len(chips), links, at_most)] or chips[:2]
    left = [chip for chip in chips if chip not in set(ring)]
    while left:
        options = [
            (_extra_hops(topology, ring, i, [chip]), j, i)
            for j, chip in enumerate(left)
            for i in _next_to_neighbours(topology, ring, chip)
        ]
        _, j, i = min(options)
        ring.insert(i, left.pop(j))
    return ring


def _swept(topology: Topology, chips: Iterable[Coord]) -> list[Coord]:
    """Chips in the order of a sweep along the longest axis, which keeps the frontier short."""
    axes = sorted(range(len(topology.shape)), key=lambda axis: -topology.shape[axis])
    return sorted(chips, key=lambda coord: [coord[axis] for axis in axes])


def _longest_possible(topology: Topology, chips: Sequence[Coord]) -> int:
    """How long a cycle can be: where hops alternate between two colours, it has as many of each."""
    colour: dict[Coord, int] = {}
    inside = set(chips)
    stack = [(chips[0], 0)]
    while stack:
        here, own = stack.pop()
        if here in colour:
            if colour[here] != own:
                return len(chips)
            continue
        colour[here] = own
        stack.extend((b, 1 - own) for b in topology.neighbours(here) if b in inside)
    counts = Counter(colour.values())
    return 2 * min(counts[0], counts[1])


def _next_to_neighbours(topology: Topology, ring: Sequence[Coord], chip: Coord) -> list[int]:
    """The positions of a ring before and after each neighbour of `chip`."""
    near = [i for i, coord in enumerate(ring) if topology.is_link(chip, coord)]
    return sorted({position for i in near for position in (i, i + 1)})


def _joined(topology: Topology, ring: list[Coord], other: list[Coord]) -> list[Coord]:
    """One ring from two that share a chip."""
    (shared,) = {*ring} & {*other}
    at, start = ring.index(shared), other.index(shared)
    rest = other[start + 1 :] + other[:start]
    options = [
        (_extra_hops(topology, ring, position, part), position, part)
        for position in (at, at + 1)
        for part in (rest, rest[::-1])
    ]
    _, position, part = min(options)
    return ring[:position] + part + ring[position:]


def _extra_hops(
    topology: Topology, ring: Sequence[Coord], position: int, part: Sequence[Coord]
) -> int:
    """The hops that are added if `part` is put into a ring before `position`."""
    before, after = ring[position - 1], ring[position % len(ring)]
    added = _distance(topology, before, part[0]) + _distance(topology, part[-1], after)
    return added - _distance(topology, before, after)


def _shortened(topology: Topology, ring: list[Coord]) -> list[Coord]:
    """Shorten the long steps of a ring for as long as a change that is tried does so."""
    while len(ring) > 3 and (shorter := _reversed_part(topology, ring) or _turned(topology, ring)):
        ring = shorter
    return ring


def _reversed_part(topology: Topology, ring: list[Coord]) -> list[Coord]:
    """A shorter ring, by reversing a stretch of it that begins or ends at a long step, or none."""
    size = len(ring)
    steps = [_distance(topology, ring[i - 1], ring[i]) for i in range(size)]  # to i
    for i in (i for i in range(size) if steps[i] > 1):
        for j in range(size):
            low, high = min(i, j), max(i, j)
            if high - low < 2 or high - low > size - 2:
                continue
            old = steps[low] + steps[high]
            new = _distance(topology, ring[low - 1], ring[high - 1])
            if new < old and new + _distance(topology, ring[low], ring[high]) < old:
                return ring[:low] + ring[low:high][::-1] + ring[high:]
    return []


def _turned(topology: Topology, ring: list[Coord]) -> list[Coord]:
    """A shorter ring, by moving the ends of a long step along other links, or none.

    Without the step the ring is a path. A link from its last chip to one further back makes another
    path with another end, and so on, until two ends are nearer to each other.
    """
    size, length = len(ring), _ring_length(topology, ring)
    for i in range(size):
        closing = _distance(topology, ring[i - 1], ring[i])
        if closing == 1:
            continue
        paths = [(length - closing, ring[i:] + ring[:i])]
        seen = {(ring[i - 1], ring[i])}
        for open_length, path in paths:  # which grows
            for there in (path, path[::-1]):
                for chip in topology.neighbours(there[-1]):
                    at = there.index(chip) if chip in there else size
                    if at > size - 3:
                        continue
                    ends = there[at + 1], there[0]
                    opened = open_length + 1 - _distance(topology, chip, there[at + 1])
                    if opened + _distance(topology, *ends) < length:
                        return there[: at + 1] + there[:at:-1]
                    if (
                        ends not in seen
                        and opened <= open_length
                        and len(paths) * size < _MAX_TURNED
                    ):
                        seen |= {ends, ends[::-1]}
                        paths.append((opened, there[: at + 1] + there[:at:-1]))
    return []


def _distance(topology: Topology, a: Coord, b: Coord) -> int:
    """Hops of the longer route of a step, there or back; many more if a route is blocked."""
    if topology.is_link(a, b):
        return 1
    routes = _both_routes(topology, a, b)
    hops = max(map(len, routes)) - 1
    is_blocked = any(_obstacle(topology, route) for route in routes)
    return hops + _BLOCKED if is_blocked else hops


def _both_routes(topology: Topology, a: Coord, b: Coord) -> tuple[Route, Route]:
    return dimension_order(topology, a, b), dimension_order(topology, b, a)


def _obstacle(topology: Topology, route: Route) -> str:
    """What is in the way on a route; empty if nothing is."""
    for a, b in pairwise(route):
        if not topology.is_live(b):
            return f"failed {topology.noun} {b}"
        if not topology.is_link(a, b):
            return f"failed link {a}-{b}"
    return ""
