"""Source lines of instructions, in the forms in which compilers write them."""

from pathlib import Path

import pytest

import ftmesh
from ftmesh.execute.hlo_text import Instruction, SourceFrame, SourceStacks, user_frame

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


def instruction(metadata):
    return Instruction("all-reduce", "", metadata=metadata)


@pytest.mark.parametrize("rows", [FROM_ZERO, FROM_ONE])
def test_frames_from_tables(rows):
    stacks = SourceStacks(f"{TABLES}{rows}\n\nENTRY %main () -> f32[] {{\n}}\n")
    frames = stacks.frames_of(instruction('op_name="psum" stack_frame_id=3}'))
    assert [frame.line for frame in frames] == [404, 11, 18]
    assert str(user_frame(frames)) == "/home/me/train.py:11"
    assert [frame.line for frame in stacks.frames_of(instruction("stack_frame_id=1}"))] == [18]
    assert stacks.frames_of(instruction("stack_frame_id=9}")) == ()
    assert stacks.frames_of(instruction("")) == ()


def test_frames_next_to_the_instruction():
    metadata = 'op_name="psum" source_file="/home/me/train.py" source_line=7 source_end_line=9}'
    assert SourceStacks("HloModule x").frames_of(instruction(metadata)) == (
        SourceFrame("/home/me/train.py", 7),
    )


def test_the_user_frame():
    ours = SourceFrame(str(Path(ftmesh.__file__).parent / "collectives" / "all_reduce.py"), 3)
    library = SourceFrame("/env/site-packages/flax/linen/module.py", 5)
    user = SourceFrame("/home/me/train.py", 7)
    assert user_frame([ours, library, user]) == user
    assert user_frame([ours, library]) == library
    assert user_frame([ours]) == ours
    assert user_frame([]) is None
