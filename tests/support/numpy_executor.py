"""Run lowered programs, schedules and phases with NumPy, as a reference."""

import numpy as np

from ftmesh.execute.check_lowered import LoopRounds
from ftmesh.schedule.transfers import COPY
from ftmesh.topology.ranks import Ranks


def run(program, buffers):
    """Run a program on every rank's buffer: all reads of a round come before its writes."""
    return run_phases((LoopRounds(**vars(loop)) for loop in program.loops), buffers)


def run_schedule(schedule, buffers):
    """Run the phases of a schedule, which numbers chips in grid order, on every rank's buffer."""
    ranks = ranks_of_chips(schedule.topology)
    after = np.empty_like(buffers)
    after[ranks] = run_phases(schedule.phases, buffers[ranks])
    return after


def ranks_of_chips(topology):
    """The rank of each live chip, in grid order: its place on the mesh axis."""
    order = Ranks(topology).coords
    return np.array([order.index(coord) for coord in topology.coords])


def between_ranks(transfers, topology):
    """Transfers between chips, in grid order, as transfers between the ranks of these chips."""
    ranks = ranks_of_chips(topology)
    return transfers.replace(src=ranks[transfers.src], dst=ranks[transfers.dst])


def run_phases(phases, buffers):
    """Run phases on every rank's buffer."""
    for phase in phases:
        for c in phase.rounds():
            where = list(zip(c.src, c.chunk, c.count, strict=True))
            read = [buffers[s, k : k + n].copy() for s, k, n in where]
            for d, k, n, op, x in zip(c.dst, c.chunk, c.count, c.op, read, strict=True):
                buffers[d, k : k + n] = x if op == COPY else buffers[d, k : k + n] + x
    return buffers
