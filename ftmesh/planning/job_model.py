"""A training job on a machine made of boards, and its speed on what is left of the machine.

`replica_options` has the other question about a damaged machine: how large a model's replicas are.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ftmesh.algorithms import registry
from ftmesh.cost.executors import native_obstacle, native_ring_seconds, one_ring_seconds
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError, PlanError, TopologyError
from ftmesh.planning.candidates import cost_native
from ftmesh.planning.selection import select_algorithm
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.notation import Block, Coord, format_shape
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes, format_bytes, format_time

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


# Replicas ---------------------------------------------------------------------------------------

WEIGHT_BYTES = 4  # float32
GATHERED_BYTES = 2  # bfloat16, in the forward pass and again in the backward pass
STATE_BYTES = 16  # per weight: float32 weights and gradients, and the two moments of Adam
EVERY_CHIP = "all"  # one replica over all live chips
MAX_WASTE = 0.1  # of the live chips, in tiles that are recommended


@dataclass(frozen=True)
class ReplicaOption:
    """Replicas of a model in tiles of chips; times are simulated, of one step."""

    tile: str
    chips: int  # of a replica
    replicas: int
    wasted: int  # live chips in tiles with failed ones
    state_bytes: int  # on each chip
    gather_seconds: float  # of weights, twice, and the scatter of gradients, in a tile
    sum_seconds: float  # of gradients over replicas
    algorithm: str  # that sums

    @property
    def seconds(self) -> float:
        """The time of a step's collectives."""
        return self.gather_seconds + self.sum_seconds

    def fits(self, memory_bytes: int) -> bool:
        """Whether the state fits in `memory_bytes` of a chip."""
        return self.state_bytes <= memory_bytes


def replica_options(
    topology: Topology, model_bytes: int, network: Network = DEFAULT
) -> list[ReplicaOption]:
    """Compare replicas of each size: a chip, tiles that divide the mesh, and all live chips.

    For each number of chips the tile is taken in which fewest live chips are lost with failed ones,
    then the fastest for gathers, then the most compact. Sides differ by a factor of two at most,
    except those that span an axis.

    Args:
        topology: The chips.
        model_bytes: Bytes of the weights in float32. The state has four times as many.
        network: The links.
    """
    weights = -(-check_bytes(model_bytes, name="model_bytes") // WEIGHT_BYTES)
    by_size: dict[int, list[tuple[int, float, Coord]]] = {}
    shapes = itertools.product(*map(_divisors, reversed(topology.shape)))
    for sides in (shape[::-1] for shape in shapes):  # 2x1 before 1x2
        open_sides = [n for n, size in zip(sides, topology.shape, strict=True) if n < size]
        if open_sides and max(open_sides) <= 2 * min(open_sides):
            with contextlib.suppress(TopologyError):  # no tile is whole
                wasted = TiledTopology.from_topology(topology, sides).num_wasted
                seconds = _gather_seconds(_box(topology, sides), weights, network)
                by_size.setdefault(math.prod(sides), []).append((wasted, seconds, sides))
    options, live = [], topology.num_live
    for chips, tiles in sorted(by_size.items()):
        for wasted, seconds, sides in sorted(tiles, key=lambda tile: (*tile[:2], sum(tile[2]))):
            tiled = TiledTopology.from_topology(topology, sides) if chips > 1 else topology
            try:
                name, sum_seconds = _sum_over(tiled, WEIGHT_BYTES * -(-weights // chips), network)
            except PlanError:  # the damage cuts the tiles into parts
                continue
            options.append(
                ReplicaOption(
                    format_shape(sides),
                    chips,
                    tiled.num_live,
                    wasted,
                    _state(weights, chips),
                    seconds,
                    sum_seconds,
                    name,
                )
            )
            break
    if len(topology.components()) == 1 and not native_obstacle(ring_order(topology)):
        state, seconds = _state(weights, live), _gather_seconds(topology, weights, network)
        options.append(ReplicaOption(EVERY_CHIP, live, 1, 0, state, seconds, 0.0, ""))
    return options


def best_replicas(options: Sequence[ReplicaOption], memory_bytes: int) -> ReplicaOption:
    """Return the tiles that fit and waste fewest chips; of several, the fastest collectives.

    If they waste more than `MAX_WASTE` of the live chips: one replica of all of these, if it fits.

    Raises:
        PlanError: Nothing fits.
    """
    fitting = [one for one in options if one.fits(memory_bytes)]
    if not fitting:
        most = options[-1]
        chips = f"{'all ' if most.tile == EVERY_CHIP else ''}{most.chips} live chips"
        raise PlanError(
            f"nothing fits: over {chips} the state takes {format_bytes(most.state_bytes)} of each, "
            f"and --memory is {format_bytes(memory_bytes)}: take more chips, fewer weights, or an "
            "optimizer with less state"
        )
    live = options[0].chips * options[0].replicas + options[0].wasted
    wastes_little = [one for one in fitting if one.wasted <= MAX_WASTE * live]
    tiles = [one for one in wastes_little if one.tile != EVERY_CHIP]
    return min(tiles or wastes_little or fitting, key=lambda one: (one.wasted, one.seconds))


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


def _state(weights: int, chips: int) -> int:
    return STATE_BYTES * -(-weights // chips)


def _box(topology: Topology, sides: Coord) -> Topology:
    axes = zip(topology.shape, topology.wrap, sides, strict=True)
    return Topology.grid(sides, wrap=tuple(wraps and n == size for size, wraps, n in axes))


def _gather_seconds(box: Topology, weights: int, network: Network) -> float:
    """Two gathers of the weights and a scatter of the gradients, among the chips of a replica."""
    order = ring_order(box)
    gathering = one_ring_seconds(order, GATHERED_BYTES * weights, network, "all_gather")
    scattering = one_ring_seconds(order, WEIGHT_BYTES * weights, network, "reduce_scatter")
    return 2 * gathering + scattering


def _sum_over(topology: Topology, num_bytes: int, network: Network) -> tuple[str, float]:
    """What sums gradients over replicas, and its time: XLA along the ring, or else a schedule."""
    if topology.num_live == 1:
        return "", 0.0
    native = cost_native(topology, num_bytes, network, "float32", reduce_scatter=False)
    if not native.rejection:
        return "XLA's ring", native.seconds
    best = select_algorithm(topology, num_bytes, network, "float32", with_native=False).best
    return best.algorithm, best.seconds


# Sharded or replicated optimizer state ----------------------------------------------------------

#: Bytes between a chip and its memory for each byte of the weights, by optimizer: the gradient is
#: read, and the weights and the optimizer's state are read and written.
MEMORY_TRAFFIC = {"sgd": 3, "momentum": 5, "lars": 5, "adam": 7, "lamb": 7}


@dataclass(frozen=True)
class UpdateCost:
    """An algorithm, with seconds of its communication and of the update itself."""

    algorithm: str
    communication: float
    update: float

    @property
    def seconds(self) -> float:
        """Both together."""
        return self.communication + self.update

    def __str__(self) -> str:
        return (
            f"{format_time(self.seconds)} by {self.algorithm}: {format_time(self.communication)} "
            f"to communicate, {format_time(self.update)} to update"
        )


@dataclass(frozen=True)
class OptimizerCosts:
    """The simulated costs of both, for one payload on one mesh."""

    sharded: UpdateCost
    replicated: UpdateCost
    num_ranks: int

    @property
    def is_sharded_faster(self) -> bool:
        """Whether sharded state is as fast, or faster."""
        return self.sharded.seconds <= self.replicated.seconds

    def __str__(self) -> str:
        return (
            f"  sharded state:    {self.sharded}; 1/{self.num_ranks} of it on each chip\n"
            f"  replicated state: {self.replicated}"
        )


def optimizer_costs(
    topology: Topology, payload_bytes: int, network: Network, optimizer: str = "adam"
) -> OptimizerCosts:
    """Compare sharded and replicated optimizer state, each with its fastest algorithm.

    *Sharded*, gradients are reduce-scattered, each chip updates the weights that it owns, and these
    are all-gathered: a chip reads and holds only its share of the state. *Replicated*, gradients
    are all-reduced, perhaps along trees, and every chip updates all weights. Which is faster
    depends on the mesh, the payload and the memory bandwidth of a chip.

    The gradients are `payload_bytes` of float32; `optimizer` is one of `MEMORY_TRAFFIC`.

    >>> from ftmesh.cost.links import NETWORKS
    >>> costs = optimizer_costs(Topology.grid("4x8", failed="2x2@2,2"), 100_000_000, NETWORKS["v3"])
    >>> costs.is_sharded_faster
    True
    """
    if optimizer not in MEMORY_TRAFFIC:
        names = ", ".join(MEMORY_TRAFFIC)
        raise ArgumentError(f"optimizer must be one of {names}, not {optimizer!r}")
    update = MEMORY_TRAFFIC[optimizer] * payload_bytes / known_memory_bandwidth(network)
    split, reduced = (
        select_algorithm(
            topology, payload_bytes, network, reduce_scatter=is_split, with_native=True
        ).best
        for is_split in (True, False)
    )
    sharded = UpdateCost(split.name, split.seconds, update / topology.num_live)
    replicated = UpdateCost(reduced.name, reduced.seconds, update)
    return OptimizerCosts(sharded, replicated, topology.num_live)


def known_memory_bandwidth(network: Network) -> float:
    """The memory bandwidth of a chip of `network`; raises ArgumentError if it is not known."""
    if network.memory_bandwidth is None:
        raise ArgumentError(
            "an update takes as long as a chip's memory needs, whose bandwidth is unknown: name a "
            "TPU generation such as 'v5e'"
        )
    return network.memory_bandwidth
