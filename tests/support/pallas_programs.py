"""Programs of random transfers, and plans, on which executors must agree."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from ftmesh.execute import primitives
from ftmesh.execute.lowering import IDLE, MIXED, Lane, Loop, Program, Table
from ftmesh.schedule.transfers import ADD
from tests.support.on_devices import PER_RANK, per_rank


def crossing_loop(num_rounds, op=ADD, *, num_ranks=3, lanes=(1, -1)):
    """Every rank sends its first chunk to others, and adds theirs to it, lane by lane."""
    ranks = np.arange(num_ranks, dtype=np.int32)
    chunks = Table.from_entries(np.zeros((num_ranks, num_rounds), np.int32))
    sources = [np.roll(ranks, step) for step in lanes]
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


def random_loop(rng, size, num_rounds, ops, *, count=1, step=None):
    """Lanes with random partners or none, that send random chunks or none."""
    lanes = []
    num_ranks, num_chunks = size
    for op in ops:
        num_pairs = rng.integers(num_ranks // 2, num_ranks + 1)
        senders, receivers = (rng.permutation(num_ranks)[:num_pairs] for _ in range(2))
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
        lanes.append(
            Lane(pairs, source, count, op, Table.from_entries(chunks.astype(np.int32)), False)
        )
    return Loop("random", num_rounds, tuple(lanes))


def make_program(loops, size):
    num_ranks, num_chunks = size
    return Program(
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        reduce_scatter=(),
        all_gather=tuple(loops),
        owner=None,
        depth=1,
        live=np.arange(num_ranks, dtype=np.int32),
        names=tuple(f"rank {r}" for r in range(num_ranks)),
        executor="pallas",
    )


def run_in_numpy(program, held):
    """Run a program on all ranks' buffers: all reads of a round, then its writes by lane."""
    held = held.copy()
    for loop in program.loops:
        for now in range(loop.num_rounds):
            read = []
            for lane in loop.lanes:
                entries = lane.send.entries_in(now)
                for src, dst in lane.permutation:
                    if (entry := entries[src]) != IDLE:
                        chunk, op = divmod(entry, 2) if lane.op == MIXED else (entry, lane.op)
                        rows = slice(chunk, chunk + lane.count)
                        read.append((op, dst, rows, held[src, rows].copy()))
            for op, dst, rows, value in read:
                held[dst, rows] = held[dst, rows] + value if op == ADD else value
    return held


def run_on_devices(program, held):
    """Run a program with its executor, one device per rank."""
    return np.asarray(_on_ranks(program)(held))


def lower_for_tpus(program, held):
    """The text of a program as it is lowered for TPUs."""
    return _on_ranks(program).trace(held).lower(lowering_platforms=("tpu",)).as_text()


def _on_ranks(program):
    mesh = Mesh(np.array(jax.devices()[: program.num_ranks]), "data")

    def body(x):
        return primitives.all_reduce_varying(x[0], axis_name="data", program=program)[None]

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=PER_RANK, out_specs=PER_RANK))


def by_both_executors(plan, run, *args, **options):
    """The results of `run(plan, *args)` on every device: in permutations, and in the kernel."""
    return [
        per_rank(chosen, partial(run, chosen), *args, **options)
        for chosen in (plan, in_kernel(plan))
    ]


def in_kernel(plan):
    """The same schedule in the Pallas kernel."""
    return replace(plan, executor="pallas")


def assert_same_bits(one, other):
    """Assert that two trees of arrays have the same dtypes, shapes and bits."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
