"""Damaged meshes, and the checks that every algorithm with a reduce-scatter must pass."""

import math
from itertools import product

from ftmesh import Topology, verify
from ftmesh.algorithms import registry
from ftmesh.topology.notation import Block

SIDES = range(4, 13, 2)


def even_blocks(shape):
    """Every even block at even coordinates."""
    return [
        Block((w, h), (x, y))
        for w, h in product(*(range(2, n + 1, 2) for n in shape))
        for x, y in product(range(0, shape[0] - w + 1, 2), range(0, shape[1] - h + 1, 2))
    ]


def slim_blocks(shape, *, step=2):
    """Every block of 2k x 2 or 2 x 2k, at every coordinate or every second one."""
    sizes = {(2 * k, 2) for k in range(1, shape[0] // 2 + 1)}
    sizes |= {(2, 2 * k) for k in range(1, shape[1] // 2 + 1)}
    return [
        Block((w, h), (x, y))
        for w, h in sorted(sizes)
        for x in range(0, shape[0] - w + 1, step)
        for y in range(0, shape[1] - h + 1, step)
    ]


def all_blocks(shape):
    """Every block, at every coordinate."""
    return [
        Block(size, corner)
        for size in product(*(range(1, n + 1) for n in shape))
        for corner in product(*(range(n - s + 1) for n, s in zip(shape, size, strict=True)))
    ]


def damaged(shape, *blocks):
    """The topology; None if fewer than two chips are live or the mesh is disconnected."""
    failed = {coord for block in blocks for coord in block.coords()}
    if len(failed) >= math.prod(shape) - 1:
        return None
    topo = Topology.grid(shape, failed=failed)
    return topo if len(topo.components()) == 1 else None


def check(topo, algorithm):
    """Build and prove a schedule, and check what all algorithms have in common."""
    schedule = registry.build_schedule(topo, algorithm)
    proof = verify(schedule)
    assert schedule.algorithm == algorithm
    assert 2 * schedule.rounds_in_reduce_scatter == schedule.num_rounds
    assert proof.num_additions == schedule.num_chunks * (topo.num_live - 1)
    assert proof.num_copies == schedule.num_chunks * (topo.num_live - 1)
    return schedule
