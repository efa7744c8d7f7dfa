"""Lowered programs, and what they are made of, run with NumPy: a second opinion on what they do."""

from ftmesh.execute.check_lowered import LoopRounds
from ftmesh.schedule.transfers import COPY


def run(program, buffers):
    """Every rank's buffer after the program: all reads of a round before its writes."""
    return run_phases(map(LoopRounds, program.loops), buffers)


def run_phases(phases, buffers):
    """The same after phases, by whoever is on them."""
    for phase in phases:
        for c in phase.rounds():
            where = list(zip(c.src, c.chunk, c.count, strict=True))
            read = [buffers[s, k : k + n].copy() for s, k, n in where]
            for d, k, n, op, x in zip(c.dst, c.chunk, c.count, c.op, read, strict=True):
                buffers[d, k : k + n] = x if op == COPY else buffers[d, k : k + n] + x
    return buffers
