"""Floods in groups: every chip owns an equal share, near the bound, on any connected mesh."""

import numpy as np
import pytest

import ftmesh
from ftmesh import Topology, VerificationError, verify
from ftmesh.algorithms import grouped_flood, registry
from ftmesh.algorithms.building_blocks import mirrored_all_reduce
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.proofs import check_sets, uncounted_chunks, ungathered_chunks
from ftmesh.schedule.transfers import ADD, COPY
from ftmesh.schedule.verify import rank_schedules
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.ring_order import ring_order
from tests.algorithms.test_flood import random_damages


def grouped(topology, size=None):
    phases, owner = grouped_flood.build_phases(topology, size)
    return mirrored_all_reduce(topology, "flood", len(owner), phases, owner)


def check(topology, size=None):
    """Prove a schedule by counting and by sets, and return it."""
    schedule = grouped(topology, size)
    proof = verify(schedule)
    assert (proof.num_owners, proof.num_additions) == (
        topology.num_live,
        topology.num_live * (topology.num_live - 1),
    )
    assert schedule.owns_evenly
    assert schedule.is_neighbour_only
    (ranks,) = rank_schedules(schedule)
    assert not len(uncounted_chunks(ranks))
    assert not len(ungathered_chunks(ranks))
    check_sets(ranks, np.arange(schedule.num_chunks))
    return schedule


def rounds_over_bound(topology, schedule):
    """Rounds weighed with what they move, over those of a chip with the fewest links."""
    flood, *rest = schedule.reduce_scatter
    size = int(flood.transfers.count[0])
    fewest = np.bincount(LinkGraph.from_topology(topology).target).min()
    moved = flood.num_rounds * size + sum(phase.num_rounds for phase in rest)
    return moved / ((topology.num_live - 1) / fewest)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_connected_mesh(size):
    for topology in random_damages(8, seed=size):
        schedule = check(topology, min(size, topology.num_live))
        ring = [topology.rank(coord) for coord in ring_order(topology).coords]
        assert schedule.owner.tolist() == ring  # shares are in the order of jax_mesh


def test_one_group_of_all():
    topology = Topology.grid("3x3")
    assert check(topology, 9).reduce_scatter[0].transfers.count.tolist() == [9] * 8


@pytest.mark.parametrize(
    ("shape", "failed", "wrap", "size", "most"),
    [
        ("8x8", "", False, 1, 1.03),
        ("8x8", "2x2@2,2", False, 1, 1.13),
        ("16x16", "4x2@4,4", False, 1, 1.06),
        ("16x16", "2x2@2,2", True, 1, 1.05),
        ("16x32", "4x2@6,14", False, 2, 1.05),
        ("4x4x8", "2x2x1@0,0,0", False, 1, 1.1),
        ("4x4x8", "2x2x1@0,0,0", True, 1, 1.12),
        pytest.param("8x16x16", "2x2x1@2,2,3", True, None, 1.1, marks=pytest.mark.slow),
    ],
)
def test_near_the_bound_of_a_reduce_scatter(shape, failed, wrap, size, most):
    topology = Topology.grid(shape, failed=failed, wrap=wrap)
    schedule = grouped(topology, size)
    verify(schedule)
    assert rounds_over_bound(topology, schedule) < most


def test_trees_span_the_mesh_and_use_links_evenly():
    topology = Topology.grid("4x4x8", failed="2x2x1@0,0,0", wrap=True)
    graph = LinkGraph.from_topology(topology)
    roots = np.arange(graph.num_ranks, dtype=np.int32)
    trees = grouped_flood.grow_trees(graph, roots, np.ones(len(roots), np.intp))
    for root, tree in enumerate(trees):
        assert (tree == -1).nonzero()[0].tolist() == [root]
        reached = {root}
        for _ in range(graph.num_ranks):
            reached |= {r for r in range(graph.num_ranks) if graph.source[tree[r]] in reached}
        assert len(reached) == graph.num_ranks
    uses = np.bincount(trees[trees >= 0], minlength=graph.num_links)
    assert uses.max() == -(-len(roots) // 5)  # five links lead to the chips next to the hole


@pytest.mark.slow
def test_large_tori():
    """More chips than a flood of single shares is planned for; also with shares left over."""
    topology = Topology.grid("12x10x10", failed="2x2x1@2,2,3;1x1x1@9,9,9", wrap=True)
    schedule = registry.build_schedule(topology, "flood")
    verify(schedule)
    assert topology.num_live % int(schedule.phases[0].transfers.count[0])
    assert rounds_over_bound(topology, schedule) < 1.15
    plan = ftmesh.plan(topology, link="v5p", executor="ppermute", reduce_scatter=True)
    assert plan.algorithm == "flood"


SMALL = grouped(Topology.grid("3x3", failed="1x1@0,0"), 3)


class TestPlantedFaults:
    """Counting accepts nothing that sets reject."""

    def changed(self, phase, **columns):
        phases = list(SMALL.reduce_scatter)
        phases[phase] = Phase("changed", phases[phase].transfers.replace(**columns))
        return [(each.name, each.content) for each in phases]

    def verify_changed(self, phase, **columns):
        phases = self.changed(phase, **columns)
        args = SMALL.topology, "flood", SMALL.num_chunks, phases, SMALL.owner
        verify(mirrored_all_reduce(*args))

    def test_a_share_that_is_handed_over_by_an_addition(self):
        op = SMALL.phases[1].transfers.op.copy()
        op[np.flatnonzero(op == COPY)[0]] = ADD
        with pytest.raises(VerificationError, match="chunk"):
            self.verify_changed(1, op=op)

    def test_a_sum_that_is_copied_too_early(self):
        op = SMALL.phases[0].transfers.op.copy()
        op[0] = COPY
        with pytest.raises(VerificationError, match="missing"):
            self.verify_changed(0, op=op)

    def test_random_changes(self):
        rng = np.random.default_rng(0)
        wrong = 0
        for _ in range(60):
            number = int(rng.integers(2))
            transfers = SMALL.reduce_scatter[number].transfers
            name, most = [
                ("chunk", SMALL.num_chunks - 2),
                ("op", 2),
                ("round", SMALL.reduce_scatter[number].num_rounds),
                ("src", 8),
                ("dst", 8),
            ][rng.integers(5)]
            column = getattr(transfers, name).copy()
            column[rng.integers(len(column))] = rng.integers(most)
            try:
                phases = self.changed(number, **{name: column})
                mutant = mirrored_all_reduce(
                    SMALL.topology, "flood", SMALL.num_chunks, phases, SMALL.owner
                )
            except ftmesh.FtmeshError:
                continue  # no schedule at all
            (ranks,) = rank_schedules(mutant)
            try:
                check_sets(ranks, np.arange(SMALL.num_chunks))
            except VerificationError:
                wrong += 1
                assert len(uncounted_chunks(ranks)) or len(ungathered_chunks(ranks))
        assert wrong > 20
