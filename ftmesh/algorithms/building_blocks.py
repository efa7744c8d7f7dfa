"""What the planners share: reduce-scatter along rings and lines, and all-reduces made from it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ftmesh.schedule.phase import Phase
from ftmesh.schedule.ring_rule import RingRule
from ftmesh.schedule.schedule import SplitSchedule
from ftmesh.schedule.transfers import Transfers, Ints, join_transfers, make_transfers
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology


def reduce_scatter_rings(
    rings: ArrayLike, *, lane: int, first_chunk: ArrayLike, count: int = 1, rounds_per_step: int = 1
) -> tuple[Transfers, Ints]:
    """Reduce-scatter along rings of equal length, all at once; and the chunk each place ends with.

    ``rings[j, p]`` is the rank at place p of ring j. Ring j works on ``length * count`` chunks from
    ``first_chunk[j]`` on, in pieces of `count`: in step s, place p sends piece p - s to place
    p + 1, which adds it. After ``length - 1`` steps place p holds piece p + 1 complete; the first
    chunk of that piece is the second result, shaped like `rings`. A step may be spread over
    several rounds, each moving an equal part of the piece.
    """
    order = np.asarray(rings, np.int32)
    length = order.shape[1]
    base = _per_row(first_chunk, order)
    place = np.arange(length)
    step = np.arange(length - 1)[:, None, None, None]
    part = np.arange(rounds_per_step)[:, None, None]
    size = count // rounds_per_step
    columns = make_transfers(
        round=step * rounds_per_step + part,
        lane=lane,
        src=order,
        dst=np.roll(order, -1, axis=1),
        chunk=base + (place - step) % length * count + part * size,
        count=size,
    )
    return columns, base + (place + 1) % length * count


def reduce_scatter_lines(
    lines: ArrayLike, *, lane: int, first_chunk: ArrayLike, count: int = 1, rounds_per_step: int = 1
) -> tuple[Transfers, Ints]:
    """The same along lines: sums flow from both ends to the place that is to own them.

    Place p ends with piece p. What has the farthest to go leaves first, so that after
    ``length - 1`` steps everything has arrived, over single hops, and no hop is used twice in a
    round. Takes two lanes, `lane` upwards and ``lane + 1`` downwards.
    """
    order = np.asarray(lines, np.int32)
    length = order.shape[1]
    base = _per_row(first_chunk, order)
    part = np.arange(rounds_per_step)[:, None, None]
    size = count // rounds_per_step
    place, goal = np.triu_indices(length, k=1)
    columns = []
    for downwards in (0, 1):
        along = order[:, ::-1] if downwards else order
        piece = length - 1 - goal if downwards else goal
        columns.append(
            make_transfers(
                round=(length - 1 - goal + place) * rounds_per_step + part,
                lane=lane + downwards,
                src=along[:, place],
                dst=along[:, place + 1],
                chunk=base + piece * count + part * size,
                count=size,
            )
        )
    return join_transfers(columns), base + np.arange(length) * count


def _per_row(values: ArrayLike, rows: Ints) -> Ints:
    return np.broadcast_to(np.asarray(values, np.int32), rows.shape[:1])[:, None]


def bidirectional_rings(
    topology: Topology, walks: Sequence[list[Coord]], *, algorithm: str, name: str
) -> SplitSchedule:
    """Equal parts of the payload each way round closed walks, each of which is over all live chips.

    No two walks may share a link.
    """
    live = topology.num_live
    rings = [np.array([[topology.rank(coord) for coord in walk]], np.int32) for walk in walks]
    ways = tuple(
        RingRule(np.ascontiguousarray(way), np.array([lane * live], np.int32), lane)
        for lane, way in enumerate(way for ring in rings for way in (ring, ring[:, ::-1]))
    )
    owner = np.empty(len(ways) * live, np.int32)
    for way in ways:
        owner[way.owned_chunks] = way.rings
    return mirrored_all_reduce(topology, algorithm, len(owner), [(name, ways)], owner)


def mirrored_all_reduce(
    topology: Topology,
    algorithm: str,
    num_chunks: int,
    halves: Sequence[tuple[str, Transfers | tuple[RingRule, ...]]],
    owner: Ints,
) -> SplitSchedule:
    """The schedule that runs reduce-scatter phases, then their mirror images as all-gather.

    `halves` are named without their purpose, first to last: ``("row rings", columns)``; rings in
    lockstep may stay a rule.
    """
    scatter = [Phase(f"{name}, reduce-scatter", what) for name, what in halves]
    gather = [
        phase.mirrored(f"{name}, all-gather")
        for phase, (name, _) in zip(reversed(scatter), reversed(halves), strict=True)
    ]
    return SplitSchedule(
        topology=topology,
        algorithm=algorithm,
        num_chunks=num_chunks,
        phases=(*scatter, *gather),
        owner=owner,
        rounds_in_reduce_scatter=sum(phase.num_rounds for phase in scatter),
    )
