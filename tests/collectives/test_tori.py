"""Collectives on tori and in three dimensions, on integers."""

import numpy as np
import pytest

import ftmesh
from ftmesh import Topology
from ftmesh.testing import on_one_device

pytestmark = pytest.mark.usefixtures("quick_compiler")

CASES = [
    ("multi_ring", Topology.grid("3x3", wrap=True)),
    ("ring", Topology.grid("4x2x2", failed="2x2x1@0,0,0")),
    pytest.param("ring", Topology.grid("3x5", failed="1x2@1,1", wrap=True), marks=pytest.mark.slow),
    pytest.param("multi_ring", Topology.grid("3x4x3", wrap=True), marks=pytest.mark.slow),
    pytest.param("two_dim", Topology.grid("2x3x2"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("algorithm", "topology"), CASES, ids=str)
def test_integer_collectives_are_exact(algorithm, topology):
    plan = ftmesh.plan(topology, algorithm)
    live = topology.num_live
    rng = np.random.default_rng(0)
    leaves, rows = (
        rng.integers(-1000, 1000, (live, *shape), np.int32) for shape in ((37,), (live, 3))
    )

    def run(leaves, rows):
        return plan.psum(leaves, "data"), plan.psum_scatter(rows, "data")

    total, share = on_one_device(run)(leaves, rows)
    np.testing.assert_array_equal(total, np.broadcast_to(leaves.sum(axis=0), leaves.shape))
    np.testing.assert_array_equal(share, rows.sum(axis=0))
