"""What the ranks read while a Pallas kernel runs, against the program it is made of."""

from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import Topology
from ftmesh.algorithms.registry import schedule
from ftmesh.execute import pallas
from ftmesh.execute.lowering import IDLE, lower
from ftmesh.execute.pallas_tables import LANE_WORDS, SLOTS, cuts, headings, pages, partners
from ftmesh.testing import cpu_grid
from tests.support.trees import tree_schedule

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOLE = Topology.grid("4x4", failed="2x2@2,2")


@pytest.mark.parametrize(
    ("algorithm", "with_idle"), [("ring", True), ("row_pair", False), ("tree", False)]
)
def test_ranks_read_what_the_program_says(algorithm, with_idle):
    planned = tree_schedule(HOLE, 6) if algorithm == "tree" else schedule(HOLE, algorithm)
    program = lower(planned, with_idle=with_idle)
    every = cuts(program.loops, chunk_rows=24, tile=8, most=8)
    assert all(cut.num == 3 for cut in every)
    in_front = headings(program.loops, program.num_ranks)
    width = partners(program.loops, program.num_ranks).shape[1]
    read = np.asarray(jax.jit(jax.vmap(partial(pages, every, num_partners=width)))(in_front))
    for cut in every:
        table = read[:, cut.first_page : cut.first_page + cut.num_pages]
        rounds = table.reshape(program.num_ranks, -1, table.shape[-1])[:, : cut.loop.num_rounds]
        for number, lane in enumerate(cut.loop.lanes):
            sent, received = rounds[:, :, 2 * number], rounds[:, :, 2 * number + 1]
            senders, receivers = np.array(lane.permutation).T
            # Sender and receiver agree on the slot too.
            np.testing.assert_array_equal(sent[senders], received[receivers])
            for words, ranks in ((sent, senders), (received, receivers)):
                others = np.setdiff1d(np.arange(program.num_ranks), ranks)
                assert (words[others] == IDLE).all()
            said = lane.send.chunks(cut.loop.num_rounds)[senders]
            words = sent[senders]
            np.testing.assert_array_equal(np.where(words < 0, IDLE, words // SLOTS), said)
            before = np.cumsum(words >= 0, axis=1) - (words >= 0)
            np.testing.assert_array_equal(
                (words % SLOTS)[words >= 0], (3 * before % SLOTS)[words >= 0]
            )


def test_partners_are_those_of_any_lane():
    program = lower(schedule(HOLE, "ring"), with_idle=True)
    table = partners(program.loops, program.num_ranks)
    pairs = {pair for loop in program.loops for lane in loop.lanes for pair in lane.permutation}
    for rank, row in enumerate(table):
        met = {b for a, b in pairs if a == rank} | {a for a, b in pairs if b == rank}
        assert set(row.tolist()) - {-1} == met
    idle = lower(schedule(HOLE, "ring"), with_idle=True).scatter
    assert (partners(idle, program.num_ranks)[[10, 11, 14, 15]] == -1).all()


def test_lanes_name_their_partners():
    program = lower(schedule(HOLE, "row_pair"))
    width = partners(program.loops, 12).shape[1]
    lanes = [lane for loop in program.loops for lane in loop.lanes]
    for rank in range(12):
        words = headings(program.loops, 12)[rank, width:].reshape(-1, LANE_WORDS)
        for (destination, source, *_), lane in zip(words.tolist(), lanes, strict=True):
            assert source == lane.source[rank]
            assert destination == dict(lane.permutation).get(rank, -1)


@pytest.mark.parametrize(
    ("rows", "most", "expected"),
    [
        (8, 512, (1, 8, 8)),
        (400, 512, (3, 136, 128)),
        (4000, 512, (8, 504, 472)),
        (96, 8, (12, 8, 8)),
    ],
)
def test_pieces_fill_a_transfer(rows, most, expected):
    (loop, _) = lower(schedule(Topology.grid("2x2"), "ring")).loops
    (cut,) = cuts((loop,), chunk_rows=rows, tile=8, most=most)
    assert (cut.num, *cut.rows[0]) == expected
    assert (cut.num - 1) * cut.rows[0][0] + cut.rows[0][1] == rows


def test_the_kernel_for_tpus_does_not_grow_with_the_rounds(monkeypatch):
    monkeypatch.setattr(pallas, "is_interpreted", lambda program: False)

    def text(shape):
        plan = ftmesh.plan(cpu_grid(shape), "ring", executor="pallas")
        mesh = plan.jax_mesh("data")
        run = jax.shard_map(
            lambda x: plan.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
        x = jax.ShapeDtypeStruct((mesh.size * 1_000_000,), np.float32)
        return jax.jit(run).trace(x).lower(lowering_platforms=("tpu",)).as_text()

    small, large = text("4x4"), text("8x8")
    assert small.count("tpu_custom_call") == large.count("tpu_custom_call") == 1
    kernel = [next(line for line in each.splitlines() if "tpu_custom_call" in line)
              for each in (small, large)]  # fmt: skip
    assert len(kernel[1]) < 1.02 * len(kernel[0])
