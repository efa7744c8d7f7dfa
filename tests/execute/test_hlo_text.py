"""Compiled programs, read back from their text."""

import pytest

from ftmesh import ArgumentError
from ftmesh.execute.hlo_text import computations, members, num_bytes

# A kernel is called with what is printed over several lines, of which some begin as the end of a
# computation does.
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


def test_what_is_printed_over_several_lines():
    found, entry = computations(KERNEL)
    assert (entry, list(found)) == ("main", ["other", "main", "last"])
    assert [one.opcode for one in found["main"]] == ["parameter", "custom-call", "all-reduce"]
    _, kernel, after = found["main"]
    assert (kernel.source, kernel.operands) == ("jit(step)/pallas_call", ["x"])
    assert kernel.config.endswith('backend_config={"id":"7"}')
    assert "stack_frame_id=15" in kernel.metadata
    assert (after.source, after.operands) == ("jit(step)/psum", ["k"])


def test_what_is_no_program():
    with pytest.raises(ArgumentError, match="has no ENTRY"):
        computations("a poem\nof two lines")


def test_types():
    assert members("f32[2,3]{1,0}") == ["f32[2,3]{1,0}"]
    assert members("(f32[2]{0:T(128)}, /*index=1*/(s8[4], u32[]))") == [
        "f32[2]{0:T(128)}",
        "(s8[4], u32[])",
    ]
    sizes = ["f32[2,3]{1,0}", "bf16[]", "pred[7]", "c64[2]", "s4[3]", "f8e4m3fn[5]", "token[]"]
    assert [num_bytes(kind) for kind in sizes] == [24, 2, 7, 16, 2, 5, 0]
    assert num_bytes("(f32[2]{0:T(128)}, (s8[4], u32[]))") == 16
