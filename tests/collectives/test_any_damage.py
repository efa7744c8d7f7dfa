"""Collectives where no ring fits: sums along trees, and by a flood where chips own a share."""

import numpy as np
import pytest

import ftmesh
from ftmesh import Topology
from ftmesh.algorithms import grouped_flood
from ftmesh.algorithms.building_blocks import mirrored_all_reduce
from ftmesh.testing import on_one_device

pytestmark = pytest.mark.usefixtures("quick_compiler")

MESHES = [
    Topology.grid("5x4", failed="1x1@1,1;1x1@3,2", failed_links="0,0-1,0"),
    Topology.grid("3x3x3", failed="1x1x1@1,1,1;2x1x1@0,0,2", wrap=(True, False, True)),
]


@pytest.mark.parametrize("topology", MESHES, ids=str)
def test_integer_collectives_are_exact(topology):
    plan = ftmesh.plan(topology)
    assert (plan.algorithm, plan.with_reduce_scatter.algorithm) == ("tree", "flood")
    assert plan.for_payload(37 * 4).algorithm == "tree"
    assert plan.for_payload(37 * 4).schedule.num_chunks < plan.schedule.num_chunks
    check_collectives(plan)


@pytest.mark.slow
@pytest.mark.parametrize("topology", MESHES, ids=str)
def test_floods_in_groups_are_exact(topology):
    """As on thousands of chips: here five shares travel together, and some alone."""
    phases, owner = grouped_flood.build_phases(topology, 5)
    assert len(owner) % 5
    assert len(phases) == 2
    schedule = mirrored_all_reduce(topology, "flood", len(owner), phases, owner)
    plan = ftmesh.Plan.from_schedule(schedule)
    assert plan.with_reduce_scatter is plan
    assert (plan.program.owned_chunks.ravel() == np.arange(topology.num_live)).all()
    check_collectives(plan)


def check_collectives(plan):
    live = plan.topology.num_live
    rng = np.random.default_rng(0)
    leaves, rows, own = (
        rng.integers(-1000, 1000, (live, *shape), np.int32) for shape in ((37,), (live, 3), (5,))
    )

    def run(leaves, rows, own):
        return (
            plan.psum(leaves, "data"),
            plan.psum_scatter(rows, "data"),
            plan.all_gather(own, "data"),
        )

    total, share, every = on_one_device(run)(leaves, rows, own)
    np.testing.assert_array_equal(total, np.broadcast_to(leaves.sum(axis=0), leaves.shape))
    np.testing.assert_array_equal(share, rows.sum(axis=0))
    np.testing.assert_array_equal(every, np.broadcast_to(own, (live, *own.shape)))
