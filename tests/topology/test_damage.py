"""What is said to have failed, as chips and links of a grid: given, or from the environment."""

import time

import pytest

from ftmesh import Topology, TopologyError, TopologyWarning
from ftmesh.topology.damage import CoordFrame, failed_chips, failed_links
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
def test_blocks_that_do_not_fit_are_named(failed, says):
    with pytest.raises(TopologyError, match=says):
        failed_chips(failed, EIGHT)


class TestFrame:
    def test_coords_have_the_axes_of_the_devices_or_of_the_grid(self):
        assert failed_chips("2x1@4,2", SLICE) == {(0, 0), (1, 0)}
        assert failed_chips("2x1x1@4,2,0", SLICE) == {(0, 0), (1, 0)}
        assert failed_links([((4, 2), (5, 2))], SLICE) == {((0, 0), (1, 0))}
        assert failed_links([((4, 2, 0), (5, 2, 0))], SLICE) == {((0, 0), (1, 0))}

    def test_a_grid_of_one_axis_takes_coords_of_one_two_or_three(self):
        assert failed_chips([(5,), (3, 6), (3, 7, 1)], UPRIGHT) == {(5,), (6,), (7,)}
        assert failed_links([((3, 6), (3, 7))], UPRIGHT) == {((6,), (7,))}

    def test_what_lies_below_the_lowest_chip_is_out_of_use_as_it_is(self):
        assert failed_chips("2x2@3,2", SLICE) == {(0, 0), (0, 1)}
        assert failed_links([((3, 2), (4, 2)), ((4, 2), (4, 3))], SLICE) == {((0, 0), (0, 1))}
        assert failed_chips([(2, 5)], UPRIGHT) == frozenset()

    def test_what_lies_beyond_the_highest_chip_is_refused(self):
        with pytest.raises(TopologyError, match="mesh 4x4, whose chips are 4,2 to 7,5"):
            failed_chips("2x2@7,2", SLICE)
        with pytest.raises(TopologyError, match=r"failed link 7,2-8,2 is not inside mesh 4x4"):
            failed_links([((7, 2), (8, 2))], SLICE)
        with pytest.raises(TopologyError, match="whose chips are 4,2,0 to 7,5,0"):
            failed_chips([(4, 2, 1)], SLICE)
        with pytest.raises(TopologyError, match="link 4,2-5,2,0 does not have the 2 axes"):
            failed_links([((4, 2), (5, 2, 0))], SLICE)


def test_blocks_that_are_repeated_count_once():
    assert failed_chips("1x1@0,0;" * 5000, EIGHT) == {(0, 0)}


def test_blocks_of_more_chips_than_any_mesh_has_are_refused():
    blocks = ";".join(f"1000x{n}@0,0" for n in range(500, 600))
    with pytest.raises(TopologyError, match="100 blocks name 54,950,000 chips in all"):
        failed_chips(blocks, EIGHT)


class TestEnvironment:
    def test_it_is_read_where_nothing_is_given(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "2x2@2,2")
        assert failed_chips(None, EIGHT) == {(2, 2), (3, 2), (2, 3), (3, 3)}
        assert failed_chips("", EIGHT) == frozenset()

    def test_what_a_made_up_mesh_does_not_have_is_left_out_and_said_to_be(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "2x2@12,12")
        says = "FTMESH_FAILED names 2x2@12,12, which is not on mesh 8x8, whose chips are 0,0 to 7,7"
        with pytest.warns(TopologyWarning, match=says) as caught:
            assert Topology.grid("8x8") == Topology.grid("8x8", failed="")
        assert [warning.filename for warning in caught] == [__file__]
        assert Topology.grid("16x16").num_live == 252

    def test_what_is_inside_counts(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "2x2@7,7;1x1@0,0")
        with pytest.warns(TopologyWarning, match="names 1x2@8,7;1x1@7,8, which is not on mesh 8x8"):
            assert Topology.grid("8x8").failed == {(0, 0), (7, 7)}

    def test_all_that_is_around_the_mesh_is_named(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "1x1@9,9;6x4@3,1")
        with pytest.warns(TopologyWarning, match="names 1x1@9,9;1x4@3,1;1x4@8,1;4x1@4,1, which is"):
            assert failed_chips(None, SLICE) == {(x, y) for x in range(4) for y in range(3)}

    def test_a_large_block_takes_no_time(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "999x999@1,1")
        start = time.process_time()
        with pytest.warns(TopologyWarning, match="names 996x999@4,1;3x996@1,4, which is not"):
            assert Topology.grid("4x4").num_live == 7
        assert time.process_time() - start < 1

    @pytest.mark.parametrize("shape", ["8", "4x4x4"])
    def test_so_are_blocks_of_a_machine_with_other_axes(self, shape, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "2x2@0,0")
        with pytest.warns(TopologyWarning, match="FTMESH_FAILED names 2x2@0,0"):
            assert Topology.grid(shape).failed == frozenset()

    @pytest.mark.parametrize("text", ["2x2", "2x2@1", "0x2@1,1", "everything"])
    def test_what_is_no_block_is_still_an_error(self, text, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", text)
        with pytest.raises(TopologyError, match="the environment variable FTMESH_FAILED: "):
            Topology.grid("8x8")

    def test_a_mesh_that_it_leaves_nothing_of_is_an_error(self, monkeypatch):
        monkeypatch.setenv("FTMESH_FAILED", "4x4@0,0")
        with pytest.raises(
            TopologyError, match=r"FTMESH_FAILED names every chip of mesh 2x2, .*''"
        ):
            Topology.grid("2x2")
        assert Topology.grid("2x2", failed="").num_live == 4
