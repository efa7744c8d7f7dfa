"""Run lowered programs and phases with NumPy, as a reference."""

from ftmesh.execute.check_lowered import LoopRounds
from ftmesh.schedule.transfers import COPY


def run(program, buffers):
    """Run a program on every rank's buffer: all reads of a round come before its writes."""
    return run_phases((LoopRounds(**vars(loop)) for loop in program.loops), buffers)


def run_phases(phases, buffers):
    """Run phases on every rank's buffer."""
    for phase in phases:
        for c in phase.rounds():
            where = list(zip(c.src, c.chunk, c.count, strict=True))
            read = [buffers[s, k : k + n].copy() for s, k, n in where]
            for d, k, n, op, x in zip(c.dst, c.chunk, c.count, c.op, read, strict=True):
                buffers[d, k : k + n] = x if op == COPY else buffers[d, k : k + n] + x
    return buffers
