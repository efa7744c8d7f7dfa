"""What algorithms share: reduce-scatters along rings and lines, and all-reduces made of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ftmesh.errors import PlanError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import SplitSchedule
from ftmesh.schedule.transfers import Ints, RingRule, Transfers, join_transfers, make_transfers
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology


def reduce_scatter_rings(
    rings: ArrayLike, *, lane: int, first_chunk: ArrayLike, count: int = 1, rounds_per_step: int = 1
) -> tuple[Transfers, Ints]:
    """Reduce-scatter along rings of equal length, all at once.

    In step s, slot p sends piece p - s to slot p + 1, which adds it. After ``length - 1`` steps
    slot p holds the sum of piece p + 1.

    Returns the transfers, and the first chunk that each slot ends with, shaped like `rings`.

    Args:
        rings: ``rings[j, p]`` is the rank in slot p of ring j.
        lane: the lane of all transfers.
        first_chunk: the first chunk of each ring, or of all; a ring has ``length * count`` chunks.
        count: chunks in a piece.
        rounds_per_step: rounds that each step is spread over, each moving an equal part of a piece.
    """
    ranks, base, part, size = _prepare(rings, first_chunk, count, rounds_per_step)
    length = ranks.shape[1]
    slot = np.arange(length)
    step = np.arange(length - 1)[:, None, None, None]
    transfers = make_transfers(
        round=step * rounds_per_step + part,
        lane=lane,
        src=ranks,
        dst=np.roll(ranks, -1, axis=1),
        chunk=base + (slot - step) % length * count + part * size,
        count=size,
    )
    return transfers, base + (slot + 1) % length * count


def reduce_scatter_lines(
    lines: ArrayLike, *, lane: int, first_chunk: ArrayLike, count: int = 1, rounds_per_step: int = 1
) -> tuple[Transfers, Ints]:
    """Reduce-scatter along lines of equal length: sums flow from both ends to their owner.

    Slot p ends with the sum of piece p. The pieces with the farthest to go leave first, so that
    everything arrives after ``length - 1`` steps of single hops, and no link is used twice in a
    round. Parameters and results are those of `reduce_scatter_rings`; `lane` is for transfers up
    the line, and ``lane + 1`` for those down.
    """
    ranks, base, part, size = _prepare(lines, first_chunk, count, rounds_per_step)
    length = ranks.shape[1]
    slot, owner = np.triu_indices(length, k=1)
    directions = []
    for is_down in (0, 1):
        line = ranks[:, ::-1] if is_down else ranks
        piece = length - 1 - owner if is_down else owner
        directions.append(
            make_transfers(
                round=(length - 1 - owner + slot) * rounds_per_step + part,
                lane=lane + is_down,
                src=line[:, slot],
                dst=line[:, slot + 1],
                chunk=base + piece * count + part * size,
                count=size,
            )
        )
    return join_transfers(directions), base + np.arange(length) * count


def check_one_part(topology: Topology) -> None:
    """Raise PlanError unless there are two live chips or more, all joined by links."""
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    if len(topology.components()) > 1:
        raise PlanError(f"no link joins some of its {topology.noun}s to the others")


def bidirectional_rings(
    topology: Topology, circuits: Sequence[list[Coord]], *, algorithm: str, name: str
) -> SplitSchedule:
    """Return an all-reduce along closed circuits, with equal parts of the payload each way round.

    Each circuit visits all live chips, and no two share a link. `name` is that of the phases.
    """
    live = topology.num_live
    rings = [np.array([[topology.rank(coord) for coord in walk]], np.int32) for walk in circuits]
    directed = [ring for both in rings for ring in (both, both[:, ::-1])]
    rules = tuple(
        RingRule(np.ascontiguousarray(ring), np.array([lane * live], np.int32), lane)
        for lane, ring in enumerate(directed)
    )
    owner = np.empty(len(rules) * live, np.int32)
    for rule in rules:
        owner[rule.owned_chunks] = rule.rings
    return mirrored_all_reduce(topology, algorithm, len(owner), [(name, rules)], owner)


def mirrored_all_reduce(
    topology: Topology,
    algorithm: str,
    num_chunks: int,
    phases: Sequence[tuple[str, Transfers | tuple[RingRule, ...]]],
    owner: Ints,
) -> SplitSchedule:
    """Return the schedule of a reduce-scatter followed by its mirror image as all-gather.

    `phases` has the name and the content of each phase of the reduce-scatter, and `owner` the rank
    that has the sum of each chunk after it.
    """
    scatter = [Phase(f"{name}, reduce-scatter", content) for name, content in phases]
    gather = [
        phase.mirrored(f"{name}, all-gather")
        for phase, (name, _) in zip(reversed(scatter), reversed(phases), strict=True)
    ]
    return SplitSchedule(
        topology=topology,
        algorithm=algorithm,
        num_chunks=num_chunks,
        phases=(*scatter, *gather),
        owner=owner,
        rounds_in_reduce_scatter=sum(phase.num_rounds for phase in scatter),
    )


def _prepare(
    rows: ArrayLike, first_chunk: ArrayLike, count: int, rounds_per_step: int
) -> tuple[Ints, Ints, NDArray[np.intp], int]:
    """The ranks, the first chunk of each row, the parts of a step, and chunks in a part."""
    ranks = np.asarray(rows, np.int32)
    base = np.broadcast_to(np.asarray(first_chunk, np.int32), ranks.shape[:1])[:, None]
    return ranks, base, np.arange(rounds_per_step)[:, None, None], count // rounds_per_step
