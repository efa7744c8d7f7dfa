"""`multi_ring` on tori, and how circuits are joined."""

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest

import ftmesh
from ftmesh import PlanError, Topology, verify
from ftmesh.algorithms import registry, rings
from ftmesh.algorithms.building_blocks import bidirectional_rings
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import addition_depth
from ftmesh.topology.join_circuits import axis_links, join_circuits, wrapping_axes

TORI = [*product(range(3, 8), repeat=2), (4, 13), (3, 20), (3, 3, 3), (3, 4, 5), (4, 4, 8)]
PARTIAL_TORI = [  # with an axis of two chips, or one that does not wrap
    ("2x4x4", True, 2),
    ("3x4x2", True, 2),
    ("5x3x3", (True, True, False), 2),
    ("4x2x3", (True, False, True), 2),
]


def cables(walk):
    return {frozenset(link) for link in pairwise([*walk, walk[0]])}


@pytest.mark.parametrize("shape", TORI, ids=str)
def test_circuits_of_a_torus_use_every_cable_once(shape):
    topo = Topology.grid(shape, wrap=True)
    walks = join_circuits(topo, [axis_links(topo, axis) for axis in range(len(shape))])
    for walk in walks:
        assert sorted(walk) == sorted(topo.coords)
    assert sum(len(cables(walk)) for walk in walks) == len(topo.links) // 2
    assert set().union(*map(cables, walks)) == {frozenset(link) for link in topo.links}


@pytest.mark.parametrize("shape", ["3x3", "4x6", "5x7", "4x4x4", "3x4x3"])
def test_every_link_is_used_in_every_round(shape):
    topo = Topology.grid(shape, wrap=True)
    schedule = registry.build_schedule(topo, "multi_ring")
    verify(schedule)
    assert schedule.is_neighbour_only
    assert schedule.num_rounds == 2 * (topo.num_live - 1)
    for phase in schedule.phases:
        loads = schedule.link_loads(phase)
        assert set(loads) == set(topo.links)
        assert set(loads.values()) == {topo.num_live - 1}
    bound = ftmesh.limits(topo).all_gather
    assert Fraction(topo.num_live - 1, schedule.num_chunks) == bound
    assert ftmesh.limits(topo).all_reduce == 2 * bound


@pytest.mark.parametrize(("shape", "wrap", "count"), PARTIAL_TORI)
def test_axes_without_rings_add_no_circuit(shape, wrap, count):
    topo = Topology.grid(shape, wrap=wrap)
    schedule = registry.build_schedule(topo, "multi_ring")
    verify(schedule)
    assert len(wrapping_axes(topo)) == count
    assert schedule.phases[0].lanes == list(range(2 * count))
    assert len(schedule.link_loads(schedule.phases[0])) == 2 * count * topo.num_live


@pytest.mark.parametrize(
    ("topo", "says"),
    [
        (Topology.grid("4x4"), "of 4x4 none wraps"),
        (Topology.grid("4x4", wrap=(True, False)), "of 4x4 one wraps"),
        (Topology.grid("2x4", wrap=True), "of 2x4 one wraps"),
        (Topology.grid("8", wrap=True), "of 8 one wraps"),
        (Topology.grid("4x4", failed="1x1@0,0", wrap=True), "the mesh is damaged"),
        (Topology.grid("4x4", failed_links="0,0-3,0", wrap=True), "the mesh is damaged"),
    ],
    ids=str,
)
def test_meshes_it_does_not_work_on_raise(topo, says):
    with pytest.raises(PlanError, match=says):
        rings.build_multi_ring(topo)


def test_circuits_that_no_square_joins_raise():
    """Two rings with a single cable between them."""
    topo = Topology.grid("3x2", wrap=True, failed_links="0,0-0,1;1,0-1,1")
    with pytest.raises(PlanError, match="squares of four chips, and 2 are left"):
        join_circuits(topo, [axis_links(topo, 0)])


def test_a_circuit_that_visits_a_chip_twice_raises():
    topo = Topology.grid("3x3", wrap=True)
    (walk, _) = join_circuits(topo, [axis_links(topo, axis) for axis in (0, 1)])
    broken = [*walk[:4], walk[2], *walk[5:]]
    with pytest.raises(ftmesh.ScheduleError, match="a rank is on it twice"):
        bidirectional_rings(topo, [broken], algorithm="multi_ring", name="broken")


def test_a_circuit_with_a_jump_or_a_failed_link_is_not_neighbour_only():
    topo = Topology.grid("3x3", wrap=True)
    walk = join_circuits(topo, [axis_links(topo, 0)])[0]
    jumps = [walk[2], walk[1], walk[0], *walk[3:]]
    damaged = Topology.grid("3x3", failed_links=[walk[:2]], wrap=True)
    for mesh, chips in ((topo, jumps), (damaged, walk)):
        proof = verify(bidirectional_rings(mesh, [chips], algorithm="ring", name="broken"))
        assert not proof.is_neighbour_only
    assert verify(
        bidirectional_rings(topo, [walk], algorithm="ring", name="whole")
    ).is_neighbour_only


@pytest.mark.parametrize(
    ("shape", "payload_bytes", "algorithm"),
    [
        ("4x4", 10**4, "two_dim"),
        ("8x8", 10**9, "two_dim"),
        ("4x16", 10**9, "multi_ring"),
        ("4x16", 10**6, "row_pair"),
    ],
)
def test_auto_chooses_the_fastest_with_a_reduce_scatter(shape, payload_bytes, algorithm):
    topo = Topology.grid(shape, wrap=True)
    plan = ftmesh.plan(topo, payload_bytes=payload_bytes, reduce_scatter=True)
    assert plan.algorithm == algorithm


@pytest.mark.parametrize("algorithm", ["ring", "multi_ring"])
def test_the_depth_of_ring_rules_is_that_of_their_transfers(algorithm):
    schedule = registry.build_schedule(Topology.grid("3x4", wrap=True), algorithm)
    (phase,) = schedule.reduce_scatter
    rows = Phase(phase.name, phase.transfers)
    assert addition_depth([phase], 12, schedule.num_chunks) == 11
    assert addition_depth([rows], 12, schedule.num_chunks) == 11
    twice = Phase("twice", (phase.content[0], replace(phase.content[1], first_chunk=np.int32([1]))))
    same = Phase("twice", twice.transfers)
    assert addition_depth([twice], 12, 24) == addition_depth([same], 12, 24) == 13


def test_tiles_of_a_torus():
    tiles = ftmesh.TiledTopology.from_topology(Topology.grid("8x6", wrap=True), "2x2")
    plan = ftmesh.plan(tiles, "multi_ring")
    assert plan.proof.num_positions == 4
    assert plan.schedule.num_rounds == 2 * 11
