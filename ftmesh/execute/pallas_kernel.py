"""The kernel of the Pallas executor: all rounds of some loops, as one rank runs them on a TPU.

Pieces of chunks go from the buffer of a rank, in HBM, over the links into slots of its partner, in
VMEM; what came is added to, or put in place of, the rows it is for. A transfer starts when its data
is there and a slot for it is free: there is one barrier, at the beginning, and no lockstep.

Of each step the order is this: start what is sent and fetch what will be added to, as soon as that
is there; then, `lag` pieces behind, let what was sent leave, for its rows may be overwritten now,
take what came, tell its sender that the slot is free, and write. What is for rows that another lane
writes to in the same round comes after that one. Credits tell a sender how many slots are free. A
receiver grants all of them when it begins a loop; a sender waits for all of them to come back when
it ends it. So every semaphore ends at zero; and as a rank cannot end before its partners have
begun, none of them sees the barrier of a later call in place of this one's.
"""

from __future__ import annotations

from functools import partial, reduce
from operator import or_
from typing import Any

from jax import lax

from ftmesh.execute.pallas_lanes import OneLane, Transfer
from ftmesh.execute.pallas_rank import Rank, Work, unless, when
from ftmesh.execute.pallas_tables import RECEIVE, SEND, SLOTS, Cut
from ftmesh.schedule.transfers import COPY


def kernel(work: Work, heading: Any, table: Any, given: Any, buffer: Any, *scratch: Any) -> None:
    """Run the loops of `work` on the buffer of this rank, which is the one given."""
    rank = Rank(work, heading, table, buffer, *scratch)

    @when(heading[0] >= 0)  # others are idle
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
        @when(True if cut.lag == 0 else i < total)
        def _() -> None:
            rank.turn_page(cut, i)
            if cut.fetch_lag == 0:
                fetch(cut, lanes, i)
            sent = [lane.transfer(i, SEND) for lane in lanes]
            for lane, each in zip(lanes, sent, strict=True):
                if rank.work.is_cast:
                    each.act(lane.stage)
            for lane, each in zip(lanes, sent, strict=True):
                each.act(lane.send)

        if cut.fetch_lag > 0:
            behind = i - cut.fetch_lag
            when((behind >= 0) & (behind < total))(partial(fetch, cut, lanes, behind))

        @when(True if cut.lag == 0 else i >= cut.lag)
        def _() -> None:
            sent, coming = (
                [lane.transfer(i - cut.lag, word) for lane in lanes] for word in (SEND, RECEIVE)
            )
            for lane, each in zip(lanes, sent, strict=True):
                each.act(lane.wait_left)
            who = list(zip(lanes, coming, late(cut, coming), strict=True))
            for act in (OneLane.take, OneLane.wait_written):
                for lane, each, is_late in who:
                    unless(is_late)(partial(each.act, partial(act, lane)))
            for lane, each, is_late in who:
                for act in (OneLane.fetch_and_take, OneLane.wait_written):
                    when(is_late)(partial(each.act, partial(act, lane)))

        return carry

    lax.fori_loop(0, total + cut.lag, step, 0)
    for lane in lanes:
        lane.take_credit(SLOTS)


def fetch(cut: Cut, lanes: list[OneLane], step: Any) -> None:
    """Start to fetch what is added to in a step, where that need not wait for others of it."""
    coming = [lane.transfer(step, RECEIVE) for lane in lanes]
    for lane, each, is_late in zip(lanes, coming, late(cut, coming), strict=True):
        if lane.lane.op != COPY:
            unless(is_late)(partial(each.act, lane.fetch))


def late(cut: Cut, coming: list[Transfer]) -> list[Any]:
    """For what comes by each lane, whether it has to wait until those before it are written.

    Where a lane is mixed, that is looked up: most of what comes by trees has not.
    """
    if not cut.shares or not cut.is_mixed:
        return [cut.shares] * len(coming)
    found = []
    for number, one in enumerate(coming):
        meets = [one.meets(other) for other in coming[:number]]
        found.append(reduce(or_, meets) if meets else False)
    return found
