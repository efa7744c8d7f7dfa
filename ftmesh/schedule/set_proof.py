"""Sets: the proof of any rounds at all, by what each rank holds of each chunk.

Contributions are counted, not flagged. While no chunk has been added twice every count is 0 or 1,
so sets of contributions are kept as bits and an addition checks that the sets are disjoint; a chunk
in which they are not is replayed with whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import VerificationError
from ftmesh.schedule.rank_schedule import AnyRankSchedule
from ftmesh.schedule.replay import replay
from ftmesh.schedule.transfers import Ints, CellMoves, cell_moves, lane_slices

STATE_BYTES = 256 * 2**20  # bits kept at a time; more chunks than fit are verified in turns

Bits = NDArray[np.uint64]
Chunks = NDArray[np.intp]
Progress = Callable[[int, int], None]


def check_sets(script: AnyRankSchedule, chunks: Chunks, progress: Progress | None = None) -> None:
    """Prove the sums of some chunks: at every rank in the end, at owners after the first half."""
    turns = _turns(script, chunks)
    for turn, some in enumerate(turns):
        if progress:
            progress(turn, len(turns))
        _check(script, some)
    if progress:
        progress(len(turns), len(turns))


def _turns(script: AnyRankSchedule, chunks: Chunks) -> list[Chunks]:
    """The chunks in parts whose state fits the memory set aside for it."""
    per_chunk = script.num_ranks * 8 * -(-script.num_ranks // 64)
    size = max(1, STATE_BYTES // per_chunk)
    return [chunks[low : low + size] for low in range(0, len(chunks), size)]


def _check(script: AnyRankSchedule, chunks: Chunks) -> None:
    ranks = script.num_ranks
    alone = _singletons(ranks)
    full = np.bitwise_or.reduce(alone[script.contributors], axis=0)
    held = np.repeat(alone[:, None], len(chunks), axis=1)
    suspects: set[int] = set()
    place = np.full(script.num_chunks, -1, np.intp)
    place[chunks] = np.arange(len(chunks))
    cells = held.reshape(-1, held.shape[2])
    scratch = np.empty(len(cells), np.int32)
    finished = 0
    for number, phase in enumerate(script.phases, start=1):
        for c in phase.rounds():
            finished += 1
            now = _of_chunks(cell_moves(c, script.num_chunks), script.num_chunks, place, len(chunks))
            if len(now.dst):
                _run_round(cells, now, scratch, suspects)
        if number == script.num_reduce_scatter_phases and script.owner is not None:
            owner = script.owner[chunks]
            incomplete = (held[owner, np.arange(len(chunks))] != full).any(axis=1)
            for chunk in [*chunks[incomplete][:1].tolist(), *sorted(suspects)]:
                _recount(script, chunk, finished, [int(script.owner[chunk])])
    incomplete = (held != full).any(axis=(0, 2))
    for chunk in [*chunks[incomplete][:1].tolist(), *sorted(suspects)]:
        _recount(script, chunk, finished, list(range(ranks)))


def _of_chunks(now: CellMoves, num_chunks: int, place: Chunks, count: int) -> CellMoves:
    """The moves of the chunks that have a place, one by one, over cells of (rank, place)."""
    step = np.arange(now.size)
    per_rank = num_chunks // now.size
    chunk = (now.chunk[:, None] + step).ravel()
    here = place[chunk]
    row = np.repeat(np.arange(len(now.dst)), now.size)[here >= 0]
    chunk, here = chunk[here >= 0], here[here >= 0]
    src, dst = (cell[row] // per_rank * count + here for cell in (now.src, now.dst))
    return CellMoves(1, now.lane[row], chunk, src, dst, now.adds[row])


def _recount(script: AnyRankSchedule, chunk: int, num_rounds: int, ranks: list[int]) -> None:
    """Raise unless each of `ranks` holds every contribution to `chunk` once."""
    exact = replay(script, chunk, num_rounds)
    for rank in ranks:
        complaint = exact.complaint(rank)
        if complaint:
            raise VerificationError(complaint)


def _singletons(ranks: int) -> Bits:
    """Row r has bit r set and no other.

    Ranks that are to contribute nothing begin with something too, which must not get into a sum.
    """
    bits = np.zeros((ranks, -(-ranks // 64)), np.uint64)
    rank = np.arange(ranks)
    bits[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
    return bits


def _run_round(cells: Bits, now: CellMoves, scratch: Ints, suspects: set[int]) -> None:
    """Move the sets of one round: all reads, then the writes lane after lane.

    `scratch` has a number for each cell, which one does not matter.
    """
    moved = cells.take(now.src, axis=0)
    for lane in _in_turn(now, scratch):
        before = cells.take(now.dst[lane], axis=0)
        if not now.adds[lane].all():
            before[~now.adds[lane]] = 0
        twice = before & moved[lane]
        if twice.any():
            suspects.update(now.chunk[lane][twice.any(axis=1)].tolist())
        before |= moved[lane]
        cells[now.dst[lane]] = before


def _in_turn(now: CellMoves, scratch: Ints) -> list[slice]:
    """What may be written at once: all of it, or one lane, where lanes bring the same chunk."""
    row = np.arange(len(now.dst), dtype=scratch.dtype)
    scratch[now.dst] = row  # one of those for the same cell remains
    if (scratch[now.dst] == row).all():
        return [slice(None)]
    return lane_slices(now)
