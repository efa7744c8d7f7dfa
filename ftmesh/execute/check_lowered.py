"""Prove a lowered program from its tables alone, so that what is proved is what runs.

Permutations, tables and rules are turned back into rounds of transfers, and those are proved as the
rounds of a schedule are. This module needs no JAX.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ftmesh.errors import VerificationError
from ftmesh.execute.chunk_tables import ChunkTable
from ftmesh.execute.lowering import IDLE, Loop, Program, Rule
from ftmesh.schedule.schedule import RankSchedule
from ftmesh.schedule.transfers import Transfers, join_transfers, make_transfers
from ftmesh.schedule.verify import prove


def check_program(program: Program) -> None:
    """Prove every use of a lowered program.

    Raises:
        VerificationError: The program does not do what it should; the message names the loop, lane,
            round and chunk.
    """
    try:
        for loop in program.loops:
            _check_lanes(loop, program)
            _check_chunk_table(loop)
        prove(read_back(program))
    except VerificationError as error:
        raise VerificationError(f"the lowered program, read back: {error}") from None


def _check_lanes(loop: Loop, program: Program) -> None:
    """Check that a lane's permutation and its receivers' sources agree."""
    for number, lane in enumerate(loop.lanes):
        sent = {(dst, src) for src, dst in lane.permutation}
        received = {(dst, src) for dst, src in enumerate(lane.source.tolist()) if src >= 0}
        for dst, src in sorted(sent ^ received):
            raise VerificationError(
                f"{loop.name}, lane {number}: expected {program.names[dst]} to receive what "
                f"{program.names[src]} sends it, but only one of the two is so"
            )


def _check_chunk_table(loop: Loop) -> None:
    """Check that the table that ranks read says what the lanes say."""
    if all(isinstance(lane.send, Rule) for lane in loop.lanes):
        return
    table = ChunkTable.from_loop(loop)
    sent, received = table.chunk_ids()
    received_ops = table.ops() if table.has_ops else None
    for number, lane in enumerate(loop.lanes):
        own, got = lane.send.entries(loop.num_rounds), lane.received_entries(loop.num_rounds)
        checks = [
            ("sends chunk", lane.chunk_ids(own), sent),
            ("receives chunk", lane.chunk_ids(got), received),
        ]
        if received_ops is not None:
            ops = np.where(got == IDLE, IDLE, lane.ops(got))
            checks.append(("receives by operation", ops, received_ops))
        for what, expected, actual in checks:
            wrong = np.argwhere(expected != actual[..., number])
            if len(wrong):
                rank, now = wrong[0]
                raise VerificationError(
                    f"{loop.name}, lane {number}, round {now}: expected that rank {rank} {what} "
                    f"{expected[rank, now]}, but its table says {actual[rank, now, number]}"
                )


def read_back(program: Program) -> RankSchedule[LoopRounds]:
    """Turn a program back into rounds of transfers between its ranks."""
    return RankSchedule(
        num_chunks=program.num_chunks,
        phases=tuple(LoopRounds(x.name, x.num_rounds, x.lanes) for x in program.loops),
        names=program.names,
        contributors=program.live,
        num_reduce_scatter_phases=len(program.reduce_scatter),
        owner=program.owner,
    )


@dataclass(frozen=True, eq=False)
class LoopRounds(Loop):
    """A loop as rounds of transfers."""

    def rounds(self) -> Iterator[Transfers]:
        """The transfers of each round in order; a round may be empty."""
        ends = [np.array(lane.permutation, np.int32).T for lane in self.lanes]
        for now in range(self.num_rounds):
            pieces = []
            for number, (lane, (src, dst)) in enumerate(zip(self.lanes, ends, strict=True)):
                entries = lane.send.entries_in(now)[src]
                sends = entries != IDLE
                sent = make_transfers(
                    round=now,
                    lane=number,
                    src=src[sends],
                    dst=dst[sends],
                    chunk=lane.chunk_ids(entries[sends]),
                    count=lane.count,
                    op=lane.ops(entries[sends]),
                )
                pieces.append(sent)
            yield join_transfers(pieces)

    def transfers_of_chunk(self, chunk: int) -> Transfers:
        """The transfers that move `chunk`, one per row."""
        return join_transfers(
            c.take((c.chunk <= chunk) & (chunk - c.chunk < c.count)) for c in self.rounds()
        )
