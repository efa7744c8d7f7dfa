"""Topology.from_devices with fake devices, real CPU devices and real TPU topologies."""

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

import ftmesh
from ftmesh import Topology, TopologyError, TopologyWarning


@dataclass(frozen=True)
class FakeTpu:
    """A fake TPU device; its coords always have three axes."""

    coords: tuple[int, int, int]
    core_on_chip: int = 0
    slice_index: int = 0


@dataclass(frozen=True)
class FakeCpu:
    """A fake device without coords."""

    id: int


def tpu_slice(width, height, cores=1):
    """A slice as libtpu lists it: host by host, 2x2 chips each, not in the order of ids."""
    return [
        FakeTpu((hx + x, hy + y, 0), core)
        for hy in range(0, height, 2)
        for hx in range(0, width, 2)
        for y in range(2)
        for x in range(2)
        for core in range(cores)
    ]


def grid_of(devices, **options):
    """The topology of `devices`, without them."""
    return Topology.from_devices(devices, **options).without_devices()


def test_tpu_coords_place_devices_and_axes_of_size_one_are_dropped():
    devices = tpu_slice(4, 4)
    topo = Topology.from_devices(devices)
    assert topo.without_devices() == Topology.grid("4x4")
    assert [d.coords[:2] for d in topo.devices] == list(topo.coords)


def test_missing_coords_are_failed():
    devices = [d for d in tpu_slice(8, 8) if d.coords[:2] not in {(2, 2), (3, 2), (2, 3), (3, 3)}]
    topo = Topology.from_devices(devices)
    assert topo.without_devices() == Topology.grid("8x8", failed="2x2@2,2")
    assert len(topo.devices) == 60


def test_shape_reveals_missing_chips_at_the_edge():
    devices = [d for d in tpu_slice(4, 4) if d.coords[1] < 2]
    assert grid_of(devices) == Topology.grid("4x2")
    assert grid_of(devices, shape="4x4") == Topology.grid("4x4", failed="4x2@0,2")
    assert grid_of(devices, shape="4x4x1") == Topology.grid("4x4", failed="4x2@0,2")
    with pytest.raises(TopologyError, match="outside the given shape 2x2"):
        Topology.from_devices(devices, shape="2x2")
    with pytest.raises(TopologyError, match="shape 4x4 has more axes than the devices' coords"):
        Topology.from_devices([FakeTpu((0,))], shape="4x4")


def test_grid_coords_start_at_zero_wherever_the_slice_starts():
    devices = [FakeTpu((4 + x, 2 + y, 0)) for y in range(4) for x in range(4)]
    assert grid_of(devices) == Topology.grid("4x4")
    damaged = grid_of(devices, failed="2x2@4,2")  # in the devices' coords
    assert damaged == Topology.grid("4x4", failed="2x2@0,0")


@pytest.mark.parametrize(
    "links", ["4,2-5,2;7,5-7,4", "4,2,0-5,2,0;7,5,0-7,4,0", "4,2-5,2;7,4,0-7,5,0"]
)
def test_failed_links_use_the_coords_of_the_devices(links):
    devices = [FakeTpu((4 + x, 2 + y, 0)) for y in range(4) for x in range(4)]
    topo = Topology.from_devices(devices, failed="1x1x1@6,3,0", failed_links=links)
    assert topo.failed == {(2, 1)}
    assert topo.failed_links == {((0, 0), (1, 0)), ((3, 2), (3, 3))}
    assert not topo.is_link((0, 0), (1, 0))


def test_a_failed_wrapping_link_uses_the_coords_of_the_devices():
    devices = [FakeTpu((4 + x, 2 + y, 0)) for y in range(4) for x in range(4)]
    topo = Topology.from_devices(devices, failed_links="7,2-4,2", wrap=True)
    assert topo.failed_links == {((0, 0), (3, 0))}


def test_failed_links_of_missing_chips_are_skipped():
    devices = [d for d in tpu_slice(4, 4) if d.coords[0] > 0]
    assert (
        Topology.from_devices(devices, failed_links="0,0-1,0;0,1-0,2").failed_links == frozenset()
    )
    with pytest.raises(TopologyError, match="failed link 3,0-4,0 is not inside mesh 3x4"):
        Topology.from_devices(devices, failed_links="3,0-4,0")
    with pytest.raises(TopologyError, match="is not a neighbour of"):
        Topology.from_devices(devices, failed_links="1,0-3,0")


def test_ftmesh_failed_uses_the_coords_of_the_devices(monkeypatch):
    devices = [FakeTpu((4 + x, 2 + y, 0)) for y in range(4) for x in range(4)]
    monkeypatch.setenv("FTMESH_FAILED", "2x1x1@7,5,0;1x1@4,2;2x2@0,0")
    says = "names 1x1x1@8,5,0;2x2@0,0, which is not on mesh 4x4, whose chips are 4,2 to 7,5"
    with pytest.warns(TopologyWarning, match=says):
        topo = Topology.from_devices(devices)
    assert topo.failed == {(3, 3), (0, 0)}


def test_failed_chips_below_the_slice_are_skipped():
    devices = [d for d in tpu_slice(4, 4) if d.coords[0] > 0]
    assert grid_of(devices, failed="1x4@0,0") == Topology.grid("3x4")


def test_devices_from_an_array_or_a_generator():
    devices = tpu_slice(4, 4)
    grid = np.empty((4, 4), object)
    grid.flat = devices
    assert grid_of(grid) == Topology.grid("4x4")
    assert grid_of(d for d in devices) == Topology.grid("4x4")


def test_topologies_with_other_devices_differ():
    ours, theirs = ([FakeCpu(first + i) for i in range(8)] for first in (0, 8))
    topo = Topology.from_devices(ours, shape="4x2", failed="1x1@3,1")
    same = Topology.from_devices([FakeCpu(i) for i in range(8)], shape="4x2", failed="1x1@3,1")
    other = Topology.from_devices(theirs, shape="4x2", failed="1x1@3,1")
    assert topo == same
    assert hash(topo) == hash(same)
    assert topo != other
    assert len({topo, same, other}) == 2
    assert topo != topo.without_devices()
    assert topo.without_devices() == other.without_devices()
    assert topo.without_devices() == Topology.grid("4x2", failed="1x1@3,1")


def test_topologies_with_another_idle_device_differ():
    devices = [FakeCpu(i) for i in range(8)]
    topo = Topology.from_devices(devices, shape="4x2", failed="1x1@3,1")
    other = Topology.from_devices([*devices[:-1], FakeCpu(99)], shape="4x2", failed="1x1@3,1")
    assert topo.devices == other.devices
    assert topo != other


def test_two_devices_per_chip():
    topo = Topology.from_devices(tpu_slice(4, 4, cores=2), failed="2x2@0,0")
    assert topo.devices_per_chip == 2
    assert topo.num_live == 12
    assert [(d.coords[:2], d.core_on_chip) for d in topo.devices[:3]] == [
        ((2, 0), 0), ((2, 0), 1), ((3, 0), 0),
    ]  # fmt: skip


def test_a_chip_with_one_of_two_cores_counts_as_failed_with_a_warning():
    devices = [d for d in tpu_slice(4, 4, cores=2) if d != FakeTpu((2, 1, 0), 1)]
    with pytest.warns(TopologyWarning, match=r"chip \(2, 1\) has 1 of 2 devices.*failed"):
        topo = Topology.from_devices(devices)
    assert topo.failed == {(2, 1)}


def test_two_devices_on_one_coord_raise():
    with pytest.raises(TopologyError, match=r"claim core 0 of the chip at \(0, 0, 0\)"):
        Topology.from_devices([*tpu_slice(4, 4), FakeTpu((0, 0, 0), 0.0)])


def test_three_dimensional_slices():
    devices = [FakeTpu((x, y, z)) for z in range(4) for y in range(4) for x in range(4)]
    assert Topology.from_devices(devices, wrap=True).shape == (4, 4, 4)


@pytest.mark.parametrize(
    ("shape", "low", "cores"),
    [
        pytest.param((4, 4, 8), (0, 0, 0), 2, id="v4"),
        pytest.param((4, 4, 8), (0, 4, 8), 1, id="part of v5p"),
        pytest.param((2, 2, 4), (0, 0, 0), 2, id="7x"),
    ],
)
def test_failures_of_three_dimensional_slices_use_the_coords_of_the_devices(shape, low, cores):
    devices = [
        FakeTpu(tuple(a + c for a, c in zip(low, coord, strict=True)), core)
        for coord in np.ndindex(shape)
        for core in range(cores)
    ]
    x, y, z = low
    missing = (x, y, z + 1)  # and a block, and two links
    topo = Topology.from_devices(
        [device for device in devices if device.coords != missing],
        failed=f"2x1x1@{x},{y},{z + 2}",
        failed_links=f"{x},{y},{z}-{x + 1},{y},{z};{x + 1},{y + 1},{z + 2}-{x + 1},{y + 1},{z + 3}",
        wrap=(False, False, True),
    )
    assert (
        topo.without_devices()
        == Topology.from_devices(
            [FakeTpu(coord, core) for coord in np.ndindex(shape) for core in range(cores)],
            failed="1x1x1@0,0,1;2x1x1@0,0,2",
            failed_links=[((0, 0, 0), (1, 0, 0)), ((1, 1, 2), (1, 1, 3))],
            wrap=(False, False, True),
        ).without_devices()
    )
    assert str(topo).endswith("less 1x1x2@0,0,1;1x1x1@1,0,2 less links 0,0,0-1,0,0;1,1,2-1,1,3")
    assert topo.num_live == np.prod(shape) - 3
    assert topo.devices_per_chip == cores
    assert [device.coords for device in topo.devices[::cores]] == [
        tuple(a + c for a, c in zip(low, coord, strict=True)) for coord in topo.coords
    ]
    proof = ftmesh.plan(topo, "flood").proof
    assert (proof.num_ranks, proof.is_neighbour_only) == (topo.num_live, True)
    with pytest.raises(TopologyError, match=r"block 1x1x2@\d,\d,\d+ is not inside mesh"):
        Topology.from_devices(devices, failed=f"1x1x2@{x},{y},{z + shape[2] - 1}")


@pytest.mark.parametrize(
    ("count", "shape"), [(64, (8, 8)), (8, (2, 4)), (60, (6, 10)), (7, (1, 7)), (1, (1, 1))]
)
def test_devices_without_coords_fill_a_near_square_grid(count, shape):
    assert Topology.from_devices([FakeCpu(i) for i in range(count)]).shape == shape


def test_ftmesh_mesh_gives_the_shape_if_the_number_of_devices_fits(monkeypatch):
    monkeypatch.setenv("FTMESH_MESH", "2x8")
    devices = [FakeCpu(i) for i in range(16)]
    assert Topology.from_devices(devices).shape == (2, 8)
    assert Topology.from_devices(devices, shape="4x4").shape == (4, 4)
    assert Topology.from_devices(devices[:4]).shape == (2, 2)


def test_devices_without_coords_fill_the_shape_row_by_row():
    topo = Topology.from_devices([FakeCpu(i) for i in range(8)], shape="4x2", failed="1x1@1,0")
    assert [d.id for d in topo.devices] == [0, 2, 3, 4, 5, 6, 7]
    with pytest.raises(TopologyError, match="8 devices without coords cannot fill mesh 3x3"):
        Topology.from_devices([FakeCpu(i) for i in range(8)], shape="3x3")


def test_no_devices_and_mixed_devices_raise():
    with pytest.raises(TopologyError, match="no devices"):
        Topology.from_devices([])
    with pytest.raises(TopologyError, match="more than once"):
        Topology.from_devices([FakeCpu(0)] * 4)
    with pytest.raises(TopologyError, match="different lengths"):
        Topology.from_devices([FakeTpu((0, 0, 0)), FakeTpu((0, 1))])
    with pytest.raises(TopologyError, match="1 of 2 devices have no coords"):
        Topology.from_devices([FakeTpu((0, 0, 0)), FakeCpu(1)])


def run_python(code, **variables):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_real_cpu_devices():
    result = run_python(
        "import jax, json, ftmesh\n"
        "from ftmesh.topology.devices import platform_of\n"
        "topo = ftmesh.Topology.from_devices(jax.devices(), shape='4x4', failed='2x2@1,1')\n"
        "platform = platform_of(topo.devices[0])\n"
        "print(json.dumps([platform, topo.num_live, [d.id for d in topo.devices]]))",
        XLA_FLAGS="--xla_force_host_platform_device_count=16",
    )
    assert result == ["cpu", 12, [0, 1, 2, 3, 4, 7, 8, 11, 12, 13, 14, 15]]


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu, which exists for x86_64 Linux only, lists real TPU coordinates",
)
def test_real_tpu_topologies():
    result = run_python(
        "import json, ftmesh\n"
        "from ftmesh.topology.devices import platform_of\n"
        "from jax.experimental import topologies\n"
        "out = {}\n"
        "for name in ('v3:16x32', 'v6e:16x16', 'v4:4x4x4'):\n"
        "    devices = topologies.get_topology_desc(platform='tpu', topology_name=name).devices\n"
        "    topo = ftmesh.Topology.from_devices(devices)\n"
        "    cores = topo.devices_per_chip\n"
        "    out[name] = [platform_of(devices[0]), topo.name, cores, len(devices), topo.num_live]\n"
        "print(json.dumps(out))",
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    )
    assert result == {
        "v3:16x32": ["TPU v3", "16x32", 2, 1024, 512],
        "v6e:16x16": ["TPU v6 lite", "16x16", 1, 256, 256],
        "v4:4x4x4": ["TPU v4", "4x4x4", 2, 128, 64],
    }


@pytest.mark.parametrize("y", [0, 2], ids=["same coords", "side by side"])
def test_devices_of_two_slices_raise(y):
    devices = [FakeTpu((x, b + n * y, 0), 0, n) for n in (0, 1) for b in (0, 1) for x in range(4)]
    with pytest.raises(TopologyError, match=r"devices are of 2 slices \(0, 1\)"):
        Topology.from_devices(devices)
