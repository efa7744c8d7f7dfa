"""The tables that ranks of a Pallas kernel read, against its program."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import Topology
from ftmesh.algorithms.registry import build_schedule
from ftmesh.execute import pallas
from ftmesh.execute.lowering import IDLE, lower
from ftmesh.execute.pallas_tables import (
    LANE_WORDS,
    SLOTS,
    partner_table,
    rank_headers,
    rank_pages,
    split_loops,
)
from ftmesh.testing import cpu_grid
from tests.support.trees import tree_schedule

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOLE = Topology.grid("4x4", failed="2x2@2,2")


@pytest.mark.parametrize(
    ("algorithm", "with_idle"), [("ring", True), ("row_pair", False), ("tree", False)]
)
def test_ranks_read_what_the_program_says(algorithm, with_idle):
    planned = tree_schedule(HOLE, 6) if algorithm == "tree" else build_schedule(HOLE, algorithm)
    program = lower(planned, with_idle=with_idle)
    splits = split_loops(program.loops, chunk_rows=24, tile=8, max_rows=8)
    assert all(split.num_pieces == 3 for split in splits)
    headers = rank_headers(program.loops, program.num_ranks)
    width = partner_table(program.loops, program.num_ranks).shape[1]
    read = np.asarray(jax.jit(jax.vmap(partial(rank_pages, splits, num_partners=width)))(headers))
    for split in splits:
        table = read[:, split.first_page : split.first_page + split.num_pages]
        rounds = table.reshape(program.num_ranks, -1, table.shape[-1])[:, : split.loop.num_rounds]
        for number, lane in enumerate(split.loop.lanes):
            sent, received = rounds[:, :, 2 * number], rounds[:, :, 2 * number + 1]
            senders, receivers = np.array(lane.permutation).T
            # Sender and receiver agree on the slot too.
            np.testing.assert_array_equal(sent[senders], received[receivers])
            for words, ranks in ((sent, senders), (received, receivers)):
                others = np.setdiff1d(np.arange(program.num_ranks), ranks)
                assert (words[others] == IDLE).all()
            expected = lane.send.entries(split.loop.num_rounds)[senders]
            words = sent[senders]
            np.testing.assert_array_equal(np.where(words < 0, IDLE, words // SLOTS), expected)
            before = np.cumsum(words >= 0, axis=1) - (words >= 0)
            np.testing.assert_array_equal(
                (words % SLOTS)[words >= 0], (3 * before % SLOTS)[words >= 0]
            )


def test_partners_are_those_of_all_lanes():
    program = lower(build_schedule(HOLE, "ring"), with_idle=True)
    table = partner_table(program.loops, program.num_ranks)
    pairs = {pair for loop in program.loops for lane in loop.lanes for pair in lane.permutation}
    for rank, row in enumerate(table):
        expected = {b for a, b in pairs if a == rank} | {a for a, b in pairs if b == rank}
        assert set(row.tolist()) - {-1} == expected
    idle = lower(build_schedule(HOLE, "ring"), with_idle=True).reduce_scatter
    assert (partner_table(idle, program.num_ranks)[12:] == -1).all()


def test_headers_name_the_partners_of_lanes():
    program = lower(build_schedule(HOLE, "row_pair"))
    width = partner_table(program.loops, 12).shape[1]
    lanes = [lane for loop in program.loops for lane in loop.lanes]
    for rank in range(12):
        words = rank_headers(program.loops, 12)[rank, width:].reshape(-1, LANE_WORDS)
        for (destination, source, *_), lane in zip(words.tolist(), lanes, strict=True):
            assert source == lane.source[rank]
            assert destination == dict(lane.permutation).get(rank, -1)


@pytest.mark.parametrize(
    ("rows", "max_rows", "expected"),
    [
        (8, 512, (1, 8, 8)),
        (400, 512, (3, 136, 128)),
        (4000, 512, (8, 504, 472)),
        (96, 8, (12, 8, 8)),
    ],
)
def test_pieces_fill_a_transfer(rows, max_rows, expected):
    (loop, _) = lower(build_schedule(Topology.grid("2x2"), "ring")).loops
    (split,) = split_loops((loop,), chunk_rows=rows, tile=8, max_rows=max_rows)
    assert (split.num_pieces, *split.rows[0]) == expected
    assert (split.num_pieces - 1) * split.rows[0][0] + split.rows[0][1] == rows


def test_the_kernel_for_tpus_does_not_grow_with_the_rounds(monkeypatch):
    monkeypatch.setattr(pallas, "is_interpreted", lambda program: False)

    def lowered_text(shape):
        plan = ftmesh.plan(cpu_grid(shape), "ring", executor="pallas")
        mesh = plan.jax_mesh("data")
        run = jax.shard_map(
            lambda x: plan.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        x = jax.ShapeDtypeStruct((mesh.size * 1_000_000,), np.float32)
        return jax.jit(run).trace(x).lower(lowering_platforms=("tpu",)).as_text()

    small, large = lowered_text("4x4"), lowered_text("8x8")
    assert small.count("tpu_custom_call") == large.count("tpu_custom_call") == 1
    kernel = [next(line for line in text.splitlines() if "tpu_custom_call" in line)
              for text in (small, large)]  # fmt: skip
    assert len(kernel[1]) < 1.02 * len(kernel[0])
