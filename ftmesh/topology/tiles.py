"""A mesh cut into equal boxes of chips, for model parallelism inside each box."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.topology import notation
from ftmesh.topology.notation import Block, Coord, Failed, Link
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class TiledTopology(Topology):
    """A topology whose ranks are live tiles: equal boxes of chips, each one model group.

    Build one with `from_topology`. A tile with a failed chip has failed. Two neighbouring tiles are
    linked if every chip of one reaches its counterpart in the other straight on.

    The devices of a tile are its *positions*: its chips, x fastest, and core by core. `devices`
    lists them tile by tile. A transfer between tiles is one transfer per position between chips,
    over the links of `chips`. Routes may cross live chips of failed tiles.

    Attributes:
        chips: the topology that was cut into tiles.
        tile: the sides of a tile.

    >>> tiles = TiledTopology.from_topology(Topology.grid("8x8", failed="3x1@2,2"), "2x2")
    >>> tiles.drawing().splitlines()
    ['....', '.XX.', '....', '....']
    >>> print(tiles.losses)
    2 of 16 tiles lost, with 5 live chips in them: tile (1, 1) to chips 2x1@2,2; tile (2, 1) to \
chips 1x1@4,2
    """

    noun: ClassVar[str] = "tile"

    chips: Topology
    tile: Coord

    @classmethod
    def from_topology(cls, topology: Topology, tile: str | Sequence[int]) -> TiledTopology:
        """Cut `topology` into tiles, starting at the low corner.

        On three axes, an axis that a tile spans completely is dropped from the grid of tiles: 4x4x8
        in tiles of 1x1x8 is a grid of 4x4.

        Args:
            topology: the chips; not tiled yet.
            tile: chips along each axis, as ``"2x1"``. Each must divide the axis.
        """
        if not isinstance(topology, Topology):
            raise ArgumentError(f"tiles are cut from a topology, and not from {topology!r:.60}")
        sides = notation.parse_shape(tile)
        name, num_axes = notation.format_shape(sides), len(topology.shape)
        if isinstance(topology, TiledTopology):
            raise TopologyError(f"{topology} is tiled already: pass its topology of chips")
        if len(sides) != num_axes or any(map(operator.mod, topology.shape, sides)):
            raise TopologyError(
                f"mesh {topology.name} cannot be cut into tiles of {name}: give each of its "
                f"{num_axes} axes a side that divides it"
            )
        tiling = _Tiling.from_topology(topology, sides)
        failed = frozenset(map(tiling.tile_of, topology.failed))
        if len(failed) == math.prod(tiling.shape):
            raise TopologyError(
                f"every tile of {name} has a failed chip on {topology}: take smaller tiles"
            )
        bare = Topology(tiling.shape, tuple(topology.wrap[axis] for axis in tiling.axes), failed)
        live, every = tiling.chips_of(bare.coords), tiling.chips_of(bare.all_coords())
        return cls(
            shape=bare.shape,
            wrap=bare.wrap,
            failed=failed,
            failed_links=frozenset(_failed_tile_links(topology, tiling, bare)),
            devices=_reordered(topology, topology.devices, topology.coords, live),
            all_devices=_reordered(topology, topology.all_devices, topology.all_coords(), every),
            chips=topology,
            tile=sides,
        )

    def without_devices(self) -> TiledTopology:
        return TiledTopology.from_topology(self.chips.without_devices(), self.tile)

    def with_failed(self, chips: Failed) -> TiledTopology:
        """Return the same tiles, of which these have failed as well, with all their chips."""
        failed = self.chips_of(notation.parse_chips(chips))
        return TiledTopology.from_topology(self.chips.with_failed(failed), self.tile)

    def coord_of(self, device: Any) -> Coord:
        return self.coords[self.devices.index(device) // self.num_positions]

    # Positions ------------------------------------------------------------------------------

    @property
    def sides(self) -> Coord:
        """Sizes of the axes of a model group: the sides of a tile, and cores where chips have 2."""
        cores = self.chips.devices_per_chip
        return self.tile if cores == 1 else (*self.tile, cores)

    @property
    def num_positions(self) -> int:
        return math.prod(self.sides)

    @property
    def physical(self) -> Topology:
        return self.chips

    def chips_of(self, coords: Iterable[Coord]) -> list[Coord]:
        return _Tiling.from_topology(self.chips, self.tile).chips_of(coords)

    @cached_property
    def chip_ranks(self) -> NDArray[np.int32]:
        """The rank in `chips` of each chip of each live tile: ``[chip of tile, tile]``."""
        ranks = [self.chips.rank(chip) for chip in self.chips_of(self.coords)]
        return np.array(ranks, np.int32).reshape(self.num_live, -1).T

    def position_shape(self, axis_names: tuple[str, ...]) -> Coord:
        if len(axis_names) == 2:
            return (self.num_positions,)
        if len(axis_names) == 1 + len(self.sides):
            return self.sides
        raise ArgumentError(
            f"{self} has an axis of ranks and one of {self.num_positions} positions, or "
            f"{len(self.sides)} of {' and '.join(map(str, self.sides))}: give two names, as "
            "('data', 'model')"
        )

    def by_position(self, devices: NDArray[Any], shape: Coord) -> NDArray[Any]:
        if len(shape) < 2:
            return super().by_position(devices, shape)
        num_sides = len(self.tile)
        grid = devices.reshape(len(devices), *self.tile[::-1], *shape[num_sides:])
        return grid.transpose(0, *range(num_sides, 0, -1), *range(num_sides + 1, grid.ndim))

    # Text -----------------------------------------------------------------------------------

    @property
    def num_wasted(self) -> int:
        """Number of live chips in failed tiles."""
        return len(self.failed) * math.prod(self.tile) - len(self.chips.failed)

    @property
    def losses(self) -> str:
        """A sentence that says which tiles were lost to which chips."""
        if not self.failed:
            return f"all {self.num_chips} tiles are live"
        reasons = []
        for tile in sorted(self.failed):
            chips = self.chips.failed.intersection(self.chips_of([tile]))
            reasons.append(f"tile {tile} to chips {notation.format_failed(chips)}")
        return (
            f"{len(self.failed)} of {self.num_chips} tiles lost, with {self.num_wasted} live chips "
            f"in them: {'; '.join(reasons)}"
        )

    def describe(self) -> str:
        """Return the lines that a plan on these tiles prints about them."""
        lines = [
            f"  {self.num_positions} positions per tile, each with its own payload; all are "
            "summed at once",
            f"  {self.losses}",
        ]
        if self.failed_links:
            links = notation.format_links(self.failed_links)
            lines.append(f"  links between tiles that some position cannot use: {links}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.chips} in {self.name} tiles of {notation.format_shape(self.tile)}"


class _Tiling(NamedTuple):
    """How a mesh is cut: the sides of a tile, the grid of tiles, and the mesh axes it keeps."""

    sides: Coord
    shape: Coord
    axes: Coord

    @staticmethod
    def from_topology(topology: Topology, sides: Coord) -> _Tiling:
        shape = tuple(n // t for n, t in zip(topology.shape, sides, strict=True))
        axes = tuple(axis for axis, size in enumerate(shape) if size > 1 or len(shape) < 3) or (0,)
        return _Tiling(sides, tuple(shape[axis] for axis in axes), axes)

    def tile_of(self, chip: Coord) -> Coord:
        return tuple(chip[axis] // self.sides[axis] for axis in self.axes)

    def chips_of(self, tiles: Iterable[Coord]) -> list[Coord]:
        """The chips of some tiles, tile by tile, x fastest."""
        chips = []
        for tile in tiles:
            corner = [0] * len(self.sides)
            for axis, index in zip(self.axes, tile, strict=True):
                corner[axis] = index * self.sides[axis]
            chips += Block(self.sides, tuple(corner)).coords()
        return chips


def _reordered(
    topology: Topology, devices: Sequence[Any], chips: Iterable[Coord], ordered: Iterable[Coord]
) -> tuple[Any, ...]:
    """The devices of `chips`, in the order of `ordered`; unchanged if some are missing."""
    cores = topology.devices_per_chip
    first = {chip: cores * i for i, chip in enumerate(chips)}
    if len(devices) != len(first) * cores:
        return tuple(devices)
    return tuple(devices[first[chip] + core] for chip, core in product(ordered, range(cores)))


def _failed_tile_links(topology: Topology, tiling: _Tiling, tiles: Topology) -> Iterator[Link]:
    """The links between tiles that some position cannot use because a link of chips has failed.

    Straight routes between two tiles use all links of that direction inside and between them.
    """
    for a, b in topology.failed_links:
        along = next(axis for axis in range(len(a)) if a[axis] != b[axis])
        if along not in tiling.axes:
            continue
        axis, side = tiling.axes.index(along), tiling.sides[along]
        low = a if b[along] == a[along] + 1 else b  # over the edge, the higher coord comes first
        here = tiling.tile_of(low)
        is_inside = low[along] % side < side - 1
        for start in (0, -1) if is_inside else (0,):
            ends = [here[axis] + start, here[axis] + start + 1]
            if tiles.wrap[axis] and tiles.shape[axis] > 2:
                ends = [end % tiles.shape[axis] for end in ends]
            if all(0 <= end < tiles.shape[axis] for end in ends):
                first, second = ((*here[:axis], end, *here[axis + 1 :]) for end in ends)
                yield first, second
