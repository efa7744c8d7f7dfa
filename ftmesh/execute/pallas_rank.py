"""One rank of the Pallas executor: what its kernel is to do, its memory, barrier and table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ftmesh.execute.pallas_tables import PAGE, SLOTS, Cut

WIDTH = 128  # elements of a row
SENT, CAME, FETCHED, WRITTEN = range(NUM_EVENTS := 4)  # semaphores of a slot


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
    def vmem_bytes(self) -> int:
        """What the pieces of all lanes take of VMEM."""
        number, wire = int(self.dtype.itemsize), int(self.wire.itemsize)
        each = SLOTS * (number + wire) + self.is_cast * (number + SLOTS * wire)
        return self.num_lanes * self.piece_rows * WIDTH * each

    def scratch(self, table_width: int) -> list[Any]:
        """Memory and semaphores of a kernel, in the order in which `Rank` takes them."""
        lanes, rows = self.num_lanes, self.piece_rows
        out = (lanes, rows) if self.is_cast else (1, self.tile)
        return [
            pltpu.SMEM((2, PAGE[0], table_width), jnp.int32),
            pltpu.VMEM((lanes, SLOTS, rows, WIDTH), self.wire),
            pltpu.VMEM((lanes, SLOTS, rows, WIDTH), self.dtype),
            pltpu.VMEM((*out, WIDTH), self.dtype),
            pltpu.VMEM((out[0], SLOTS, out[1], WIDTH), self.wire),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((NUM_EVENTS, lanes, SLOTS)),
            pltpu.SemaphoreType.REGULAR((sum(len(cut.loop.lanes) for cut in self.cuts),)),
        ]


@dataclass(frozen=True, eq=False)
class Rank:
    """The memory of a rank, and what its lanes have in common."""

    work: Work
    heading: Any
    table: Any  # in HBM, as is the buffer
    buffer: Any
    page: Any  # two of the table, in SMEM
    arrived: Any  # slots in VMEM, of each lane: what came
    own: Any  # what it is added to
    staged: Any  # one piece of each lane that is to be cast
    out: Any  # slots for what was
    page_came: Any
    done: Any  # semaphores of slots
    credits: Any  # semaphores of lanes

    def meet(self) -> None:
        """Wait until all partners have begun."""
        barrier = pltpu.get_barrier_semaphore()
        met = jnp.int32(0)
        for i in range(self.work.num_partners):
            partner = self.heading[i]
            met += (partner >= 0).astype(jnp.int32)

            when(partner >= 0)(partial(self.signal, barrier, 1, partner))

        pl.semaphore_wait(barrier, met)

    def signal(self, semaphore: Any, number: int, partner: Any) -> None:
        """Signal the semaphore of a partner."""
        pl.semaphore_signal(semaphore, number, device_id={self.work.axis_name: partner})

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

        @when((place == 0) & (number > 0))
        def _() -> None:
            self.wait_for_page()

        # Until then, what came in rounds before is looked at, which are in the page before.
        @when((place == cut.rounds_behind * cut.num) & (number + 1 < cut.num_pages))
        def _() -> None:
            self.fetch_page(cut.first_page + number + 1)


def when(condition: Any) -> Callable[[Callable[[], None]], None]:
    """As `pl.when`; what is always so, or never, is not asked for."""
    if condition is False:
        return lambda act: None
    return (lambda act: act()) if condition is True else pl.when(condition)


def unless(condition: Any) -> Callable[[Callable[[], None]], None]:
    """The opposite of `when`."""
    return when(not condition if isinstance(condition, bool) else ~condition)
