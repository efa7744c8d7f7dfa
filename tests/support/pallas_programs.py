"""Programs made of random transfers, which sum nothing in particular, for executors to agree on."""

import jax
import numpy as np
from jax.sharding import Mesh

from ftmesh.execute import primitives
from ftmesh.execute.lowering import IDLE, MIXED, Lane, Loop, Program, Table
from ftmesh.schedule.transfers import ADD
from tests.support.on_devices import EACH


def crossing_loop(num_rounds, op=ADD, *, num_ranks=3, lanes=(1, -1)):
    """Everyone sends its first chunk to others, and adds theirs to it, lane by lane."""
    everyone = np.arange(num_ranks, dtype=np.int32)
    chunks = Table.of(np.zeros((num_ranks, num_rounds), np.int32))
    sources = [np.roll(everyone, step) for step in lanes]
    return Loop(
        "crossing",
        num_rounds,
        tuple(
            Lane(
                tuple(zip(source.tolist(), range(num_ranks), strict=True)),
                source,
                1,
                op,
                chunks,
                True,
            )
            for source in sources
        ),
    )


def random_loop(rng, program, num_rounds, ops, *, count=1, step=None):
    """Lanes with random partners, some of them none, that send random chunks or none."""
    lanes = []
    num_ranks, num_chunks = program
    for op in ops:
        number = rng.integers(num_ranks // 2, num_ranks + 1)
        senders, receivers = (rng.permutation(num_ranks)[:number] for _ in range(2))
        source = np.full(num_ranks, -1, np.int32)
        source[receivers] = senders
        chunks = rng.choice(
            np.arange(0, num_chunks - count + 1, step or count), (num_ranks, num_rounds)
        )
        if op == MIXED:
            chunks = 2 * chunks + rng.integers(0, 2, chunks.shape)
        chunks[rng.random(chunks.shape) < 0.2] = IDLE
        chunks[np.setdiff1d(np.arange(num_ranks), senders)] = IDLE
        pairs = tuple(zip(senders.tolist(), receivers.tolist(), strict=True))
        lanes.append(Lane(pairs, source, count, op, Table.of(chunks.astype(np.int32)), False))
    return Loop("random", num_rounds, tuple(lanes))


def program_of(loops, program):
    num_ranks, num_chunks = program
    return Program(
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        scatter=(),
        gather=tuple(loops),
        owner=None,
        depth=1,
        live=np.arange(num_ranks, dtype=np.int32),
        names=tuple(f"rank {r}" for r in range(num_ranks)),
        executor="pallas",
    )


def in_numpy(program, held):
    """The buffers of all ranks after all rounds: all reads of a round, then its writes by lane."""
    held = held.copy()
    for loop in program.loops:
        for now in range(loop.num_rounds):
            read = []
            for lane in loop.lanes:
                numbers = lane.send.at(now)
                for src, dst in lane.permutation:
                    if (number := numbers[src]) != IDLE:
                        chunk, op = divmod(number, 2) if lane.op == MIXED else (number, lane.op)
                        rows = slice(chunk, chunk + lane.count)
                        read.append((op, dst, rows, held[src, rows].copy()))
            for op, dst, rows, value in read:
                held[dst, rows] = held[dst, rows] + value if op == ADD else value
    return held


def on_devices(program, held):
    """The same by the executor of the program, a device for each rank."""
    mesh = Mesh(np.array(jax.devices()[: program.num_ranks]), "data")

    def body(x):
        return primitives.sum_varying(x[0], axis_name="data", program=program)[None]

    return np.asarray(jax.jit(jax.shard_map(body, mesh=mesh, in_specs=EACH, out_specs=EACH))(held))
