import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh.errors import TopologyError
from ftmesh.mesh.notation import (
    Block,
    format_failed,
    format_shape,
    parse_drawing,
    parse_failed,
    parse_links,
    parse_shape,
)


def test_shapes_are_x_first():
    assert parse_shape("16x32") == (16, 32)
    assert parse_shape([4, 4, 8]) == (4, 4, 8)
    assert format_shape((16, 32)) == "16x32"


@pytest.mark.parametrize("text", ["", "16", "16x", "x4", "4 x 4", "0x4", "-1x4", "4x4@1,1"])
def test_bad_shapes_are_named(text):
    if text == "16":
        assert parse_shape(text) == (16,)
        return
    with pytest.raises(TopologyError, match="shape"):
        parse_shape(text)


def test_a_block_is_size_then_low_corner():
    assert parse_failed("4x2@6,14", (16, 32)) == {
        (6, 14), (7, 14), (8, 14), (9, 14), (6, 15), (7, 15), (8, 15), (9, 15),
    }  # fmt: skip


def test_several_blocks_and_coords():
    assert parse_failed("1x1@0,0; 1x2@3,1", (4, 4)) == {(0, 0), (3, 1), (3, 2)}
    assert parse_failed([(0, 0), [3, 1]], (4, 4)) == {(0, 0), (3, 1)}
    assert parse_failed("", (4, 4)) == frozenset()


def test_the_environment_is_read_where_nothing_is_given(monkeypatch):
    monkeypatch.setenv("FTMESH_FAILED", "2x2@2,2")
    assert len(parse_failed(None, (8, 8))) == 4
    assert parse_failed("", (8, 8)) == frozenset()
    monkeypatch.setenv("FTMESH_FAILED", "2x2@7,7")
    with pytest.raises(TopologyError, match="FTMESH_FAILED"):
        parse_failed(None, (8, 8))


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        ("2x2@7,7", "2x2@7,7 is not inside mesh 8x8"),
        ("2x2", "'2x2' is not a block"),
        ("2x2@1", "does not have the 2 axes"),
        ("2x2x2@0,0,0", "does not have the 2 axes"),
        ([(8, 0)], "1x1@8,0 is not inside"),
        ([(-1, 0)], "1x1@-1,0 is not inside"),
        ([(1, 2, 3)], "axes"),
    ],
)
def test_bad_blocks_are_named(failed, says):
    with pytest.raises(TopologyError, match=says):
        parse_failed(failed, (8, 8))


def test_links_have_their_low_end_first():
    assert parse_links("4,2-3,2") == {((3, 2), (4, 2))}
    assert parse_links([((0, 1), (0, 0))]) == {((0, 0), (0, 1))}
    with pytest.raises(TopologyError, match="'3,2' is not a link"):
        parse_links("3,2")


def test_drawings_have_x_across_and_y_down():
    assert parse_drawing("....\n..X.\n") == ((4, 2), {(2, 1)})
    with pytest.raises(TopologyError, match="one length"):
        parse_drawing("...\n..")
    with pytest.raises(TopologyError, match="not \\['o'\\]"):
        parse_drawing("oo")


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))))
def test_formatted_failures_read_back(failed):
    assert parse_failed(format_failed(failed), (6, 6)) == failed


def test_an_even_block_is_formatted_as_itself():
    assert format_failed(Block((4, 2), (6, 14)).coords()) == "4x2@6,14"
