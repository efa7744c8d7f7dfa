"""The algorithms that sum along rings, and along lines.

`ring`: one Hamiltonian circuit through every live chip, run in both directions at once; the paper's
figures 3 and 8. How the circuit is found: `ftmesh.topology.hamiltonian`.

`multi_ring`: several edge-disjoint rings through every chip of a torus, at once. On k axes, k
Hamiltonian circuits, each run in both directions with an equal part of the payload, use all 2k
links of every chip in every round. The rings along each axis are joined to one circuit. An axis
that does not wrap, or has two chips, adds none; the circuits of the others pass along it.

`two_dim`: x then y for one half of the payload, y then x for the other, at once: the paper's
figures 4 and 5. On three axes it is thirds, each starting with another axis. Along an axis that
wraps, rows (or columns) are rings, and half of each part runs backwards, so that both directions of
every link are used. Along an axis that does not, a ring would use its own links twice. Instead sums
flow along the line to their owners from both ends, in as many rounds.

`chain`: single hops along chips in a line. It works on meshes of one axis (1x8, 8x1 or 8) and
wherever damage leaves every chip with at most two neighbours. Along an open line, sums flow to
their owners from both ends. Around a closed one, half of the payload goes each way.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from ftmesh.algorithms.building_blocks import (
    bidirectional_rings,
    check_one_part,
    mirrored_all_reduce,
    reduce_scatter_lines,
    reduce_scatter_rings,
)
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Ints, Transfers, join_transfers
from ftmesh.topology.hamiltonian import find_circuit
from ftmesh.topology.join_circuits import axis_links, join_circuits, wrapping_axes
from ftmesh.topology.notation import Coord
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
    """Return the schedule with half of the payload each way round the circuit."""
    circuit = find_circuit(topology)
    return bidirectional_rings(topology, [circuit], algorithm="ring", name="Hamiltonian ring")


def along_ring_order(topology: Topology) -> Schedule:
    """Return the schedule along `ring_order`, whose steps may be longer than one hop.

    Raises:
        PlanError: A step of the ring has no route that is clear of failures.
    """
    check_one_part(topology)
    order = ring_order(topology)
    if order.blocked:
        a, b = order.blocked[0]
        raise PlanError(
            f"the ring that XLA sums along has a step from {topology.noun} {a} to {b} whose route "
            "goes over a failure: plan with executor='ppermute', which stays clear of it"
        )
    return bidirectional_rings(topology, [[*order.coords]], algorithm="ring", name="ring of XLA")


def build_multi_ring(topology: Topology) -> Schedule:
    """Return the schedule with one circuit, both ways round, for each axis that wraps."""
    axes = wrapping_axes(topology)
    if len(axes) < 2:
        raise PlanError(
            f"it needs two axes or more that wrap, of 3 {topology.noun}s or more each, and of "
            f"{topology.name} {'one' if axes else 'none'} wraps"
        )
    if topology.failed or topology.failed_links:
        raise PlanError(
            f"its circuits use every link of every {topology.noun}, and the mesh is damaged"
        )
    circuits = join_circuits(topology, [axis_links(topology, axis) for axis in axes])
    name = f"{len(axes)} circuits"
    return bidirectional_rings(topology, circuits, algorithm="multi_ring", name=name)


def build_two_dim(topology: Topology) -> Schedule:
    """Return the schedule: a part of the payload for each axis, summed along that axis first.

    If pieces of the same rounds differ in size, and the large ones are multiples of the smallest,
    the steps of the large ones are spread over that many rounds, so that all have one size.
    """
    num_axes = len(topology.shape)
    if num_axes < 2 or min(topology.shape) < 2:
        raise PlanError(
            f"it needs two or three axes, of 2 {topology.noun}s or more each, not {topology.name}"
        )
    if topology.failed or topology.failed_links:
        raise PlanError("it needs every row and column whole, and the mesh is damaged")
    ranks = np.array([topology.rank(c) for c in np.ndindex(topology.shape)], np.int32)
    ranks = ranks.reshape(topology.shape)
    orders = [[(first + i) % num_axes for i in range(num_axes)] for first in range(num_axes)]
    directions = [+1, -1] if any(topology.wrap) else [+1]
    chips = topology.num_live
    num_chunks = num_axes * len(directions) * chips
    owner = np.empty(num_chunks, np.int32)
    stages: list[list[Transfers]] = [[] for _ in range(num_axes)]
    for part, (axes, direction) in enumerate(product(orders, directions)):
        grid = ranks.transpose(axes)[(slice(None, None, direction),) * num_axes]
        owned = np.full(grid.shape, part * chips, np.int32)
        for stage, axis in enumerate(axes):
            smallest = min(_piece_size(topology, order[: stage + 1]) for order in orders)
            size = _piece_size(topology, axes[: stage + 1])
            reduce_scatter = reduce_scatter_rings if topology.wrap[axis] else reduce_scatter_lines
            transfers, ends = reduce_scatter(
                _rows(grid, stage),
                lane=2 * part,
                first_chunk=_rows(owned, stage)[:, 0],
                count=size,
                rounds_per_step=1 if size % smallest else size // smallest,
            )
            stages[stage].append(transfers)
            owned = _from_rows(ends, owned, stage)
        owner[owned] = grid
    phases = [(_phase(orders, stage), join_transfers(parts)) for stage, parts in enumerate(stages)]
    return mirrored_all_reduce(topology, "two_dim", num_chunks, phases, owner)


def _piece_size(topology: Topology, axes: list[int]) -> int:
    """Chunks in a piece that is scattered along the last of `axes`, after those before."""
    return topology.num_live // math.prod(topology.shape[axis] for axis in axes)


def _rows(grid: Ints, axis: int) -> Ints:
    return np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])


def _from_rows(rows: Ints, like: Ints, axis: int) -> Ints:
    """The inverse of `_rows`: a grid shaped like `like`."""
    return np.moveaxis(rows.reshape(np.moveaxis(like, axis, -1).shape), -1, axis)


def _phase(orders: list[list[int]], stage: int) -> str:
    """``x first and y first``, or on three axes ``x, y and z first``."""
    word = ("first", "next", "last")[stage]
    *others, last = ("xyz"[axes[stage]] for axes in orders)
    if len(others) == 1:
        return f"{others[0]} {word} and {last} {word}"
    return f"{', '.join(others)} and {last} {word}"


def build_chain(topology: Topology) -> Schedule:
    """Return the schedule along the line, or both ways round it if it closes."""
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    chips = line_order(topology)
    if len(topology.neighbours(chips[0])) == 2:
        return bidirectional_rings(topology, [chips], algorithm="chain", name="two-way ring")
    ranks = np.array([[topology.rank(coord) for coord in chips]], np.int32)
    transfers, _ = reduce_scatter_lines(ranks, lane=0, first_chunk=0)
    phases = [("chain", transfers)]
    return mirrored_all_reduce(topology, "chain", len(chips), phases, owner=ranks[0])


def line_order(topology: Topology) -> list[Coord]:
    """Return the live chips in order, from the end with the lower rank; if closed, from rank 0."""
    noun = topology.noun
    branching = [coord for coord in topology.coords if len(topology.neighbours(coord)) > 2]
    if branching:
        raise PlanError(
            f"it needs {noun}s in a line, each with at most two neighbours, and {noun} "
            f"{branching[0]} has {len(topology.neighbours(branching[0]))}"
        )
    ends = [coord for coord in topology.coords if len(topology.neighbours(coord)) < 2]
    chips = dict.fromkeys([*ends, *topology.coords][:1])
    while True:
        unvisited = [b for b in topology.neighbours(next(reversed(chips))) if b not in chips]
        if not unvisited:
            break
        chips[unvisited[0]] = None
    if len(chips) < topology.num_live:
        raise PlanError(f"its line ends after {len(chips)} of {topology.num_live} {noun}s")
    return list(chips)
