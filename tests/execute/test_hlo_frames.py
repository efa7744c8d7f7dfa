"""The lines that instructions were made by, in the ways that compilers write them."""

from pathlib import Path

import pytest

import ftmesh
from ftmesh.execute.hlo_text import Frame, Instruction, Stacks, users_frame

TABLES = """\
HloModule jit_step

FileNames
1 "/home/me/train.py"
2 "/env/site-packages/flax/nnx/nn/normalization.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=18 end_line=18 column=6 end_column=6}
2 {file_name_id=1 function_name_id=1 line=11 end_line=13 column=6 end_column=6}
3 {file_name_id=2 function_name_id=1 line=404 end_line=404 column=6 end_column=6}

StackFrames
"""
# The same stacks: 18, 18 calls 11, and that calls 404.
FROM_ZERO = "1 {file_location_id=1}\n2 {file_location_id=2 parent_frame_id=1}\n" + (
    "3 {file_location_id=3 parent_frame_id=2}\n"
)
FROM_ONE = (
    "1 {file_location_id=1 parent_frame_id=1}\n2 {file_location_id=2 parent_frame_id=2}\n"
    + ("3 {file_location_id=3 parent_frame_id=3}\n")
)


def made_by(metadata):
    return Instruction("all-reduce", "", metadata=metadata)


@pytest.mark.parametrize("rows", [FROM_ZERO, FROM_ONE])
def test_tables(rows):
    stacks = Stacks(f"{TABLES}{rows}\n\nENTRY %main () -> f32[] {{\n}}\n")
    found = stacks.of(made_by('op_name="psum" stack_frame_id=3}'))
    assert [frame.line for frame in found] == [404, 11, 18]
    assert str(users_frame(found)) == "/home/me/train.py:11"
    assert [frame.line for frame in stacks.of(made_by("stack_frame_id=1}"))] == [18]
    assert stacks.of(made_by("stack_frame_id=9}")) == ()
    assert stacks.of(made_by("")) == ()


def test_beside_the_instruction():
    said = 'op_name="psum" source_file="/home/me/train.py" source_line=7 source_end_line=9}'
    assert Stacks("HloModule x").of(made_by(said)) == (Frame("/home/me/train.py", 7),)


def test_whose_a_frame_is():
    ours = Frame(str(Path(ftmesh.__file__).parent / "collectives" / "all_reduce.py"), 3)
    library = Frame("/env/site-packages/flax/linen/module.py", 5)
    user = Frame("/home/me/train.py", 7)
    assert users_frame([ours, library, user]) == user
    assert users_frame([ours, library]) == library
    assert users_frame([ours]) == ours
    assert users_frame([]) is None
