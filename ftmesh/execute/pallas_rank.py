"""One rank of the Pallas executor: the kernel's parameters, memory, barrier and table pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute.pallas_tables import PAGE_ROUNDS, SLOTS, PieceSplit

WIDTH = 128  # elements of a row
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
        """The most lanes of a loop."""
        return max(len(split.loop.lanes) for split in self.splits)

    @property
    def piece_rows(self) -> int:
        """The rows of the longest piece."""
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
        """Wait until all partners have started."""
        barrier = pltpu.get_barrier_semaphore()
        num_partners = jnp.int32(0)
        for i in range(self.spec.num_partners):
            partner = self.header[i]
            num_partners += (partner >= 0).astype(jnp.int32)

            when(partner >= 0)(partial(self.signal, barrier, 1, partner))

        pl.semaphore_wait(barrier, num_partners)

    def signal(self, semaphore: Any, number: int, partner: Any) -> None:
        """Signal the semaphore of a partner."""
        pl.semaphore_signal(semaphore, number, device_id={self.spec.axis_name: partner})

    def start_page_fetch(self, number: Any) -> None:
        """Start to fetch a page of the table."""
        pltpu.make_async_copy(
            self.pages.at[number], self.page.at[lax.rem(number, 2)], self.page_arrived
        ).start()

    def wait_for_page(self) -> None:
        """Wait for the page that was fetched last."""
        pltpu.make_async_copy(self.pages.at[0], self.page.at[0], self.page_arrived).wait()

    def advance_page(self, split: PieceSplit, step: Any) -> None:
        """Wait for the page of a step; fetch the next once the previous one is no longer read."""
        if split.num_pages == 1:
            return
        steps_per_page = PAGE_ROUNDS * split.num_pieces
        number, position = lax.div(step, steps_per_page), lax.rem(step, steps_per_page)

        @when((position == 0) & (number > 0))
        def _() -> None:
            self.wait_for_page()

        # Until then, arrivals of earlier rounds are looked up in the previous page.
        @when((position == split.rounds_behind * split.num_pieces) & (number + 1 < split.num_pages))
        def _() -> None:
            self.start_page_fetch(split.first_page + number + 1)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """`pl.when`, decided at trace time if the condition is a Python bool."""
    if condition is False:
        return lambda act: None
    return (lambda act: act()) if condition is True else pl.when(condition)


def unless(condition: Any) -> Callable[[Callable[[], None]], None]:
    """The opposite of `when`."""
    return when(not condition if isinstance(condition, bool) else ~condition)
