"""The ppermute executor against NumPy, round by round, from a schedule file."""

import jax
import numpy as np
import pytest

import ftmesh
from ftmesh import Topology
from ftmesh.algorithms import registry, tree
from ftmesh.execute.context import NO_CAST, ExecutionContext
from ftmesh.execute.lowering import lower
from ftmesh.execute.ppermute import rounds_on_rank, run_loop
from ftmesh.topology.ranks import Ranks
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOLE = Topology.grid("6x6", failed="2x2@2,2")


def numpy_rounds(path, held):
    """The buffers of all ranks after each round of a schedule file, replayed with NumPy."""
    with np.load(path) as file:
        coords = map(tuple, file["coords"].tolist())
        rank = np.array([Ranks(HOLE).coords.index(coord) for coord in coords])
        names = ("round", "src", "dst", "chunk", "count", "op")
        rows = np.stack([file[name] for name in names], axis=1)
        rows[:, 1:3] = rank[rows[:, 1:3]]
    for now in range(rows[-1, 0] + 1):
        this = rows[rows[:, 0] == now]
        read = [held[src, chunk : chunk + count].copy() for _, src, _, chunk, count, _ in this]
        for (_, _, dst, chunk, count, op), value in zip(this, read, strict=True):
            here = slice(chunk, chunk + count)
            held[dst, here] = value if op else held[dst, here] + value
        yield held.copy()


@pytest.mark.parametrize("algorithm", ["ring", *map(slow, ("row_pair", "wide tree"))])
def test_every_round_leaves_what_the_file_says(algorithm, tmp_path):
    if algorithm == "wide tree":
        schedule = tree.build_schedule(HOLE, 24, width=3)
    else:
        schedule = registry.build_schedule(HOLE, algorithm)
    ftmesh.save(schedule, tmp_path / "plan.npz")
    program = lower(ftmesh.load(tmp_path / "plan.npz"))
    context = ExecutionContext("rank", program.num_ranks, NO_CAST, emulated=True)
    held = np.random.default_rng(0).integers(0, 1000, (32, program.num_chunks, 1, 2), np.int32)
    expected = numpy_rounds(tmp_path / "plan.npz", held.copy())
    for loop in program.loops:

        @jax.jit
        def one_round(held, now, loop=loop):
            def run(x):
                return rounds_on_rank(loop, context)[1](x, now, 1)

            return jax.vmap(run, axis_name="rank")(held)

        @jax.jit
        def all_rounds(held, loop=loop):
            return jax.vmap(lambda x: run_loop(x, loop, context), axis_name="rank")(held)

        after = held
        for now in range(loop.num_rounds):
            after = np.asarray(one_round(after, now))
            np.testing.assert_array_equal(after, next(expected))
        np.testing.assert_array_equal(after, all_rounds(held))
        held = after
    assert next(expected, None) is None
    assert (held == held[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_unrolled_rounds_do_what_loops_do(algorithm):
    topology = Topology.grid("4x4", failed="2x2@0,0")
    looped, unrolled = (
        ftmesh.plan(topology, algorithm, executor=name)
        for name in ("ppermute", "ppermute_unrolled")
    )
    x = np.random.default_rng(0).normal(size=(12, 50)).astype(np.float32)

    def total(plan):
        return jax.jit(jax.vmap(lambda x: plan.psum(x, "rank"), axis_name="rank"))

    np.testing.assert_array_equal(total(looped)(x), total(unrolled)(x))
    assert "while" in total(looped).lower(x).as_text()
    assert "while" not in total(unrolled).lower(x).as_text()
