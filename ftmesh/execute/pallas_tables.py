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
from jax import lax

from ftmesh.execute.lower import IDLE, Lane, Loop, Program, Rule, Table
from ftmesh.schedule.columns import Ints

SLOTS = 4  # pieces of a lane that may be under way to a rank; a power of two
PAGE = 8, 128  # rounds of a page of the table, and the least number of words in a row of it
SEND, RECEIVE = 0, 1  # the words of a lane in a row: a chunk and the slot of its first piece
DESTINATION, SOURCE = 0, 1  # the words of a lane in front: its two partners


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


def heading(loops: tuple[Loop, ...], program: Program, rank: Any) -> jax.Array:
    """The partners of a rank in all, and in each lane of each loop the two it has there."""
    columns = [partners(loops, program.num_ranks)]
    for loop in loops:
        for lane in loop.lanes:
            columns += [_destination(lane)[:, None], lane.source[:, None]]
    return jnp.asarray(np.concatenate(columns, axis=1, dtype=np.int32))[rank]


def pages(every: tuple[Cut, ...], rank: Any) -> jax.Array:
    """What a rank sends and receives in each round of each loop, in pages: see `SEND`.

    Rounds of rules are computed, so that no table of all ranks is in the program.
    """
    width = PAGE[1] * -(-2 * max(len(cut.loop.lanes) for cut in every) // PAGE[1])
    found = []
    for cut in every:
        words = []
        for lane in cut.loop.lanes:
            source = jnp.asarray(lane.source)[rank]
            for who, takes_part in (
                (rank, jnp.asarray(_destination(lane))[rank] >= 0),
                (jnp.maximum(source, 0), source >= 0),
            ):
                chunks = _chunks(lane.send, who, cut.loop.num_rounds)
                happens = takes_part & (chunks != IDLE)
                before = jnp.cumsum(happens) - happens  # transfers of the lane in earlier rounds
                slot = before * cut.num % SLOTS
                words.append(jnp.where(happens, chunks * SLOTS + slot, IDLE))
        rounds = jnp.stack(words, axis=1).astype(jnp.int32)
        room = (0, cut.num_pages * PAGE[0] - cut.loop.num_rounds), (0, width - len(words))
        found.append(jnp.pad(rounds, room).reshape(-1, PAGE[0], width))
    return jnp.concatenate(found)


def _chunks(send: Table | Rule, rank: Any, num_rounds: int) -> Any:
    """The chunks that `rank` sends in all rounds; IDLE where it sends none."""
    now = lax.iota(jnp.int32, num_rounds)
    if isinstance(send, Rule):
        first, place = jnp.asarray(send.first)[rank], jnp.asarray(send.place)[rank]
        return first + (place + send.step * now) % send.size * send.count
    row = jnp.asarray(send.rows)[jnp.asarray(send.row)[rank]]
    return jnp.where(row == IDLE, IDLE, jnp.asarray(send.base)[rank] + row)
