"""Loops in the text of compiled programs, and reports on them."""

from dataclasses import replace

import jax
import pytest

import ftmesh
from ftmesh import ArgumentError
from ftmesh.testing import cpu_grid
from ftmesh.tpu.compile_report import CompileReport, compile_report, strategy
from ftmesh.tpu.compiled_rounds import CompiledLoop, compiled_loops
from tests.support.on_devices import plan_on_cpu
from tests.support.reporting import report_for, tree_source

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%add_computation (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b), metadata={op_name="calls=%other"}
}

%body.1 (state: (s32[], /*index=1*/f32[8,8,128])) -> (s32[], f32[8,8,128]) {
  %state = (s32[]{:T(128)}, /*index=1*/f32[8,8,128]{2,1,0:T(8,128)}) parameter(0)
IN THE LOOP
  ROOT %next = (s32[]{:T(128)}, f32[8,8,128]{2,1,0:T(8,128)}) tuple(%i, %buffer)
}

%other (state: f32[]) -> f32[] {
  ROOT %never = f32[] collective-permute(%state), source_target_pairs={{0,1}}
}

%condition.1 (state: (s32[], f32[8,8,128])) -> pred[] {
  ROOT %go = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8,8,128]) -> f32[8,8,128] {
BEFORE THE LOOP
  %loop = (s32[], f32[8,8,128]{2,1,0:T(8,128)}) while(%init), condition=%condition.1, body=%body.1
  ROOT %out = f32[8,8,128]{2,1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""
CHUNK = "f32[1,8,128]{2,1,0:T(8,128)S(1)}"
LINES = {
    "start": f"  %s.N = ({CHUNK}, {CHUNK}, u32[]{{:S(2)}}) collective-permute-start(%x.N), "
    "channel_id=1, source_target_pairs={{0,1},{1,0}}",
    "done": f"  %d.N = {CHUNK} collective-permute-done(%s.N)",
    "plain": f"  %p.N = {CHUNK} collective-permute(%x.N), source_target_pairs={{{{0,1}},{{1,0}}}}",
}


def program(*inside, before=()):
    """A program with one loop; permutations in it, and before it, are written ``start 0``."""
    lines = [
        "\n".join(LINES[kind].replace("N", number) for kind, number in map(str.split, ops))
        for ops in (inside, before)
    ]
    return PROGRAM.replace("IN THE LOOP", lines[0]).replace("BEFORE THE LOOP", lines[1])


@pytest.mark.parametrize(
    ("ops", "in_flight"),
    [
        (["start 0", "done 0", "start 1", "done 1"], 1),  # one after the other
        (["start 0", "start 1", "done 0", "done 1"], 2),
        (["start 0", "start 1", "done 1", "start 2", "done 0", "done 2"], 2),
        (["start 0", "start 1", "start 2", "start 3", *(f"done {i}" for i in range(4))], 4),
    ],
)
def test_permutations_in_flight(ops, in_flight):
    (loop,) = compiled_loops(program(*ops))
    assert loop == CompiledLoop("loop 0", len(ops) // 2, in_flight, synchronous=False)
    assert f"{in_flight} in flight at once" in str(loop)


def test_synchronous_permutations():
    (loop,) = compiled_loops(program("plain 0", "plain 1"))
    assert loop == CompiledLoop("loop 0", 2, 1, synchronous=True)
    assert str(loop) == "loop 0: 2 permutations per round, synchronous"


def test_permutations_outside_loops_count_as_a_loop():
    text = program("start 0", "start 1", "done 0", "done 1", before=["start 9", "done 9"])
    loops = compiled_loops(text)
    assert [(loop.name, loop.permutations) for loop in loops] == [("loop 0", 1), ("loop 1", 2)]


def test_loops_without_permutations_do_not_count():
    assert compiled_loops(program()) == ()


def test_permutations_in_called_computations_belong_to_the_caller():
    text = program("start 0", "done 0").replace(
        "  ROOT %next", "  %c = f32[] call(%x), to_apply=%other\n  ROOT %next"
    )
    (loop,) = compiled_loops(text)
    assert loop.permutations == 2


def test_text_that_is_not_a_program():
    with pytest.raises(ArgumentError, match="no ENTRY"):
        compiled_loops("HloModule empty")


def test_the_compilers_strategy():
    debug = r'"debug":"\nStrategyRing{colors:1 phases:1 cores:{252} nophase0:0}"'
    assert strategy('"strategy":"StrategyRing",' + debug) == "StrategyRing{colors:1 phases:1}"
    assert strategy('{"strategy":"StrategyND"}') == "StrategyND"
    assert strategy("all-reduce") == "strategy not stated"


CPU_GRID = "cpu_grid('4x4', failed='2x2@0,0')"


@pytest.mark.slow
def test_a_report_for_cpu_devices():
    report = report_for("100_000", CPU_GRID)
    assert (report["accepted"], report["platform"], report["num_devices"]) == (True, "cpu", 12)
    assert [loop["name"] for loop in report["loops"]] == [
        "row-pair rings, reduce-scatter", "row-pair rings, all-gather",
    ]  # fmt: skip
    assert all(loop["permutations"] == 4 and loop["synchronous"] for loop in report["loops"])
    assert report["temporary_ratio"] == report["temporary_bytes"] / 100_000


@pytest.mark.slow
def test_a_report_for_a_pytree():
    shapes = {"loss": (), "conv": (3, 3, 64, 64), "bias": (64,)}
    report = report_for(tree_source(shapes.values()), CPU_GRID)
    assert (report["accepted"], report["payload_bytes"]) == (True, 4 * (1 + 36_864 + 64))


@pytest.mark.parametrize("payload", [0, [], {"a": jax.ShapeDtypeStruct((0, 3), "float32")}])
def test_an_empty_payload_is_rejected(payload):
    with pytest.raises(ArgumentError, match="there is nothing to sum"):
        compile_report(plan_on_cpu("ring", "2x2", None), payload)


def test_the_algorithm_that_runs_is_reported():
    plan = ftmesh.plan(cpu_grid("2x2"), executor="ppermute")
    runs = plan.for_payload(400)
    assert runs.algorithm != plan.algorithm
    report = compile_report(plan, 400)
    assert report.algorithm == runs.algorithm
    assert [loop.name for loop in report.loops] == [loop.name for loop in runs.program.loops]


def test_a_program_that_cannot_be_printed(unprinted):
    report = compile_report(plan_on_cpu("ring", "2x2", None), 64)
    assert report.accepted
    assert report.program_bytes + report.temporary_bytes > 0
    assert (report.loops, report.packing) == ((), None)
    *_, ours, theirs = str(report).splitlines()
    for line in (ours.removeprefix("  "), theirs.removeprefix("  lax.psum on the same devices: ")):
        assert line.startswith(f"this JAX cannot print what was compiled ({unprinted})")


def test_the_text_of_a_report():
    report = CompileReport(
        platform="TPU v6 lite",
        mesh="16x16 less 2x2@2,2",
        algorithm="ring",
        num_devices=252,
        with_idle=False,
        payload_bytes=100_000_000,
        refusal="",
        compile_seconds=2.5,
        program_bytes=900_000,
        temporary_bytes=102_000_000,
        loops=(CompiledLoop("ring", 2, 2, synchronous=False),),
        lax_psum="StrategyRing{colors:1 phases:1}",
    )
    assert str(report).splitlines() == [
        "ring on 16x16 less 2x2@2,2, 252 devices of TPU v6 lite: accepted",
        "  compiled in 2.5 s to 900 kB",
        "  102 MB of temporary memory, 1.02 times the payload",
        "  ring: 2 permutations per round, 2 in flight at once",
        "  lax.psum on the same devices: StrategyRing{colors:1 phases:1}",
    ]
    rejected = replace(report, refusal="the program should include all slice devices")
    assert "\n  a plan with idle devices (with_idle, --idle) may be accepted\n" in str(rejected)
    assert "idle" not in str(replace(report, refusal="RESOURCE_EXHAUSTED: Ran out of memory"))
    kernel = replace(report, executor="pallas", loops=())
    assert str(kernel).startswith("ring in a Pallas kernel on 16x16 less 2x2@2,2, 252 devices")
    assert kernel.as_dict()["executor"] == "pallas"
