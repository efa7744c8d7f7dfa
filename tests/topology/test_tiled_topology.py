"""TiledTopology: live tiles, links between tiles, and the devices of tiles."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import TiledTopology, Topology, TopologyError, jax_mesh
from ftmesh.topology.routing import dimension_order


@dataclass(frozen=True)
class FakeTpu:
    """A fake TPU device."""

    coords: tuple[int, int, int]
    core_on_chip: int = 0


def tiled(shape, tile, **options):
    return TiledTopology.from_topology(Topology.grid(shape, **options), tile)


def test_a_tile_with_a_failed_chip_has_failed():
    tiles = tiled("8x6", "2x3", failed="2x1@3,2;1x1@7,5")
    assert (tiles.name, tiles.num_chips, tiles.num_live) == ("4x2", 8, 5)
    assert tiles.failed == {(1, 0), (2, 0), (3, 1)}
    assert tiles.num_wasted == 15
    assert tiles.losses == (
        "3 of 8 tiles lost, with 15 live chips in them: tile (1, 0) to chips 1x1@3,2; "
        "tile (2, 0) to chips 1x1@4,2; tile (3, 1) to chips 1x1@7,5"
    )
    assert str(tiles) == "8x6 less 2x1@3,2;1x1@7,5 in 4x2 tiles of 2x3"
    assert tiled("8x8", "2x2").losses == "all 16 tiles are live"


def test_chips_of_a_tile_are_ordered_x_fastest():
    tiles = tiled("4x4", "2x2", failed="1x1@0,0")
    assert tiles.coords == ((1, 0), (0, 1), (1, 1))
    chips = [[tiles.chips.coords[rank] for rank in ranks] for ranks in tiles.chip_ranks]
    assert chips[0] == [(2, 0), (0, 2), (2, 2)]
    assert chips[1] == [(3, 0), (1, 2), (3, 2)]
    assert chips[2] == [(2, 1), (0, 3), (2, 3)]
    assert tiles.chips_of([(1, 0)]) == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert (tiles.num_positions, tiles.sides, tiles.physical) == (4, (2, 2), tiles.chips)


def test_axes_that_a_tile_spans_are_dropped_if_there_are_three():
    tiles = tiled("4x2x6", "1x2x2", failed="1x1x1@3,1,5", failed_links="0,0,0-0,1,0;0,0,1-0,0,2")
    assert (tiles.shape, tiles.failed) == ((4, 3), {(3, 2)})
    assert tiles.chips_of([(2, 1)]) == [(2, 0, 2), (2, 1, 2), (2, 0, 3), (2, 1, 3)]
    assert tiles.failed_links == {((0, 0), (0, 1))}
    assert tiled("4x4x4", "4x4x4").shape == (1,)
    assert tiled("4x4", "4x1").shape == (1, 4)
    assert tiled("4x4x4", "1x1x4", wrap=[True, False, True]).wrap == (True, False)


def test_meshes_that_cannot_be_tiled():
    for tile in ("3x2", "2", "2x2x1", "16x8"):
        with pytest.raises(TopologyError, match=f"mesh 8x8 cannot be cut into tiles of {tile}"):
            tiled("8x8", tile)
    with pytest.raises(TopologyError, match=r"every tile of 2x2 .* take smaller tiles"):
        tiled("4x2", "2x2", failed="2x1@1,0")
    with pytest.raises(TopologyError, match="is tiled already"):
        TiledTopology.from_topology(tiled("8x8", "2x2"), "2x2")
    with pytest.raises(TopologyError, match=r"tile \(0, 0\) has failed on 4x4 less"):
        tiled("4x4", "2x2", failed="1x1@1,1").rank((0, 0))


def test_more_tiles_fail():
    devices = [FakeTpu((x, y, 0), core) for y in range(4) for x in range(4) for core in range(2)]
    tiles = TiledTopology.from_topology(Topology.from_devices(devices), "2x2")
    left = tiles.with_failed([(0, 0)])
    assert (left.num_live, len(left.devices)) == (3, 24)
    assert str(left) == "4x4 less 2x2@0,0 in 2x2 tiles of 2x2"
    for tile in left.coords:
        chips = set(left.chips_of([tile]))
        members = [d for d in left.devices if left.coord_of(d) == tile]
        assert {d.coords[:2] for d in members} == chips
        assert len(members) == 8


def test_equal_by_content():
    tiles, same = (tiled("8x8", "2x2", failed="1x1@0,0") for _ in range(2))
    assert tiles == same
    assert hash(tiles) == hash(same)
    assert tiles != tiled("8x8", "2x2", failed="1x1@1,0")  # another chip of the same tile
    assert tiles != Topology.grid("4x4", failed="1x1@0,0")


class TestLinks:
    @pytest.mark.parametrize(
        ("failed", "broken"),
        [
            ("1,0-2,0", [((0, 0), (1, 0))]),  # between two tiles
            ("2,0-3,0", [((0, 0), (1, 0)), ((1, 0), (2, 0))]),  # within one
            ("0,1-1,1", [((0, 0), (1, 0))]),  # within the first of a row
            ("2,1-2,2", [((1, 0), (1, 1))]),  # across the other way
            ("2,0-2,1", [((1, 0), (1, 1))]),
        ],
    )
    def test_a_failed_link_breaks_the_tile_links_that_need_it(self, failed, broken):
        tiles = tiled("8x4", "2x2", failed_links=failed)
        assert tiles.failed_links == set(broken)
        words = ";".join(f"{ax},{ay}-{bx},{by}" for (ax, ay), (bx, by) in broken)
        assert tiles.describe().endswith(
            f"\n  links between tiles that some position cannot use: {words}"
        )

    def test_wrapping_links(self):
        tiles = tiled("8x2", "2x2", wrap=[True, False], failed_links="0,0-7,0")
        assert tiles.wrap == (True, False)
        assert tiles.failed_links == {((0, 0), (3, 0))}
        assert tiled("8x2", "2x2", wrap=[True, False]).is_link((3, 0), (0, 0))
        assert not tiled("4x2", "2x2", wrap=[True, False], failed_links="0,0-3,0").failed_links

    @given(
        st.sampled_from(["2x1", "1x2", "2x2", "3x1"]),
        st.sets(st.integers(0, 10**6), max_size=3),
        st.booleans(),
    )
    def test_tiles_are_linked_if_all_their_chips_have_straight_routes(self, tile, picks, wrap):
        whole = Topology.grid("6x6", wrap=wrap)
        links = [whole.links[pick % len(whole.links)] for pick in picks]
        tiles = tiled("6x6", tile, wrap=wrap, failed_links=links)
        for a in tiles.coords:
            for b in TiledTopology.from_topology(whole, tile).neighbours(a):
                ends = zip(tiles.chips_of([a]), tiles.chips_of([b]), strict=True)
                routes = [dimension_order(tiles.chips, *pair) for pair in ends]
                straight = all(tiles.chips.is_link(*hop) for r in routes for hop in pairwise(r))
                assert tiles.is_link(a, b) == straight


class TestDevices:
    def tpu_slice(self, width, height, cores=1):
        chips = [(x, y, 0) for x in range(width) for y in range(height)]
        return [FakeTpu(chip, core) for chip in chips for core in range(cores)]

    def test_devices_are_ordered_by_tile_and_position(self):
        topology = Topology.from_devices(self.tpu_slice(4, 2), failed="1x1@0,0")
        tiles = TiledTopology.from_topology(topology, "2x2")
        assert [device.coords[:2] for device in tiles.devices] == [(2, 0), (3, 0), (2, 1), (3, 1)]
        assert [device.coords[:2] for device in tiles.all_devices[:4]] == [
            (0, 0),
            (1, 0),
            (0, 1),
            (1, 1),
        ]
        assert tiles.without_devices() == tiled("4x2", "2x2", failed="1x1@0,0")

    def test_cores_are_positions(self):
        tiles = TiledTopology.from_topology(
            Topology.from_devices(self.tpu_slice(2, 2, cores=2)), "1x1"
        )
        assert (tiles.num_positions, tiles.sides, tiles.devices_per_chip) == (2, (1, 1, 2), 1)
        assert [device.core_on_chip for device in tiles.devices] == [0, 1] * 4
        pairs = TiledTopology.from_topology(
            Topology.from_devices(self.tpu_slice(2, 2, cores=2)), "2x1"
        )
        first = [(*device.coords[:2], device.core_on_chip) for device in pairs.devices[:4]]
        assert first == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)]
        mesh = jax_mesh(pairs, ("data", "x", "y", "core"))
        assert mesh.devices.shape == (2, 2, 1, 2)
        assert mesh.devices[1, 1, 0, 0] == FakeTpu((1, 1, 0), 0)

    def test_missing_devices(self):
        devices = [device for device in self.tpu_slice(4, 4) if device.coords[:2] != (0, 0)]
        tiles = TiledTopology.from_topology(Topology.from_devices(devices), "2x2")
        assert len(tiles.devices) == 12
        assert len(tiles.all_devices) == 15
