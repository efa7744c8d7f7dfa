"""Which axes of TPU slices have wrap links, and what `Topology.from_devices` makes of it."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

import ftmesh
from ftmesh import TiledTopology, Topology, TopologyError
from ftmesh.topology.devices import describe_slice_wraps, slice_wraps, tpu_generation
from ftmesh.topology.notation import parse_shape

# Generation, as devices or libtpu name it, shape, and the axes that wrap.
SLICES = [
    ("v2", "16x16", "xy"), ("v2", "8x16", ""), ("v2", "8x8", ""),
    ("TPU v3", "32x32", "xy"), ("v3", "16x32", ""), ("v3", "16x16", ""), ("v3", "32x32x1", "xy"),
    ("TPU v4", "4x4x4", "xyz"), ("v4", "4x4x8", "xyz"), ("v4", "4x4x12", "xyz"),
    ("v4", "12x16x16", "xyz"), ("v4", "2x2x1", ""), ("v4", "2x2x4", ""), ("v4", "2x4x4", ""),
    ("v4", "4x4x1", ""), ("v4", "4x4", ""), ("v4", "4x4x6", ""),
    ("TPU v5 lite", "16x16", "xy"), ("TPU v5e", "8x16", "y"), ("v5e", "16x8", "x"),
    ("v5litepod", "8x8", ""), ("v5e", "4x8", ""), ("v5e", "2x4", ""), ("v5e", "1x1", ""),
    ("TPU v5", "4x4x8", "xyz"), ("TPU v5p", "8x8x16", "xyz"), ("v5p", "16x16x24", "xyz"),
    ("v5p", "16x20x28", "xyz"), ("v5p", "2x2x2", ""), ("v5p", "2x2x1", ""),
    ("TPU v6 lite", "16x16", "xy"), ("v6e", "8x16", "y"), ("v6e", "8x8", ""), ("v6e", "16", "x"),
    ("v6e", "16x16x1", "xy"), ("v6e", "16x32", ""), ("v6e", "4x4x16", ""),
    ("TPU7x", "4x4x4", "xyz"), ("tpu7x", "16x24x24", "xyz"), ("v7x", "2x2x2", ""),
    ("TPU v99", "16x16", ""), ("TPU v4 lite", "4x4x4", ""), ("NVIDIA H200", "4x4x4", ""),
    ("cpu", "16x16", ""), ("", "16x16", ""),
]  # fmt: skip


@pytest.mark.parametrize(("generation", "shape", "axes"), SLICES)
def test_the_axes_of_slices_that_wrap(generation, shape, axes):
    sizes = parse_shape(shape)
    assert slice_wraps(generation, sizes) == tuple(x in axes for x in "xyz"[: len(sizes)])


def test_generations_by_name():
    names = "TPU v2", "tpu v3", "v4", "TPU v5 lite", "TPU v5", "TPU v5p", "TPU v6 lite", "TPU7x"
    assert [tpu_generation(name) for name in names] == [
        "v2", "v3", "v4", "v5e", "v5p", "v5p", "v6e", "v7x",
    ]  # fmt: skip
    assert {tpu_generation(name) for name in ("TPU v4 lite", "TPU v10", "v8", "", "cpu")} == {None}


@pytest.mark.parametrize(
    ("generation", "shape", "twists"),
    [
        ("v4", (4, 4, 8), True), ("v5p", (4, 8, 8), True), ("v7x", (8, 16, 16), True),
        ("v5p", (8, 4, 4), True), ("v4", (4, 4, 4), False), ("v4", (8, 8, 12), False),
        ("v5p", (4, 8, 16), False), ("v4", (2, 2, 4), False), ("v6e", (8, 16), False),
    ],
)  # fmt: skip
def test_slices_that_may_be_twisted_are_taken_as_untwisted(generation, shape, twists):
    text = describe_slice_wraps(generation, shape)
    assert text.startswith((f"{generation} slices ", f"a {generation} slice "))
    assert ("is taken as untwisted" in text) == twists


@dataclass(frozen=True)
class FakeTpu:
    """A fake TPU device; its coords always have three axes."""

    coords: tuple[int, int, int]
    device_kind: str
    core_on_chip: int = 0


def tpus(kind, shape, cores=1):
    """The devices of a whole slice."""
    full = (*parse_shape(shape), 1, 1)[:3]
    return [FakeTpu(coord, kind, core) for coord in np.ndindex(full) for core in range(cores)]


@pytest.mark.parametrize(
    ("kind", "shape", "cores", "wrap"),
    [
        ("TPU v3", "32x32", 2, (True, True)),
        ("TPU v3", "16x32", 2, (False, False)),
        ("TPU v4", "4x4x4", 2, (True, True, True)),
        ("TPU v4", "4x4x1", 2, (False, False)),
        ("TPU v5 lite", "8x16", 1, (False, True)),
        ("TPU v5", "4x4x8", 1, (True, True, True)),
        ("TPU v5", "2x2x2", 1, (False, False, False)),
        ("TPU v6 lite", "16x16", 1, (True, True)),
        ("TPU v6 lite", "8x8", 1, (False, False)),
        ("TPU7x", "4x4x4", 2, (True, True, True)),
        ("TPU v99", "16x16", 1, (False, False)),
    ],
)
def test_devices_wrap_by_generation_and_shape(kind, shape, cores, wrap):
    topology = Topology.from_devices(tpus(kind, shape, cores))
    assert topology.wrap == wrap
    assert bool(topology.wrap_source) == (kind != "TPU v99")
    expected = Topology.grid(topology.shape, wrap=wrap)
    assert topology.without_devices() == replace(expected, devices_per_chip=cores)


def test_a_hole_changes_nothing():
    devices = tpus("TPU v6 lite", "16x16")
    live = [d for d in devices if d.coords[:2] not in {(2, 2), (3, 2), (2, 3), (3, 3)}]
    expected = Topology.grid("16x16", failed="2x2@2,2", wrap=True)
    assert Topology.from_devices(live).without_devices() == expected
    assert Topology.from_devices(devices, failed="2x2@2,2").without_devices() == expected
    assert Topology.from_devices(live).is_link((0, 0), (15, 0))


def test_without_the_chips_at_an_edge_the_axis_across_does_not_wrap():
    """Its wrap links lead to the missing chips; those of the other axes remain."""

    def mesh(kind, full, keep, **options):
        devices = [device for device in tpus(kind, full) if keep(*device.coords)]
        topology = Topology.from_devices(devices, **options)
        return topology.name, topology.wrap

    assert mesh("TPU v6 lite", "16x16", lambda x, y, z: x < 15) == ("15x16", (False, True))
    assert mesh("TPU v6 lite", "16x16", lambda x, y, z: x > 0) == ("15x16", (False, True))
    whole = (True, True, True)
    low, high = (lambda x, y, z: z > 0), (lambda x, y, z: z < 7)
    assert mesh("TPU v4", "4x4x8", low) == ("4x4x7", (True, True, False))
    assert mesh("TPU v4", "4x4x8", low, shape="4x4x8") == ("4x4x8", whole)
    assert mesh("TPU v4", "4x4x8", high) == ("4x4x7", (False, False, False))  # not of whole cubes
    assert mesh("TPU v4", "4x4x8", high, shape="4x4x8") == ("4x4x8", whole)


def test_part_of_a_slice():
    """It looks like a slice of its own unless its coords say otherwise, or the user does."""
    devices = tpus("TPU v4", "4x4x8")
    first = [device for device in devices if device.coords[2] < 4]
    second = [device for device in devices if device.coords[2] >= 4]
    plane = [device for device in devices if device.coords[2] == 7]
    assert Topology.from_devices(first).wrap == (True, True, True)
    assert Topology.from_devices(first, wrap=(True, True, False)).wrap == (True, True, False)
    assert Topology.from_devices(first, shape="4x4x8").name == "4x4x8"
    assert Topology.from_devices(second).without_devices() == Topology.grid(
        "4x4x4", wrap=(True, True, False)
    )
    assert Topology.from_devices(plane).without_devices() == Topology.grid("4x4", wrap=True)


def test_what_is_given_wins():
    devices = tpus("TPU v6 lite", "16x16")
    none = Topology.from_devices(devices, wrap=False)
    x = Topology.from_devices(devices, wrap=[True, False])
    assert (none.wrap, x.wrap) == ((False, False), (True, False))
    assert none.wrap_source == x.wrap_source == "wrap links as given"
    with pytest.raises(TopologyError, match="needs one entry per axis of 16x16"):
        Topology.from_devices(devices, wrap=[True])


def test_devices_of_two_kinds_and_without_a_kind_do_not_wrap():
    mixed = tpus("TPU v6 lite", "16x16")
    mixed[0] = replace(mixed[0], device_kind="TPU v5 lite")
    for devices in (mixed, [object() for _ in range(256)]):
        topology = Topology.from_devices(devices, shape="16x16")
        assert (topology.wrap, topology.wrap_source) == ((False, False), "")


def test_the_source_is_no_part_of_a_topology():
    devices = tpus("TPU v6 lite", "16x16")
    known, given = Topology.from_devices(devices), Topology.from_devices(devices, wrap=True)
    assert known.wrap_source != given.wrap_source
    assert known == given
    assert hash(known) == hash(given)
    assert known.with_failed([(0, 0)]).wrap_source == known.wrap_source


def test_a_plan_shows_what_is_known_of_wrap_links():
    rule = "  v6e slices have wrap links on axes of 16 chips"
    topology = Topology.from_devices(tpus("TPU v6 lite", "16x16"), failed="2x2@2,2")
    lines = str(ftmesh.plan(topology, "row_pair")).splitlines()
    assert lines[0].startswith("row_pair on 16x16 (wrapping in xy) less 2x2@2,2: 252 live chips")
    assert rule in lines
    small = Topology.from_devices(tpus("TPU v6 lite", "4x4"))
    assert rule in str(ftmesh.plan(small, "ring")).splitlines()
    tiles = TiledTopology.from_topology(topology, "2x2")
    assert rule in str(ftmesh.plan(tiles, "row_pair")).splitlines()
    assert "wrap links" not in str(ftmesh.plan(Topology.grid("4x4", wrap=True), "ring"))
