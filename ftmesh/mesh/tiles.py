"""Tiles: a mesh cut into equal boxes of chips, each of which is one model group.

>>> tiles = TiledTopology.of(Topology.grid("8x8", failed="3x1@2,2"), "2x2")
>>> tiles.drawing().splitlines()
['....', '.XX.', '....', '....']
>>> print(tiles.losses)
2 of 16 tiles lost, with 5 live chips in them: tile (1, 1) to chips 2x1@2,2; tile (2, 1) to chips \
1x1@4,2
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import TopologyError
from ftmesh.mesh.notation import Block, Coord, Link, format_failed, format_shape, parse_shape
from ftmesh.mesh.topology import Topology


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
    def of(cls, topology: Topology, tile: str | Sequence[int]) -> TiledTopology:
        """`topology` cut into tiles, as ``"2x1"``: 2 along x, 1 along y, from the low corner on."""
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
        shape = tuple(n // t for n, t in zip(topology.shape, sides, strict=True))
        failed = frozenset(_tile_of(chip, sides) for chip in topology.failed)
        if len(failed) == math.prod(shape):
            raise TopologyError(
                f"every tile of {format_shape(sides)} has a failed chip on {topology}: take "
                "smaller tiles"
            )
        bare = Topology(shape, topology.wrap, failed)
        return cls(
            shape=shape,
            wrap=topology.wrap,
            failed=failed,
            failed_links=frozenset(_broken(topology, sides, bare)),
            devices=_by_tile(topology.devices, topology, topology.coords, bare.coords, sides),
            all_devices=_by_tile(
                topology.all_devices, topology, topology.every_coord(), bare.every_coord(), sides
            ),
            chips=topology,
            tile=sides,
        )

    def without_devices(self) -> TiledTopology:
        """The tiles alone: what a schedule is planned for, whichever devices it runs on."""
        return TiledTopology.of(self.chips.without_devices(), self.tile)

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
    def wires(self) -> Topology:
        """The chips and links that transfers travel over."""
        return self.chips

    def chips_of(self, coords: Iterable[Coord]) -> list[Coord]:
        """The chips of some tiles, tile by tile."""
        return [chip for tile in coords for chip in _chips_of(tile, self.tile)]

    @cached_property
    def players(self) -> NDArray[np.int32]:
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
        """What a plan on these tiles should say of them, in two lines."""
        return (
            f"  {self.num_positions} positions to a tile, each with a payload of its own; all are "
            f"summed at once\n  {self.losses}"
        )

    def __str__(self) -> str:
        return f"{self.chips} in {self.name} tiles of {format_shape(self.tile)}"


def _tile_of(chip: Coord, sides: Coord) -> Coord:
    return tuple(c // t for c, t in zip(chip, sides, strict=True))


def _chips_of(tile: Coord, sides: Coord) -> list[Coord]:
    """The chips of a tile, x fastest."""
    return Block(sides, tuple(c * t for c, t in zip(tile, sides, strict=True))).coords()


def _by_tile(
    devices: Sequence[Any],
    topology: Topology,
    chips: Iterable[Coord],
    tiles: Iterable[Coord],
    sides: Coord,
) -> tuple[Any, ...]:
    """The devices of `chips` in the order of `tiles`; as they come, where some are not there."""
    at, cores = list(chips), topology.devices_per_chip
    if len(devices) != len(at) * cores:
        return tuple(devices)
    first = {chip: cores * i for i, chip in enumerate(at)}
    places = [first[chip] for tile in tiles for chip in _chips_of(tile, sides)]
    return tuple(devices[place + core] for place, core in product(places, range(cores)))


def _broken(topology: Topology, sides: Coord, tiles: Topology) -> Iterable[Link]:
    """The links between tiles that some position cannot use straight on, for failed links.

    From chip to chip of two tiles side by side, routes take all links of that direction inside
    either tile, and those between the two.
    """
    for a, b in topology.failed_links:
        axis = next(i for i in range(len(a)) if a[i] != b[i])
        low = a if b[axis] == a[axis] + 1 else b  # over the edge, the high end is before the low
        here = _tile_of(low, sides)
        inside = low[axis] % sides[axis] < sides[axis] - 1
        for start in (0, -1) if inside else (0,):
            ends = [here[axis] + start, here[axis] + start + 1]
            if tiles.wrap[axis] and tiles.shape[axis] > 2:
                ends = [end % tiles.shape[axis] for end in ends]
            if all(0 <= end < tiles.shape[axis] for end in ends):
                one, other = ((*here[:axis], end, *here[axis + 1 :]) for end in ends)
                yield one, other
