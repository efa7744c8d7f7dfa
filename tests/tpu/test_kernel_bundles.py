"""The bundles of a kernel, read from what the TPU compiler dumps."""

import os

import pytest

from ftmesh import ArgumentError
from ftmesh.tpu.compile_report import BundleLoop, dump_bundles, parse_bundles, read_bundles

# The compiler's format, with made-up instructions: two bundles, a loop of 9 steps with a copy of 17
# vector registers in it, and a last bundle.
DUMP = """\
= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = smov.u32 0 }
   0x1   :  { %2 = sbr.rel (%p1) target = $region9 }
   0x2 LB: > { %p3_p0 = scmp.ge.s32.totalorder %s4_s1, 8 }
   0x3   :  {}
   0x4   : > { %s5_s2 = smov.u32 0 }
   0x5 LB: >> { %v6_v0 = vld [vmem:[%s7_s3]]  ;;  %p8_p1 = scmp.ge.s32.totalorder %s9_s4, 17 }
   0x6   : >> { %10 = vst [vmem:[%s11_s5] sm:$0xff] /*vst_source=*/%v6_v0 }
   0x7   :  {} /* End region 4 */
   0x8 PF: > { %12 = vsyncadd %s13_s6, 2176 }
   0x9   : > { %p14_p2 = scmp.ge.s32.totalorder %s15_s7, 9 /* loop exit test */ } /* End region 3 */
   0xa   :  { %16 = sbr.rel (!%p14_p2) target = $region3 }
"""


def test_loops_and_what_is_in_them():
    kernel = parse_bundles(DUMP)
    (loop,) = kernel.loops
    assert loop == BundleLoop(5, 9, inner=(BundleLoop(3, 17),))
    assert loop.total == 9 * (5 + 3 * 17)
    assert kernel.outside == 3
    assert kernel.total == 3 + loop.total
    assert str(kernel) == "at most 5 in each of 9 steps and 51 in its inner loops, 3 once"


def test_a_loop_without_a_test_counts_as_one_step():
    kernel = parse_bundles("0x1 LB: > { a }\n0x2 : > { b }\n0x3 : { c }\n")
    assert kernel.loops == (BundleLoop(2, None),)
    assert kernel.total == 3
    assert "2 in each of an unknown number of steps" in str(kernel)


def test_only_our_kernels_are_read(tmp_path):
    for name in ("7-ftmesh_loops.1-72-final_bundles.txt", "7-fusion.3-72-final_bundles.txt"):
        (tmp_path / name).write_text(DUMP)
    analysis = "7-ftmesh_loops.1-71-schedule-analysis_final_bundles.txt"
    (tmp_path / analysis).write_text("nothing")
    assert read_bundles(tmp_path) == (parse_bundles(DUMP),)


def test_where_the_compiler_leaves_them(monkeypatch, tmp_path):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1024")
    dump_bundles(tmp_path)
    given, option = os.environ["LIBTPU_INIT_ARGS"].split()
    assert (given, option) == (
        "--xla_tpu_scoped_vmem_limit_kib=1024",
        f"--xla_jf_dump_to={tmp_path}",
    )
    with pytest.raises(ArgumentError, match="has --xla_jf_dump_to already"):
        dump_bundles(tmp_path)
