"""The kernel of the Pallas executor: all rounds of some loops, as one rank runs them on a TPU.

Pieces of chunks go from the buffer of a rank, in HBM, over the links into slots of its partner, in
VMEM; what came is added to, or put in place of, the rows it is for. A transfer starts when its data
is there and a slot for it is free: there is one barrier, at the beginning, and no lockstep.

Of each step the order is this: start what is sent and fetch what will be added to; then, `lag`
pieces behind, let what was sent leave, for its rows may be overwritten now, take what came, tell
its sender that the slot is free, and write. Credits tell a sender how many slots are free. A
receiver grants all of them when it begins a loop; a sender waits for all of them to come back when
it ends it. So every semaphore ends at zero; and as a rank cannot end before its partners have
begun, none of them sees the barrier of a later call in place of this one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute.lower import Lane
from ftmesh.execute.pallas_tables import (
    DESTINATION,
    LANE_WORDS,
    PAGE,
    RECEIVE,
    SEND,
    SLOTS,
    SOURCE,
    Cut,
)
from ftmesh.schedule.columns import ADD

ROWS_AT_ONCE = 256  # that are added by one turn of a loop


@dataclass(frozen=True, eq=False)
class Work:
    """What a kernel is to do, as far as all ranks have it in common."""

    axis_name: Any
    cuts: tuple[Cut, ...]
    chunk_rows: int
    tile: int
    dtype: Any  # of the buffer, and of sums
    wire: Any  # of what travels
    num_partners: int

    @property
    def is_cast(self) -> bool:
        """Whether things travel in another dtype than that of the buffer."""
        return bool(self.wire != self.dtype)

    @property
    def num_lanes(self) -> int:
        """The most lanes of a loop."""
        return max(len(cut.loop.lanes) for cut in self.cuts)

    @property
    def piece_rows(self) -> int:
        """Those of the longest piece."""
        return max(rows for cut in self.cuts for each in cut.rows for rows in each)

    @property
    def piece_bytes(self) -> int:
        """What each row of a piece takes of VMEM, in all slots of all lanes, times its rows."""
        width = 128 * self.num_lanes * self.piece_rows
        slots = SLOTS * (self.dtype.itemsize + self.wire.itemsize)
        return width * (slots + self.is_cast * (self.dtype.itemsize + SLOTS * self.wire.itemsize))

    def scratch(self, table_width: int) -> list[Any]:
        """Memory and semaphores of a kernel, in the order in which `Rank` takes them."""
        lanes, rows = self.num_lanes, self.piece_rows
        slots = lanes, SLOTS, rows, 128
        staged = self.num_lanes if self.is_cast else 1, rows if self.is_cast else self.tile
        return [
            pltpu.SMEM((2, PAGE[0], table_width), jnp.int32),
            pltpu.VMEM(slots, self.wire),
            pltpu.VMEM(slots, self.dtype),
            pltpu.VMEM((staged[0], staged[1], 128), self.dtype),
            pltpu.VMEM((staged[0], SLOTS, staged[1], 128), self.wire),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((4, lanes, SLOTS)),
            pltpu.SemaphoreType.REGULAR((sum(len(cut.loop.lanes) for cut in self.cuts),)),
        ]


def kernel(work: Work, heading: Any, table: Any, _: Any, buffer: Any, *scratch: Any) -> None:
    """Run the loops of `work` on the buffer of this rank."""
    rank = Rank(work, heading, table, buffer, *scratch)

    @pl.when(heading[0] >= 0)  # others are idle
    def _() -> None:
        rank.meet()
        number = 0
        for cut in work.cuts:
            lanes = [OneLane(rank, cut, i, number + i) for i in range(len(cut.loop.lanes))]
            run_loop(rank, cut, lanes)
            number += len(lanes)


def run_loop(rank: Rank, cut: Cut, lanes: list[OneLane]) -> None:
    """All rounds of a loop, piece by piece."""
    for lane in lanes:
        lane.grant(SLOTS)
    rank.fetch_page(cut.first_page)
    rank.wait_for_page()
    total = cut.loop.num_rounds * cut.num

    def step(i: Any, carry: Any) -> Any:
        @_when(True if cut.lag == 0 else i < total)
        def _() -> None:
            rank.turn_page(cut, i)
            sent, coming = ([lane.transfer(i, word) for lane in lanes] for word in (SEND, RECEIVE))
            for lane, each in zip(lanes, coming, strict=True):
                if lane.is_added and not cut.shares:
                    each.act(lane.fetch)
            for lane, each in zip(lanes, sent, strict=True):
                if rank.work.is_cast:
                    each.act(lane.stage)
            for lane, each in zip(lanes, sent, strict=True):
                each.act(lane.send)

        @_when(True if cut.lag == 0 else i >= cut.lag)
        def _() -> None:
            sent, coming = (
                [lane.transfer(i - cut.lag, word) for lane in lanes] for word in (SEND, RECEIVE)
            )
            for lane, each in zip(lanes, sent, strict=True):
                each.act(lane.wait_left)
            for lane, each in zip(lanes, coming, strict=True):
                each.act(lane.take)
                if cut.shares:
                    each.act(lane.wait_written)
            for lane, each in zip(lanes, coming, strict=True):
                if not cut.shares:
                    each.act(lane.wait_written)

        return carry

    lax.fori_loop(0, total + cut.lag, step, 0)
    for lane in lanes:
        lane.take_credit(SLOTS)


@dataclass(frozen=True, eq=False)
class Rank:
    """The memory of a rank, and what its lanes have in common."""

    work: Work
    heading: Any
    table: Any
    buffer: Any
    page: Any
    arrived: Any
    own: Any
    staged: Any
    out: Any
    page_came: Any
    done: Any
    credits: Any

    def meet(self) -> None:
        """Wait until all partners have begun."""
        barrier = pltpu.get_barrier_semaphore()
        met = jnp.int32(0)
        for i in range(self.work.num_partners):
            partner = self.heading[i]
            met += (partner >= 0).astype(jnp.int32)

            @pl.when(partner >= 0)
            def _(partner: Any = partner) -> None:
                self.signal(barrier, 1, partner)

        pl.semaphore_wait(barrier, met)

    def signal(self, semaphore: Any, number: int, partner: Any) -> None:
        """Signal the semaphore of a partner."""
        pl.semaphore_signal(
            semaphore,
            number,
            device_id={self.work.axis_name: partner},
        )

    def fetch_page(self, number: Any) -> None:
        """Start to fetch a page of the table."""
        pltpu.make_async_copy(
            self.table.at[number], self.page.at[lax.rem(number, 2)], self.page_came
        ).start()

    def wait_for_page(self) -> None:
        """Wait for the page that was asked for last."""
        pltpu.make_async_copy(self.table.at[0], self.page.at[0], self.page_came).wait()

    def turn_page(self, cut: Cut, step: Any) -> None:
        """Have the page of a step, and ask for the next one when that before is done with."""
        if cut.num_pages == 1:
            return
        number, place = lax.div(step, PAGE[0] * cut.num), lax.rem(step, PAGE[0] * cut.num)

        @pl.when((place == 0) & (number > 0))
        def _() -> None:
            self.wait_for_page()

        # What came in the round before is looked at in this one, and was in the page before.
        @pl.when((place == cut.num) & (number + 1 < cut.num_pages))
        def _() -> None:
            self.fetch_page(cut.first_page + number + 1)


SENT, CAME, FETCHED, WRITTEN = range(4)  # semaphores of a slot


class OneLane:
    """A lane of a loop, as one rank sees it."""

    def __init__(self, rank: Rank, cut: Cut, index: int, number: int) -> None:
        self.rank, self.cut, self.index, self.number = rank, cut, index, number
        self.work = rank.work
        self.lane: Lane = cut.loop.lanes[index]
        self.is_added = self.lane.op == ADD
        first = self.work.num_partners + LANE_WORDS * number
        self.destination = rank.heading[first + DESTINATION]
        self.source = rank.heading[first + SOURCE]

    def transfer(self, step: Any, word: int) -> Transfer:
        """What the rank sends or receives in a step."""
        now = lax.div(step, self.cut.num)
        page = lax.rem(self.cut.first_page + lax.div(now, PAGE[0]), 2)
        found = self.rank.page[page, lax.rem(now, PAGE[0]), 2 * self.index + word]
        return Transfer(self, found, lax.rem(step, self.cut.num))

    # Credits

    def grant(self, number: int) -> None:
        """Tell the source, if there is one, that so many slots more are free."""

        @_when(True if self.lane.is_full else self.source >= 0)
        def _() -> None:
            self.rank.signal(self.rank.credits.at[self.number], number, self.source)

    def take_credit(self, number: int) -> None:
        """Wait until so many slots of the destination, if there is one, are free."""

        @_when(True if self.lane.is_full else self.destination >= 0)
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
            by_rows(
                piece.size, lambda some: _set(source, some, staged[some].astype(self.work.wire))
            )
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
        """Start to fetch what a piece is added to."""
        pltpu.make_async_copy(piece.rows, piece.of(self.rank.own), piece.semaphore(FETCHED)).start()

    def take(self, piece: Piece) -> None:
        """Add or copy a piece that came, and start to write what it makes."""
        came, own = piece.of(self.rank.arrived), piece.of(self.rank.own)
        if self.is_added:
            if self.cut.shares:
                self.fetch(piece)
            wait(own, piece.semaphore(FETCHED))
        self.wait_came(piece)
        if self.is_added or self.work.is_cast:
            self.put_together(own, came, piece.size)
            self.grant(1)
            pltpu.make_async_copy(own, piece.rows, piece.semaphore(WRITTEN)).start()
        else:
            pltpu.make_async_copy(came, piece.rows, piece.semaphore(WRITTEN)).start()

    def put_together(self, own: Any, came: Any, size: int) -> None:
        """The sum of two pieces, or the second in the dtype of the first, in place of the first."""

        def some_rows(some: Any) -> None:
            x = came[some].astype(self.work.dtype)
            _set(own, some, add(own[some], x) if self.is_added else x)

        by_rows(size, some_rows)

    def wait_written(self, piece: Piece) -> None:
        """Wait until a piece is written."""
        is_own = self.is_added or self.work.is_cast
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

    def act(self, act: Callable[[Piece], None]) -> None:
        """Act on the piece, if there is one; a shorter last one has code of its own."""
        lane, cut = self.lane, self.lane.cut
        whole, last = cut.rows[lane.index]
        slot = lax.rem(self.word + self.number, SLOTS)
        start = lax.div(self.word, SLOTS) * lane.work.chunk_rows + self.number * whole
        start = pl.multiple_of(start, lane.work.tile)
        is_last = self.number == cut.num - 1
        cases = {whole: True} if last == whole else {whole: ~is_last, last: is_last}

        @_when(True if lane.lane.is_full else self.word >= 0)
        def _() -> None:
            for size, is_so in cases.items():
                _when(is_so)(lambda size=size: act(Piece(lane, start, size, slot)))


@dataclass(frozen=True)
class Piece:
    """Some rows of the buffer that are sent or received, and the number of a slot for them."""

    lane: OneLane
    start: Any
    size: int
    slot: Any

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


def _set(memory: Any, some: Any, value: Any) -> None:
    memory[some] = value


def _when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """As `pl.when`; what is always so is not asked for."""
    return (lambda act: act()) if condition is True else pl.when(condition)
