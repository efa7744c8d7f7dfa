"""The overlap of convolutions with permutations, read from compiled text."""

from ftmesh.tpu.compiled_rounds import Overlap, overlap

TEXT = """\
HloModule jit_step, is_scheduled=true

%fused (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %c = f32[8] convolution(%a, %a), dim_labels=b01f_01io->b01f
}

%negate (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  ROOT %n = f32[8] negate(%a)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
LINES
  ROOT %out = f32[8] negate(%x)
}
"""
START = "  %s.{0} = (f32[8], f32[8], u32[]) collective-permute-start(%x), channel_id={0}"
DONE = "  %d.{0} = f32[8] collective-permute-done(%s.{0})"
CONVOLUTION = "  %f.{0} = f32[8] fusion(%x), kind=kOutput, calls=%fused"
NEGATE = "  %g.{0} = f32[8] fusion(%x), kind=kLoop, calls=%negate"


def program(*lines):
    return TEXT.replace("LINES", "\n".join(line.format(i) for line, i in lines))


def test_no_overlap():
    text = program((START, 0), (NEGATE, 0), (DONE, 0), (CONVOLUTION, 0))
    assert overlap(text) == Overlap(1, 0, 1, 0)


def test_one_of_two_overlaps():
    text = program((START, 0), (DONE, 0), (START, 1), (CONVOLUTION, 0), (DONE, 1))
    assert overlap(text) == Overlap(2, 1, 1, 1)
    assert str(overlap(text)).startswith("1 of 2 permutations")


def test_several_overlap():
    text = program(
        (START, 0), (START, 1), (CONVOLUTION, 0), (DONE, 1), (CONVOLUTION, 1), (DONE, 0),
        (CONVOLUTION, 2),
    )  # fmt: skip
    assert overlap(text) == Overlap(2, 2, 3, 2)


def test_permutations_of_other_scopes_do_not_count():
    other = START + ', metadata={{op_name="jit(our_sums_of_norms)/ppermute"}}'
    ours = START + ', metadata={{op_name="jit(step)/transpose(jvp(our_sums))/ppermute"}}'
    text = program((other, 0), (CONVOLUTION, 0), (DONE, 0), (ours, 1), (DONE, 1))
    assert overlap(text) == Overlap(2, 1, 1, 1)
    assert overlap(text, "our_sums") == Overlap(1, 0, 1, 0)
