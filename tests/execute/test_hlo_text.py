"""Compiled programs parsed from their text."""

import pytest

from ftmesh import ArgumentError
from ftmesh.execute.hlo_text import parse_computations, tuple_types, type_bytes

# The arguments of a kernel span several lines, some of which begin like the end of a computation.
KERNEL = """\
HloModule jit_step

%other (p: f32[8]) -> f32[8] {
  ROOT %p = f32[8] parameter(0)
}, execution_thread="host"

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %k = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"mesh_axes":"[\\"data\\"]"
}}, metadata={op_name="jit(step)/pallas_call" stack_frame_id=15}, backend_config={"id":"7"}
  ROOT %r = f32[8]{0} all-reduce(%k), replica_groups={{0,1}}, metadata={op_name="jit(step)/psum"}
}

%last (q: f32[8]) -> f32[8] {
  ROOT %q = f32[8] parameter(0)
}
"""


def test_instructions_over_several_lines():
    computations, entry = parse_computations(KERNEL)
    assert (entry, list(computations)) == ("main", ["other", "main", "last"])
    assert [i.opcode for i in computations["main"]] == ["parameter", "custom-call", "all-reduce"]
    _, kernel, after = computations["main"]
    assert (kernel.op_name, kernel.operands) == ("jit(step)/pallas_call", ["x"])
    assert kernel.config.endswith('backend_config={"id":"7"}')
    assert "stack_frame_id=15" in kernel.metadata
    assert (after.op_name, after.operands) == ("jit(step)/psum", ["k"])


def test_text_that_is_not_a_program():
    with pytest.raises(ArgumentError, match="has no ENTRY"):
        parse_computations("a poem\nof two lines")


def test_types():
    assert tuple_types("f32[2,3]{1,0}") == ["f32[2,3]{1,0}"]
    assert tuple_types("(f32[2]{0:T(128)}, /*index=1*/(s8[4], u32[]))") == [
        "f32[2]{0:T(128)}",
        "(s8[4], u32[])",
    ]
    sizes = ["f32[2,3]{1,0}", "bf16[]", "pred[7]", "c64[2]", "s4[3]", "f8e4m3fn[5]", "token[]"]
    assert [type_bytes(kind) for kind in sizes] == [24, 2, 7, 16, 2, 5, 0]
    assert type_bytes("(f32[2]{0:T(128)}, (s8[4], u32[]))") == 16
