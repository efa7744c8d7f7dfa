"""One rank of the Pallas executor: its memory, barrier and table pages, and its lanes."""

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
from ftmesh.execute.pallas_tables import (
    DESTINATION,
    LANE_WORDS,
    PAGE_BITS,
    PAGE_ROUNDS,
    RECEIVE,
    SLOT_BITS,
    SLOTS,
    SOURCE,
    PieceSplit,
)
from ftmesh.schedule.transfers import ADD, COPY

WIDTH = 128  # elements of a row
ROWS_PER_ITERATION = 256  # of the loop that adds or casts rows
SENT, ARRIVED, FETCHED, WRITTEN = range(NUM_EVENTS := 4)  # semaphores of a slot


@dataclass(frozen=True, eq=False)
class KernelSpec:
    """The parameters of a kernel that all ranks have in common."""

    axis_name: Any
    splits: tuple[PieceSplit, ...]  # by loop
    chunk_rows: int
    tile: int
    dtype: Any  # of the buffer and of sums
    wire: Any  # the dtype of what travels
    num_partners: int

    @property
    def is_cast(self) -> bool:
        """True if pieces travel in another dtype than the buffer's."""
        return bool(self.wire != self.dtype)

    @property
    def num_lanes(self) -> int:
        return max(len(split.loop.lanes) for split in self.splits)

    @property
    def piece_rows(self) -> int:
        return max(rows for split in self.splits for sizes in split.rows for rows in sizes)

    @property
    def vmem_bytes(self) -> int:
        """The VMEM that the slots of all lanes take."""
        buffer, wire = int(self.dtype.itemsize), int(self.wire.itemsize)
        per_element = SLOTS * (buffer + wire) + self.is_cast * (buffer + SLOTS * wire)
        return self.num_lanes * self.piece_rows * WIDTH * per_element

    def scratch_shapes(self, table_width: int) -> list[Any]:
        """Memory and semaphores of a kernel, in the order in which `KernelRank` takes them."""
        lanes, rows = self.num_lanes, self.piece_rows
        out = (lanes, rows) if self.is_cast else (1, self.tile)
        return [
            pltpu.SMEM((2, PAGE_ROUNDS, table_width), jnp.int32),
            pltpu.VMEM((lanes, SLOTS, rows, WIDTH), self.wire),
            pltpu.VMEM((lanes, SLOTS, rows, WIDTH), self.dtype),
            pltpu.VMEM((*out, WIDTH), self.dtype),
            pltpu.VMEM((out[0], SLOTS, out[1], WIDTH), self.wire),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((NUM_EVENTS, lanes, SLOTS)),
            pltpu.SemaphoreType.REGULAR((sum(len(split.loop.lanes) for split in self.splits),)),
        ]


@dataclass(frozen=True, eq=False)
class KernelRank:
    """The memory of a rank, and what its lanes have in common."""

    spec: KernelSpec
    header: Any
    pages: Any  # in HBM, like the buffer
    buffer: Any
    page: Any  # two pages of the table, in SMEM
    arrived: Any  # slots in VMEM, by lane: what was received
    own: Any  # slots for the rows it is added to
    staged: Any  # one piece per lane that is to be cast
    out: Any  # slots for cast pieces
    page_arrived: Any  # semaphore
    done: Any  # semaphores of slots
    credits: Any  # semaphores of lanes

    def barrier(self) -> None:
        barrier = pltpu.get_barrier_semaphore()
        num_partners = jnp.int32(0)
        for i in range(self.spec.num_partners):
            partner = self.header[i]
            num_partners += (partner >= 0).astype(jnp.int32)
            when(partner >= 0)(partial(self.signal, barrier, 1, partner))
        pl.semaphore_wait(barrier, num_partners)

    def signal(self, semaphore: Any, number: int, partner: Any) -> None:
        pl.semaphore_signal(semaphore, number, device_id={self.spec.axis_name: partner})

    def start_page_fetch(self, number: Any) -> None:
        pltpu.make_async_copy(
            self.pages.at[number], self.page.at[lax.rem(number, 2)], self.page_arrived
        ).start()

    def wait_for_page(self) -> None:
        pltpu.make_async_copy(self.pages.at[0], self.page.at[0], self.page_arrived).wait()

    def advance_page(self, split: PieceSplit, step: Any) -> None:
        """Wait for the page of a step; fetch the next once the previous one is no longer read."""
        if split.num_pages == 1:
            return
        steps_per_page = PAGE_ROUNDS * split.num_pieces
        number, position = lax.div(step, steps_per_page), lax.rem(step, steps_per_page)
        when((position == 0) & (number > 0))(self.wait_for_page)

        # Until then, arrivals of earlier rounds are looked up in the previous page.
        @when((position == split.rounds_behind * split.num_pieces) & (number + 1 < split.num_pages))
        def _() -> None:
            self.start_page_fetch(split.first_page + number + 1)

    def read_word(self, split: PieceSplit, step: Any, word: int) -> Any:
        """A word of the table for the round of a step."""
        now = lax.div(step, split.num_pieces)
        page = (split.first_page + (now >> PAGE_BITS)) & 1
        return self.page[page, now & (PAGE_ROUNDS - 1), word]


class KernelLane:
    """A lane as one rank sees it; `index` counts the lanes of the loop, `number` of all loops."""

    def __init__(self, rank: KernelRank, split: PieceSplit, index: int, number: int) -> None:
        self.rank, self.split, self.index, self.number = rank, split, index, number
        self.spec = rank.spec
        self.lane: Lane = split.loop.lanes[index]
        first = self.spec.num_partners + LANE_WORDS * number
        self.destination = rank.header[first + DESTINATION]
        self.source = rank.header[first + SOURCE]

    def transfer(self, step: Any, word: int) -> PieceTransfer:
        """What the rank sends or receives in a step."""
        entry = self.rank.read_word(self.split, step, 2 * self.index + word)
        return PieceTransfer(self, entry, lax.rem(step, self.split.num_pieces), word == RECEIVE)

    def must_wait(self, step: Any) -> Any:
        """Whether what arrives in a step must wait until that of earlier lanes is written."""
        if not self.split.is_mixed:
            return self.split.shares_chunks
        if self.index == 0 or not self.split.shares_chunks:
            return False
        mask = self.rank.read_word(self.split, step, self.split.waits_word)
        return (mask >> self.index) & 1 == 1

    def grant_credits(self) -> None:
        """Tell the source, if there is one, that all slots are free."""
        when(True if self.lane.is_full else self.source >= 0)(partial(self.grant_credit, SLOTS))

    def take_credits(self) -> None:
        """Wait until all slots of the destination, if there is one, are free."""
        has_destination = True if self.lane.is_full else self.destination >= 0
        when(has_destination)(partial(self.take_credit, SLOTS))

    def grant_credit(self, number: int) -> None:
        """Tell the source that `number` more slots are free."""
        self.rank.signal(self.rank.credits.at[self.number], number, self.source)

    def take_credit(self, number: int) -> None:
        """Wait until `number` slots of the destination are free."""
        pl.semaphore_wait(self.rank.credits.at[self.number], number)

    def stage(self, piece: KernelPiece) -> None:
        """Start to fetch a piece that is cast before it is sent."""
        staged = self.rank.staged.at[self.index, pl.ds(0, piece.size)]
        pltpu.make_async_copy(piece.rows, staged, piece.semaphore(SENT)).start()

    def send(self, piece: KernelPiece) -> None:
        """Send a piece once the destination has a free slot."""
        source = piece.rows
        if self.spec.is_cast:
            staged = self.rank.staged.at[self.index, pl.ds(0, piece.size)]
            wait(staged, piece.semaphore(SENT))
            source = piece.slot_of(self.rank.out)

            def cast_rows(rows: Any) -> None:
                source[rows] = staged[rows].astype(self.spec.wire)

            for_rows(piece.size, cast_rows)
        self.take_credit(1)
        pltpu.make_async_remote_copy(
            src_ref=source,
            dst_ref=piece.slot_of(self.rank.arrived),
            send_sem=piece.semaphore(SENT),
            recv_sem=piece.semaphore(ARRIVED),
            device_id={self.spec.axis_name: self.destination},
        ).start()

    def wait_sent(self, piece: KernelPiece) -> None:
        wait(piece.slot_of(self.rank.arrived), piece.semaphore(SENT))

    def wait_arrived(self, piece: KernelPiece) -> None:
        wait(piece.slot_of(self.rank.arrived), piece.semaphore(ARRIVED))

    def fetch(self, piece: KernelPiece) -> None:
        """Start to fetch the rows that a piece is added to, if it is added."""
        if piece.is_added:
            own = piece.slot_of(self.rank.own)
            pltpu.make_async_copy(piece.rows, own, piece.semaphore(FETCHED)).start()

    def receive(self, piece: KernelPiece) -> None:
        """Add or copy a piece that arrives, and start to write the result."""
        arrived, own = piece.slot_of(self.rank.arrived), piece.slot_of(self.rank.own)
        if piece.is_added:
            wait(own, piece.semaphore(FETCHED))
        self.wait_arrived(piece)
        if piece.is_added or self.spec.is_cast:
            self.combine(piece)
            self.grant_credit(1)
            pltpu.make_async_copy(own, piece.rows, piece.semaphore(WRITTEN)).start()
        else:
            pltpu.make_async_copy(arrived, piece.rows, piece.semaphore(WRITTEN)).start()

    def fetch_and_receive(self, piece: KernelPiece) -> None:
        """`receive` for a piece that had to wait for other lanes."""
        self.fetch(piece)
        self.receive(piece)

    def combine(self, piece: KernelPiece) -> None:
        """Add what arrived to the fetched rows, or cast it into their place."""
        arrived, own = piece.slot_of(self.rank.arrived), piece.slot_of(self.rank.own)

        def combine_rows(rows: Any) -> None:
            x = arrived[rows].astype(self.spec.dtype)
            own[rows] = add(own[rows], x) if piece.is_added else x

        for_rows(piece.size, combine_rows)

    def wait_written(self, piece: KernelPiece) -> None:
        is_own = piece.is_added or self.spec.is_cast
        memory = self.rank.own if is_own else self.rank.arrived
        wait(piece.slot_of(memory), piece.semaphore(WRITTEN))
        if not is_own:
            self.grant_credit(1)


@dataclass(frozen=True)
class PieceTransfer:
    """What a rank sends or receives on a lane in a step, if anything: a piece of some chunks."""

    lane: KernelLane
    word: Any  # of the table
    number: Any  # of the piece
    is_received: bool

    @property
    def chunk(self) -> Any:
        return self.word >> (SLOT_BITS + (self.lane.lane.op == MIXED))

    def apply(self, act: Callable[[KernelPiece], None]) -> None:
        """Apply a function to the piece, if there is one.

        A shorter last piece has code of its own, and so have added and copied pieces on a mixed
        lane.
        """
        lane, split = self.lane, self.lane.split
        size, last_size = split.rows[lane.index]
        slot = (self.word + self.number) & (SLOTS - 1)
        ops: dict[int, Any] = {lane.lane.op: True}
        if lane.lane.op == MIXED and self.is_received:
            op = (self.word >> SLOT_BITS) & 1
            ops = {ADD: op == ADD, COPY: op == COPY}
        start = self.chunk * lane.spec.chunk_rows + self.number * size
        start = pl.multiple_of(start, lane.spec.tile)
        is_last = self.number == split.num_pieces - 1
        sizes = {size: True} if last_size == size else {size: ~is_last, last_size: is_last}

        @when(True if lane.lane.is_full else self.word >= 0)
        def _() -> None:
            for (rows, has_rows), (op, is_op) in product(sizes.items(), ops.items()):
                act_on_piece = partial(act, KernelPiece(lane, start, rows, slot, op == ADD))
                when(has_rows)(partial(when(is_op), act_on_piece))


@dataclass(frozen=True)
class KernelPiece:
    """Rows of the buffer that are sent or received, and their slot."""

    lane: KernelLane
    start: Any
    size: int
    slot: Any
    is_added: bool

    @property
    def rows(self) -> Any:
        return self.lane.rank.buffer.at[pl.ds(self.start, self.size)]

    def slot_of(self, memory: Any) -> Any:
        """As many rows of the piece's slot in `memory`."""
        return memory.at[self.lane.index, self.slot, pl.ds(0, self.size)]

    def semaphore(self, event: int) -> Any:
        return self.lane.rank.done.at[event, self.lane.index, self.slot]


def wait(memory: Any, semaphore: Any) -> None:
    """Wait for a copy of as many bytes as `memory` has."""
    pltpu.make_async_copy(memory, memory, semaphore).wait()


def add(x: Any, y: Any) -> Any:
    """Add; 16-bit values by way of float32, which rounds alike and every chip supports."""
    if x.dtype.itemsize < 4:
        return (x.astype(jnp.float32) + y.astype(jnp.float32)).astype(x.dtype)
    return x + y


def for_rows(size: int, act: Callable[[Any], None]) -> None:
    """Apply a function to all rows of a piece, `ROWS_PER_ITERATION` at a time."""
    num_iterations, rest = divmod(size, ROWS_PER_ITERATION)

    def body(i: Any, carry: Any) -> Any:
        start = pl.multiple_of(i * ROWS_PER_ITERATION, ROWS_PER_ITERATION)
        act(pl.ds(start, ROWS_PER_ITERATION))
        return carry

    if num_iterations:
        lax.fori_loop(0, num_iterations, body, 0)
    if rest:
        act(pl.ds(num_iterations * ROWS_PER_ITERATION, rest))


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when`, decided at trace time if the condition is a Python bool."""
    if condition is False:
        return lambda act: None
    return (lambda act: act()) if condition is True else pl.when(condition)


def unless(condition: Any) -> Callable[[Callable[[], None]], None]:
    """The opposite of `when`."""
    return when(not condition if isinstance(condition, bool) else ~condition)
