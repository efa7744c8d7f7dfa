"""Lower bounds on the time of any collective on a mesh, and the parts of the mesh that prove them.

Links are full-duplex and all alike. Whatever the schedule, three things bound the time from below:

- All-gather and reduce-scatter: what a set S of chips holds, ``|S| / N`` of the payload, must leave
  it over the links around it. The tightest of all cuts is found exactly.
- All-reduce: take any partition of the chips into k parts. For each byte of the payload it takes
  k - 1 transfers between parts until some part can know the sum, and k - 1 more until all do; a
  link carries one each way at a time. The least number of links between parts per join, of which
  there are k - 1, is the strength of the graph (Tutte, Nash-Williams). It is found exactly, over
  all partitions. Packed spanning trees, each used upward to reduce and downward to broadcast at the
  same time, come arbitrarily close to this bound.
- Latency: data between the two chips furthest from each other travels the diameter, hop by hop.

If ranks are tiles of chips, parts are made of tiles, and the links between two parts carry the
payloads of every position. That is a bound too, if not always a tight one: links inside a tile are
not counted, and the live chips of failed tiles may forward as much as they like.

>>> print(limits(Topology.grid("8x8", failed="3x3@1,1")))
8x8 less 3x3@1,1: 55 live chips, 88 links, 14 hops across
  all-gather: the busiest link carries at least 0.4909 of the payload
    chip (0, 0) hangs on 2 links
  all-reduce: the busiest link carries at least 0.8750 of the payload (strength 1.143)
    the 7 chips 4x1@0,0;1x3@0,1 each for itself, the other 48 together: 8 links for 7 joins
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ftmesh.cost.links import Network
from ftmesh.cost.min_cut import tightest_cut, weakest_partition
from ftmesh.errors import TopologyError
from ftmesh.topology.notation import Coord, format_failed
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes

_SOURCES = 4096  # chips whose distances to all others are computed at a time
_MAX_BLOCKS = 4  # blocks that are listed; of more, the box around them


@dataclass(frozen=True)
class Limits:
    """Exact lower bounds of a mesh, with the parts of it that prove them.

    Attributes:
        links: Number of links.
        all_gather, all_reduce: Share of the payload that some link must carry, each way.
        cut: What proves the first: chips that everything else must reach over too few links.
        partition: What proves the second: parts of the mesh, the largest first.
        diameter: Hops between the two chips furthest apart.
    """

    topology: Topology
    links: int
    all_gather: Fraction
    cut: tuple[Coord, ...]
    all_reduce: Fraction
    partition: tuple[tuple[Coord, ...], ...]
    diameter: int

    @property
    def live(self) -> int:
        """The number of live chips, or tiles."""
        return self.topology.num_live

    @property
    def strength(self) -> Fraction | None:
        """Links per join in the weakest partition; None for a single chip, which has no joins."""
        return 1 / self.all_reduce if self.all_reduce else None

    def all_gather_seconds(self, payload_bytes: float, link: Network | float) -> float:
        """The least time of an all-gather, or of a reduce-scatter, of `payload_bytes` in all.

        `link` is a rate in bytes per second each way, or a network, whose latency counts too.
        """
        return self._seconds(self.all_gather, payload_bytes, link)

    def all_reduce_seconds(self, payload_bytes: float, link: Network | float) -> float:
        """The least time of any all-reduce; arguments as above.

        A reduce-scatter followed by an all-gather takes at least twice `all_gather_seconds`.
        """
        return self._seconds(self.all_reduce, payload_bytes, link)

    def latency_seconds(self, latency: float, overhead: float = 0.0) -> float:
        """The least time of any collective with an empty payload."""
        return self.diameter * latency + overhead if self.diameter else 0.0

    def _seconds(self, share: Fraction, payload_bytes: float, link: Network | float) -> float:
        if isinstance(payload_bytes, int):
            check_bytes(payload_bytes)
        network = link if isinstance(link, Network) else Network(float(link), latency=0.0)
        latency = self.latency_seconds(network.latency, network.overhead)
        return max(float(share) * payload_bytes / network.bandwidth, latency)

    @property
    def why_all_gather(self) -> str:
        """A sentence that says what limits an all-gather."""
        if not self.cut:
            return f"a single {self.topology.noun} has it all"
        links = self._links(_links_around(self.topology, self.cut))
        return f"{self._chips(self.cut)} {'hang' if len(self.cut) > 1 else 'hangs'} on {links}"

    @property
    def why_all_reduce(self) -> str:
        """A sentence that says what limits an all-reduce."""
        rest, *others = self.partition
        if not others:
            return f"a single {self.topology.noun} has it all"
        links = self._links(_links_between(self.topology, self.partition))
        where = [f"{self._chips(part)} together" for part in others if len(part) > 1]
        alone = [part[0] for part in others if len(part) == 1]
        if alone:
            where.append(self._chips(alone) + (" each for itself" if len(alone) > 1 else " alone"))
        where.append(f"the other {len(rest)} together")
        if len(rest) == 1:
            where = [f"each {self.topology.noun} for itself"]
        return f"{', '.join(where)}: {links} for {_count(len(others), 'join')}"

    def _chips(self, chips: Iterable[Coord]) -> str:
        """Chips in words: by name, in blocks, or by the box around them."""
        coords, noun = sorted(chips), self.topology.noun
        if len(coords) == 1:
            return f"{noun} {coords[0]}"
        blocks = format_failed(coords)
        if blocks.count(";") >= _MAX_BLOCKS:
            low, high = (tuple(map(end, zip(*coords, strict=True))) for end in (min, max))
            blocks = f"between {low} and {high}"
        return f"the {len(coords)} {noun}s {blocks}"

    def _links(self, number: int) -> str:
        positions = self.topology.num_positions
        shared = f" shared by {positions} positions" if positions > 1 else ""
        return _count(number, "link") + shared

    def __str__(self) -> str:
        strength = f" (strength {float(self.strength):.3f})" if self.strength else ""
        gathered, reduced = float(self.all_gather), float(self.all_reduce)
        lines = (
            f"{self.topology}: {_count(self.live, f'live {self.topology.noun}')}, "
            f"{_count(self.links, 'link')}, {_count(self.diameter, 'hop')} across",
            f"  all-gather: the busiest link carries at least {gathered:.4f} of the payload",
            f"    {self.why_all_gather}",
            f"  all-reduce: the busiest link carries at least {reduced:.4f} of the payload"
            f"{strength}",
            f"    {self.why_all_reduce}",
        )
        return "\n".join(lines)


def limits(topology: Topology) -> Limits:
    """Compute the lower bounds of the live part of `topology`.

    Raises:
        TopologyError: The live chips are not connected.
    """
    return replace(_limits(topology.without_devices()), topology=topology)


@lru_cache(maxsize=32)
def _limits(topology: Topology) -> Limits:
    _check_connected(topology)
    coords = topology.coords
    edges = _edges(topology)
    cut: tuple[Coord, ...] = ()
    all_gather = all_reduce = Fraction(0)
    parts: dict[int, list[Coord]] = {}
    for coord, part in zip(coords, weakest_partition(len(coords), edges), strict=True):
        parts.setdefault(part, []).append(coord)
    partition = tuple(sorted(map(tuple, parts.values()), key=len, reverse=True))
    if edges:
        cut = tuple(coords[rank] for rank in tightest_cut(len(coords), edges))
        outside = Fraction(len(coords) - len(cut), len(coords))
        all_gather = topology.num_positions * outside / _links_around(topology, cut)
        joins = topology.num_positions * (len(partition) - 1)
        all_reduce = Fraction(joins, _links_between(topology, partition))
    diameter = _diameter(topology)
    return Limits(topology, len(edges), all_gather, cut, all_reduce, partition, diameter)


def _check_connected(topology: Topology) -> None:
    parts = topology.components()
    if len(parts) > 1:
        sizes = ", ".join(f"{_count(len(part), topology.noun)} around {part[0]}" for part in parts)
        raise TopologyError(
            f"{topology} is cut into {len(parts)} parts that no link joins: {sizes}; no sum can "
            "cross them"
        )


def _parts(topology: Topology, parts: Iterable[Iterable[Coord]], rest: int) -> dict[Coord, int]:
    """The index of the part that each chip is in; `rest` for chips that are in none."""
    part_of = dict.fromkeys(topology.physical.coords, rest)
    for number, coords in enumerate(parts):
        part_of.update(dict.fromkeys(topology.chips_of(coords), number))
    return part_of


def _edges(topology: Topology) -> list[tuple[int, int]]:
    """The links as pairs of ranks; between tiles, one for each link between their chips."""
    rank = _parts(topology, ([coord] for coord in topology.coords), rest=-1)
    ends = ((rank[a], rank[b]) for a, b in topology.physical.links)
    return [(a, b) for a, b in ends if 0 <= a < b]


def _links_around(topology: Topology, coords: Iterable[Coord]) -> int:
    """The number of links between some chips, or tiles, and the others."""
    inside = set(topology.chips_of(coords))
    return sum(b not in inside for a in inside for b in topology.physical.neighbours(a))


def _links_between(topology: Topology, partition: Iterable[Iterable[Coord]]) -> int:
    """The number of links between parts; chips of failed tiles count with the first part."""
    part = _parts(topology, partition, rest=0)
    return sum(part[a] != part[b] for a, b in topology.physical.links) // 2


def _diameter(topology: Topology) -> int:
    """The most hops between two chips, or between like chips of two tiles."""
    if not isinstance(topology, TiledTopology):
        return _spread(topology, np.arange(topology.num_live))
    return max(_spread(topology.chips, ranks) for ranks in topology.chip_ranks)


def _spread(topology: Topology, ranks: NDArray[np.integer]) -> int:
    """The most hops between two of `ranks`, by a search from all of them at once."""
    neighbours = [[topology.rank(b) for b in topology.neighbours(a)] for a in topology.coords]
    degree = max(map(len, neighbours))
    near = np.array([[*row, *[rank] * (degree - len(row))] for rank, row in enumerate(neighbours)])
    diameter = 0
    for low in range(0, len(ranks), _SOURCES):
        begin = np.zeros((len(near), min(_SOURCES, len(ranks) - low)), np.bool_)
        begin[ranks[low : low + _SOURCES], np.arange(begin.shape[1])] = True
        reach = np.packbits(begin, axis=1)
        hops = 0
        while not (reach[ranks] == reach[ranks[0]]).all():
            reach = np.bitwise_or.reduce([reach, *(reach[column] for column in near.T)])
            hops += 1
        diameter = max(diameter, hops)
    return diameter


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
