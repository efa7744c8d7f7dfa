"""`row_pair`: rings of two rows, then sums over the same place in every pair.

The paper's figures 6 and 7, and 9 and 10 where chips have failed. Each pair of rows is one ring; no
two rings share a link, and each runs in both directions, with half of the payload each way. A pair
that damage has broken is left out: its live chips sum among neighbours and forward to the full
rings beside them (`ftmesh.algorithms.forwarding`), while those run. The second phase joins the full
rings from pair to pair, over hops of two rows; where damage is in the way, hops go around it. Where
the axis across the pairs wraps, each place's chips form a ring; where it does not, sums flow along
the line to their owners from both ends, since a ring would have to fold back over its own links.

The rings may lie along x or along y, whichever needs fewer rounds; where ranks are tiles of chips,
whose hops are longer one way than the other and share links, whichever keeps links less busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from ftmesh.algorithms.forwarding import Booking, Piece, book, form_groups
from ftmesh.algorithms.building_blocks import mirrored_all_reduce, reduce_scatter_lines, reduce_scatter_rings
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Transfers, join_transfers, make_transfers
from ftmesh.topology.graph import direction_lanes
from ftmesh.topology.notation import Coord
from ftmesh.topology.routing import find_cycle
from ftmesh.topology.topology import Topology

AXES = ("row", "column")
MAX_HEAD_START = 8  # rounds; a group of forwarding chips that needs more is joined with others


@dataclass(frozen=True)
class PairRings:
    """The full rings of one orientation: ``rings[i][p]`` is the chip at place p of full pair i."""

    along: int
    rings: list[list[Coord]]
    bookings: list[Booking]

    @property
    def ring_rounds(self) -> int:
        """Rounds that a reduce-scatter along the rings takes by itself."""
        return len(self.rings[0]) - 1

    @property
    def first_rounds(self) -> int:
        """Rounds of the first phase; what exceeds `ring_rounds` is the forwarding's head start."""
        return max([self.ring_rounds, *(booking.round + 1 for booking in self.bookings)])

    @property
    def num_rounds(self) -> int:
        """Rounds of the reduce-scatter half."""
        return self.first_rounds + len(self.rings) - 1


def build_schedule(topology: Topology) -> Schedule:
    """The schedule with the fewest rounds over both orientations, or on tiles the least load."""
    if len(topology.shape) != 2 or min(topology.shape) < 2:
        raise PlanError(
            f"it works on meshes of two axes, of 2 {topology.noun}s or more each, not on "
            f"{topology.name}"
        )
    choices, reasons = [], []
    for along in (0, 1):
        try:
            choices.append(_pairs(topology, along))
        except PlanError as error:
            reasons.append(str(error))
    able = []
    for pairs in sorted(choices, key=lambda pairs: (pairs.num_rounds, pairs.along)):
        schedule = _schedule(topology, pairs)
        if find_cycle(schedule.on_chips.routes.values()):
            name = AXES[pairs.along]
            reasons.append(f"hops across its {name} pairs could deadlock in their detours")
            continue
        if topology.num_positions == 1:
            return schedule
        able.append(schedule)
    if not able:
        raise PlanError(" and ".join(reasons))
    return min(able, key=_load)


def _load(schedule: Schedule) -> float:
    """The share of the payload that the busiest link of each phase carries, phase after phase."""
    busiest = (max(schedule.link_loads(phase).values()) for phase in schedule.phases)
    return sum(busiest) / schedule.num_chunks


def _full_rings(topology: Topology, along: int) -> list[list[Coord]]:
    """The chips of every unbroken pair of rows (`along` 0) or columns (1), in ring order."""
    length, across = topology.shape[along], topology.shape[1 - along]
    name = AXES[along]
    if across % 2:
        raise PlanError(f"its {across} {name}s do not make pairs")
    rings = []
    for low in range(0, across, 2):
        flat = [(u, low) for u in range(length)] + [(u, low + 1) for u in reversed(range(length))]
        ring: list[Coord] = [place[:: 1 - 2 * along] for place in flat]
        if all(topology.is_link(a, b) for a, b in pairwise([*ring, ring[0]])):
            rings.append(ring)
    if not rings:
        raise PlanError(f"no pair of {name}s is whole")
    return rings


def _pairs(topology: Topology, along: int) -> PairRings:
    """Full rings of one orientation, and the forwarding that brings everyone else onto them."""
    rings = _full_rings(topology, along)
    length = len(rings[0])
    place = {coord: p for ring in rings for p, coord in enumerate(ring)}
    loose = {coord for coord in topology.coords if coord not in place}

    def arrival(chip: Coord, piece: Piece) -> int:
        half, index = piece
        here = length - 1 - place[chip] if half else place[chip]
        return length - 1 - (here - index) % length

    groups = form_groups(topology, loose, across=1 - along)
    pieces = list(product((0, 1), range(length)))
    return PairRings(
        along, rings, book(topology, groups, pieces, arrival, by=length - 1 + MAX_HEAD_START)
    )


def _schedule(topology: Topology, pairs: PairRings) -> Schedule:
    rings = np.array([[topology.rank(coord) for coord in ring] for ring in pairs.rings], np.int32)
    num_rings, length = rings.shape
    half_chunks = length * num_rings
    across = reduce_scatter_rings if topology.wrap[1 - pairs.along] else reduce_scatter_lines
    owner = np.empty(2 * half_chunks, np.int32)
    first, second = [], []
    for half, direction in enumerate((+1, -1)):
        places = rings[:, ::direction]
        columns, owned = reduce_scatter_rings(
            places, lane=half, first_chunk=half * half_chunks, count=num_rings
        )
        first.append(columns.shifted(rounds=pairs.first_rounds - pairs.ring_rounds))
        towers = places[::direction].T
        columns, owned = across(towers, lane=2 * half, first_chunk=owned[0])
        second.append(columns)
        owner[owned] = towers
    if pairs.bookings:
        first.append(_forwarding(topology, pairs, half_chunks))
        columns = join_transfers(first)
        first = [columns.replace(lane=direction_lanes(topology, columns.src, columns.dst))]
    name = AXES[pairs.along]
    halves = [(f"{name}-pair rings", join_transfers(first))]
    if num_rings > 1:
        halves.append((f"across {name} pairs", join_transfers(second)))
    return mirrored_all_reduce(topology, "row_pair", 2 * half_chunks, halves, owner)


def _forwarding(topology: Topology, pairs: PairRings, half_chunks: int) -> Transfers:
    """The bookings of all groups as transfers, to be given lanes."""
    size = len(pairs.rings)
    last = pairs.first_rounds - 1
    rows = [
        (last - b.round, topology.rank(b.link[1]), topology.rank(b.link[0]), *b.piece)
        for b in pairs.bookings
    ]
    when, src, dst, half, index = np.array(rows).T
    return make_transfers(
        round=when, lane=0, src=src, dst=dst, chunk=half * half_chunks + index * size, count=size
    )
