"""Tiles: a mesh cut into equal boxes of chips, each of which is one model group.

>>> tiles = TiledTopology.from_topology(Topology.grid("8x8", failed="3x1@2,2"), "2x2")
>>> tiles.drawing().splitlines()
['....', '.XX.', '....', '....']
>>> print(tiles.losses)
2 of 16 tiles lost, with 5 live chips in them: tile (1, 1) to chips 2x1@2,2; tile (2, 1) to chips \
1x1@4,2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import TopologyError
from ftmesh.topology.notation import (
    Block,
    Coord,
    Link,
    format_coord,
    format_failed,
    format_shape,
    parse_shape,
)
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class TiledTopology(Topology):
    """The grid of tiles as a topology of its own, in which a rank is a live tile; see `of`.

    A tile with a failed chip has failed. Two tiles side by side are linked if every chip of one
    reaches its like in the other straight on. The devices of a tile are its *positions*: those of
    its chips, x fastest, and of each chip core by core. `devices` has them tile by tile. A transfer
    from tile to tile is one from chip to chip at every position, over the links of `chips`; routes
    may cross the live chips of failed tiles.
    """

    noun: ClassVar[str] = "tile"

    chips: Topology  # that was cut into tiles
    tile: Coord  # its sides

    @classmethod
    def from_topology(cls, topology: Topology, tile: str | Sequence[int]) -> TiledTopology:
        """`topology` cut into tiles, as ``"2x1"``: 2 along x, 1 along y, from the low corner on.

        Of three axes, those that a tile spans whole are none of the grid of tiles: 4x4x8 in tiles
        of 1x1x8 is planned as 4x4.
        """
        sides = parse_shape(tile)
        if isinstance(topology, TiledTopology):
            raise TopologyError(f"{topology} is in tiles already: cut the mesh of its chips")
        if len(sides) != len(topology.shape) or any(
            n % t for n, t in zip(topology.shape, sides, strict=True)
        ):
            raise TopologyError(
                f"mesh {topology.name} cannot be cut into tiles of {format_shape(sides)}: give "
                f"each of its {len(topology.shape)} axes a side that divides it"
            )
        tiling = _Tiling.of(topology, sides)
        failed = frozenset(map(tiling.tile_of, topology.failed))
        if len(failed) == math.prod(tiling.shape):
            raise TopologyError(
                f"every tile of {format_shape(sides)} has a failed chip on {topology}: take "
                "smaller tiles"
            )
        bare = Topology(tiling.shape, tuple(topology.wrap[axis] for axis in tiling.axes), failed)
        live, every = bare.coords, bare.all_coords()
        return cls(
            shape=bare.shape,
            wrap=bare.wrap,
            failed=failed,
            failed_links=frozenset(_broken(topology, tiling, bare)),
            devices=_by_tile(topology, topology.devices, topology.coords, tiling.chips_of(live)),
            all_devices=_by_tile(
                topology, topology.all_devices, topology.all_coords(), tiling.chips_of(every)
            ),
            chips=topology,
            tile=sides,
        )

    def without_devices(self) -> TiledTopology:
        """The tiles alone: what a schedule is planned for, whichever devices it runs on."""
        return TiledTopology.from_topology(self.chips.without_devices(), self.tile)

    # Positions ------------------------------------------------------------------------------

    @property
    def sides(self) -> Coord:
        """The axes of a model group: the sides of a tile, and the cores where chips have two."""
        cores = self.chips.devices_per_chip
        return self.tile if cores == 1 else (*self.tile, cores)

    @property
    def num_positions(self) -> int:
        """Devices of a tile."""
        return math.prod(self.sides)

    @property
    def physical(self) -> Topology:
        """The chips and links that transfers travel over."""
        return self.chips

    def chips_of(self, coords: Iterable[Coord]) -> list[Coord]:
        """The chips of some tiles, tile by tile."""
        return _Tiling.of(self.chips, self.tile).chips_of(coords)

    @cached_property
    def chip_ranks(self) -> NDArray[np.int32]:
        """The ranks, among `chips`, of the chips of every live tile: ``[chip of tile, tile]``."""
        ranks = [self.chips.rank(chip) for chip in self.chips_of(self.coords)]
        return np.array(ranks, np.int32).reshape(self.num_live, -1).T

    # Text -----------------------------------------------------------------------------------

    @property
    def num_wasted(self) -> int:
        """Live chips of failed tiles."""
        return len(self.failed) * math.prod(self.tile) - len(self.chips.failed)

    @property
    def losses(self) -> str:
        """Which tiles were lost to which chips, in words."""
        if not self.failed:
            return f"all {self.num_chips} tiles are live"
        why = "; ".join(
            f"tile {tile} to chips {format_failed(self.chips.failed & {*self.chips_of([tile])})}"
            for tile in sorted(self.failed)
        )
        return (
            f"{len(self.failed)} of {self.num_chips} tiles lost, with {self.num_wasted} live chips "
            f"in them: {why}"
        )

    def describe(self) -> str:
        """What a plan on these tiles should say of them, a line for each thing."""
        lines = [
            f"  {self.num_positions} positions to a tile, each with a payload of its own; all are "
            "summed at once",
            f"  {self.losses}",
        ]
        if self.failed_links:
            links = (f"{format_coord(a)}-{format_coord(b)}" for a, b in sorted(self.failed_links))
            lines.append(f"  not straight on for every position: {';'.join(links)}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.chips} in {self.name} tiles of {format_shape(self.tile)}"


class _Tiling(NamedTuple):
    """How a mesh is cut: the sides of a tile, the grid of tiles, and the mesh's axes it has."""

    sides: Coord
    shape: Coord
    axes: Coord

    @staticmethod
    def of(topology: Topology, sides: Coord) -> _Tiling:
        """Of three axes, those that tiles span whole are left out of the grid."""
        shape = tuple(n // t for n, t in zip(topology.shape, sides, strict=True))
        axes = tuple(axis for axis, size in enumerate(shape) if size > 1 or len(shape) < 3) or (0,)
        return _Tiling(sides, tuple(shape[axis] for axis in axes), axes)

    def tile_of(self, chip: Coord) -> Coord:
        """The tile that a chip is in."""
        return tuple(chip[axis] // self.sides[axis] for axis in self.axes)

    def chips_of(self, tiles: Iterable[Coord]) -> list[Coord]:
        """The chips of some tiles, tile by tile, x fastest."""
        found = []
        for tile in tiles:
            corner = [0] * len(self.sides)
            for axis, place in zip(self.axes, tile, strict=True):
                corner[axis] = place * self.sides[axis]
            found += Block(self.sides, tuple(corner)).coords()
        return found


def _by_tile(
    topology: Topology, devices: Sequence[Any], chips: Iterable[Coord], ordered: Iterable[Coord]
) -> tuple[Any, ...]:
    """The devices of `chips` with those `ordered`; as they come, where some are not there."""
    cores = topology.devices_per_chip
    first = {chip: cores * i for i, chip in enumerate(chips)}
    if len(devices) != len(first) * cores:
        return tuple(devices)
    return tuple(devices[first[chip] + core] for chip, core in product(ordered, range(cores)))


def _broken(topology: Topology, tiling: _Tiling, tiles: Topology) -> Iterator[Link]:
    """The links between tiles that some position cannot use straight on, for failed links.

    From chip to chip of two tiles side by side, routes take all links of that direction inside
    either tile, and those between the two.
    """
    for a, b in topology.failed_links:
        along = next(axis for axis in range(len(a)) if a[axis] != b[axis])
        if along not in tiling.axes:
            continue
        axis, side = tiling.axes.index(along), tiling.sides[along]
        low = a if b[along] == a[along] + 1 else b  # over the edge, the high end is before the low
        here = tiling.tile_of(low)
        is_inside = low[along] % side < side - 1
        for start in (0, -1) if is_inside else (0,):
            ends = [here[axis] + start, here[axis] + start + 1]
            if tiles.wrap[axis] and tiles.shape[axis] > 2:
                ends = [end % tiles.shape[axis] for end in ends]
            if all(0 <= end < tiles.shape[axis] for end in ends):
                one, other = ((*here[:axis], end, *here[axis + 1 :]) for end in ends)
                yield one, other
