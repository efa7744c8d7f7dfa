"""Phases: consecutive rounds with one purpose.

The transfers of a *round* happen together: all reads before all writes. A *lane* is a set of
transfers of one round with distinct sources and distinct destinations: one ``ppermute``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ScheduleError
from ftmesh.schedule.transfers import (
    ADD,
    COPY,
    Ints,
    RingRule,
    Transfers,
    join_transfers,
    repeated_rows,
    row_key,
    sort_order,
)


@dataclass(frozen=True, eq=False)
class Phase:
    """Rounds of transfers, numbered from 0; invalid ones raise a `ScheduleError`."""

    name: str
    content: Transfers | tuple[RingRule, ...]  # rings in lockstep stay a rule

    def __post_init__(self) -> None:
        if isinstance(self.content, Transfers):
            _check_transfers(self.name, self.content)
            order = sort_order(self.content.round, self.content.lane, self.content.src)
            if (np.diff(order) != 1).any():
                object.__setattr__(self, "content", self.content.take(order))
            self.content.freeze()
        else:
            _check_rings(self.name, self.content)

    @cached_property
    def transfers(self) -> Transfers:
        """Every transfer, sorted by round, lane and source."""
        if isinstance(self.content, Transfers):
            return self.content
        transfers = join_transfers(self.rounds())
        transfers.freeze()
        return transfers

    @property
    def num_rounds(self) -> int:
        """Rounds up to the last that has a transfer."""
        if isinstance(self.content, Transfers):
            return int(self.content.round[-1]) + 1
        return self.content[0].num_rounds

    @property
    def num_transfers(self) -> int:
        transfers, times = self._distinct_rounds
        return len(transfers) * times

    def rounds(self) -> Iterator[Transfers]:
        """Yield the transfers of each round in turn; a round may be empty."""
        if isinstance(self.content, Transfers):
            for start, stop in pairwise(self.round_bounds.tolist()):
                yield self.content.take(slice(start, stop))
            return
        first = self.first_round
        for index in range(self.num_rounds):
            chunk = np.concatenate([rule.chunks_in_round(index) for rule in self.content])
            yield first.replace(
                round=np.full_like(first.round, index), chunk=chunk[self._ring_order]
            )

    @property
    def round_bounds(self) -> NDArray[np.intp]:
        """Where each round starts among `transfers`, and where the last ends."""
        return np.searchsorted(self.transfers.round, np.arange(self.num_rounds + 1))

    @cached_property
    def first_round(self) -> Transfers:
        """The first round of rings; other rounds differ only in their chunks."""
        return self._first_unsorted.take(self._ring_order)

    @property
    def _first_unsorted(self) -> Transfers:
        assert not isinstance(self.content, Transfers)
        return join_transfers(rule.first_round() for rule in self.content)

    @cached_property
    def _ring_order(self) -> NDArray[np.intp]:
        first = self._first_unsorted
        return np.lexsort((first.src, first.lane))

    @property
    def _distinct_rounds(self) -> tuple[Transfers, int]:
        """Transfers that have every pair of ranks and every chunk, and how often they repeat."""
        if isinstance(self.content, Transfers):
            return self.content, 1
        return self.first_round, self.num_rounds

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The distinct (source rank, destination rank) pairs, sorted."""
        transfers, _ = self._distinct_rounds
        _, first = np.unique(row_key(transfers.src, transfers.dst), return_index=True)
        ends = transfers.take(first)
        return list(zip(ends.src.tolist(), ends.dst.tolist(), strict=True))

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Chunks that each pair of ranks moves in the whole phase."""
        transfers, times = self._distinct_rounds
        _, pair = np.unique(row_key(transfers.src, transfers.dst), return_inverse=True)
        chunks = np.bincount(pair, weights=transfers.count) * times
        return dict(zip(self.pairs, chunks.astype(int).tolist(), strict=True))

    @cached_property
    def lanes(self) -> list[int]:
        return list(np.unique(self._distinct_rounds[0].lane).tolist())

    @cached_property
    def counts(self) -> list[int]:
        """The distinct numbers of chunks that transfers move."""
        return list(np.unique(self._distinct_rounds[0].count).tolist())

    def chunks_moved(self, op: int) -> int:
        """Return the number of chunks that are added (`ADD`) or copied (`COPY`)."""
        transfers, times = self._distinct_rounds
        return times * int(transfers.count[transfers.op == op].sum(dtype=np.int64))

    @property
    def extent(self) -> tuple[int, int]:
        """The highest rank, and the end of the highest chunk."""
        t, _ = self._distinct_rounds
        rank = max(int(t.src.max()), int(t.dst.max()))
        return rank, int((t.chunk.astype(np.int64) + t.count).max())

    def transfers_of_chunk(self, chunk: int) -> Transfers:
        parts = [self.content] if isinstance(self.content, Transfers) else self.rounds()
        return join_transfers(
            part.take((part.chunk <= chunk) & (chunk - part.chunk < part.count)) for part in parts
        )

    def mirrored(self, name: str) -> Phase:
        """Return the phase backwards in time, with every addition a copy the other way.

        The mirror of a phase that sums chunks at their owners sends the results back.
        """
        if isinstance(self.content, Transfers):
            return Phase(name, self.content.mirrored(self.num_rounds - 1))
        return Phase(name, tuple(rule.mirror() for rule in self.content))

    def is_same(self, other: Phase) -> bool:
        return (
            self.name == other.name
            and self.num_rounds == other.num_rounds
            and self.num_transfers == other.num_transfers
            and all(
                all(map(np.array_equal, mine, theirs))
                for mine, theirs in zip(self.rounds(), other.rounds(), strict=True)
            )
        )


class PhaseLike(Protocol):
    """The part of `Phase` that proofs read."""

    @property
    def name(self) -> str: ...

    @property
    def num_rounds(self) -> int: ...

    def rounds(self) -> Iterator[Transfers]: ...

    def transfers_of_chunk(self, chunk: int) -> Transfers: ...


P = TypeVar("P", bound=PhaseLike)


def with_starts(phases: Iterable[P]) -> Iterator[tuple[int, P]]:
    """Yield each phase with the round that it starts in."""
    start = 0
    for phase in phases:
        yield start, phase
        start += phase.num_rounds


def _chunk_ranges(rule: RingRule) -> tuple[Ints, Ints]:
    """The first chunk of each ring, and the end of its last."""
    return rule.first_chunk, rule.first_chunk + np.int32(rule.length * rule.count)


def _check_rings(name: str, rings: tuple[RingRule, ...]) -> None:
    """Check what `_check_transfers` checks, from the rule."""
    if not rings or rings[0].num_rounds < 1:
        raise ScheduleError(f"phase {name!r} has no transfers")
    if len({rule.num_rounds for rule in rings}) > 1:
        raise ScheduleError(f"phase {name!r} has rings of different lengths: use Transfers")
    if any(rule.count < 1 or rule.lane < 0 or rule.first_chunk.min() < 0 for rule in rings):
        raise ScheduleError(
            f"phase {name!r}: a transfer moves one chunk or more; chunks and lanes count from 0"
        )
    by_lane: dict[int, list[Ints]] = {}
    for rule in rings:
        by_lane.setdefault(rule.lane, []).append(rule.rings.ravel())
    for lane, members in by_lane.items():
        ranks = np.concatenate(members)
        if len(np.unique(ranks)) < len(ranks):
            raise ScheduleError(f"phase {name!r}, lane {lane}: a rank is on it twice")
        if ranks.min() < 0:
            raise ScheduleError(f"phase {name!r}, lane {lane}: ranks count from 0")
    for i, a in enumerate(rings):
        for b in rings[i + 1 :]:
            if a.op == b.op == ADD:
                continue
            _, in_a, in_b = np.intersect1d(a.rings, b.rings, return_indices=True)
            low_a, high_a = (ends[in_a // a.length] for ends in _chunk_ranges(a))
            low_b, high_b = (ends[in_b // b.length] for ends in _chunk_ranges(b))
            if ((low_a < high_b) & (low_b < high_a)).any():
                raise ScheduleError(
                    f"phase {name!r}, lanes {a.lane} and {b.lane}: rings that share a rank write "
                    "the same chunks: use Transfers"
                )


def _check_transfers(name: str, transfers: Transfers) -> None:
    t = transfers
    if len(t.round) == 0:
        raise ScheduleError(f"phase {name!r} has no transfers")

    def reject(bad: NDArray[np.bool_], why: str) -> None:
        if bad.any():
            i = int(bad.argmax())
            raise ScheduleError(
                f"phase {name!r}, round {t.round[i]}, lane {t.lane[i]}: rank {t.src[i]} to rank "
                f"{t.dst[i]}, chunk {t.chunk[i]}: {why}"
            )

    reject((t.round < 0) | (t.lane < 0), "rounds and lanes count from 0")
    reject((t.src < 0) | (t.dst < 0), "ranks count from 0")
    reject((t.chunk < 0) | (t.count < 1), "a transfer moves one chunk or more, counted from 0")
    reject((t.op != ADD) & (t.op != COPY), "the operation must be 0 (add) or 1 (copy)")
    reject(t.src == t.dst, "a rank cannot send to itself")
    for ends, verb in ((t.src, "sends"), (t.dst, "receives")):
        reject(repeated_rows(t.round, t.lane, ends), f"the rank {verb} twice in one lane")
    if (t.op == COPY).any():
        reject(_conflicts(t), "another transfer of the round writes the same chunk there")


def _conflicts(t: Transfers) -> NDArray[np.bool_]:
    """Transfers of one round to one rank whose chunks overlap, if one of the two is a copy.

    Sorted by first chunk, a transfer overlaps an earlier one if it starts before that one ends.
    """
    if (t.count == 1).all():
        key = np.sort(row_key(t.round, t.dst, t.chunk))
        if (key[1:] != key[:-1]).all():
            return np.zeros(len(t), np.bool_)
    order = np.argsort(row_key(t.round, t.dst, t.chunk), kind="stable")
    target = row_key(t.round, t.dst)[order]
    is_new = np.concatenate(([True], target[1:] != target[:-1]))
    span = int((t.chunk.astype(np.int64) + t.count).max()) + 1
    base = np.cumsum(is_new) * span  # so that chunks of one target end before those of the next
    start = base + t.chunk[order]
    end = start + t.count[order]
    copies = t.op[order] == COPY
    bad = np.zeros(len(t), np.bool_)
    max_end = _exclusive(np.maximum.accumulate(end))
    max_copy_end = _exclusive(np.maximum.accumulate(np.where(copies, end, base)))
    bad[order] = (copies & (start < max_end)) | (start < max_copy_end)
    return bad


def _exclusive(running: NDArray[np.int64]) -> NDArray[np.int64]:
    """A running maximum, without the entry itself."""
    return np.concatenate((running[:1] * 0, running[:-1]))
