"""Lowered programs run with NumPy, as a second opinion on what they do."""

from ftmesh.execute.read_back import LoopRounds
from ftmesh.schedule.columns import COPY


def run(program, buffers):
    """Every rank's buffer after the program: all reads of a round before its writes."""
    for loop in program.loops:
        for c in LoopRounds(loop).rounds():
            where = list(zip(c.src, c.chunk, c.count, strict=True))
            read = [buffers[s, k : k + n].copy() for s, k, n in where]
            for d, k, n, op, x in zip(c.dst, c.chunk, c.count, c.op, read, strict=True):
                buffers[d, k : k + n] = x if op == COPY else buffers[d, k : k + n] + x
    return buffers
