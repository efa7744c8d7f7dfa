"""Topology: which chips there are, how they are joined, and what has failed.

>>> topo = Topology.grid("4x4", failed="2x2@1,1")
>>> topo.drawing().splitlines()
['....', '.XX.', '.XX.', '....']
>>> topo.num_live, topo.coords[4], topo.rank((3, 1))
(12, (0, 1), 5)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from ftmesh.errors import TopologyError
from ftmesh.topology import damage, regions
from ftmesh.topology.damage import CoordFrame
from ftmesh.topology.devices import read_layout
from ftmesh.topology.notation import (
    Block,
    Coord,
    Failed,
    format_coord,
    format_failed,
    format_shape,
    parse_drawing,
    parse_links,
    parse_shape,
)
from ftmesh.topology.notation import Link as Link


@dataclass(frozen=True)
class Topology:
    """A grid of chips with a mask of what has failed; a value, equal and hashable by content.

    Build one with `grid`, `from_devices` or `from_drawing`. Live chips are numbered by dense
    ranks, x fastest, which is the order of the JAX mesh axis. A failed link is a cable: it fails
    in both directions, and is kept with its lower end first. A topology built from devices holds
    those of its live chips, by rank, and all that were given, by place; the same grid on other
    devices is another topology, and `without_devices` is what the two have in common.

    >>> topology = Topology.grid("4x2", failed="2x1@1,0")
    >>> print(topology.drawing())
    .XX.
    ....
    >>> topology.num_live, topology.coords[1], topology.rank((0, 1))
    (6, (3, 0), 2)
    """

    noun: ClassVar[str] = "chip"  # what a rank is

    shape: Coord
    wrap: tuple[bool, ...]
    failed: frozenset[Coord] = frozenset()
    failed_links: frozenset[Link] = frozenset()
    devices_per_chip: int = 1
    devices: tuple[Any, ...] = field(default=(), repr=False)
    all_devices: tuple[Any, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if len(self.wrap) != len(self.shape):
            raise TopologyError(f"wrap {self.wrap} needs one entry per axis of {self.name}")
        outside = sorted(c for c in self.failed if not self._inside(c))
        if outside:
            raise TopologyError(f"failed chip {outside[0]} is not on mesh {self.name}")
        links = {(min(a, b), max(a, b)) for a, b in self.failed_links}
        object.__setattr__(self, "failed_links", frozenset(links))
        for a, b in sorted(links):
            if not self._inside(a) or not self._inside(b) or b not in self._beside(a):
                raise TopologyError(
                    f"failed link {a}-{b}: {b} is not a neighbour of {a} on mesh {self.name}"
                )
        if len(self.failed) == math.prod(self.shape):
            raise TopologyError(f"all {len(self.failed)} chips of mesh {self.name} have failed")

    # Building -------------------------------------------------------------------------------

    @classmethod
    def grid(
        cls,
        shape: str | Sequence[int],
        *,
        failed: Failed = None,
        failed_links: str | Iterable[Sequence[Sequence[int]]] = (),
        wrap: bool | Sequence[bool] = False,
    ) -> Topology:
        """A mesh by its shape, as in ``Topology.grid("16x32", failed="4x2@6,14")``.

        Where `failed` is not given, the environment variable ``FTMESH_FAILED`` is read. It speaks
        of this machine: what it names outside the mesh is left out, with a `TopologyWarning`.
        """
        sizes = parse_shape(shape)
        return cls(
            shape=sizes,
            wrap=_per_axis(wrap, sizes),
            failed=damage.failed_chips(failed, CoordFrame.for_grid(sizes)),
            failed_links=parse_links(failed_links),
        )

    @classmethod
    def from_devices(
        cls,
        devices: Iterable[Any],
        *,
        shape: str | Sequence[int] | None = None,
        failed: Failed = None,
        failed_links: str | Iterable[Sequence[Sequence[int]]] = (),
        wrap: bool | Sequence[bool] = False,
    ) -> Topology:
        """The mesh that `devices` sit on: ``jax.devices()``, or a compile-only TPU topology's.

        TPU devices are placed by their coords. Axes of size 1 are dropped, and coords missing
        from `shape` (or, where it is not given, from the bounding box) are failed. `failed` and
        `failed_links` are in the devices' own coords, with or without the axes that are dropped;
        the topology's start at the low corner of the box. Devices without coords fill `shape`,
        or that of the environment variable ``FTMESH_MESH`` where it has as many chips, or a
        near-square grid, row by row. ``FTMESH_FAILED`` is read as by `grid`.
        """
        layout = read_layout(devices, None if shape is None else parse_shape(shape))
        frame = layout.frame
        bare = cls(
            shape=frame.shape,
            wrap=_per_axis(wrap, frame.shape),
            failed=layout.missing | damage.failed_chips(failed, frame),
            failed_links=damage.failed_links(parse_links(failed_links), frame),
            devices_per_chip=layout.devices_per_chip,
        )
        at = layout.devices_at
        live = tuple(device for coord in bare.coords for device in at[coord])
        every = tuple(device for coord in bare.all_coords() for device in at.get(coord, ()))
        return replace(bare, devices=live, all_devices=every)

    @classmethod
    def from_drawing(cls, drawing: str, *, wrap: bool | Sequence[bool] = False) -> Topology:
        """A 2-D mesh from a picture: ``.`` live, ``X`` failed, x across, y down."""
        shape, failed = parse_drawing(drawing)
        return cls(shape=shape, wrap=_per_axis(wrap, shape), failed=failed)

    def without_devices(self) -> Topology:
        """The grid alone: what a schedule is planned for, whichever devices it runs on."""
        return replace(self, devices=(), all_devices=())

    def with_failed(self, chips: Iterable[Coord]) -> Topology:
        """The same mesh, with these chips failed as well.

        >>> str(Topology.grid("4x4").with_failed([(0, 0), (1, 0)]))
        '4x4 less 2x1@0,0'
        """
        bare = replace(self, failed=self.failed | {*chips}, devices=())
        return replace(bare, devices=tuple(d for c in bare.coords for d in self._devices_at(c)))

    def _devices_at(self, coord: Coord) -> tuple[Any, ...]:
        if not self.devices:
            return ()
        first = self.rank(coord) * self.devices_per_chip
        return self.devices[first : first + self.devices_per_chip]

    def coord_of(self, device: Any) -> Coord:
        """The live chip that a device is of."""
        return self.coords[self.devices.index(device) // self.devices_per_chip]

    # Chips ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The shape as it is written: ``16x32``."""
        return format_shape(self.shape)

    @property
    def num_chips(self) -> int:
        """Places in the grid, live and failed."""
        return math.prod(self.shape)

    @property
    def num_live(self) -> int:
        """Live chips, hence ranks."""
        return len(self.coords)

    @cached_property
    def coords(self) -> tuple[Coord, ...]:
        """The coord of every rank."""
        return tuple(c for c in self.all_coords() if c not in self.failed)

    @cached_property
    def _ranks(self) -> dict[Coord, int]:
        return {coord: rank for rank, coord in enumerate(self.coords)}

    def rank(self, coord: Sequence[int]) -> int:
        """The rank of the live chip at `coord`."""
        rank = self._ranks.get(tuple(coord))
        if rank is None:
            state = "has failed" if self._inside(tuple(coord)) else "is not on the mesh"
            raise TopologyError(f"{self.noun} {tuple(coord)} {state} on {self}")
        return rank

    def grid_index(self, coord: Sequence[int]) -> int:
        """The place of `coord` among all chips, live and failed, x fastest."""
        return int(np.ravel_multi_index(tuple(coord)[::-1], self.shape[::-1]))

    def is_live(self, coord: Sequence[int]) -> bool:
        """Whether `coord` is a live chip of this mesh."""
        return tuple(coord) in self._ranks

    # Links ----------------------------------------------------------------------------------

    @cached_property
    def _neighbours(self) -> dict[Coord, tuple[Coord, ...]]:
        return {
            a: tuple(
                b
                for b in self._beside(a)
                if b in self._ranks and (min(a, b), max(a, b)) not in self.failed_links
            )
            for a in self.coords
        }

    def neighbours(self, coord: Sequence[int]) -> tuple[Coord, ...]:
        """The live chips one live link away from a live chip."""
        return self._neighbours[self.coords[self.rank(coord)]]

    def is_link(self, a: Coord, b: Coord) -> bool:
        """Whether a live link leads from live chip `a` to live chip `b`."""
        return b in self._neighbours.get(a, ())

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Every directed pair of neighbouring live chips, by rank of the first."""
        return tuple((a, b) for a, beside in self._neighbours.items() for b in beside)

    def components(self) -> tuple[tuple[Coord, ...], ...]:
        """The connected parts of the live mesh, largest first."""
        return regions.connected(self._neighbours)

    # What a rank is; `ftmesh.topology.tiles` has other answers ------------------------------------

    @property
    def physical(self) -> Topology:
        """The chips and links that transfers travel over."""
        return self

    @property
    def num_positions(self) -> int:
        """Payloads that are summed at once, each over all ranks."""
        return 1

    def chips_of(self, coords: Iterable[Coord]) -> list[Coord]:
        """The chips at the places of ranks."""
        return list(coords)

    # What a user would fall back to ---------------------------------------------------------

    def largest_rectangle(self) -> Block:
        """The largest box without a failed chip or link: the sub-mesh left without ftmesh.

        Ties go to the squarest, then to the lowest corner.
        """
        return regions.largest_box(self.shape, self.failed, self.failed_links)

    def groups(self, size: int) -> tuple[tuple[int, ...], ...]:
        """Ranks in groups of `size` neighbouring chips: the grid cut into equal, squarish tiles.

        A failed chip leaves its group smaller; a tile with no live chip leaves no group.
        """
        tile = regions.squarest_tile(self.shape, size)
        if tile is None:
            raise TopologyError(
                f"mesh {self.name} cannot be cut into equal boxes of {size} chips: "
                f"choose a product of divisors of {' and '.join(map(str, self.shape))}"
            )
        groups: dict[Coord, list[int]] = {}
        for rank, coord in enumerate(self.coords):
            key = tuple(c // t for c, t in zip(coord, tile, strict=True))
            groups.setdefault(key, []).append(rank)
        return tuple(map(tuple, groups.values()))

    # JAX ------------------------------------------------------------------------------------

    def jax_mesh(
        self,
        axis_name: str | Sequence[str],
        *,
        along: str | None = None,
        with_idle: bool = False,
    ) -> Any:
        """A ``jax.sharding.Mesh`` of one axis: the live devices by rank.

        With `with_idle`, every device by its place, those of failed chips too, for platforms that
        insist on whole slices and for chips that still run but must be kept out. Tiles take several
        names, as ``("data", "model")``: ranks are `along` one of them, the first if it is not said.
        The others have the positions of a tile, all on one axis, or an axis for each side of it
        (x first, cores last).
        """
        from ftmesh.topology.jax_mesh import jax_mesh

        return jax_mesh(self, axis_name, along=along, with_idle=with_idle)

    # Text -----------------------------------------------------------------------------------

    def drawing(self) -> str:
        """The picture that `from_drawing` reads; a mesh of one axis is a row."""
        if len(self.shape) > 2:
            raise TopologyError(f"only 2-D meshes and lines can be drawn as text, not {self.name}")
        marks = "".join(".X"[coord in self.failed] for coord in self.all_coords())
        width = self.shape[0]
        return "\n".join(marks[start : start + width] for start in range(0, len(marks), width))

    def __str__(self) -> str:
        text = self.name
        if any(self.wrap):
            axes = "".join("xyz"[i] for i, wraps in enumerate(self.wrap) if wraps)
            text += f" (wrapping in {axes})"
        if self.failed:
            text += f" less {format_failed(self.failed)}"
        if self.failed_links:
            links = (f"{format_coord(a)}-{format_coord(b)}" for a, b in sorted(self.failed_links))
            text += f" less links {';'.join(links)}"
        return text

    # Inside ---------------------------------------------------------------------------------

    def all_coords(self) -> Iterator[Coord]:
        """The chips of the grid, live and failed, by place."""
        axes = (range(n) for n in reversed(self.shape))
        return (tuple(reversed(c)) for c in itertools.product(*axes))

    def _inside(self, coord: Coord) -> bool:
        return len(coord) == len(self.shape) and all(
            0 <= c < n for c, n in zip(coord, self.shape, strict=True)
        )

    def _beside(self, coord: Coord) -> list[Coord]:
        """The chips next to `coord` on the undamaged mesh: +x, -x, +y, -y and so on."""
        found: list[Coord] = []
        for axis, size in enumerate(self.shape):
            for step in (1, -1):
                place = coord[axis] + step
                if not 0 <= place < size:
                    if not self.wrap[axis] or size <= 2:
                        continue
                    place %= size
                found.append((*coord[:axis], place, *coord[axis + 1 :]))
        return found


def _per_axis(wrap: bool | Sequence[bool], shape: Coord) -> tuple[bool, ...]:
    each = (wrap,) * len(shape) if isinstance(wrap, bool) else tuple(wrap)
    if not all(isinstance(one, (bool, np.bool_)) for one in each):
        raise TopologyError(f"wrap is True, False, or one of these per axis, not {wrap!r}")
    return tuple(map(bool, each))
