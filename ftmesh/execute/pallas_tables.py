"""Tables for the Pallas executor: how transfers are cut, and what one rank reads while it runs.

A transfer is as many rows as its chunks have, one after the other, and travels in pieces. In most
loops all transfers have one size and begin at multiples of it, so that pieces of one number form a
program of their own: the first ones of a round may go ahead of the last ones of the round before.
Where transfers overlap in other ways each is one piece, and rounds follow each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ftmesh.execute.lower import IDLE, Lane, Loop, Rule, Table
from ftmesh.schedule.columns import Ints

SLOTS = 4  # pieces of a lane that may be under way to a rank; a power of two
PAGE = 8, 128  # rounds of a page of the table, and the least number of words in a row of it
SEND, RECEIVE = 0, 1  # the words of a lane in a row: a chunk and the slot of its first piece
LANE_WORDS, DESTINATION, SOURCE = 6, 0, 1  # the words of a lane in a heading


@dataclass(frozen=True, eq=False)
class Cut:
    """A loop, and how its transfers are cut: into `num` pieces, of which the last may be shorter.

    `rows` has for each lane those of a piece and those of the last one. Lanes of a loop that
    `shares` may write to one place in one round, and have to wait for each other.
    """

    loop: Loop
    num: int
    rows: tuple[tuple[int, int], ...]
    shares: bool
    first_page: int

    @property
    def lag(self) -> int:
        """So many pieces are sent before the first that came is looked at."""
        return min(self.num, SLOTS) - 1

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
        found.append(Cut(loop, num, sizes, shares, before))
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
    sent = [np.where(_sends(lane)[:, None], lane.send.chunks(loop.num_rounds), IDLE)
            for lane in loop.lanes]  # fmt: skip
    counts = {lane.count for lane in loop.lanes}
    places = {int(place) for each in sent for place in np.unique(each[each != IDLE] % max(counts))}
    shares = False
    for (one, a), (other, b) in combinations(zip(loop.lanes, sent, strict=True), 2):
        here, there = (
            np.where(lane.source[:, None] >= 0, chunks[lane.source], IDLE)
            for lane, chunks in ((one, a), (other, b))
        )
        overlap = (here < there + other.count) & (there < here + one.count)
        shares = shares or bool((overlap & (here != IDLE) & (there != IDLE)).any())
    return len(counts) == 1 and len(places) <= 1, shares


def _sends(lane: Lane) -> Any:
    """The ranks that have a destination."""
    return _destination(lane) >= 0


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
            for rank, takes_part in (
                (np.arange(num_ranks), _destination(lane) >= 0),
                (np.maximum(lane.source, 0), lane.source >= 0),
            ):
                if isinstance(lane.send, Rule):
                    first, place = lane.send.first[rank], lane.send.place[rank]
                else:
                    first, place = lane.send.base[rank], lane.send.row[rank] + row
                columns.append(np.stack([np.where(takes_part, first, IDLE), place], axis=1))
            row += len(lane.send.rows) if isinstance(lane.send, Table) else 0
    return np.concatenate(columns, axis=1, dtype=np.int32)


def pages(every: tuple[Cut, ...], heading: jax.Array, num_partners: int) -> jax.Array:
    """What a rank with this heading sends and receives in each round of each loop, in pages.

    Rounds of rules are computed, so that no table of all ranks is in the program.
    """
    width = PAGE[1] * -(-2 * max(len(cut.loop.lanes) for cut in every) // PAGE[1])
    words = heading[num_partners:].reshape(-1, LANE_WORDS)
    found = []
    for cut in every:
        lanes, words = words[: len(cut.loop.lanes)], words[len(cut.loop.lanes) :]
        places = lanes[:, 2:].reshape(-1, 2, 2)  # lane, sent or received, first and place
        rounds = _rounds(cut, places)
        room = (0, cut.num_pages * PAGE[0] - cut.loop.num_rounds), (0, width - rounds.shape[1])
        found.append(jnp.pad(rounds, room).reshape(-1, PAGE[0], width))
    return jnp.concatenate(found)


def _rounds(cut: Cut, places: jax.Array) -> jax.Array:
    """For each round a row of words: what is sent and received on each lane."""
    loop = cut.loop
    now = np.arange(loop.num_rounds, dtype=np.int32)
    tables = [i for i, lane in enumerate(loop.lanes) if isinstance(lane.send, Table)]
    rows = _table_words(cut)[places[np.array(tables), :, 1]] if tables else ()
    of_table = dict(zip(tables, rows, strict=True))
    words = []
    for i, lane in enumerate(loop.lanes):
        first, place = places[i, :, :1], places[i, :, 1:]
        if isinstance(lane.send, Rule):
            turn = (place + lane.send.step * now) % lane.send.size
            chunks = (first + turn * lane.send.count) * SLOTS + now * cut.num % SLOTS
            words.append(jnp.where(first == IDLE, IDLE, chunks))
        else:
            row = of_table[i]
            words.append(jnp.where((first == IDLE) | (row == IDLE), IDLE, first * SLOTS + row))
    return jnp.concatenate(words).T


def _table_words(cut: Cut) -> jax.Array:
    """The rows of all tables of a loop, with slots: those transfers count that happen."""
    rows = np.concatenate(
        [lane.send.rows for lane in cut.loop.lanes if isinstance(lane.send, Table)]
    )
    happens = rows != IDLE
    slots = (np.cumsum(happens, axis=1) - happens) * cut.num % SLOTS
    return jnp.asarray(np.where(happens, rows * SLOTS + slots, IDLE).astype(np.int32))
