import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh.errors import TopologyError
from ftmesh.topology.notation import (
    Block,
    format_failed,
    format_shape,
    parse_blocks,
    parse_drawing,
    parse_links,
    parse_shape,
)


def test_shapes_are_x_first():
    assert parse_shape("16x32") == (16, 32)
    assert parse_shape("16") == (16,)
    assert parse_shape([4, 4, 8]) == (4, 4, 8)
    assert format_shape((16, 32)) == "16x32"


@pytest.mark.parametrize("text", ["", "16x", "x4", "4 x 4", "0x4", "-1x4", "4x4@1,1"])
def test_bad_shapes_raise(text):
    with pytest.raises(TopologyError, match="shape"):
        parse_shape(text)


def test_a_block_is_size_then_low_corner():
    (block,) = parse_blocks("4x2@6,14")
    assert block == Block((4, 2), (6, 14))
    assert block.top == (9, 15)
    assert block.coords() == [
        (6, 14), (7, 14), (8, 14), (9, 14), (6, 15), (7, 15), (8, 15), (9, 15),
    ]  # fmt: skip


def test_several_blocks_and_coords():
    assert parse_blocks([Block([2, 2], [2, 2])]) == parse_blocks("2x2@2,2")
    assert parse_blocks("1x1@0,0; 1x2@3,1") == [Block((1, 1), (0, 0)), Block((1, 2), (3, 1))]
    assert parse_blocks([(0, 0), [3, 1]]) == [Block((1, 1), (0, 0)), Block((1, 1), (3, 1))]
    assert parse_blocks("") == []


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        ("2x2", "'2x2' is not a block"),
        ("2x2@1", "2x2@1 has a corner that does not have the 2 axes of its size"),
        (Block((2, 2), (1,)), "does not have the 2 axes"),
        (Block((2, -2), (1, 1)), "of 1 or more chips each"),
    ],
)
def test_bad_blocks_raise(failed, says):
    with pytest.raises(TopologyError, match=says):
        parse_blocks(failed)


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
    assert {
        coord for block in parse_blocks(format_failed(failed)) for coord in block.coords()
    } == failed


def test_an_even_block_is_formatted_as_itself():
    assert format_failed(Block((4, 2), (6, 14)).coords()) == "4x2@6,14"
