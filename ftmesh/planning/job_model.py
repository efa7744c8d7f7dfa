"""Site: a machine made of boards, a job on it, and how fast that runs on what is left of it.

>>> site = Site(Topology.grid("4x4"), mtbf=8e6, repair=3e4, checkpoint=3600.0, step=0.02)
>>> [str(board) for board in site.boards]
['2x2@0,0', '2x2@2,0', '2x2@0,2', '2x2@2,2']
>>> str(site.sub_mesh(frozenset({3}))[0])
'2x4@0,0'
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.notation import Block, Coord
from ftmesh.topology.topology import Topology

BOARD = 2  # chips along x, and along y, of a board
SIDES = (BOARD, BOARD, 1)  # of a board; on three axes it lies within a layer

Boards = frozenset[int]


@dataclass(frozen=True)
class Site:
    """A machine and a job on it; times in seconds. `step` is a training step on the full mesh."""

    topology: Topology  # undamaged
    mtbf: float  # mean time between failures of one board
    repair: float
    checkpoint: float  # time between checkpoints
    step: float
    payload_bytes: int = 100_000_000
    restart: float = 600.0
    spares: int = 0
    network: Network = DEFAULT

    def __post_init__(self) -> None:
        for name in ("mtbf", "repair", "checkpoint", "step"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.restart < 0 or self.spares < 0:
            raise ArgumentError("restart and spares cannot be below 0")
        if self.topology.failed or self.topology.failed_links:
            raise ArgumentError(f"a site is described undamaged, not as {self.topology}")
        if self.full_sum >= self.step:
            raise ArgumentError(
                f"a step of {self.step:g} s is shorter than its all-reduce, {self.full_sum:g} s"
            )

    @cached_property
    def boards(self) -> list[Block]:
        """The 2x2 blocks at even coordinates, cut off at the edge of a mesh of odd sides.

        On three axes a board lies within a layer: 2x2x1.
        """
        sides = list(zip(self.topology.shape, SIDES, strict=False))
        corners = itertools.product(*(range(0, n, board) for n, board in reversed(sides)))
        return [
            Block(
                tuple(min(board, n - c) for (n, board), c in zip(sides, corner, strict=True)),
                corner,
            )
            for corner in (tuple(reversed(c)) for c in corners)
        ]

    @cached_property
    def boxes(self) -> list[tuple[int, Block]]:
        """Every box of whole boards, the largest first, as `Topology.largest_rectangle` has them.

        Each with its boards, as the bits of a number.
        """
        sides = [
            [(low, min(high, n) - low) for low in range(0, n, side) for high in _ends(low, n, side)]
            for n, side in zip(self.topology.shape, SIDES, strict=False)
        ]
        found = [Block(*reversed([*zip(*each, strict=True)])) for each in itertools.product(*sides)]
        found.sort(key=lambda b: (-math.prod(b.size), max(b.size), b.size, b.corner[::-1]))
        bit = {board.corner: 1 << number for number, board in enumerate(self.boards)}
        return [(sum(bit[corner] for corner in _corners(box)), box) for box in found]

    def sub_mesh(self, failed: Boards) -> tuple[Block, Boards]:
        """The largest box without a failed board, and its boards."""
        bad = sum(1 << board for board in failed)
        bits, box = next(each for each in self.boxes if not each[0] & bad)
        return box, frozenset(n for n in range(len(self.boards)) if bits >> n & 1)

    @cached_property
    def full_sum(self) -> float:
        """The all-reduce on the full mesh."""
        return self.sum_on(self.topology)

    def sum_on(self, topology: Topology) -> float:
        """The fastest all-reduce on `topology`; a `PlanError` where there is none."""
        if topology.num_live == 1:
            return 0.0
        times = []
        for name in _algorithms(topology):
            with contextlib.suppress(PlanError):
                times.append(self._seconds(registry.schedule(topology, name)))
        return min(times) if times else self._seconds(registry.schedule(topology, "flood"))

    def _seconds(self, schedule: Schedule) -> float:
        return Simulator(schedule).seconds(self.payload_bytes, self.network)

    def speed_on(self, topology: Topology) -> float:
        """Training on `topology`, as a share of the full mesh's."""
        compute = (self.step - self.full_sum) * self.topology.num_chips / topology.num_live
        return self.step / (compute + self.sum_on(topology))

    def damaged(self, boards: Boards) -> Topology:
        """The mesh less some boards."""
        failed = [chip for board in sorted(boards) for chip in self.boards[board].coords()]
        return Topology.grid(self.topology.shape, failed=failed, wrap=self.topology.wrap)


def box_alone(topology: Topology, box: Block) -> Topology:
    """A box without damage, as a mesh of its own: it wraps where it spans an axis that does."""
    over_edge = [
        any(abs(a[axis] - b[axis]) > 1 for a, b in topology.failed_links)
        for axis in range(len(box.size))
    ]
    sides = zip(topology.wrap, over_edge, box.size, topology.shape, strict=True)
    wrap = [wraps and not cut and size == whole for wraps, cut, size, whole in sides]
    return Topology.grid(box.size, failed="", wrap=wrap)


def _ends(start: int, length: int, side: int) -> range:
    """Where a row of boards that begins at `start` may end; the last may be cut off."""
    return range(start + side, length + side, side)


def _corners(box: Block) -> Iterator[Coord]:
    """Those of the boards in a box."""
    sides = zip(box.corner, box.size, SIDES, strict=False)
    return itertools.product(*(range(low, low + size, side) for low, size, side in sides))


def _algorithms(topology: Topology) -> tuple[str, ...]:
    """Those worth pricing on `topology`: see `ftmesh.planning.advise.ASSUMPTIONS`."""
    if sum(size > 1 for size in topology.shape) < 2:
        return ("line",)
    is_deep = len(topology.shape) > 2
    if not topology.failed and not topology.failed_links:
        return ("two_dim", "colours", "flood") if is_deep else ("two_dim", "colours")
    return ("row_pair", "ring", "flood") if is_deep or any(topology.wrap) else ("row_pair", "ring")
