"""Parsing of failed chips and links, given or from FTMESH_FAILED."""

import time

import pytest

from ftmesh import Topology, TopologyError, TopologyWarning
from ftmesh.topology.damage import (
    CoordFrame,
    environment_failed_chips,
    failed_chips,
    failed_links,
)
from ftmesh.topology.notation import Block

EIGHT = CoordFrame.for_grid((8, 8))
SLICE = CoordFrame((4, 4), low=(4, 2, 0), kept=(0, 1))  # chips 4,2 to 7,5 of a larger machine
UPRIGHT = CoordFrame((8,), low=(3, 0, 1), kept=(1,))  # a column of another


def test_blocks_and_coords_name_chips():
    assert failed_chips("4x2@6,14", CoordFrame.for_grid((16, 32))) == {
        (6, 14), (7, 14), (8, 14), (9, 14), (6, 15), (7, 15), (8, 15), (9, 15),
    }  # fmt: skip
    assert failed_chips("1x1@0,0; 1x2@3,1", EIGHT) == {(0, 0), (3, 1), (3, 2)}
    assert failed_chips([(0, 0), [3, 1], Block((1, 2), (4, 4))], EIGHT) == {
        (0, 0), (3, 1), (4, 4), (4, 5),
    }  # fmt: skip
    assert failed_chips("", EIGHT) == frozenset()


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        ("2x2@7,7", "block 2x2@7,7 is not inside mesh 8x8, whose chips are 0,0 to 7,7"),
        ("2x2@1", "does not have the 2 axes"),
        ("2x2x2@0,0,0", "does not have the 2 axes"),
        ([(8, 0)], "1x1@8,0 is not inside"),
        ([(-1, 0)], "1x1@-1,0 is not inside"),
        ([(1, 2, 3)], "axes"),
    ],
)
def test_blocks_outside_the_grid_raise(failed, says):
    with pytest.raises(TopologyError, match=says):
        failed_chips(failed, EIGHT)


class TestCoordFrame:
    def test_coords_use_the_axes_of_the_devices_or_of_the_grid(self):
        assert failed_chips("2x1@4,2", SLICE) == {(0, 0), (1, 0)}
        assert failed_chips("2x1x1@4,2,0", SLICE) == {(0, 0), (1, 0)}
        assert failed_links([((4, 2), (5, 2))], SLICE) == {((0, 0), (1, 0))}
        assert failed_links([((4, 2, 0), (5, 2, 0))], SLICE) == {((0, 0), (1, 0))}

    def test_a_grid_of_one_axis_takes_coords_of_one_two_or_three(self):
        assert failed_chips([(5,), (3, 6), (3, 7, 1)], UPRIGHT) == {(5,), (6,), (7,)}
        assert failed_links([((3, 6), (3, 7))], UPRIGHT) == {((6,), (7,))}

    def test_chips_below_the_lowest_are_skipped(self):
        assert failed_chips("2x2@3,2", SLICE) == {(0, 0), (0, 1)}
        assert failed_links([((3, 2), (4, 2)), ((4, 2), (4, 3))], SLICE) == {((0, 0), (0, 1))}
        assert failed_chips([(2, 5)], UPRIGHT) == frozenset()

    def test_chips_beyond_the_highest_raise(self):
        with pytest.raises(TopologyError, match="mesh 4x4, whose chips are 4,2 to 7,5"):
            failed_chips("2x2@7,2", SLICE)
        with pytest.raises(TopologyError, match=r"failed link 7,2-8,2 is not inside mesh 4x4"):
            failed_links([((7, 2), (8, 2))], SLICE)
        with pytest.raises(TopologyError, match="whose chips are 4,2,0 to 7,5,0"):
            failed_chips([(4, 2, 1)], SLICE)
        with pytest.raises(TopologyError, match="link 4,2-5,2,0 does not have the 2 axes"):
            failed_links([((4, 2), (5, 2, 0))], SLICE)


def test_repeated_blocks_count_once():
    assert failed_chips("1x1@0,0;" * 5000, EIGHT) == {(0, 0)}


def test_blocks_of_more_chips_than_any_mesh_raise():
    blocks = ";".join(f"1000x{n}@0,0" for n in range(500, 600))
    with pytest.raises(TopologyError, match="100 blocks name 54,950,000 chips in all"):
        failed_chips(blocks, EIGHT)


class TestEnvironment:
    @staticmethod
    def failed_on(shape):
        return environment_failed_chips(CoordFrame.for_grid(shape))

    def test_it_names_failed_chips(self, monkeypatch):
        assert self.failed_on("8x8") == frozenset()
        monkeypatch.setenv("FTMESH_FAILED", "2x2@2,2")
        assert self.failed_on("8x8") == {(2, 2), (3, 2), (2, 3), (3, 3)}

    @pytest.mark.parametrize("text", ["2x2@2,2", "64x64@0,0", "everything"])
    def test_constructors_of_grids_do_not_read_it(self, text, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", text)
        assert failed_chips(None, EIGHT) == frozenset()
        assert Topology.grid("8x8").num_live == 64
        assert Topology.from_drawing("....\n....").num_live == 8

    def test_from_devices_reads_it_unless_failed_is_given(self, monkeypatch):
        devices = [object() for _ in range(16)]
        monkeypatch.setenv("FTMESH_FAILED", "2x2@2,2")
        assert Topology.from_devices(devices, shape="4x4").num_live == 12
        assert Topology.from_devices(devices, shape="4x4", failed="").num_live == 16

    def test_chips_outside_the_grid_are_skipped_with_a_warning(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "2x2@12,12")
        says = "FTMESH_FAILED names 2x2@12,12, which is not on mesh 8x8, whose chips are 0,0 to 7,7"
        with pytest.warns(TopologyWarning, match=says) as caught:
            topo = Topology.from_devices([object() for _ in range(64)], shape="8x8")
        assert topo.num_live == 64
        assert [warning.filename for warning in caught] == [__file__]
        assert len(self.failed_on("16x16")) == 4

    def test_the_part_of_a_block_inside_the_grid_counts(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "2x2@7,7;1x1@0,0")
        with pytest.warns(TopologyWarning, match="names 1x2@8,7;1x1@7,8, which is not on mesh 8x8"):
            assert self.failed_on("8x8") == {(0, 0), (7, 7)}

    def test_the_warning_names_every_part_outside_the_grid(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "1x1@9,9;6x4@3,1")
        with pytest.warns(TopologyWarning, match="names 1x1@9,9;1x4@3,1;1x4@8,1;4x1@4,1, which is"):
            assert environment_failed_chips(SLICE) == {(x, y) for x in range(4) for y in range(3)}

    def test_a_large_block_takes_no_time(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "999x999@1,1")
        start = time.process_time()
        with pytest.warns(TopologyWarning, match="names 996x999@4,1;3x996@1,4, which is not"):
            assert len(self.failed_on("4x4")) == 9
        assert time.process_time() - start < 1

    @pytest.mark.parametrize("shape", ["8", "4x4x4"])
    def test_blocks_with_other_axes_are_skipped_with_a_warning(self, shape, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "2x2@0,0")
        with pytest.warns(TopologyWarning, match="FTMESH_FAILED names 2x2@0,0"):
            assert self.failed_on(shape) == frozenset()

    @pytest.mark.parametrize("text", ["2x2", "2x2@1", "0x2@1,1", "everything"])
    def test_text_that_cannot_be_parsed_raises(self, text, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", text)
        with pytest.raises(TopologyError, match="the environment variable FTMESH_FAILED: "):
            self.failed_on("8x8")

    def test_naming_every_chip_raises(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "4x4@0,0")
        with pytest.raises(
            TopologyError, match=r"FTMESH_FAILED names every chip of mesh 2x2, .*''"
        ):
            self.failed_on("2x2")
