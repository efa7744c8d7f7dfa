"""`row_pair`: rings of two rows, then sums over the same slot of every pair.

The paper's figures 6 and 7, and 9 and 10 where chips have failed. Each pair of rows is one ring,
run in both directions with half of the payload each way. A pair that is broken by failures has no
ring: its live chips sum among neighbours and forward to the full rings next to them
(`ftmesh.algorithms.building_blocks`) while those run.

The second phase sums over the full rings, pair to pair, with hops of two rows that go around
failures. If the axis across the pairs wraps, the chips of a slot form a ring. If it does not, sums
flow along a line to their owners from both ends, since a ring would use its own links twice.

The rings lie along x or along y, whichever takes fewer rounds. If ranks are tiles, whose hops are
longer one way than the other and share links, it is whichever has the lower link load.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from ftmesh.algorithms import building_blocks as blocks
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Transfers, join_transfers, make_transfers
from ftmesh.topology.graph import direction_lanes
from ftmesh.topology.notation import Coord
from ftmesh.topology.routing import find_cycle
from ftmesh.topology.topology import Topology

AXES = ("row", "column")
MAX_HEAD_START = 8  # rounds; a group of forwarding chips that needs more is merged with others


@dataclass(frozen=True)
class PairRings:
    """The full rings of one orientation, and the forwarding to them."""

    along: int  # the axis that the rows lie along
    rings: list[list[Coord]]  # [i][p] is the chip in slot p of full pair i
    bookings: list[blocks.Booking]  # the forwarding of the other chips

    @property
    def first_rounds(self) -> int:
        """Rounds of the first phase; those beyond the rings' are a head start for forwarding."""
        return max([len(self.rings[0]) - 1, *(booking.round + 1 for booking in self.bookings)])

    @property
    def num_rounds(self) -> int:
        return self.first_rounds + len(self.rings) - 1


def build_schedule(topology: Topology) -> Schedule:
    """Return the schedule of the orientation with fewer rounds, or on tiles with less load."""
    if len(topology.shape) != 2 or min(topology.shape) < 2:
        raise PlanError(
            f"it needs two axes, of 2 {topology.noun}s or more each, not {topology.name}"
        )
    orientations, reasons = [], []
    for along in (0, 1):
        try:
            orientations.append(_find_pairs(topology, along))
        except PlanError as error:
            reasons.append(str(error))
    schedules = []
    for pairs in sorted(orientations, key=lambda pairs: (pairs.num_rounds, pairs.along)):
        schedule = _pair_schedule(topology, pairs)
        if find_cycle(schedule.on_chips.routes.values()):
            name = AXES[pairs.along]
            reasons.append(f"hops across its {name} pairs could deadlock in their detours")
            continue
        if topology.num_positions == 1:
            return schedule
        schedules.append(schedule)
    if not schedules:
        raise PlanError(" and ".join(reasons))
    return min(schedules, key=_load)


def _load(schedule: Schedule) -> float:
    busiest = (max(schedule.link_loads(phase).values()) for phase in schedule.phases)
    return sum(busiest) / schedule.num_chunks


def _full_rings(topology: Topology, along: int) -> list[list[Coord]]:
    """The chips of every unbroken pair of rows (`along` 0) or columns (1), in ring order."""
    length, across = topology.shape[along], topology.shape[1 - along]
    name = AXES[along]
    if across % 2:
        raise PlanError(f"its {across} {name}s do not form pairs")
    rings = []
    for low in range(0, across, 2):
        flat = [(u, low) for u in range(length)] + [(u, low + 1) for u in reversed(range(length))]
        ring: list[Coord] = [coord[:: 1 - 2 * along] for coord in flat]
        if all(topology.is_link(a, b) for a, b in pairwise([*ring, ring[0]])):
            rings.append(ring)
    if not rings:
        raise PlanError(f"no pair of {name}s is whole")
    return rings


def _find_pairs(topology: Topology, along: int) -> PairRings:
    rings = _full_rings(topology, along)
    length = len(rings[0])
    slot = {coord: p for ring in rings for p, coord in enumerate(ring)}
    off_ring = {coord for coord in topology.coords if coord not in slot}

    def arrival(chip: Coord, piece: blocks.Piece) -> int:
        half, index = piece
        position = length - 1 - slot[chip] if half else slot[chip]
        return length - 1 - (position - index) % length

    groups = blocks.form_groups(topology, off_ring, across=1 - along)
    pieces = list(product((0, 1), range(length)))
    bookings = blocks.book(topology, groups, pieces, arrival, by=length - 1 + MAX_HEAD_START)
    return PairRings(along, rings, bookings)


def _pair_schedule(topology: Topology, pairs: PairRings) -> Schedule:
    rings = np.array([[topology.rank(coord) for coord in ring] for ring in pairs.rings], np.int32)
    num_rings, length = rings.shape
    half_chunks = length * num_rings
    wraps = topology.wrap[1 - pairs.along]
    across = blocks.reduce_scatter_rings if wraps else blocks.reduce_scatter_lines
    owner = np.empty(2 * half_chunks, np.int32)
    first, second = [], []
    for half, direction in enumerate((+1, -1)):
        directed = rings[:, ::direction]
        transfers, owned = blocks.reduce_scatter_rings(
            directed, lane=half, first_chunk=half * half_chunks, count=num_rings
        )
        first.append(transfers.shifted(rounds=pairs.first_rounds - (length - 1)))
        by_slot = directed[::direction].T
        transfers, owned = across(by_slot, lane=2 * half, first_chunk=owned[0])
        second.append(transfers)
        owner[owned] = by_slot
    if pairs.bookings:
        first.append(_forwarding_transfers(topology, pairs, half_chunks))
        transfers = join_transfers(first)
        first = [transfers.replace(lane=direction_lanes(topology, transfers.src, transfers.dst))]
    name = AXES[pairs.along]
    phases = [(f"{name}-pair rings", join_transfers(first))]
    if num_rings > 1:
        phases.append((f"across {name} pairs", join_transfers(second)))
    return blocks.mirrored_all_reduce(topology, "row_pair", 2 * half_chunks, phases, owner)


def _forwarding_transfers(topology: Topology, pairs: PairRings, half_chunks: int) -> Transfers:
    """The bookings of all groups as transfers, without lanes."""
    size, last = len(pairs.rings), pairs.first_rounds - 1
    rows = [
        (last - b.round, topology.rank(b.link[1]), topology.rank(b.link[0]), *b.piece)
        for b in pairs.bookings
    ]
    round_index, src, dst, half, index = np.array(rows).T
    chunk = half * half_chunks + index * size
    return make_transfers(round=round_index, lane=0, src=src, dst=dst, chunk=chunk, count=size)
