"""Phase: consecutive rounds with one meaning, which cannot be invalid.

The transfers of a *round* happen together: all reads before all writes. A *lane* is a set of
transfers of one round with distinct sources and distinct destinations, which is to say one
``ppermute``. A `Phase` checks all of this when it is built, so that an invalid round cannot exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ScheduleError
from ftmesh.schedule.ring_rule import RingRule
from ftmesh.schedule.transfers import ADD, COPY, Transfers, Ints, join, repeats, row_key, sorting


@dataclass(frozen=True, eq=False)
class Phase:
    """Rounds of transfers, numbered from 0: rows, or rings in lockstep that stay a rule.

    >>> from ftmesh.schedule.transfers import make_transfers
    >>> swap = make_transfers(round=0, lane=0, src=[0, 1], dst=[1, 0], chunk=[0, 1])
    >>> Phase("swap", swap).num_rounds
    1
    """

    name: str
    content: Transfers | tuple[RingRule, ...]

    def __post_init__(self) -> None:
        if isinstance(self.content, Transfers):
            _check_rows(self.name, self.content)
            order = sorting(self.content.round, self.content.lane, self.content.src)
            if (np.diff(order) != 1).any():
                object.__setattr__(self, "content", self.content.take(order))
            self.content.freeze()
        else:
            _check_rings(self.name, self.content)

    @property
    def num_rounds(self) -> int:
        """Rounds from the first to the last that has a transfer."""
        if isinstance(self.content, Transfers):
            return int(self.content.round[-1]) + 1
        return self.content[0].num_rounds

    @cached_property
    def transfers(self) -> Transfers:
        """Every transfer, in a row of its own, by round, lane and source."""
        if isinstance(self.content, Transfers):
            return self.content
        rows = join(self.rounds())
        rows.freeze()
        return rows

    @cached_property
    def first_round(self) -> Transfers:
        """The transfers of the first round of rings; those of others differ in their chunks."""
        return self._of_rings(0).take(self._ring_order)

    def _of_rings(self, now: int) -> Transfers:
        assert not isinstance(self.content, Transfers)
        return join([rule.at(now) for rule in self.content])

    @cached_property
    def _ring_order(self) -> NDArray[np.intp]:
        first = self._of_rings(0)
        return np.lexsort((first.src, first.lane))

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The distinct (source rank, destination rank) pairs, sorted."""
        both = self.content if isinstance(self.content, Transfers) else self.first_round
        _, first = np.unique(row_key(both.src, both.dst), return_index=True)
        both = both.take(first)
        return list(zip(both.src.tolist(), both.dst.tolist(), strict=True))

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Chunks in all that go from one rank to another, by pair."""
        c = self.content if isinstance(self.content, Transfers) else self.first_round
        times = 1 if isinstance(self.content, Transfers) else self.num_rounds
        _, where = np.unique(row_key(c.src, c.dst), return_inverse=True)
        chunks = np.bincount(where, weights=c.count) * times
        return dict(zip(self.pairs, chunks.astype(int).tolist(), strict=True))

    @cached_property
    def lanes(self) -> list[int]:
        """The lanes that are used."""
        lanes = (
            np.unique(self.content.lane).tolist()
            if isinstance(self.content, Transfers)
            else {rule.lane for rule in self.content}
        )
        return sorted(lanes)

    @cached_property
    def counts(self) -> list[int]:
        """The numbers of chunks that transfers move."""
        counts = (
            np.unique(self.content.count).tolist()
            if isinstance(self.content, Transfers)
            else {rule.count for rule in self.content}
        )
        return sorted(counts)

    @property
    def num_transfers(self) -> int:
        """Rows in all."""
        if isinstance(self.content, Transfers):
            return len(self.content)
        return len(self.first_round) * self.num_rounds

    def chunks_moved(self, op: int) -> int:
        """Chunks in all that are added, or copied."""
        if isinstance(self.content, Transfers):
            return int(self.content.count[self.content.op == op].sum(dtype=np.int64))
        rings = (each for each in self.content if each.op == op)
        return sum(each.num_rounds * each.rings.size * each.count for each in rings)

    @property
    def most(self) -> tuple[int, int]:
        """The highest rank, and the end of the highest chunk."""
        if isinstance(self.content, Transfers):
            c = self.content
            rank = max(int(c.src.max()), int(c.dst.max()))
            return rank, int((c.chunk.astype(np.int64) + c.count).max())
        return (
            max(int(each.rings.max()) for each in self.content),
            max(int(each.first_chunk.max()) + each.num_places * each.count for each in self.content),
        )

    def mirrored(self, name: str) -> Phase:
        """The phase run backwards in time: every addition becomes a copy the other way.

        Where a phase gathers sums along in-trees, its mirror spreads results along the same trees.
        """
        if isinstance(self.content, Transfers):
            return Phase(name, self.content.mirrored(self.num_rounds - 1))
        return Phase(name, tuple(rule.mirror() for rule in self.content))

    @property
    def bounds(self) -> NDArray[np.intp]:
        """Where each round begins among the transfers, and where the last one ends."""
        return np.searchsorted(self.transfers.round, np.arange(self.num_rounds + 1))

    def rounds(self) -> Iterator[Transfers]:
        """The transfers of each round in turn; a round may be empty."""
        if isinstance(self.content, Transfers):
            for start, stop in pairwise(self.bounds.tolist()):
                yield self.content.take(slice(start, stop))
            return
        for now in range(self.num_rounds):
            chunk = np.concatenate([each.chunks(now) for each in self.content])[self._ring_order]
            same = self.first_round
            yield same.replace(round=np.full_like(same.round, now), chunk=chunk)

    def transfers_of_chunk(self, chunk: int) -> Transfers:
        """The transfers that move `chunk`, in a row each."""
        parts = [self.content] if isinstance(self.content, Transfers) else self.rounds()
        found = [c.take((c.chunk <= chunk) & (chunk - c.chunk < c.count)) for c in parts]
        return join(found)

    def is_same(self, other: Phase) -> bool:
        """Whether both have the same name and the same transfers."""
        return (
            self.name == other.name
            and self.num_rounds == other.num_rounds
            and self.num_transfers == other.num_transfers
            and all(
                all(map(np.array_equal, mine, theirs))
                for mine, theirs in zip(self.rounds(), other.rounds(), strict=True)
            )
        )


def _check_rings(name: str, rings: tuple[RingRule, ...]) -> None:
    """What `_check_rows` would say of the rows, found from the rule."""
    if not rings or rings[0].num_rounds < 1:
        raise ScheduleError(f"phase {name!r} has no transfers")
    if len({each.num_rounds for each in rings}) > 1:
        raise ScheduleError(f"phase {name!r} has rings of different lengths: write their rows out")
    if any(each.count < 1 or each.lane < 0 or each.first_chunk.min() < 0 for each in rings):
        raise ScheduleError(
            f"phase {name!r}: a transfer moves one chunk or more; chunks and lanes count from 0"
        )
    by_lane: dict[int, list[Ints]] = {}
    for each in rings:
        by_lane.setdefault(each.lane, []).append(each.rings.ravel())
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
            low_a = a.first_chunk[in_a // a.num_places]
            low_b = b.first_chunk[in_b // b.num_places]
            high_a, high_b = (
                low + each.num_places * each.count for low, each in ((low_a, a), (low_b, b))
            )
            if ((low_a < high_b) & (low_b < high_a)).any():
                raise ScheduleError(
                    f"phase {name!r}, lanes {a.lane} and {b.lane}: rings that meet write the same "
                    "chunks; write their rows out"
                )


def _check_rows(name: str, c: Transfers) -> None:
    if len(c.round) == 0:
        raise ScheduleError(f"phase {name!r} has no transfers")

    def reject(bad: NDArray[np.bool_], why: str) -> None:
        if bad.any():
            i = int(bad.argmax())
            raise ScheduleError(
                f"phase {name!r}, round {c.round[i]}, lane {c.lane[i]}: rank {c.src[i]} to rank "
                f"{c.dst[i]}, chunk {c.chunk[i]}: {why}"
            )

    reject((c.round < 0) | (c.lane < 0), "rounds and lanes count from 0")
    reject((c.src < 0) | (c.dst < 0), "ranks count from 0")
    reject((c.chunk < 0) | (c.count < 1), "a transfer moves one chunk or more, counted from 0")
    reject((c.op != ADD) & (c.op != COPY), "the operation must be 0 (add) or 1 (copy)")
    reject(c.src == c.dst, "a rank cannot send to itself")
    for ends, verb in ((c.src, "sends"), (c.dst, "receives")):
        reject(repeats(c.round, c.lane, ends), f"the rank {verb} twice in one lane")
    if (c.op == COPY).any():
        reject(_clashes(c), "another transfer of the round writes the same chunk there")


def _clashes(c: Transfers) -> NDArray[np.bool_]:
    """Transfers of one round to one rank whose chunks overlap, one of the two a copy.

    They are looked at in the order of their first chunks: one that begins before an earlier one
    ends overlaps it.
    """
    if (c.count == 1).all():
        key = np.sort(row_key(c.round, c.dst, c.chunk))
        if (key[1:] != key[:-1]).all():
            return np.zeros(len(c), np.bool_)
    order = np.argsort(row_key(c.round, c.dst, c.chunk), kind="stable")
    place = row_key(c.round, c.dst)[order]
    is_new = np.concatenate(([True], place[1:] != place[:-1]))
    reach = int((c.chunk.astype(np.int64) + c.count).max()) + 1
    base = np.cumsum(is_new) * reach  # so that ends of one place are below those of the next
    start = base + c.chunk[order]
    end = start + c.count[order]
    copies = c.op[order] == COPY
    bad = np.zeros(len(c), np.bool_)
    after_any = _before(np.maximum.accumulate(end))
    after_copy = _before(np.maximum.accumulate(np.where(copies, end, base)))
    bad[order] = (copies & (start < after_any)) | (start < after_copy)
    return bad


def _before(running: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each running maximum as it was before its entry."""
    return np.concatenate((running[:1] * 0, running[:-1]))
