"""Lanes of the Pallas executor: what a rank sends and receives on one of them, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute.lowering import MIXED, Lane
from ftmesh.execute.pallas_rank import CAME, FETCHED, SENT, WRITTEN, Rank, when
from ftmesh.execute.pallas_tables import (
    DESTINATION,
    LANE_WORDS,
    PAGE,
    RECEIVE,
    SLOTS,
    SOURCE,
    Cut,
)
from ftmesh.schedule.transfers import ADD, COPY

ROWS_AT_ONCE = 256  # that are added by one turn of a loop


class OneLane:
    """A lane of a loop, as one rank sees it."""

    def __init__(self, rank: Rank, cut: Cut, index: int, number: int) -> None:
        self.rank, self.cut, self.index, self.number = rank, cut, index, number
        self.work = rank.work
        self.lane: Lane = cut.loop.lanes[index]
        first = self.work.num_partners + LANE_WORDS * number
        self.destination = rank.heading[first + DESTINATION]
        self.source = rank.heading[first + SOURCE]

    def transfer(self, step: Any, word: int) -> Transfer:
        """What the rank sends or receives in a step."""
        now = lax.div(step, self.cut.num)
        page = lax.rem(self.cut.first_page + lax.div(now, PAGE[0]), 2)
        found = self.rank.page[page, lax.rem(now, PAGE[0]), 2 * self.index + word]
        return Transfer(self, found, lax.rem(step, self.cut.num), word == RECEIVE)

    # Credits

    def grant(self, number: int) -> None:
        """Tell the source, if there is one, that so many slots more are free."""

        @when(True if self.lane.is_full else self.source >= 0)
        def _() -> None:
            self.rank.signal(self.rank.credits.at[self.number], number, self.source)

    def take_credit(self, number: int) -> None:
        """Wait until so many slots of the destination, if there is one, are free."""

        @when(True if self.lane.is_full else self.destination >= 0)
        def _() -> None:
            pl.semaphore_wait(self.rank.credits.at[self.number], number)

    # Pieces

    def stage(self, piece: Piece) -> None:
        """Start to fetch what is cast before it is sent."""
        staged = self.rank.staged.at[self.index, pl.ds(0, piece.size)]
        pltpu.make_async_copy(piece.rows, staged, piece.semaphore(SENT)).start()

    def send(self, piece: Piece) -> None:
        """Start a piece on its way, when there is a slot for it."""
        source = piece.rows
        if self.work.is_cast:
            staged = self.rank.staged.at[self.index, pl.ds(0, piece.size)]
            wait(staged, piece.semaphore(SENT))
            source = piece.of(self.rank.out)
            by_rows(piece.size, lambda some: put(source, some, staged[some].astype(self.work.wire)))
        self.take_credit(1)
        pltpu.make_async_remote_copy(
            src_ref=source,
            dst_ref=piece.of(self.rank.arrived),
            send_sem=piece.semaphore(SENT),
            recv_sem=piece.semaphore(CAME),
            device_id={self.work.axis_name: self.destination},
        ).start()

    def wait_left(self, piece: Piece) -> None:
        """Wait until a piece has left."""
        wait(piece.of(self.rank.arrived), piece.semaphore(SENT))

    def wait_came(self, piece: Piece) -> None:
        """Wait until a piece has come."""
        wait(piece.of(self.rank.arrived), piece.semaphore(CAME))

    def fetch(self, piece: Piece) -> None:
        """Start to fetch what a piece is added to, if it is."""
        if piece.is_added:
            own = piece.of(self.rank.own)
            pltpu.make_async_copy(piece.rows, own, piece.semaphore(FETCHED)).start()

    def take(self, piece: Piece) -> None:
        """Add or copy a piece that came, and start to write what it makes."""
        came, own = piece.of(self.rank.arrived), piece.of(self.rank.own)
        if piece.is_added:
            wait(own, piece.semaphore(FETCHED))
        self.wait_came(piece)
        if piece.is_added or self.work.is_cast:
            self.put_together(piece)
            self.grant(1)
            pltpu.make_async_copy(own, piece.rows, piece.semaphore(WRITTEN)).start()
        else:
            pltpu.make_async_copy(came, piece.rows, piece.semaphore(WRITTEN)).start()

    def fetch_and_take(self, piece: Piece) -> None:
        """The same for a piece that waited for others."""
        self.fetch(piece)
        self.take(piece)

    def put_together(self, piece: Piece) -> None:
        """What came, added to what was fetched or in its dtype, in place of what was fetched."""
        came, own = piece.of(self.rank.arrived), piece.of(self.rank.own)

        def some_rows(some: Any) -> None:
            x = came[some].astype(self.work.dtype)
            put(own, some, add(own[some], x) if piece.is_added else x)

        by_rows(piece.size, some_rows)

    def wait_written(self, piece: Piece) -> None:
        """Wait until a piece is written."""
        is_own = piece.is_added or self.work.is_cast
        memory = self.rank.own if is_own else self.rank.arrived
        wait(piece.of(memory), piece.semaphore(WRITTEN))
        if not is_own:
            self.grant(1)


@dataclass(frozen=True)
class Transfer:
    """What a rank sends or receives on a lane in a step, if anything: a piece of some chunks."""

    lane: OneLane
    word: Any  # of the table
    number: Any  # of the piece
    comes: bool  # and is not sent

    @property
    def chunk(self) -> Any:
        """The first one."""
        number = lax.div(self.word, SLOTS)
        return lax.div(number, 2) if self.lane.lane.op == MIXED else number

    def meets(self, other: Transfer) -> Any:
        """Whether both are there, and for some chunk that is the same."""
        ahead = self.chunk - other.chunk
        overlap = (ahead < other.lane.lane.count) & (-ahead < self.lane.lane.count)
        return (self.word >= 0) & (other.word >= 0) & overlap

    def act(self, act: Callable[[Piece], None]) -> None:
        """Act on the piece, if there is one; a shorter last one has code of its own.

        So have those that are added and those that are copied, where a lane has both.
        """
        lane, cut = self.lane, self.lane.cut
        whole, last = cut.rows[lane.index]
        slot = lax.rem(self.word + self.number, SLOTS)
        ops: dict[int, Any] = {lane.lane.op: True}
        if lane.lane.op == MIXED and self.comes:
            op = lax.rem(lax.div(self.word, SLOTS), 2)
            ops = {ADD: op == ADD, COPY: op == COPY}
        start = self.chunk * lane.work.chunk_rows + self.number * whole
        start = pl.multiple_of(start, lane.work.tile)
        is_last = self.number == cut.num - 1
        sizes = {whole: True} if last == whole else {whole: ~is_last, last: is_last}

        @when(True if lane.lane.is_full else self.word >= 0)
        def _() -> None:
            for (size, is_long), (op, is_op) in product(sizes.items(), ops.items()):
                act_on = partial(act, Piece(lane, start, size, slot, op == ADD))
                when(is_long)(partial(when(is_op), act_on))


@dataclass(frozen=True)
class Piece:
    """Some rows of the buffer that are sent or received, and the number of a slot for them."""

    lane: OneLane
    start: Any
    size: int
    slot: Any
    is_added: bool

    @property
    def rows(self) -> Any:
        """Those of the buffer."""
        return self.lane.rank.buffer.at[pl.ds(self.start, self.size)]

    def of(self, memory: Any) -> Any:
        """As many rows of the slot in some memory that has slots."""
        return memory.at[self.lane.index, self.slot, pl.ds(0, self.size)]

    def semaphore(self, which: int) -> Any:
        """One of the semaphores of the slot."""
        return self.lane.rank.done.at[which, self.lane.index, self.slot]


def wait(memory: Any, semaphore: Any) -> None:
    """Wait for a copy of as many bytes as some memory has."""
    pltpu.make_async_copy(memory, memory, semaphore).wait()


def add(x: Any, y: Any) -> Any:
    """A sum; of 16 bits by way of 32, which rounds alike and is there on every chip."""
    if x.dtype.itemsize < 4:
        return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
    return x + y


def by_rows(size: int, act: Callable[[Any], None]) -> None:
    """Act on all rows of a piece, some at a time."""
    turns, rest = divmod(size, ROWS_AT_ONCE)

    def turn(i: Any, carry: Any) -> Any:
        act(pl.ds(pl.multiple_of(i * ROWS_AT_ONCE, ROWS_AT_ONCE), ROWS_AT_ONCE))
        return carry

    if turns:
        lax.fori_loop(0, turns, turn, 0)
    if rest:
        act(pl.ds(turns * ROWS_AT_ONCE, rest))


def put(memory: Any, some: Any, value: Any) -> None:
    memory[some] = value
