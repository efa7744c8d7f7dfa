"""`flood`: in every round each link brings a chip a chunk that it lacks, until all have all.

Beyond the paper. It asks of a mesh only that it is connected: chips and links may have failed
anywhere, on one axis, two or three, with or without wrap links. Each live chip owns an equal share.

Think of the gather half, which is easier to see. A chunk comes to every chip once, so the ways it
takes form a tree that grows from its owner. Run backwards, contributions flow along the same trees
to the owners, and are summed on their way.

What cannot be beaten is the chip with the fewest links, which must receive everything over them:
none of those may idle in any round. So a link first brings what nobody has a hop ahead of it, which
is what no other neighbour could bring, and of that what its source sends nowhere else in the round.
Beyond this, choices are scattered, so that neighbours do not come to hold the same. Where damage
leaves chips in a row, what comes in at both its ends must differ too, and looking further ahead
helps.

A round of a flood: which chunk each link brings. See `ftmesh.algorithms.flood`.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.algorithms.building_blocks import mirrored_all_reduce
from ftmesh.errors import PlanError
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Ints, make_transfers
from ftmesh.topology.graph import lane_sources
from ftmesh.topology.topology import Topology

APART = 100_003  # rounds between the choices of one attempt and those of the next
ENOUGH = 1.05  # chunks are made smaller until whole rounds cost no more than this many times
SIGHTS = (1, 3, 6)  # hops to look ahead, in turn, where a flood was not as short as can be
FEWEST_TRIES, MOST_TRIES, TRIED_CHIPS = 2, 32, 1024  # small meshes are tried more often


class Gather(NamedTuple):
    """Transfers of the gather half: in `round`, `lane` brings `chunk` to rank `dst`."""

    round: Ints
    lane: Ints
    dst: Ints
    chunk: Ints

    @property
    def num_rounds(self) -> int:
        """Rounds in all."""
        return int(self.round[-1]) + 1


def build_schedule(topology: Topology) -> Schedule:
    """A flood from all chips at once is the gather half; the same backwards, the first."""
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    if len(topology.components()) > 1:
        raise PlanError(f"no link joins some of its {topology.noun}s to the others")
    beside = lane_sources(topology)
    share = chunks_per_chip(beside)
    gather = _shortest(beside, share)
    columns = make_transfers(
        round=gather.num_rounds - 1 - gather.round,
        lane=gather.lane,
        src=gather.dst,
        dst=beside[gather.lane, gather.dst],
        chunk=gather.chunk,
    )
    owner = np.repeat(np.arange(topology.num_live, dtype=np.int32), share)
    return mirrored_all_reduce(topology, "flood", len(owner), [("flood", columns)], owner)


def chunks_per_chip(beside: Ints) -> int:
    """As few as fill whole rounds without much waste: one, but for small meshes.

    >>> [chunks_per_chip(lane_sources(Topology.grid(shape))) for shape in ("2x2", "3x3", "8x8")]
    [2, 1, 1]
    """
    share = 1
    while least_rounds(beside, share) > ENOUGH * share * _received(beside):
        share += 1
    return share


def least_rounds(beside: Ints, share: int) -> int:
    """The rounds in which the chip with the fewest links can receive `share` chunks of each."""
    return math.ceil(share * _received(beside))


def _received(beside: Ints) -> Fraction:
    """Chunks over each link of the chip with the fewest, were there one of every other chip."""
    chips = beside.shape[1]
    num_links = (beside < chips).sum(axis=0).min()
    return Fraction(chips - 1, int(num_links))


def _shortest(beside: Ints, share: int) -> Gather:
    """A flood that none can beat, or the shortest of some."""
    tries = min(max(FEWEST_TRIES, TRIED_CHIPS // beside.shape[1]), MOST_TRIES)
    best = flood(beside, share, SIGHTS[0])
    for attempt in range(1, tries):
        if best.num_rounds > least_rounds(beside, share):
            other = flood(beside, share, SIGHTS[attempt % len(SIGHTS)], attempt)
            best = min(best, other, key=lambda gather: gather.num_rounds)
    return best


def flood(beside: Ints, share: int, sight: int, attempt: int = 0) -> Gather:
    """Let `share` chunks of every chip spread to all; ``beside[lane, rank]`` is who brings them.

    Chunks that nobody has up to `sight` hops ahead go first, then those that nobody has nearer by.
    Each `attempt` scatters choices in another way, and every time in the same.
    """
    held = _owned(beside.shape[1], share)
    where = beside.astype(np.intp)
    rounds: list[Ints] = []
    while (moved := bring(held, where, sight, len(rounds) + APART * attempt)).size:
        rounds.append(moved)
    when = np.repeat(np.arange(len(rounds), dtype=np.int32), [moved.shape[1] for moved in rounds])
    return Gather(when, *np.concatenate(rounds, axis=1))


def _owned(chips: int, share: int) -> Sets:
    """What each chip holds at first; the row below is of one that is not there."""
    chunk = np.arange(chips * share)
    held = np.zeros((chips + 1, -(-chips * share // 64)), np.uint64)
    np.bitwise_or.at(held, (chunk // share, chunk // 64), ONE << chunk.astype(np.uint64) % WORD)
    return held


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
