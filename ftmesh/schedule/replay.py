"""Replays one chunk with integer counts, and explains what happened to each contribution.

Slow and exact. Proofs call it for chunks that look wrong, to write the error message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.rank_schedule import AnyRankSchedule
from ftmesh.schedule.transfers import ADD

MAX_COUNT = 2**31  # counts saturate here, far from 1

Move = tuple[int, int, int]  # round, source, destination


@dataclass(frozen=True)
class Replay:
    """What every rank holds of one chunk after some rounds.

    Attributes:
        counts: ``counts[r, s]`` is how often rank r holds the contribution of rank s.
        last_move: contribution -> the last move that brought it to a new rank.
        first_double: contribution -> the move that first made a count exceed 1.
    """

    ranks: AnyRankSchedule
    chunk: int
    num_rounds: int
    counts: NDArray[np.int64]
    last_move: dict[int, Move]
    first_double: dict[int, Move]

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
            if nearest in self.last_move:
                history = f"which last moved {self._describe(self.last_move[nearest])}"
            else:
                history = "which never left it"
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
    for index, transfers in ranks.rounds_of_chunk(chunk):
        if index < ranks.rounds_in_reduce_scatter:
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
    return f"{expected}that in {ranks.describe_round(index)} {names[src]} {verb}, to {names[dst]}"
