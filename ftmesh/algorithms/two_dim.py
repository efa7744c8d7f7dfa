"""`two_dim`: x then y for one half of the payload, y then x for the other, at once.

The paper's figures 4 and 5. On three axes it is thirds, each starting with another axis. Along an
axis that wraps, rows (or columns) are rings, and half of each part runs backwards, so that both
directions of every link are used. Along an axis that does not, a ring would use its own links
twice. Instead sums flow along the line to their owners from both ends, in as many rounds.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from ftmesh.algorithms import building_blocks as blocks
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Ints, Transfers, join_transfers
from ftmesh.topology.topology import Topology


def build_schedule(topology: Topology) -> Schedule:
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
            reduce_scatter = (
                blocks.reduce_scatter_rings if topology.wrap[axis] else blocks.reduce_scatter_lines
            )
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
    phases = [(_name(orders, stage), join_transfers(parts)) for stage, parts in enumerate(stages)]
    return blocks.mirrored_all_reduce(topology, "two_dim", num_chunks, phases, owner)


def _piece_size(topology: Topology, axes: list[int]) -> int:
    """Chunks in a piece that is scattered along the last of `axes`, after those before."""
    return topology.num_live // math.prod(topology.shape[axis] for axis in axes)


def _rows(grid: Ints, axis: int) -> Ints:
    return np.moveaxis(grid, axis, -1).reshape(-1, grid.shape[axis])


def _from_rows(rows: Ints, like: Ints, axis: int) -> Ints:
    """The inverse of `_rows`: a grid shaped like `like`."""
    return np.moveaxis(rows.reshape(np.moveaxis(like, axis, -1).shape), -1, axis)


def _name(orders: list[list[int]], stage: int) -> str:
    """``x first and y first``, or on three axes ``x, y and z first``."""
    word = ("first", "next", "last")[stage]
    *others, last = ("xyz"[axes[stage]] for axes in orders)
    if len(others) == 1:
        return f"{others[0]} {word} and {last} {word}"
    return f"{', '.join(others)} and {last} {word}"
