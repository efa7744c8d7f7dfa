"""The kernel of the Pallas executor: all rounds of some loops, as one rank runs them on a TPU.

Pieces of chunks go from a rank's buffer in HBM over the links into VMEM slots of its partner, which
adds them to the rows they are for, or copies them there. A transfer starts once its data has
arrived and a slot is free: there is one barrier at the start, and no lockstep.

Each step first starts the sends, and prefetches the rows that will be added to once they are up to
date. Then, `lag` pieces behind, it waits until what was sent has left, since its rows may be
overwritten now, adds or copies what has arrived, tells the sender that the slot is free, and writes
back. A piece for rows that another lane writes in the same round comes after that lane's.

Credits count a sender's free slots. A receiver grants all of them when it starts a loop; a sender
waits for all of them to come back when it ends it. So every semaphore ends at zero; and since a
rank cannot finish before its partners have started, no partner mistakes the barrier of a later call
for this one's.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import or_
from typing import Any

from jax import lax

from ftmesh.execute.pallas_rank import (
    KernelLane,
    KernelRank,
    KernelSpec,
    PieceTransfer,
    unless,
    when,
)
from ftmesh.execute.pallas_tables import RECEIVE, SEND, SLOTS, PieceSplit
from ftmesh.schedule.transfers import COPY


def kernel(
    spec: KernelSpec, header: Any, pages: Any, aliased: Any, buffer: Any, *scratch: Any
) -> None:
    """Run the loops of `spec` on the buffer of this rank, which aliases the input."""
    rank = KernelRank(spec, header, pages, buffer, *scratch)

    @when(header[0] >= 0)  # a rank without partners is idle
    def _() -> None:
        rank.barrier()
        first = 0
        for split in spec.splits:
            lanes = [KernelLane(rank, split, i, first + i) for i in range(len(split.loop.lanes))]
            run_loop(rank, split, lanes)
            first += len(lanes)


def run_loop(rank: KernelRank, split: PieceSplit, lanes: list[KernelLane]) -> None:
    """Run all rounds of a loop, piece by piece."""
    for lane in lanes:
        lane.grant_credit(SLOTS)
    rank.start_page_fetch(split.first_page)
    rank.wait_for_page()
    total = split.loop.num_rounds * split.num_pieces

    def step(i: Any, carry: Any) -> Any:
        @when(True if split.lag == 0 else i < total)
        def _() -> None:
            rank.advance_page(split, i)
            if split.fetch_lag == 0:
                fetch(split, lanes, i)
            sends = [lane.transfer(i, SEND) for lane in lanes]
            for lane, transfer in zip(lanes, sends, strict=True):
                if rank.spec.is_cast:
                    transfer.apply(lane.stage)
            for lane, transfer in zip(lanes, sends, strict=True):
                transfer.apply(lane.send)

        if split.fetch_lag > 0:
            behind = i - split.fetch_lag
            when((behind >= 0) & (behind < total))(partial(fetch, split, lanes, behind))

        @when(True if split.lag == 0 else i >= split.lag)
        def _() -> None:
            sends, arrivals = (
                [lane.transfer(i - split.lag, word) for lane in lanes] for word in (SEND, RECEIVE)
            )
            for lane, transfer in zip(lanes, sends, strict=True):
                transfer.apply(lane.wait_sent)
            pending = list(zip(lanes, arrivals, must_wait(split, arrivals), strict=True))
            for act in (KernelLane.receive, KernelLane.wait_written):
                for lane, transfer, waits in pending:
                    unless(waits)(partial(transfer.apply, partial(act, lane)))
            for lane, transfer, waits in pending:
                for act in (KernelLane.fetch_and_receive, KernelLane.wait_written):
                    when(waits)(partial(transfer.apply, partial(act, lane)))

        return carry

    lax.fori_loop(0, total + split.lag, step, 0)
    for lane in lanes:
        lane.take_credit(SLOTS)


def fetch(split: PieceSplit, lanes: list[KernelLane], step: Any) -> None:
    """Prefetch the rows that are added to in a step, unless other lanes write them first."""
    arrivals = [lane.transfer(step, RECEIVE) for lane in lanes]
    for lane, transfer, waits in zip(lanes, arrivals, must_wait(split, arrivals), strict=True):
        if lane.lane.op != COPY:
            unless(waits)(partial(transfer.apply, lane.fetch))


def must_wait(split: PieceSplit, arrivals: list[PieceTransfer]) -> list[Any]:
    """For the arrival of each lane, whether it must wait for those of earlier lanes to be written.

    With mixed lanes this is computed per round: along trees most arrivals need not wait.
    """
    if not split.shares_chunks or not split.is_mixed:
        return [split.shares_chunks] * len(arrivals)
    waits = []
    for number, transfer in enumerate(arrivals):
        overlaps = [transfer.overlaps(other) for other in arrivals[:number]]
        waits.append(reduce(or_, overlaps) if overlaps else False)
    return waits
