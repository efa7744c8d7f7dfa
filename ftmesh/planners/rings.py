"""What the planners share: reduce-scatter along rings, and an all-reduce from a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ftmesh.schedule import Columns, Ints, Phase, Schedule, transfers
from ftmesh.topology import Topology


def fold(length: int, *, wraps: bool) -> list[int]:
    """The order in which a ring visits a line of `length` places.

    A line that wraps is a ring as it stands. Otherwise out over the even places and back over the
    odd ones: no hop is longer than two, and each direction of the line is crossed once.

    >>> fold(6, wraps=False)
    [0, 2, 4, 5, 3, 1]
    """
    if wraps:
        return list(range(length))
    return [*range(0, length, 2), *reversed(range(1, length, 2))]


def reduce_scatter(
    rings: ArrayLike, *, lane: int, first_chunk: ArrayLike, count: int = 1, rounds_per_step: int = 1
) -> tuple[Columns, Ints]:
    """Reduce-scatter along rings of equal length, all at once; and the chunk each place ends with.

    `rings[j, p]` is the rank at place p of ring j. Ring j works on ``length * count`` chunks from
    ``first_chunk[j]`` on, in pieces of `count`: in step s, place p sends piece p - s to place
    p + 1, which adds it. After ``length - 1`` steps place p holds piece p + 1 complete; the first
    chunk of that piece is the second result, shaped like `rings`. A step may be spread over
    several rounds, each moving an equal part of the piece.
    """
    order = np.asarray(rings, np.int32)
    length = order.shape[1]
    base = np.broadcast_to(np.asarray(first_chunk, np.int32), order.shape[:1])[:, None]
    place = np.arange(length)
    step = np.arange(length - 1)[:, None, None, None]
    part = np.arange(rounds_per_step)[:, None, None]
    size = count // rounds_per_step
    columns = transfers(
        round=step * rounds_per_step + part,
        lane=lane,
        src=order,
        dst=np.roll(order, -1, axis=1),
        chunk=base + (place - step) % length * count + part * size,
        count=size,
    )
    return columns, base + (place + 1) % length * count


def all_reduce(
    topology: Topology,
    algorithm: str,
    num_chunks: int,
    halves: Sequence[tuple[str, Columns]],
    owner: Ints,
) -> Schedule:
    """The schedule that runs reduce-scatter phases, then their mirror images as all-gather.

    `halves` are named without their purpose, first to last: ``("row rings", columns)``.
    """
    scatter = [Phase(f"{name}, reduce-scatter", columns) for name, columns in halves]
    gather = [
        phase.mirrored(f"{name}, all-gather")
        for phase, (name, _) in zip(reversed(scatter), reversed(halves), strict=True)
    ]
    return Schedule(
        topology=topology,
        algorithm=algorithm,
        num_chunks=num_chunks,
        phases=(*scatter, *gather),
        owner=owner,
        rounds_in_reduce_scatter=sum(phase.num_rounds for phase in scatter),
    )
