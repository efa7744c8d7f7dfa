"""Chunks that travel as two streams, one half behind the other: the same bits, and by price."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import Topology
from ftmesh.algorithms import registry
from ftmesh.execute.context import OWN, Setting, Wire
from ftmesh.execute.lowering import lower
from ftmesh.execute.ppermute import Rows, run_loops
from ftmesh.testing import cpu_grid

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOLE = Topology.grid("4x4", failed="2x2@2,2")
HALF = Wire(jnp.bfloat16, jnp.bfloat16)


def ran(program, held, wire=OWN):
    """The buffers of all ranks after all loops, on one device."""
    setting = Setting("rank", program.num_ranks, wire, emulated=True)

    def run(x):
        return run_loops(x, program.loops, program, setting)

    return np.asarray(jax.jit(jax.vmap(run, axis_name="rank"))(held))


def permutations(run, *args):
    """How many are written down in a function, the ones in loops too."""
    return str(jax.make_jaxpr(run)(*args)).count(" ppermute[")


@pytest.mark.parametrize(
    ("algorithm", "wire"),
    [
        pytest.param("ring", OWN, id="ring-whole"),
        pytest.param("ring", HALF, id="ring-half"),
        pytest.param("row_pair", OWN, id="row_pair-whole"),
        pytest.param("row_pair", HALF, id="row_pair-half", marks=pytest.mark.slow),
        pytest.param("tree", OWN, id="tree-whole", marks=pytest.mark.slow),
        pytest.param("tree", HALF, id="tree-half"),
    ],
)
def test_the_same_bits(algorithm, wire):
    program = lower(registry.schedule(HOLE, algorithm), devices_per_chip=2)
    shape = program.num_ranks, program.num_chunks, 48, 8
    held = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    alike = ran(program.split(lambda loop: 0.0), held, wire)
    np.testing.assert_array_equal(alike, ran(program, held, wire))
    if wire is OWN:
        np.testing.assert_allclose(alike, np.broadcast_to(held.sum(0), shape), atol=1e-4)


@pytest.mark.parametrize(("rows", "streams"), [(1, 1), (16, 1), (31, 1), (32, 2), (40, 2)])
def test_halves_are_whole_tiles_or_there_are_none(rows, streams):
    program = lower(registry.schedule(HOLE, "ring"))
    setting = Setting("rank", program.num_ranks, OWN, emulated=False)
    mesh = jax.make_mesh((12,), ("rank",), (jax.sharding.AxisType.Auto,))

    def run(split_bytes):
        loops = program.split(lambda loop: split_bytes).loops
        body = jax.shard_map(
            lambda x: run_loops(x[0], loops, program, setting)[None],
            mesh=mesh, in_specs=P("rank"), out_specs=P("rank"),
        )  # fmt: skip
        return permutations(body, jnp.zeros((12, program.num_chunks, rows, 8)))

    assert run(0.0) == streams * run(math.inf)
    bytes_of_a_chunk = rows * 8 * 4
    assert run(bytes_of_a_chunk) == run(0.0)
    assert run(bytes_of_a_chunk + 1) == run(math.inf)


@pytest.mark.parametrize("rows", [Rows(0, 48), Rows(16, 32)])
def test_only_the_chunk_is_computed_of_where_rows_are(rows):
    """What is known is written down as a number, so that programs stay small."""
    buffer = jnp.zeros((4, 48, 8, 3))
    for run in (
        lambda chunk: rows.take(buffer, chunk, 2),
        lambda chunk: rows.put(buffer, buffer[:2, : rows.number], chunk),
    ):
        found = str(jax.make_jaxpr(run)(jnp.int32(1)))
        assert found.count(" select_n ") == 1


@pytest.mark.parametrize("algorithm", ["row_pair", "tree"])
def test_large_payloads_of_a_plan_for_v3(algorithm):
    """On the wires alone, for payloads of some kB and where rounds are written out they do not."""
    topology = cpu_grid("4x4", failed="2x2@0,0")

    def found(num_bytes, **how):
        plan = ftmesh.plan(topology, algorithm, payload_bytes=num_bytes, **how)
        body = jax.shard_map(
            lambda x: plan.psum(x, "data"), mesh=plan.jax_mesh("data"), in_specs=P("data"),
            out_specs=P("data"), check_vma=False,
        )  # fmt: skip
        x = jax.ShapeDtypeStruct((12 * num_bytes // 4,), jnp.float32)
        return permutations(body, x) / sum(len(loop.lanes) for loop in plan.program.loops)

    num_bytes = 4 * 10_000_000
    whole = found(num_bytes)
    assert found(num_bytes, link="v3") == 2 * whole
    assert found(40_000, link="v3") == found(40_000)
    assert all(
        loop.split_bytes == math.inf
        for how in ({"unrolled": True, "link": "v3"}, {"link": "v5p"}, {})
        for loop in ftmesh.plan(topology, "ring", **how).program.loops
    )
