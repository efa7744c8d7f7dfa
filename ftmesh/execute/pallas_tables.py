"""Tables for the Pallas executor: how transfers are cut, and what one rank reads while it runs.

A transfer is as many rows as its chunks have, one after the other, and travels in pieces. In most
loops all transfers have one size and begin at multiples of it, so that pieces of one number form a
program of their own: the first ones of a round may go ahead of the last ones of the round before.
Where transfers overlap in other ways each is one piece. Where what comes in a round is not needed
in the next, as in plans along trees with a lag, whole rounds go ahead of each other too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.execute.lowering import IDLE, MIXED, Lane, Loop, Rule, Table
from ftmesh.schedule.transfers import ADD, Ints

SLOTS = 4  # pieces of a lane that may be under way to a rank; a power of two
PAGE = 8, 128  # rounds of a page of the table, and the least number of words in a row of it
SEND, RECEIVE = 0, 1  # the words of a lane in a row: its number and the slot of its first piece
LANE_WORDS, DESTINATION, SOURCE = 12, 0, 1  # the words of a lane in a heading
NOTHING = np.zeros(5, np.int32)  # the words of a lane on which a rank receives nothing


@dataclass(frozen=True, eq=False)
class Cut:
    """A loop, and how its transfers are cut: into `num` pieces, of which the last may be shorter.

    `rows` has for each lane those of a piece and those of the last one. Lanes of a loop that
    `shares` may write to one place in one round, and have to wait for each other. What comes is
    sent, and added to, so many rounds later at the earliest as `apart` says.
    """

    loop: Loop
    num: int
    rows: tuple[tuple[int, int], ...]
    shares: bool
    apart: tuple[int, int]
    first_page: int

    @property
    def is_mixed(self) -> bool:
        """Whether operations of a lane differ."""
        return any(lane.op == MIXED for lane in self.loop.lanes)

    @property
    def lag(self) -> int:
        """So many pieces are sent before the first that came is looked at."""
        return min(self.apart[0] * self.num, SLOTS) - 1

    @property
    def fetch_lag(self) -> int:
        """So many pieces are sent before the first that is added to is fetched."""
        return self.lag - min(self.apart[1] * self.num - 1, self.lag)

    @property
    def rounds_behind(self) -> int:
        """So many rounds after one is begun, all that came in it was looked at."""
        return -(-self.lag // self.num)

    @property
    def num_pages(self) -> int:
        """Pages of the table that the loop has."""
        return -(-self.loop.num_rounds // PAGE[0])


def cuts(loops: tuple[Loop, ...], *, chunk_rows: int, tile: int, most: int) -> tuple[Cut, ...]:
    """The loops, with pieces of at most `most` rows, and whole tiles of them.

    Transfers that have to be one piece may be longer: the caller looks whether they fit.
    """
    found: list[Cut] = []
    for loop in loops:
        is_alike, shares = _overlaps(loop)
        rows = [lane.count * chunk_rows for lane in loop.lanes]
        num, sizes = 1, tuple((each, each) for each in rows)
        if is_alike:
            piece = _piece_rows(rows[0], tile, most)
            num = -(-rows[0] // piece)
            sizes = ((piece, rows[0] - (num - 1) * piece),) * len(rows)
        before = found[-1].first_page + found[-1].num_pages if found else 0
        found.append(Cut(loop, num, sizes, shares, _apart(loop), before))
    return tuple(found)


def _piece_rows(rows: int, tile: int, most: int) -> int:
    """Those of each piece but the last: so few that wires are busy while pieces are added.

    >>> _piece_rows(1000, 8, 512), _piece_rows(40, 8, 512), _piece_rows(4000, 8, 512)
    (256, 40, 504)
    """
    least = max(most // SLOTS, tile)
    num = max(-(-rows // most), min(SLOTS, rows // least), 1)
    return -(-rows // (num * tile)) * tile


@lru_cache(maxsize=64)
def _overlaps(loop: Loop) -> tuple[bool, bool]:
    """Whether transfers coincide where they overlap, and whether lanes write to one place."""
    received = [lane.chunks(lane.received(loop.num_rounds)) for lane in loop.lanes]
    counts = {lane.count for lane in loop.lanes}
    every = np.concatenate([each[each != IDLE] for each in received])
    shares = False
    for (one, here), (other, there) in combinations(zip(loop.lanes, received, strict=True), 2):
        overlap = (here < there + other.count) & (there < here + one.count)
        shares = shares or bool((overlap & (here != IDLE) & (there != IDLE)).any())
    return len(counts) == 1 and len(np.unique(every % max(counts))) <= 1, shares


@lru_cache(maxsize=64)
def _apart(loop: Loop) -> tuple[int, int]:
    """The fewest rounds from one in which a chunk comes to one in which it is sent, or added to.

    As many as there are slots stand for more.
    """
    sent = [lane.chunks(lane.send.chunks(loop.num_rounds)) for lane in loop.lanes]
    numbers = [lane.received(loop.num_rounds) for lane in loop.lanes]
    every = list(zip(loop.lanes, sent, numbers, strict=True))
    num_chunks = max(int(chunks.max()) + lane.count for lane, chunks, _ in every)
    came = np.full((len(sent[0]), num_chunks), -SLOTS)  # by rank and chunk: the last round
    to_send = to_add = SLOTS

    def places(lane: Lane, chunks: Ints) -> tuple[Any, Any]:
        ranks = np.flatnonzero(chunks != IDLE)
        return ranks[:, None], chunks[ranks, None] + np.arange(lane.count)

    for now in range(loop.num_rounds):
        for lane, chunks, received in every:
            number = received[:, now]
            added = np.where(lane.ops(number) == ADD, lane.chunks(number), IDLE)
            to_send = min(to_send, now - came[places(lane, chunks[:, now])].max(initial=-SLOTS))
            to_add = min(to_add, now - came[places(lane, added)].max(initial=-SLOTS))
        for lane, _, received in every:
            came[places(lane, lane.chunks(received[:, now]))] = now
        if to_send == to_add == 1:
            break
    return int(to_send), int(to_add)


def _destination(lane: Lane) -> Ints:
    """Rank -> the rank it sends to, or -1: `Lane.source`, the other way round."""
    destination = np.full(len(lane.source), -1, np.int32)
    receivers = np.flatnonzero(lane.source >= 0)
    destination[lane.source[receivers]] = receivers
    return destination


@lru_cache(maxsize=64)
def partners(loops: tuple[Loop, ...], num_ranks: int) -> Ints:
    """For each rank those that it exchanges anything with, in ascending order; -1 fills up rows."""
    pairs = {pair for loop in loops for lane in loop.lanes for pair in lane.permutation}
    met: list[set[int]] = [set() for _ in range(num_ranks)]
    for one, other in pairs:
        met[one].add(other)
        met[other].add(one)
    table = np.full((num_ranks, max(1, *map(len, met))), -1, np.int32)
    for rank, others in enumerate(met):
        table[rank, : len(others)] = sorted(others)
    return table


@lru_cache(maxsize=64)
def headings(loops: tuple[Loop, ...], num_ranks: int) -> Ints:
    """For each rank its partners, and for each lane of each loop in turn the words of a lane.

    Those are whom it sends to, whom it receives from, and where what it sends and receives is in
    the table, or in the rule, of the lane: see `pages`.
    """
    columns = [partners(loops, num_ranks)]
    for loop in loops:
        row = 0
        for lane in loop.lanes:
            columns += [_destination(lane)[:, None], lane.source[:, None]]
            words = _places(lane.send, row)
            received = np.where(lane.source[:, None] >= 0, words[lane.source], NOTHING)
            columns += [words, received]
            row += len(lane.send.rows) if isinstance(lane.send, Table) else 0
    return np.concatenate(columns, axis=1, dtype=np.int32)


def _places(send: Table | Rule, first_row: int) -> Ints:
    """For each rank five words that tell what it sends: see `_rounds`."""
    if isinstance(send, Rule):
        return np.stack([send.begin, send.end, send.first, send.place, send.step], axis=1)
    always = np.full_like(send.base, np.iinfo(np.int32).max)
    row = send.row + first_row
    return np.stack([0 * always, always, send.base, row, row], axis=1)


def pages(every: tuple[Cut, ...], heading: jax.Array, num_partners: int) -> jax.Array:
    """What a rank with this heading sends and receives in each round of each loop, in pages.

    Rounds of rules are computed, so that no table of all ranks is in the program.
    """
    width = PAGE[1] * -(-2 * max(len(cut.loop.lanes) for cut in every) // PAGE[1])
    words = heading[num_partners:].reshape(-1, LANE_WORDS)
    found = []
    for cut in every:
        lanes, words = words[: len(cut.loop.lanes)], words[len(cut.loop.lanes) :]
        rounds = _rounds(cut, lanes[:, 2:].reshape(-1, 2, len(NOTHING)))
        room = (0, cut.num_pages * PAGE[0] - cut.loop.num_rounds), (0, width - rounds.shape[1])
        found.append(jnp.pad(rounds, room).reshape(-1, PAGE[0], width))
    return jnp.concatenate(found)


def _rounds(cut: Cut, places: jax.Array) -> jax.Array:
    """For each round a row of words: what is sent and received on each lane.

    Of `places` each lane has two rows of words, for what is sent and for what is received: from
    which round until which there is anything; then the first chunk, the place and the step of a
    rule, or what chunks of a table begin with, and a row of it.
    """
    loop = cut.loop
    now = np.arange(loop.num_rounds, dtype=np.int32)
    tables = [i for i, lane in enumerate(loop.lanes) if isinstance(lane.send, Table)]
    rows = _table_words(cut)[places[np.array(tables), :, 3]].astype(np.int32) if tables else ()
    of_table = dict(zip(tables, rows, strict=True))
    words = []
    for i, lane in enumerate(loop.lanes):
        begin, end, first, place, step = (places[i, :, word, None] for word in range(5))
        happens = (begin <= now) & (now < end)
        if isinstance(lane.send, Rule):
            chunk = first + (place + step * now) % lane.send.size * lane.send.count
            word = chunk * SLOTS + (now - begin) * cut.num % SLOTS
        else:
            word = first * SLOTS + of_table[i]
            happens &= of_table[i] != IDLE
        words.append(jnp.where(happens, word, IDLE))
    return jnp.concatenate(words).T


def _table_words(cut: Cut) -> jax.Array:
    """The rows of all tables of a loop, with slots: those transfers count that happen.

    Mixed lanes have a row for nearly every rank, which are to take little of the program.
    """
    rows = np.concatenate(
        [lane.send.rows for lane in cut.loop.lanes if isinstance(lane.send, Table)]
    )
    happens = rows != IDLE
    slots = (np.cumsum(happens, axis=1) - happens) * cut.num % SLOTS
    words = np.where(happens, rows * SLOTS + slots, IDLE)
    is_short = cut.is_mixed and words.max() < 2**15
    return jnp.asarray(words.astype(np.int16 if is_short else np.int32))
