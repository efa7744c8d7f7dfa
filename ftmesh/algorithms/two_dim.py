"""`two_dim`: along x then along y for one half of the payload, y then x for the other, at once.

The paper's figures 4 and 5; on three axes it is thirds, and each begins with another axis and goes
on to the next. Along an axis that wraps, rows (or columns) are rings, and half of each part runs
backwards, so that both directions of every link are used. Along one that does not, a ring would
have to fold back over its own links, with hops of two; sums flow along the line to their owners
instead, from both ends, which takes as many rounds and single hops.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from ftmesh.algorithms.building_blocks import mirrored_all_reduce, reduce_scatter_lines, reduce_scatter_rings
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Transfers, Ints, join_transfers
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
    """A part of the payload for each axis, reduce-scattered along that one and then the others.

    Where pieces that travel in the same rounds differ in size, and the large ones are multiples of
    the smallest, their steps are spread over as many rounds, so that all are of one size.
    """
    num_axes = len(topology.shape)
    if num_axes < 2 or min(topology.shape) < 2:
        raise PlanError(
            f"it works on meshes of two axes or three, of 2 {topology.noun}s or more each, not on "
            f"{topology.name}"
        )
    if topology.failed or topology.failed_links:
        raise PlanError("it needs every row and column whole, and the mesh is damaged")
    ranks = np.array([topology.rank(c) for c in np.ndindex(topology.shape)], np.int32)
    ranks = ranks.reshape(topology.shape)
    orders = [[(first + i) % num_axes for i in range(num_axes)] for first in range(num_axes)]
    strands = [+1, -1] if any(topology.wrap) else [+1]
    chips = topology.num_live
    num_chunks = num_axes * len(strands) * chips
    owner = np.empty(num_chunks, np.int32)
    phases: list[list[Transfers]] = [[] for _ in range(num_axes)]
    for part, (axes, direction) in enumerate(product(orders, strands)):
        grid = ranks.transpose(axes)[(slice(None, None, direction),) * num_axes]
        owned = np.full(grid.shape, part * chips, np.int32)
        for turn, axis in enumerate(axes):
            least = min(_piece(topology, order[: turn + 1]) for order in orders)
            size = _piece(topology, axes[: turn + 1])
            along = reduce_scatter_rings if topology.wrap[axis] else reduce_scatter_lines
            columns, ends = along(
                _rows(grid, turn),
                lane=2 * part,
                first_chunk=_rows(owned, turn)[:, 0],
                count=size,
                rounds_per_step=1 if size % least else size // least,
            )
            phases[turn].append(columns)
            owned = _from_rows(ends, owned, turn)
        owner[owned] = grid
    halves = [(_name(orders, turn), join_transfers(phase)) for turn, phase in enumerate(phases)]
    return mirrored_all_reduce(topology, "two_dim", num_chunks, halves, owner)


def _piece(topology: Topology, axes: list[int]) -> int:
    """Chunks in a piece of what is shared out along the last of `axes`, after the ones before."""
    return topology.num_live // math.prod(topology.shape[axis] for axis in axes)


def _rows(grid: Ints, axis: int) -> Ints:
    """A grid as a list of its lines along an axis."""
    return np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])


def _from_rows(rows: Ints, like: Ints, axis: int) -> Ints:
    """The grid, shaped as another, whose lines along an axis are `rows`."""
    return np.moveaxis(rows.reshape(np.moveaxis(like, axis, -1).shape), -1, axis)


def _name(orders: list[list[int]], turn: int) -> str:
    """What happens in a turn: ``x first and y first``, or on three axes ``x, y and z first``."""
    word = ("first", "next", "last")[turn]
    *some, last = ("xyz"[axes[turn]] for axes in orders)
    if len(some) == 1:
        return f"{some[0]} {word} and {last} {word}"
    return f"{', '.join(some)} and {last} {word}"
