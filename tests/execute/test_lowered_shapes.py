"""Lowered rings on tori and on three axes, run with NumPy."""

import numpy as np
import pytest

from ftmesh import Topology
from ftmesh.algorithms import registry
from ftmesh.execute.check_lowered import check_program
from ftmesh.execute.lowering import Rule, lower
from tests.support.numpy_executor import run

CASES = [
    ("multi_ring", Topology.grid("3x4", wrap=True), 1),
    ("multi_ring", Topology.grid("3x3", wrap=True), 2),
    ("multi_ring", Topology.grid("3x3x3", wrap=True), 1),
    ("multi_ring", Topology.grid("3x3x2", wrap=(True, True, False)), 1),
    ("ring", Topology.grid("3x5", wrap=True), 1),
    ("ring", Topology.grid("5x5", failed="2x2@1,1", wrap=True), 1),
    ("ring", Topology.grid("4x2x2", failed="2x2x1@0,0,0", failed_links="3,0,0-3,0,1"), 2),
    ("two_dim", Topology.grid("3x3x3"), 1),
    ("two_dim", Topology.grid("2x3x4", wrap=(True, False, True)), 1),
    ("two_dim", Topology.grid("2x2x3", wrap=True), 2),
]


@pytest.mark.parametrize(("algorithm", "topology", "devices_per_chip"), CASES, ids=str)
def test_every_device_ends_with_the_sum(algorithm, topology, devices_per_chip):
    schedule = registry.build_schedule(topology, algorithm)
    program = lower(schedule, devices_per_chip=devices_per_chip)
    check_program(program)
    held = np.random.default_rng(0).integers(0, 100, (program.num_ranks, program.num_chunks))
    assert (run(program, held.copy()) == held.sum(axis=0)).all()


def test_every_direction_is_one_permutation_without_a_table():
    schedule = registry.build_schedule(Topology.grid("4x4x4", wrap=True), "multi_ring")
    for loop in lower(schedule).loops:
        assert len(loop.lanes) == 6
        assert all(isinstance(lane.send, Rule) and lane.is_full for lane in loop.lanes)


def test_idle_chips_of_three_axes_get_the_sum():
    topology = Topology.grid("4x4x2", failed="2x2x1@0,0,0")
    program = lower(registry.build_schedule(topology, "ring"), with_idle=True)
    check_program(program)
    held = np.random.default_rng(0).integers(0, 100, (program.num_ranks, program.num_chunks))
    assert (run(program, held.copy()) == held[program.live].sum(axis=0)).all()
