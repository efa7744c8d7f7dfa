"""How a program grows with the mesh: not in operations, and by a fixed number of bytes a rank."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import Topology
from tests.support.slow import slow

MESHES = [("8x8", "2x2@2,2"), ("16x32", "4x2@6,14"), ("32x32", "4x2@14,14")]


def lowered(shape, failed, algorithm):
    """The text of a sum over so many devices, none of which is here, and their number."""
    plan = ftmesh.plan(Topology.grid(shape, failed=failed), algorithm)
    ranks = plan.program.num_ranks
    run = jax.shard_map(
        lambda x: plan.psum(x[0], "data"),
        mesh=AbstractMesh((ranks,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=P("data"),
        out_specs=P(),
        check_vma=False,
    )
    traced = jax.jit(run).trace(jax.ShapeDtypeStruct((ranks, 100_000), np.float32))
    return traced.lower(lowering_platforms=("tpu",)).as_text(), ranks


@pytest.mark.parametrize(("algorithm", "bytes_per_rank"), [("ring", 300), slow("row_pair", 1300)])
def test_only_constants_grow_with_the_mesh(algorithm, bytes_per_rank):
    """Constants are all that grows: who sends to whom, a pair for each rank, and tables of chunks.

    Nothing is left out of the count.
    """
    small, middle, large = (lowered(*mesh, algorithm) for mesh in MESHES)
    assert len({len(text.splitlines()) for text, _ in (small, middle, large)}) == 1
    for text, ranks in (middle, large):
        assert (len(text) - len(small[0])) / (ranks - small[1]) < bytes_per_rank
