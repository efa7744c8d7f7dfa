"""The check that a mesh has the devices of a plan in order, along one axis or one of several."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ftmesh import CollectiveError
from ftmesh.execute.context import check_mesh_devices
from tests.support.on_devices import plan_on_cpu


@dataclass(frozen=True)
class Chip:
    """A device with the coordinates that a TPU's has."""

    coords: tuple[int, ...]
    slice_index: int = 0
    core_on_chip: int = 0


PLANE = [Chip((x, y, 0)) for y in range(2) for x in range(2)]


def above(chips, z):
    return [Chip((x, y, z)) for x, y, _ in (chip.coords for chip in chips)]


def check(*lines, expected=PLANE):
    devices = np.empty((len(lines[0]), len(lines)), object)
    for i, line in enumerate(lines):
        devices[:, i] = line
    check_mesh_devices(devices, ("data", "model"), "data", expected)


class TestLines:
    def test_one_line_is_the_plans_and_the_others_have_its_shape(self):
        check(PLANE)
        check(PLANE, above(PLANE, 1), above(PLANE, 2))
        check(above(PLANE, 1), PLANE)
        check(PLANE, [Chip(chip.coords, slice_index=1) for chip in PLANE])

    def test_another_order(self):
        other = [PLANE[i] for i in (0, 2, 1, 3)]
        with pytest.raises(CollectiveError, match=r"rank 1 should be .*1, 0, 0.* and is .*0, 1, 0"):
            check(other, above(PLANE, 1))
        with pytest.raises(CollectiveError, match=r"has several lines of devices.*\(0, 1, 1\)"):
            check(PLANE, above(other, 1))

    def test_no_line_is_the_plans(self):
        with pytest.raises(CollectiveError, match="the plan is for other devices"):
            check(above(PLANE, 1), above(PLANE, 2))

    def test_a_line_over_two_slices(self):
        torn = [Chip(chip.coords, slice_index=1 + i // 2) for i, chip in enumerate(PLANE)]
        with pytest.raises(CollectiveError, match="has several lines of devices"):
            check(PLANE, torn)

    def test_a_plan_with_several_lines_needs_all_of_them(self):
        """A plan on tiles has one line per position; the mesh may have more."""
        first, second = (above(PLANE, z) for z in (0, 1))
        lines = np.empty((len(PLANE), 3), object)
        lines[:, 0], lines[:, 1], lines[:, 2] = second, above(PLANE, 2), first
        check_mesh_devices(lines, ("data", "model"), "data", first, second)
        with pytest.raises(CollectiveError, match=r"rank 0 should be .*\(0, 0, 1\).* and is "):
            check_mesh_devices(lines[:, 1:], ("data", "model"), "data", first, second)
        lines[2:, 0] = second[:1:-1]
        with pytest.raises(CollectiveError, match=r"rank 2 should be .* make the mesh with plan"):
            check_mesh_devices(lines, ("data", "model"), "data", first, second)

    def test_unknown_devices_are_not_checked(self):
        check(above(PLANE, 1), expected=())
        check_mesh_devices(np.array(PLANE), ("other",), "data", PLANE)  # the axis is that of a vmap


@pytest.fixture
def plan():
    """On devices 0 and 1, and then 3 and 2 below them: once around."""
    return plan_on_cpu("ring", "2x2", "")


def run(plan, mesh, axis_names=("data",)):
    body = jax.shard_map(
        lambda x: plan.psum(x[0], "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        axis_names=set(axis_names),
    )
    return jax.jit(body)(np.arange(4.0))


class TestMeshes:
    def grid(self, lines):
        return Mesh(np.array(jax.devices())[np.array(lines)], ("model", "data"))

    def test_a_mesh_with_two_axes(self, plan):
        for axis_names in (("data",), ("data", "model")):
            assert run(plan, self.grid([[4, 5, 7, 6], [0, 1, 3, 2]]), axis_names) == 6
            with pytest.raises(CollectiveError, match=r"rank 1 should be .* and is "):
                run(plan, self.grid([[4, 5, 7, 6], [0, 3, 1, 2]]), axis_names)
            with pytest.raises(CollectiveError, match=r"rank 0 should be .* and is "):
                run(plan, self.grid([[4, 5, 7, 6], [8, 9, 11, 10]]), axis_names)

    def test_an_abstract_mesh_with_a_mesh_set(self, plan):
        """JAX knows the devices when it lowers, not when it traces."""
        devices = np.array(jax.devices())
        right, wrong = (Mesh(devices[order], "data") for order in ([0, 1, 3, 2], [1, 0, 3, 2]))
        for mesh in (None, right.abstract_mesh):
            with jax.set_mesh(right):
                assert run(plan, mesh) == 6
            with jax.set_mesh(wrong), pytest.raises(CollectiveError, match="rank 0 should be"):
                run(plan, mesh)
