"""Proves any schedule by tracking which contributions each rank holds of each chunk.

Contributions are counted, not flagged. As long as nothing is added twice every count is 0 or 1, so
contributions are kept as sets of bits, and an addition checks that the sets are disjoint. A chunk
for which they are not is replayed with integer counts: slow and exact, to write the error message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import VerificationError
from ftmesh.schedule.phase import with_starts
from ftmesh.schedule.schedule import AnyRankSchedule
from ftmesh.schedule.transfers import ADD, CellMoves, Ints, cell_moves, lane_slices
from ftmesh.topology.graph import single_bits

STATE_BYTES = 256 * 2**20  # memory for the sets; more chunks than fit are verified in batches
MAX_COUNT = 2**31  # counts saturate here, far from 1

Bits = NDArray[np.uint64]
Chunks = NDArray[np.intp]
Move = tuple[int, int, int]  # round, source, destination
Progress = Callable[[int, int], None]  # called with work done and work in all


def check_sets(ranks: AnyRankSchedule, chunks: Chunks, progress: Progress | None = None) -> None:
    """Prove the sums of `chunks`: at owners after the reduce-scatter, at every rank in the end."""
    report = progress or (lambda done, total: None)
    per_chunk = ranks.num_ranks * 8 * -(-ranks.num_ranks // 64)
    size = max(1, STATE_BYTES // per_chunk)
    batches = [chunks[low : low + size] for low in range(0, len(chunks), size)]
    for index, batch in enumerate(batches):
        report(index, len(batches))
        _check_batch(ranks, batch)
    report(len(batches), len(batches))


def _check_batch(ranks: AnyRankSchedule, chunks: Chunks) -> None:
    own = single_bits(ranks.num_ranks)  # of ranks that contribute nothing too, to detect these
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
    exact = replay(ranks, chunk, num_rounds)
    for error in filter(None, map(exact.error_at, holders)):
        raise VerificationError(error)


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


@dataclass(frozen=True)
class Replay:
    """What every rank holds of one chunk after some rounds."""

    ranks: AnyRankSchedule
    chunk: int
    num_rounds: int
    counts: NDArray[np.int64]  # [r, s]: how often rank r holds the contribution of rank s
    last_move: dict[int, Move]  # contribution -> the last move that brought it to a new rank
    first_double: dict[int, Move]  # contribution -> the move that first made a count exceed 1

    def error_at(self, rank: int) -> str | None:
        """Return what is wrong with the sum at `rank`; None if it has each contribution once."""
        names, expected = self.ranks.names, self.ranks.contributors
        counts = self.counts[rank, expected]
        idle = np.setdiff1d(np.flatnonzero(self.counts[rank]), expected)
        if (counts == 1).all() and not len(idle):
            return None
        problems = []
        if len(idle):
            problems.append(f"the initial value of the idle {names[idle[0]]}")
        doubled = expected[counts > 1].tolist()
        if doubled:
            worst = min(doubled, key=lambda s: self.first_double[s])
            problems.append(
                f"{len(doubled)} more than once, such as {names[worst]}'s "
                f"{self.counts[rank, worst]} times "
                f"(first doubled {self._describe(self.first_double[worst])})"
            )
        missing = expected[counts == 0].tolist()
        if missing:
            nearest = max(missing, key=lambda s: self.last_move.get(s, (-1, 0, 0)))
            history = "which never left it"
            if nearest in self.last_move:
                history = f"which last moved {self._describe(self.last_move[nearest])}"
            problems.append(f"{len(missing)} missing, such as {names[nearest]}'s, {history}")
        return (
            f"after round {self.num_rounds - 1}, chunk {self.chunk} at {names[rank]}: "
            f"expected each of {len(expected)} contributions exactly once, found "
            + "; ".join(problems)
        )

    def _describe(self, move: Move) -> str:
        index, src, dst = move
        return f"in round {index}, {self.ranks.names[src]} to {self.ranks.names[dst]}"


def replay(ranks: AnyRankSchedule, chunk: int, num_rounds: int) -> Replay:
    """Run the first `num_rounds` rounds for `chunk` alone."""
    counts = np.eye(ranks.num_ranks, dtype=np.int64)
    last_move: dict[int, Move] = {}
    first_double: dict[int, Move] = {}
    for index, transfers in ranks.rounds_of_chunk(chunk):
        if index >= num_rounds:
            break
        read = counts[transfers.src]
        columns = transfers.src, transfers.dst, transfers.op, read
        for src, dst, op, value in zip(*columns, strict=True):
            before = counts[dst].copy()
            counts[dst] = np.minimum(before + value, MAX_COUNT) if op == ADD else value
            move = (index, int(src), int(dst))
            for s in np.flatnonzero((before == 0) & (counts[dst] > 0)):
                last_move[int(s)] = move
            for s in np.flatnonzero((counts[dst] > 1) & (counts[dst] > before)):
                first_double.setdefault(int(s), move)
    return Replay(ranks, chunk, num_rounds, counts, last_move, first_double)


def all_gather_error(ranks: AnyRankSchedule, chunk: int) -> str:
    """Explain why the all-gather alone does not bring `chunk` from its owner to every rank."""
    assert ranks.owner is not None
    names, owner = ranks.names, int(ranks.owner[chunk])
    holders, overwritten = {owner}, {}
    rounds_in_reduce_scatter = sum(phase.num_rounds for phase in ranks.reduce_scatter)
    for index, transfers in ranks.rounds_of_chunk(chunk):
        if index < rounds_in_reduce_scatter:
            continue
        before = frozenset(holders)
        columns = (transfers.src, transfers.dst, transfers.op)
        for src, dst, op in zip(*(column.tolist() for column in columns), strict=True):
            if op != ADD and src in before:
                holders.add(dst)
            else:
                holders.discard(dst)
                overwritten[dst] = (index, src, dst, op)
    rank = min(set(range(ranks.num_ranks)) - holders)
    expected = (
        f"the all-gather alone does not bring chunk {chunk} to {names[rank]}: it starts with the "
        f"chunk at its owner, {names[owner]}, and any value elsewhere; expected copies at every "
        "rank, found "
    )
    if rank not in overwritten:
        return expected + "none there"
    index, src, dst, op = overwritten[rank]
    seen = {rank}
    while src in overwritten and overwritten[src][0] < index and src not in seen:
        seen.add(src)  # go back to the first fault
        index, src, dst, op = overwritten[src]
    verb = "adds to what is there" if op == ADD else "sends a value it does not hold"
    phase = [phase for start, phase in with_starts(ranks.phases) if start <= index][-1]
    where = f"round {index} ({phase.name})"
    return f"{expected}that in {where} {names[src]} {verb}, to {names[dst]}"
