"""The two proofs that chunks are summed: by counting transfers, and by sets of contributions.

Counting takes no longer than reading the rounds, and proves the chunks of the usual forms:

**Sums.** Take one chunk in the reduce-scatter. Let every contributor except the owner send its
partial sum exactly once, and let nobody receive after sending. Then what a rank sends holds its own
contribution and all that it received, and goes to a rank that sends later or to the owner, who
never sends. So every contribution takes one path, which ends at the owner: the additions form a
tree, and each contribution is there exactly once. They may also end at another rank, from which
copies bring the sum to the owner, if nothing is added to that chunk from the first copy on.

**Results.** The all-gather alone starts with each chunk at its owner and any value elsewhere. A
copy gives a rank the result if the sender has it; an addition never does.

**Trees.** Without a reduce-scatter, take all transfers of one chunk over N ranks. Let there be
N - 1 pairs of ranks with one transfer each way. Let every rank send to another only after it has
heard from all *other* ranks it hears from. Let a transfer be an addition if it is sent before, or
with, the transfer the other way, and a copy if it is sent after. Around a cycle of pairs each
transfer would have to be later than the one before, so there is no cycle, and the pairs form a tree
that spans all ranks. Then an addition carries all contributions from the sender's side of the pair
once, and a copy carries all contributions.

All other chunks are proved with sets: what contributions each rank holds. Contributions are
counted, not flagged. As long as nothing is added twice every count is 0 or 1, so contributions are
kept as sets of bits, and an addition checks that the sets are disjoint. A chunk for which they are
not is replayed with integer counts: slow and exact, to write the error message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import VerificationError
from ftmesh.schedule.phase import PhaseLike, with_starts
from ftmesh.schedule.schedule import AnyRankSchedule
from ftmesh.schedule.transfers import ADD, CellMoves, Ints, cell_moves, lane_slices
from ftmesh.topology.graph import single_bits

STATE_BYTES = 256 * 2**20  # memory for the sets; more chunks than fit are verified in batches
MAX_COUNT = 2**31  # counts saturate here, far from 1

Flags = NDArray[np.bool_]
Bits = NDArray[np.uint64]
Chunks = NDArray[np.intp]
Move = tuple[int, int, int]  # round, source, destination
Progress = Callable[[int, int], None]  # called with work done and work in all


# By counting ------------------------------------------------------------------------------------


def uncounted_chunks(ranks: AnyRankSchedule) -> NDArray[np.intp]:
    """Return the chunks whose sum at the owner cannot be proved by counting."""
    assert ranks.owner is not None
    num_ranks, num_chunks = ranks.num_ranks, ranks.num_chunks
    contributes = np.zeros(num_ranks, np.bool_)
    contributes[ranks.contributors] = True
    sent = np.zeros(num_ranks * num_chunks, np.bool_)  # for an addition
    copied, unproved = np.zeros((2, num_chunks), np.bool_)
    for phase in ranks.reduce_scatter:
        for transfers in phase.rounds():
            _, handed_over = transfers.take(transfers.op != ADD).expanded()
            copied[handed_over] = True
            moves = cell_moves(transfers.take(transfers.op == ADD), num_chunks)
            cells = sent.reshape(-1, moves.size)
            wrong = copied[moves.chunk[:, None] + np.arange(moves.size)].any(axis=1)
            for lane in lane_slices(moves):  # a lane has each source once
                wrong[lane] |= cells[moves.src[lane]].any(axis=1)
                cells[moves.src[lane]] = True
            wrong |= cells[moves.dst].any(axis=1)
            unproved[moves.chunk[wrong][:, None] + np.arange(moves.size)] = True
    by_rank = sent.reshape(num_ranks, num_chunks)
    unproved |= by_rank[~contributes].any(axis=0)
    has_sum = contributes[:, None] & ~by_rank
    unproved |= has_sum.sum(axis=0) != 1
    if copied.any():
        _copy(has_sum, ranks.reduce_scatter)
    unproved |= ~has_sum[ranks.owner, np.arange(num_chunks)]
    if not contributes.all():
        unproved |= _received_by(ranks, ~contributes)
    return np.flatnonzero(unproved)


def _copy(holds: Flags, phases: Iterable[PhaseLike]) -> None:
    """Pass what is held of each chunk, ``[rank, chunk]``, on with the copies of some phases."""
    num_chunks, flat = holds.shape[1], holds.reshape(-1)
    for phase in phases:
        for transfers in phase.rounds():
            moves = cell_moves(transfers.take(transfers.op != ADD), num_chunks)
            cells = flat.reshape(-1, moves.size)
            cells[moves.dst] = cells[moves.src]


def _received_by(ranks: AnyRankSchedule, receivers: Flags) -> Flags:
    """The chunks that one of `receivers` receives in the reduce-scatter without owning them."""
    assert ranks.owner is not None
    chunks = np.zeros(ranks.num_chunks, np.bool_)
    for phase in ranks.reduce_scatter:
        for transfers in phase.rounds():
            received = transfers.take(receivers[transfers.dst])
            row, chunk = received.expanded()
            chunks[chunk[ranks.owner[chunk] != received.dst[row]]] = True
    return chunks


def ungathered_chunks(ranks: AnyRankSchedule) -> NDArray[np.intp]:
    """Return the chunks that the all-gather alone does not bring from owners to every rank."""
    assert ranks.owner is not None
    num_chunks = ranks.num_chunks
    holds = np.zeros((ranks.num_ranks, num_chunks), np.bool_)
    holds[ranks.owner, np.arange(num_chunks)] = True
    flat = holds.reshape(-1)
    for phase in ranks.all_gather:
        for moves in (cell_moves(transfers, num_chunks) for transfers in phase.rounds()):
            cells = flat.reshape(-1, moves.size)
            cells[moves.dst] = cells[moves.src] & ~moves.adds[:, None]
    return np.flatnonzero(~holds.all(axis=0))


def unspanned_chunks(ranks: AnyRankSchedule) -> NDArray[np.intp]:
    """Return the chunks whose transfers cannot be proved, by counting, to sum along a tree."""
    num_ranks, num_chunks = ranks.num_ranks, ranks.num_chunks
    if len(ranks.contributors) < num_ranks:
        return np.arange(num_chunks)
    chunk, src, dst, sent, adds = _by_chunk(ranks)
    unproved = np.bincount(chunk, minlength=num_chunks) != 2 * (num_ranks - 1)
    unproved[chunk[src == dst]] = True
    base = chunk.astype(np.int64) * num_ranks
    there, back = (base + src) * num_ranks + dst, (base + dst) * num_ranks + src
    order, back_order = np.argsort(there), np.argsort(back)
    there, back = there[order], back[back_order]  # both have as many of each chunk
    chunk, sent, adds, answered = chunk[order], sent[order], adds[order], sent[back_order]
    unproved[chunk[there != back]] = True
    unproved[chunk[1:][there[1:] == there[:-1]]] = True
    unproved[chunk[adds != (sent <= answered)]] = True
    sender = there // num_ranks
    first = np.flatnonzero(np.concatenate(([True], sender[1:] != sender[:-1])))
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(sender))))
    latest = np.maximum.reduceat(answered, first)[group]
    is_latest = answered == latest
    is_alone = np.add.reduceat(is_latest, first)[group] == 1
    second = np.maximum.reduceat(np.where(is_latest, -1, answered), first)[group]
    unproved[chunk[sent <= np.where(is_latest & is_alone, second, latest)]] = True
    return np.flatnonzero(unproved)


def _by_chunk(ranks: AnyRankSchedule) -> tuple[Ints, ...]:
    """For every chunk moved: the chunk, source, destination, round, and whether it is added."""
    parts = []
    rounds = (transfers for phase in ranks.phases for transfers in phase.rounds())
    for index, t in enumerate(rounds):
        row, chunk = t.expanded()
        columns = chunk, t.src[row], t.dst[row], np.full(len(row), index), (t.op == ADD)[row]
        parts.append(np.stack(columns).astype(np.int32))
    return tuple(np.concatenate(parts, axis=1))


# By sets ----------------------------------------------------------------------------------------


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
