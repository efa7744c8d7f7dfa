"""A round of a flood: which chunk each link brings. See `ftmesh.planners.flood`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftmesh.schedule.transfers import Ints

Sets = NDArray[np.uint64]  # a set of chunks in each row, 64 to a word
Index = NDArray[np.intp]

ONE, WORD = np.uint64(1), np.uint64(64)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # whose multiples are scattered evenly


def bring(held: Sets, beside: Index, sight: int, scatter: int) -> Ints:
    """Add to what is `held` what links bring in a round: lanes, ranks and chunks.

    Lanes take turns, so that none brings what another has brought. Chips that have all, most of
    them in the end, are not looked at.
    """
    num_lanes, chips = beside.shape
    rank = np.flatnonzero((held[:-1] != np.bitwise_or.reduce(held, axis=0)).any(axis=1))
    source = beside[:, rank]
    theirs = held[source]
    lacked = ~held[rank]
    ahead = _known_ahead(held, beside, theirs, rank, sight)
    sent = np.zeros_like(held)
    moved = []
    for turn in range(num_lanes):
        lane = (turn + scatter) % num_lanes
        left = theirs[lane] & lacked
        for worse in (*(known[lane] for known in ahead), sent[source[lane]]):
            left = _preferred(left, worse)
        place = _scattered(rank + chips * (turn + num_lanes * scatter))
        found, word, bit = _pick(left, place)
        lacked[found, word] ^= ONE << bit
        sent[source[lane, found], word] |= ONE << bit
        chunk = word * 64 + bit.astype(np.intp)
        moved.append(np.array([np.full_like(found, lane), rank[found], chunk]))
    held[rank] = ~lacked
    return np.concatenate(moved, axis=1).astype(np.int32)


def _preferred(sets: Sets, worse: Sets) -> Sets:
    """What of each set is not `worse`, or all of it where that is nothing."""
    better = sets & ~worse
    np.copyto(better, sets, where=~better.any(axis=1, keepdims=True))
    return better


def _known_ahead(held: Sets, beside: Index, theirs: Sets, rank: Index, sight: int) -> list[Sets]:
    """What is held up to a hop ahead of some ranks, two hops, and so on: ``[lane, rank]``.

    Ahead is wherever its other lanes come from; what is there, one hop on, is `theirs`.
    """
    if sight == 1:
        return [_all_but_one(theirs)]
    known = np.broadcast_to(held, (len(beside), *held.shape))
    found = []
    for _ in range(sight):
        known = _one_hop_more(held, beside, known)
        found.append(known[:, rank])
    return found


def _one_hop_more(held: Sets, beside: Index, known: Sets) -> Sets:
    """What is held at a chip and ahead of it, if so much was known at each chip for each lane."""
    found = np.zeros(known.shape, np.uint64)
    there = np.stack([known[lane ^ 1, rank] for lane, rank in enumerate(beside)])
    found[:, :-1] = _all_but_one(there) | held[:-1]
    return found


def _all_but_one(sets: Sets) -> Sets:
    """For each lane, what the other lanes have together."""
    found = np.zeros_like(sets)
    lanes = list(zip(found, sets, strict=True))
    for way in (lanes, lanes[::-1]):
        passed = np.zeros_like(sets[0])
        for here, there in way:
            here |= passed
            passed |= there
    return found


def _scattered(number: Index) -> NDArray[np.uint64]:
    """A place for each number, as good as at random."""
    place = number.astype(np.uint64) * GOLDEN
    return place ^ place >> np.uint64(32)


def _pick(sets: Sets, place: NDArray[np.uint64]) -> tuple[Index, Index, NDArray[np.uint64]]:
    """One chunk of each set that has any, the first from a place on: its row, word and bit."""
    num_words = sets.shape[1]
    begin = (place % np.uint64(num_words)).astype(np.intp)
    filled = sets != 0
    word = filled.argmax(axis=1)
    filled &= np.arange(num_words) >= begin[:, None]
    after = filled.argmax(axis=1)
    rows = np.arange(len(sets))
    word = np.where(filled[rows, after], after, word)
    bits = sets[rows, word]
    row = np.flatnonzero(bits)
    bits, turn = bits[row], (place[row] >> np.uint64(40)) % WORD
    turned = bits >> turn | bits << (WORD - turn) % WORD
    lowest = np.bitwise_count(~turned & (turned - ONE))
    return row, word[row], (lowest + turn) % WORD
