"""Which chips a mesh has, how they are linked, and what has failed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.topology import damage, notation
from ftmesh.topology.damage import CoordFrame
from ftmesh.topology.devices import WRAP_AS_GIVEN, device_wraps, read_layout
from ftmesh.topology.notation import Block, Coord, Failed
from ftmesh.topology.notation import Link as Link

FailedLinks = str | Iterable[Sequence[Sequence[int]]] | None


@dataclass(frozen=True)
class Topology:
    """A grid of chips, with the chips and links that have failed.

    Build one with `grid`, `from_devices` or `from_drawing`. Live chips have dense ranks in grid
    order, x fastest; `ftmesh.jax_mesh` puts their devices in the order of a ring. A failed link
    fails in both directions.

    Topologies are values: equal and hashable by content. One built from devices is equal only to
    one with the same devices; compare `without_devices()` to compare grids.

    Attributes:
        wrap: for each axis, whether its last chip is linked to its first.
        wrap_source: how that is known, in words; empty if there is nothing to say. Topologies that
            differ in it alone are equal.
        failed_links: failed links, each with its lower end first.
        devices: the devices of live chips, by rank; empty unless built from devices.
        all_devices: all devices that were given, in grid order.

    >>> topology = Topology.grid("4x2", failed="2x1@1,0")
    >>> print(topology.drawing())
    .XX.
    ....
    >>> topology.num_live, topology.coords[1], topology.rank((0, 1))
    (6, (3, 0), 2)
    """

    noun: ClassVar[str] = "chip"  # what messages call a rank

    shape: Coord
    wrap: tuple[bool, ...]
    failed: frozenset[Coord] = frozenset()
    failed_links: frozenset[Link] = frozenset()
    devices_per_chip: int = 1
    devices: tuple[Any, ...] = field(default=(), repr=False)
    all_devices: tuple[Any, ...] = field(default=(), repr=False)
    wrap_source: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.wrap) != len(self.shape):
            raise TopologyError(f"wrap {self.wrap} needs one entry per axis of {self.name}")
        outside = sorted(c for c in self.failed if not self._is_on_grid(c))
        if outside:
            raise TopologyError(f"failed chip {outside[0]} is not on mesh {self.name}")
        links = {(min(a, b), max(a, b)) for a, b in self.failed_links}
        object.__setattr__(self, "failed_links", frozenset(links))
        for a, b in sorted(links):
            if not self._is_on_grid(a) or b not in self._grid_neighbours(a):
                raise TopologyError(
                    f"failed link {a}-{b}: {b} is not a neighbour of {a} on mesh {self.name}"
                )
        if len(self.failed) == math.prod(self.shape):
            raise TopologyError(f"all {len(self.failed)} chips of mesh {self.name} have failed")

    # Constructors ---------------------------------------------------------------------------

    @classmethod
    def grid(
        cls,
        shape: str | Sequence[int],
        *,
        failed: Failed = None,
        failed_links: FailedLinks = None,
        wrap: bool | Sequence[bool] = False,
    ) -> Topology:
        """Return a mesh of the given shape, as in ``Topology.grid("16x32", failed="4x2@6,14")``.

        Args:
            shape: ``"16x32"`` or ``(16, 32)``, x first; one to three axes.
            failed: failed chips, as blocks ``"2x2@2,2;4x2@6,14"`` or a list of coords. No
                environment variable is read.
            failed_links: failed links, as ``"3,2-4,2;0,0-0,1"`` or a list of pairs of coords.
            wrap: whether axes wrap; one value for all axes or one for each.
        """
        sizes = notation.parse_shape(shape)
        return cls(
            shape=sizes,
            wrap=notation.parse_wrap(wrap, sizes),
            failed=damage.failed_chips(failed, CoordFrame.for_grid(sizes)),
            failed_links=notation.parse_links(failed_links),
        )

    @classmethod
    def from_devices(
        cls,
        devices: Iterable[Any],
        *,
        shape: str | Sequence[int] | None = None,
        failed: Failed = None,
        failed_links: FailedLinks = None,
        wrap: bool | Sequence[bool] | None = None,
    ) -> Topology:
        """Return the mesh of `devices`: ``jax.devices()``, or those of a compile-only topology.

        TPU devices are placed by their coords. Axes of size 1 are dropped. Coords without a device
        count as failed. Devices without coords, such as CPU devices, fill the grid row by row.

        Args:
            devices: the devices, each once.
            shape: shape of the grid. Default with coords: the bounding box of the devices. Default
                without: the environment variable ``FTMESH_MESH`` where it has as many chips, else
                a near-square grid.
            failed: failed chips, in the coords of the devices, with or without the axes that are
                dropped. Default: the environment variable ``FTMESH_FAILED``; ``""`` for none.
            failed_links: failed links, in the same coords.
            wrap: whether axes wrap; one value for all axes or one for each. Default: known by the
                generation and shape of a TPU slice, and none elsewhere; `wrap_source` says which.
                The slice is taken to reach from coord 0 to the highest. If chips at its far edges
                are missing, or the devices are part of a larger slice, give its `shape`, or `wrap`.
        """
        layout = read_layout(devices, None if shape is None else notation.parse_shape(shape))
        frame, at = layout.frame, layout.devices_at
        if failed is None:
            failed_chips = damage.environment_failed_chips(frame)
        else:
            failed_chips = damage.failed_chips(failed, frame)
        if wrap is None:
            wraps, wrap_source = device_wraps(itertools.chain.from_iterable(at.values()), frame)
        else:
            wraps, wrap_source = notation.parse_wrap(wrap, frame.shape), WRAP_AS_GIVEN
        bare = cls(
            shape=frame.shape,
            wrap=wraps,
            failed=layout.missing | failed_chips,
            failed_links=damage.failed_links(notation.parse_links(failed_links), frame),
            devices_per_chip=layout.devices_per_chip,
            wrap_source=wrap_source,
        )
        live = tuple(device for coord in bare.coords for device in at[coord])
        every = tuple(device for coord in bare.all_coords() for device in at.get(coord, ()))
        return replace(bare, devices=live, all_devices=every)

    @classmethod
    def from_drawing(cls, drawing: str, *, wrap: bool | Sequence[bool] = False) -> Topology:
        """Return a 2-D mesh from a picture: ``.`` live, ``X`` failed, x across, y down."""
        shape, failed = notation.parse_drawing(drawing)
        return cls(shape=shape, wrap=notation.parse_wrap(wrap, shape), failed=failed)

    def without_devices(self) -> Topology:
        """Return the grid alone, which is what a schedule is built for."""
        return replace(self, devices=(), all_devices=())

    def with_failed(self, chips: Failed) -> Topology:
        """Return the same mesh with these chips failed as well: blocks or coords, as for `grid`.

        >>> str(Topology.grid("4x4").with_failed([(0, 0), (1, 0)]))
        '4x4 less 2x1@0,0'
        """
        bare = replace(self, failed=self.failed | notation.parse_chips(chips), devices=())
        return replace(bare, devices=tuple(d for c in bare.coords for d in self._devices_at(c)))

    # Chips ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The shape as text: ``16x32``."""
        return notation.format_shape(self.shape)

    @property
    def num_chips(self) -> int:
        """Number of chips, live and failed."""
        return math.prod(self.shape)

    @property
    def num_live(self) -> int:
        """Number of live chips, which is the number of ranks."""
        return len(self.coords)

    @cached_property
    def coords(self) -> tuple[Coord, ...]:
        """The coord of every rank."""
        return tuple(c for c in self.all_coords() if c not in self.failed)

    def all_coords(self) -> Iterator[Coord]:
        """Yield the coords of the grid, live and failed, x fastest."""
        axes = (range(n) for n in reversed(self.shape))
        return (tuple(reversed(c)) for c in itertools.product(*axes))

    def rank(self, coord: Sequence[int]) -> int:
        """Return the rank of the live chip at `coord`, or raise a `TopologyError`."""
        rank = self._ranks.get(tuple(coord))
        if rank is None:
            state = "has failed" if self._is_on_grid(tuple(coord)) else "is not on the mesh"
            raise TopologyError(f"{self.noun} {tuple(coord)} {state} on {self}")
        return rank

    def grid_index(self, coord: Sequence[int]) -> int:
        """Return the index of `coord` among all chips, live and failed, x fastest."""
        return int(np.ravel_multi_index(tuple(coord)[::-1], self.shape[::-1]))

    def is_live(self, coord: Sequence[int]) -> bool:
        """Return whether `coord` is a live chip of this mesh."""
        return tuple(coord) in self._ranks

    def coord_of(self, device: Any) -> Coord:
        """Return the coord of the live chip that `device` belongs to."""
        return self.coords[self.devices.index(device) // self.devices_per_chip]

    @cached_property
    def _ranks(self) -> dict[Coord, int]:
        return {coord: rank for rank, coord in enumerate(self.coords)}

    def _devices_at(self, coord: Coord) -> tuple[Any, ...]:
        if not self.devices:
            return ()
        first = self.rank(coord) * self.devices_per_chip
        return self.devices[first : first + self.devices_per_chip]

    def _is_on_grid(self, coord: Coord) -> bool:
        return len(coord) == len(self.shape) and all(
            0 <= c < n for c, n in zip(coord, self.shape, strict=True)
        )

    # Links ----------------------------------------------------------------------------------

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Every directed pair of neighbouring live chips, by rank of the first."""
        return tuple((a, b) for a, ends in self._neighbours.items() for b in ends)

    def neighbours(self, coord: Sequence[int]) -> tuple[Coord, ...]:
        """Return the live chips one live link away from a live chip."""
        return self._neighbours[self.coords[self.rank(coord)]]

    def is_link(self, a: Coord, b: Coord) -> bool:
        """Return whether a live link leads from live chip `a` to live chip `b`."""
        return b in self._neighbours.get(a, ())

    def components(self) -> tuple[tuple[Coord, ...], ...]:
        """Return the connected parts of the live mesh, largest first."""
        return damage.connected_components(self._neighbours)

    @cached_property
    def _neighbours(self) -> dict[Coord, tuple[Coord, ...]]:
        return {
            a: tuple(
                b
                for b in self._grid_neighbours(a)
                if b in self._ranks and (min(a, b), max(a, b)) not in self.failed_links
            )
            for a in self.coords
        }

    def _grid_neighbours(self, coord: Coord) -> list[Coord]:
        """The neighbours of `coord` on the undamaged mesh: +x, -x, +y, -y and so on."""
        neighbours: list[Coord] = []
        for axis, size in enumerate(self.shape):
            for step in (1, -1):
                index = coord[axis] + step
                if not 0 <= index < size:
                    if not self.wrap[axis] or size <= 2:
                        continue
                    index %= size
                neighbours.append((*coord[:axis], index, *coord[axis + 1 :]))
        return neighbours

    # What a rank is: `ftmesh.topology.tiles` overrides these ------------------------------------

    @property
    def physical(self) -> Topology:
        """The topology of chips and links that transfers travel over."""
        return self

    @property
    def num_positions(self) -> int:
        """Number of independent payloads that are summed at once, each over all ranks."""
        return 1

    def chips_of(self, coords: Iterable[Coord]) -> list[Coord]:
        """Return the chips of the ranks at `coords`."""
        return list(coords)

    def position_shape(self, axis_names: tuple[str, ...]) -> Coord:
        """The sizes of the JAX mesh axes other than that of ranks."""
        if len(axis_names) != 1:
            raise ArgumentError(
                f"{self} has one axis of ranks, not {axis_names}: give one name, or use "
                "TiledTopology.from_topology(topology, '2x1') for a model axis"
            )
        return ()

    def by_position(self, devices: NDArray[Any], shape: Coord) -> NDArray[Any]:
        """Devices ``[rank, position]`` as ``[rank, *shape]``."""
        return devices.reshape(len(devices), *shape)

    # Parts ----------------------------------------------------------------------------------

    def largest_rectangle(self) -> Block:
        """Return the largest box without a failed chip or link; see `damage.largest_box`."""
        return damage.largest_box(self.shape, self.failed, self.failed_links)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Return ranks in groups of `size` neighbouring chips: equal, squarish boxes of the grid.

        A failed chip leaves its group smaller; a box with no live chip gives no group. Raises a
        `TopologyError` if the grid cannot be cut into such boxes.
        """
        tile = damage.squarest_tile(self.shape, size)
        groups: dict[Coord, list[int]] = {}
        for rank, coord in enumerate(self.coords):
            key = tuple(c // t for c, t in zip(coord, tile, strict=True))
            groups.setdefault(key, []).append(rank)
        return tuple(map(tuple, groups.values()))

    # Text -----------------------------------------------------------------------------------

    def drawing(self) -> str:
        """Return the picture that `from_drawing` reads; a mesh of one axis is one row."""
        return notation.format_drawing(self.shape, self.failed)

    def __str__(self) -> str:
        text = self.name
        if any(self.wrap):
            axes = "".join("xyz"[i] for i, wraps in enumerate(self.wrap) if wraps)
            text += f" (wrapping in {axes})"
        if self.failed:
            text += f" less {notation.format_failed(self.failed)}"
        if self.failed_links:
            text += f" less links {notation.format_links(self.failed_links)}"
        return text
