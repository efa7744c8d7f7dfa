"""Proves any schedule by tracking which contributions each rank holds of each chunk.

Contributions are counted, not flagged. As long as nothing is added twice every count is 0 or 1, so
contributions are kept as sets of bits, and an addition checks that the sets are disjoint. A chunk
for which they are not is replayed with integer counts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import VerificationError
from ftmesh.schedule.rank_schedule import AnyRankSchedule
from ftmesh.schedule.replay import replay
from ftmesh.schedule.transfers import CellMoves, Ints, cell_moves, lane_slices

STATE_BYTES = 256 * 2**20  # memory for the sets; more chunks than fit are verified in batches

Bits = NDArray[np.uint64]
Chunks = NDArray[np.intp]
Progress = Callable[[int, int], None]


def check_sets(ranks: AnyRankSchedule, chunks: Chunks, progress: Progress | None = None) -> None:
    """Prove the sums of `chunks`: at owners after the reduce-scatter, at every rank in the end.

    `progress` is called with the batches of chunks that are done, and their number.
    """
    report = progress or (lambda done, total: None)
    per_chunk = ranks.num_ranks * 8 * -(-ranks.num_ranks // 64)
    size = max(1, STATE_BYTES // per_chunk)
    batches = [chunks[low : low + size] for low in range(0, len(chunks), size)]
    for index, batch in enumerate(batches):
        report(index, len(batches))
        _check_batch(ranks, batch)
    report(len(batches), len(batches))


def _check_batch(ranks: AnyRankSchedule, chunks: Chunks) -> None:
    own = _single_bits(ranks.num_ranks)
    full = np.bitwise_or.reduce(own[ranks.contributors], axis=0)
    held = np.repeat(own[:, None], len(chunks), axis=1)
    suspects: set[int] = set()
    slot = np.full(ranks.num_chunks, -1, np.intp)
    slot[chunks] = np.arange(len(chunks))
    cells = held.reshape(-1, held.shape[2])
    scratch = np.empty(len(cells), np.int32)
    num_rounds = 0
    for number, phase in enumerate(ranks.phases, start=1):
        for transfers in phase.rounds():
            num_rounds += 1
            moves = cell_moves(transfers, ranks.num_chunks)
            moves = _moves_of_batch(moves, ranks.num_chunks, slot, len(chunks))
            if len(moves.dst):
                _run_round(cells, moves, scratch, suspects)
        if number == ranks.num_reduce_scatter_phases and ranks.owner is not None:
            owner = ranks.owner[chunks]
            incomplete = (held[owner, np.arange(len(chunks))] != full).any(axis=1)
            for chunk in [*chunks[incomplete][:1].tolist(), *sorted(suspects)]:
                _recount(ranks, chunk, num_rounds, [int(ranks.owner[chunk])])
    incomplete = (held != full).any(axis=(0, 2))
    for chunk in [*chunks[incomplete][:1].tolist(), *sorted(suspects)]:
        _recount(ranks, chunk, num_rounds, list(range(ranks.num_ranks)))


def _moves_of_batch(moves: CellMoves, num_chunks: int, slot: Chunks, num_slots: int) -> CellMoves:
    """The moves of the chunks that have a slot, one by one, over cells of (rank, slot)."""
    per_rank = num_chunks // moves.size
    chunk = (moves.chunk[:, None] + np.arange(moves.size)).ravel()
    is_ours = slot[chunk] >= 0
    row = np.repeat(np.arange(len(moves.dst)), moves.size)[is_ours]
    chunk = chunk[is_ours]
    src, dst = (cell[row] // per_rank * num_slots + slot[chunk] for cell in (moves.src, moves.dst))
    return CellMoves(1, moves.lane[row], chunk, src, dst, moves.adds[row])


def _recount(ranks: AnyRankSchedule, chunk: int, num_rounds: int, holders: list[int]) -> None:
    """Raise unless each of `holders` has every contribution to `chunk` once."""
    exact = replay(ranks, chunk, num_rounds)
    for error in filter(None, map(exact.error_at, holders)):
        raise VerificationError(error)


def _single_bits(num_ranks: int) -> Bits:
    """Row r has only bit r set; ranks that contribute nothing too, to detect their values."""
    bits = np.zeros((num_ranks, -(-num_ranks // 64)), np.uint64)
    rank = np.arange(num_ranks)
    bits[rank, rank // 64] = np.uint64(1) << (rank % 64).astype(np.uint64)
    return bits


def _run_round(cells: Bits, moves: CellMoves, scratch: Ints, suspects: set[int]) -> None:
    """Apply one round: all reads, then the writes lane by lane. `scratch` has a word per cell."""
    read = cells.take(moves.src, axis=0)
    for lane in _write_batches(moves, scratch):
        before = cells.take(moves.dst[lane], axis=0)
        if not moves.adds[lane].all():
            before[~moves.adds[lane]] = 0
        twice = before & read[lane]
        if twice.any():
            suspects.update(moves.chunk[lane][twice.any(axis=1)].tolist())
        before |= read[lane]
        cells[moves.dst[lane]] = before


def _write_batches(moves: CellMoves, scratch: Ints) -> list[slice]:
    """Moves that can be written at once: all, or lane by lane if lanes write the same cell."""
    row = np.arange(len(moves.dst), dtype=scratch.dtype)
    scratch[moves.dst] = row  # of several moves to one cell, one remains
    if (scratch[moves.dst] == row).all():
        return [slice(None)]
    return lane_slices(moves)
