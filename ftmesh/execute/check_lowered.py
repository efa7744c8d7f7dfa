"""Read back: what a lowered program does, told from its tables alone, and proved.

So that what is proved is what runs: permutations, tables and rules are turned into rounds of
transfers again, and those are proved as the rounds of a schedule are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ftmesh.errors import VerificationError
from ftmesh.execute.chunk_tables import Numbers
from ftmesh.execute.lowering import IDLE, Loop, Program, Rule
from ftmesh.schedule.rank_schedule import Script
from ftmesh.schedule.transfers import Columns, join, transfers
from ftmesh.schedule.verify import prove


def check_program(program: Program) -> None:
    """Prove a lowered program, every use of it, or raise `VerificationError` naming the place."""
    try:
        for loop in program.loops:
            _check_lanes(loop, program)
            _check_places(loop)
        prove(read_back(program))
    except VerificationError as error:
        raise VerificationError(f"the lowered program, read back: {error}") from None


def _check_lanes(loop: Loop, program: Program) -> None:
    """What is sent is received: the permutation, and whom ranks take to be their source, agree."""
    for number, lane in enumerate(loop.lanes):
        sent = {(dst, src) for src, dst in lane.permutation}
        taken = set(enumerate(lane.source.tolist()))
        for dst, src in sorted(sent ^ {pair for pair in taken if pair[1] >= 0}):
            raise VerificationError(
                f"{loop.name}, lane {number}: expected {program.names[dst]} to receive what "
                f"{program.names[src]} sends it, found that only one of the two is so"
            )


def _check_places(loop: Loop) -> None:
    """What is put into places is what comes by the lanes, where it is read from tables."""
    if all(isinstance(lane.send, Rule) for lane in loop.lanes):
        return
    numbers = Numbers.of(loop)
    sent, received = numbers.chunks()
    received_ops = numbers.ops() if numbers.has_ops else None
    for number, lane in enumerate(loop.lanes):
        own, got = lane.send.chunks(loop.num_rounds), lane.received(loop.num_rounds)
        looked_at = [
            ("sends chunk", lane.chunks(own), sent),
            ("receives chunk", lane.chunks(got), received),
        ]
        if received_ops is not None:
            ops = np.where(got == IDLE, IDLE, lane.ops(got))
            looked_at.append(("receives by operation", ops, received_ops))
        for what, one, other in looked_at:
            wrong = np.argwhere(one != other[..., number])
            if len(wrong):
                rank, now = wrong[0]
                raise VerificationError(
                    f"{loop.name}, lane {number}, round {now}: expected that rank {rank} {what} "
                    f"{one[rank, now]}, found {other[rank, now, number]} in its numbers"
                )


def read_back(program: Program) -> Script[LoopRounds]:
    """What the devices of a program do."""
    return Script(
        num_chunks=program.num_chunks,
        phases=tuple(map(LoopRounds, program.loops)),
        names=program.names,
        contributors=program.live,
        num_scatter=len(program.scatter),
        owner=program.owner,
    )


@dataclass(frozen=True, eq=False)
class LoopRounds:
    """A loop as rounds of transfers."""

    loop: Loop

    @property
    def name(self) -> str:
        """That of the phase it was made of."""
        return self.loop.name

    @property
    def num_rounds(self) -> int:
        """Turns of the loop."""
        return self.loop.num_rounds

    def rounds(self) -> Iterator[Columns]:
        """The transfers of each round in turn; a round may be empty."""
        ends = [np.array(lane.permutation, np.int32).T for lane in self.loop.lanes]
        for now in range(self.loop.num_rounds):
            pieces = []
            for number, (lane, (src, dst)) in enumerate(zip(self.loop.lanes, ends, strict=True)):
                sent = lane.send.at(now)[src]
                sends = sent != IDLE
                pieces.append(
                    transfers(
                        round=now,
                        lane=number,
                        src=src[sends],
                        dst=dst[sends],
                        chunk=lane.chunks(sent[sends]),
                        count=lane.count,
                        op=lane.ops(sent[sends]),
                    )
                )
            yield join(pieces)

    def of_chunk(self, chunk: int) -> Columns:
        """The transfers that move `chunk`, in a row each."""
        return join(c.take((c.chunk <= chunk) & (chunk - c.chunk < c.count)) for c in self.rounds())
