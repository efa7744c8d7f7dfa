"""A training job on a machine made of boards, and its speed on what is left of the machine.

>>> job = TrainingJob(
...     Topology.grid("4x4"), mtbf=8e6, repair_time=3e4, checkpoint_interval=3600.0, step_time=0.02
... )
>>> [str(board) for board in job.boards], str(job.largest_box(frozenset({3}))[0])
(['2x2@0,0', '2x2@2,0', '2x2@0,2', '2x2@2,2'], '2x4@0,0')
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ftmesh.algorithms import registry
from ftmesh.cost.executors import native_obstacle, native_ring_seconds, one_ring_seconds
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.notation import Block, Coord
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology

BOARD = 2  # chips along x, and along y, of a board
SIDES = (BOARD, BOARD, 1)  # of a board; on three axes it lies within a layer

Boards = frozenset[int]


@dataclass(frozen=True)
class TrainingJob:
    """A machine and a job on it; times in seconds."""

    topology: Topology  # undamaged
    mtbf: float  # mean time between failures of one board
    repair_time: float  # from the failure of a board to its return
    checkpoint_interval: float
    step_time: float  # on the full mesh, with its all-reduce
    payload_bytes: int = 100_000_000  # of the all-reduce of a step
    restart_time: float = 600.0  # after a failure, or to return to more chips
    num_spares: int = 0  # spare boards
    network: Network = DEFAULT

    def __post_init__(self) -> None:
        for name in ("mtbf", "repair_time", "checkpoint_interval", "step_time"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.restart_time < 0 or self.num_spares < 0:
            raise ArgumentError("restart_time and num_spares cannot be below 0")
        if self.topology.failed or self.topology.failed_links:
            raise ArgumentError(f"a job needs the undamaged topology, not {self.topology}")
        if self.full_all_reduce_seconds >= self.step_time:
            raise ArgumentError(
                f"a step of {self.step_time:g} s is shorter than its all-reduce, "
                f"{self.full_all_reduce_seconds:g} s"
            )

    @cached_property
    def boards(self) -> list[Block]:
        """The 2x2 blocks at even coordinates, smaller at the edge of a mesh with odd sides."""
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
        """Every box of whole boards with its boards as a bit mask, the largest box first.

        The order is that of `Topology.largest_rectangle`.
        """
        spans = [
            [
                (low, min(high, n) - low)  # the last board may be cut off
                for low in range(0, n, side)
                for high in range(low + side, n + side, side)
            ]
            for n, side in zip(self.topology.shape, SIDES, strict=False)
        ]
        boxes = [Block(*reversed([*zip(*box, strict=True)])) for box in itertools.product(*spans)]
        boxes.sort(key=lambda b: (-math.prod(b.size), max(b.size), b.size, b.corner[::-1]))
        bit = {board.corner: 1 << number for number, board in enumerate(self.boards)}
        return [(sum(bit[corner] for corner in _corners(box)), box) for box in boxes]

    def largest_box(self, failed: Boards) -> tuple[Block, Boards]:
        """The largest box without a failed board, and its boards."""
        failed_mask = sum(1 << board for board in failed)
        mask, box = next(item for item in self.boxes if not item[0] & failed_mask)
        return box, frozenset(n for n in range(len(self.boards)) if mask >> n & 1)

    @cached_property
    def full_all_reduce_seconds(self) -> float:
        """The time of the all-reduce on the full mesh."""
        return self.all_reduce_seconds(self.topology)

    def all_reduce_seconds(self, topology: Topology) -> float:
        """The time of the fastest all-reduce; raises PlanError if no algorithm can serve.

        XLA's own sum is among them, along the ring of ftmesh or over all axes of a whole mesh.
        """
        if topology.num_live == 1:
            return 0.0
        registry.check_connected(topology)
        times = []
        for name in _algorithms(topology):
            with contextlib.suppress(PlanError):
                times.append(self._seconds(registry.build_schedule(topology, name)))
        if not times:
            times.append(self._seconds(registry.build_schedule(topology, "flood")))
        order = ring_order(topology)
        if topology.num_chips == self.topology.num_chips:
            if not native_obstacle(order):
                times.append(native_ring_seconds(order, self.payload_bytes, self.network))
        elif not order.blocked:  # a part of the slice, where XLA has one ring
            times.append(one_ring_seconds(order, self.payload_bytes, self.network))
        return min(times)

    def _seconds(self, schedule: Schedule) -> float:
        return Simulator(schedule).seconds(self.payload_bytes, self.network)

    def relative_speed(self, topology: Topology) -> float:
        """The speed of training on `topology`, as a share of that on the full mesh."""
        compute = self.step_time - self.full_all_reduce_seconds
        compute *= self.topology.num_chips / topology.num_live
        return self.step_time / (compute + self.all_reduce_seconds(topology))

    def without_boards(self, failed: Boards) -> Topology:
        """The mesh less some boards."""
        chips = [chip for board in sorted(failed) for chip in self.boards[board].coords()]
        return Topology.grid(self.topology.shape, failed=chips, wrap=self.topology.wrap)


def box_topology(topology: Topology, box: Block) -> Topology:
    """An undamaged box as a mesh of its own, which wraps where it spans an axis that does."""
    is_cut = [
        any(abs(a[axis] - b[axis]) > 1 for a, b in topology.failed_links)
        for axis in range(len(box.size))
    ]
    sides = zip(topology.wrap, is_cut, box.size, topology.shape, strict=True)
    wrap = [wraps and not cut and size == length for wraps, cut, size, length in sides]
    return Topology.grid(box.size, failed="", wrap=wrap)


def _corners(box: Block) -> Iterator[Coord]:
    """The corners of the boards in a box."""
    sides = zip(box.corner, box.size, SIDES, strict=False)
    return itertools.product(*(range(low, low + size, side) for low, size, side in sides))


def _algorithms(topology: Topology) -> tuple[str, ...]:
    """The algorithms to simulate on `topology`: see `ftmesh.planning.advise.ASSUMPTIONS`."""
    if sum(size > 1 for size in topology.shape) < 2:
        return ("chain",)
    has_three_axes = len(topology.shape) > 2
    if not topology.failed and not topology.failed_links:
        return ("two_dim", "multi_ring", *["flood"] * has_three_axes)
    return ("row_pair", "ring", *["flood"] * (has_three_axes or any(topology.wrap)))
