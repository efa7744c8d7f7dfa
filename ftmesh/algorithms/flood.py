"""`flood`: in every round each link brings a chip a chunk that it lacks, until all have all.

Beyond the paper. It works on every connected mesh, and each live chip owns an equal share of the
chunks. The flood is the all-gather. A chunk reaches every chip once, so its transfers form a tree
that grows from its owner. Run backwards, contributions flow along the same trees to the owners and
are summed on the way.

The lower bound is the chip with the fewest links, which must receive everything over them: none of
its links may idle in any round. So a link prefers chunks that no chip one hop ahead has, since no
other neighbour could bring those, and of these the ones that its source sends nowhere else in the
round. Beyond that, choices are pseudo-random, so that neighbours do not come to hold the same
chunks. Where damage leaves chips in a row, the chunks that come in at its two ends must differ too,
and looking further ahead helps.

On large meshes chips form groups, and only one chip of each floods (`grouped_flood`).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftmesh.algorithms import grouped_flood
from ftmesh.algorithms.building_blocks import check_one_part, mirrored_all_reduce
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Ints, make_transfers
from ftmesh.topology.graph import lane_sources
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology

SEED_STRIDE = 100_003  # distance between the seeds of two attempts
MAX_WASTE = 1.05  # chunks are made smaller until rounding up to whole rounds costs at most this
LOOKAHEADS = (1, 3, 6)  # hops to look ahead, in turn, until a flood meets the lower bound
MIN_TRIES, MAX_TRIES, TRIED_CHIPS = 2, 32, 1024  # small meshes are tried more often
GROUPED_CHIPS = 1024  # more chips form groups
ONE, WORD = np.uint64(1), np.uint64(64)
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # its multiples are spread evenly over 64 bits

Sets = NDArray[np.uint64]  # a set of chunks in each row, 64 to a word
Index = NDArray[np.intp]


class Gather(NamedTuple):
    """The transfers of the all-gather: in `round`, `lane` brings `chunk` to rank `dst`."""

    round: Ints
    lane: Ints
    dst: Ints
    chunk: Ints

    @property
    def num_rounds(self) -> int:
        return int(self.round[-1]) + 1


def build_schedule(topology: Topology) -> Schedule:
    """Return the schedule: a flood from all chips at once, and before it the same backwards."""
    check_one_part(topology)
    if topology.num_live > GROUPED_CHIPS:
        phases, owner = grouped_flood.build_phases(topology)
        return mirrored_all_reduce(topology, "flood", len(owner), phases, owner)
    sources = lane_sources(topology)
    share = chunks_per_chip(sources)
    gather = _shortest_flood(sources, share)
    # Shares are numbered in the order of the mesh axis, as sharded arrays are.
    ring = np.array([topology.rank(coord) for coord in ring_order(topology).coords], np.int32)
    place = np.argsort(ring)
    transfers = make_transfers(
        round=gather.num_rounds - 1 - gather.round,
        lane=gather.lane,
        src=gather.dst,
        dst=sources[gather.lane, gather.dst],
        chunk=place[gather.chunk // share] * share + gather.chunk % share,
    )
    owner = np.repeat(ring, share)
    return mirrored_all_reduce(topology, "flood", len(owner), [("flood", transfers)], owner)


def chunks_per_chip(sources: Ints) -> int:
    """Return the fewest chunks per chip that fill whole rounds with little waste."""
    share = 1
    while min_rounds(sources, share) > MAX_WASTE * share * _chunks_per_link(sources):
        share += 1
    return share


def min_rounds(sources: Ints, share: int) -> int:
    """Return the rounds in which the chip with the fewest links can receive all chunks."""
    return math.ceil(share * _chunks_per_link(sources))


def _chunks_per_link(sources: Ints) -> Fraction:
    """Chunks over each link of the chip with the fewest links, at one chunk per chip."""
    num_chips = sources.shape[1]
    num_links = (sources < num_chips).sum(axis=0).min()
    return Fraction(num_chips - 1, int(num_links))


def _shortest_flood(sources: Ints, share: int) -> Gather:
    """A flood that meets the lower bound, or the shortest of several."""
    tries = min(max(MIN_TRIES, TRIED_CHIPS // sources.shape[1]), MAX_TRIES)
    best = flood(sources, share, LOOKAHEADS[0])
    for attempt in range(1, tries):
        if best.num_rounds > min_rounds(sources, share):
            other = flood(sources, share, LOOKAHEADS[attempt % len(LOOKAHEADS)], attempt)
            best = min(best, other, key=lambda gather: gather.num_rounds)
    return best


def flood(sources: Ints, share: int, lookahead: int, attempt: int = 0) -> Gather:
    """Spread `share` chunks of every chip to all chips.

    Links prefer chunks that no chip within `lookahead` hops has. `attempt` seeds the other choices.
    """
    held = _own_chunks(sources.shape[1], share)
    index = sources.astype(np.intp)
    rounds: list[Ints] = []
    while (moved := _flood_round(held, index, lookahead, len(rounds) + SEED_STRIDE * attempt)).size:
        rounds.append(moved)
    counts = [moved.shape[1] for moved in rounds]
    round_index = np.repeat(np.arange(len(rounds), dtype=np.int32), counts)
    return Gather(round_index, *np.concatenate(rounds, axis=1))


def _own_chunks(num_chips: int, share: int) -> Sets:
    """What each chip holds at first; the extra last row stands for a missing neighbour."""
    chunk = np.arange(num_chips * share)
    held = np.zeros((num_chips + 1, -(-num_chips * share // 64)), np.uint64)
    np.bitwise_or.at(held, (chunk // share, chunk // 64), ONE << chunk.astype(np.uint64) % WORD)
    return held


def _flood_round(held: Sets, sources: Index, lookahead: int, seed: int) -> Ints:
    """Run one round: update `held`, and return lane, rank and chunk of each move.

    Lanes choose one after the other, so that no two bring a chip the same chunk. Chips that have
    everything, most of them in the end, are skipped.
    """
    num_lanes, num_chips = sources.shape
    rank = np.flatnonzero((held[:-1] != np.bitwise_or.reduce(held, axis=0)).any(axis=1))
    source = sources[:, rank]
    offered = held[source]
    lacked = ~held[rank]
    ahead = _held_ahead(held, sources, offered, rank, lookahead)
    sent = np.zeros_like(held)
    moved = []
    for turn in range(num_lanes):
        lane = (turn + seed) % num_lanes
        candidates = offered[lane] & lacked
        for worse in (*(known[lane] for known in ahead), sent[source[lane]]):
            candidates = _prefer_without(candidates, worse)
        start = _hash(rank + num_chips * (turn + num_lanes * seed))
        row, word, bit = _pick(candidates, start)
        lacked[row, word] ^= ONE << bit
        sent[source[lane, row], word] |= ONE << bit
        chunk = word * 64 + bit.astype(np.intp)
        moved.append(np.array([np.full_like(row, lane), rank[row], chunk]))
    held[rank] = ~lacked
    return np.concatenate(moved, axis=1).astype(np.int32)


def _prefer_without(sets: Sets, worse: Sets) -> Sets:
    """Each set without `worse`, or all of it if nothing would be left."""
    better = sets & ~worse
    np.copyto(better, sets, where=~better.any(axis=1, keepdims=True))
    return better


def _held_ahead(
    held: Sets, sources: Index, offered: Sets, rank: Index, lookahead: int
) -> list[Sets]:
    """What is held within one hop ahead of some ranks, within two, and so on: ``[lane, rank]``.

    Ahead of a lane is where the other lanes of a rank come from; one hop ahead, that is `offered`.
    """
    if lookahead == 1:
        return [_all_other_lanes(offered)]
    known = np.broadcast_to(held, (len(sources), *held.shape))
    ahead = []
    for _ in range(lookahead):
        neighbour = np.stack([known[lane ^ 1, source] for lane, source in enumerate(sources)])
        known = np.zeros(known.shape, np.uint64)
        known[:, :-1] = _all_other_lanes(neighbour) | held[:-1]
        ahead.append(known[:, rank])
    return ahead


def _all_other_lanes(sets: Sets) -> Sets:
    """For each lane, the union of the sets of all other lanes."""
    union = np.zeros_like(sets)
    lanes = list(zip(union, sets, strict=True))
    for ordered in (lanes, lanes[::-1]):
        passed = np.zeros_like(sets[0])
        for target, own in ordered:
            target |= passed
            passed |= own
    return union


def _hash(number: Index) -> NDArray[np.uint64]:
    scaled = number.astype(np.uint64) * GOLDEN
    return scaled ^ scaled >> np.uint64(32)


def _pick(sets: Sets, start: NDArray[np.uint64]) -> tuple[Index, Index, NDArray[np.uint64]]:
    """From each non-empty set, pick the first chunk from a hashed start: row, word and bit."""
    num_words = sets.shape[1]
    first_word = (start % np.uint64(num_words)).astype(np.intp)
    filled = sets != 0
    word = filled.argmax(axis=1)
    filled &= np.arange(num_words) >= first_word[:, None]
    after = filled.argmax(axis=1)
    rows = np.arange(len(sets))
    word = np.where(filled[rows, after], after, word)
    bits = sets[rows, word]
    row = np.flatnonzero(bits)
    bits, shift = bits[row], (start[row] >> np.uint64(40)) % WORD
    rotated = bits >> shift | bits << (WORD - shift) % WORD
    lowest = np.bitwise_count(~rotated & (rotated - ONE))
    return row, word[row], (lowest + shift) % WORD
