"""Compiled programs: reading their text, and what the TPU compiler makes of damaged meshes."""

import json
import os
import re
import subprocess
import sys

import pytest

import ftmesh
from ftmesh import ArgumentError, FtmeshError, TopologyError, TopologyWarning
from ftmesh.cli import main
from ftmesh.tpu import slices
from ftmesh.tpu.report import CompiledLoop, CompileReport, compiled_loops, strategy

needs_libtpu = pytest.mark.skipif(
    not slices.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)


# Reading compiled text --------------------------------------------------------------------------

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
        (["start 0", "done 0", "start 1", "done 1"], 1),  # one waits for the other
        (["start 0", "start 1", "done 0", "done 1"], 2),
        (["start 0", "start 1", "done 1", "start 2", "done 0", "done 2"], 2),
        (["start 0", "start 1", "start 2", "start 3", *(f"done {i}" for i in range(4))], 4),
    ],
)
def test_permutations_in_flight(ops, in_flight):
    (loop,) = compiled_loops(program(*ops), ["around"])
    assert loop == CompiledLoop("around", len(ops) // 2, in_flight, synchronous=False)
    assert f"{in_flight} in flight at once" in str(loop)


def test_synchronous_permutations_are_said_to_be():
    (loop,) = compiled_loops(program("plain 0", "plain 1"), ["around"])
    assert loop == CompiledLoop("around", 2, 1, synchronous=True)
    assert str(loop) == "around: 2 permutations a round, synchronous here"


def test_permutations_outside_loops_count_on_their_own_and_names_need_to_match():
    text = program("start 0", "start 1", "done 0", "done 1", before=["start 9", "done 9"])
    loops = compiled_loops(text, ["between cores", "around"])
    assert [(loop.name, loop.permutations) for loop in loops] == [
        ("between cores", 1),
        ("around", 2),
    ]
    assert [loop.name for loop in compiled_loops(text, ["around"])] == ["loop 0", "loop 1"]


def test_loops_without_permutations_and_computations_that_do_not_run_are_left_out():
    assert compiled_loops(program(), []) == ()


def test_permutations_in_called_computations_belong_to_the_caller():
    text = program("start 0", "done 0").replace(
        "  ROOT %next", "  %c = f32[] call(%x), to_apply=%other\n  ROOT %next"
    )
    (loop,) = compiled_loops(text, ["around"])
    assert loop.permutations == 2


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ArgumentError, match="no ENTRY"):
        compiled_loops("HloModule empty", [])


def test_the_compilers_strategy():
    debug = r'"debug":"\nStrategyRing{colors:1 phases:1 cores:{252} nophase0:0}"'
    assert strategy('"strategy":"StrategyRing",' + debug) == "StrategyRing{colors:1 phases:1}"
    assert strategy('{"strategy":"StrategyND"}') == "StrategyND"
    assert strategy("all-reduce") == "strategy not stated"


# Options, devices, the command ------------------------------------------------------------------


FOUR = {"xla_max_concurrent_async_collective_permutes": "4"}
SIX = {"xla_max_concurrent_async_collective_permutes": "6"}
ASYNC = {"xla_enable_async_collective_permute": "true"}


@pytest.mark.parametrize(
    ("platform", "options"),
    [
        ("tpu v6e", FOUR), ("v6e", FOUR), ("TPU v6 lite", FOUR), ("v6e:16x16", FOUR),
        ("v6e-256", FOUR), ("tpu v5p", SIX), ("TPU v5", SIX), ("tpu7x", SIX), ("v4", SIX),
        ("v2", ASYNC), ("v3:16x32", ASYNC), ("TPU v3", ASYNC),
        ("TPU v5 lite", {}), ("v5litepod-4", {}),
        ("cpu", {}), ("gpu", {}), ("cuda", {}),
    ],
)  # fmt: skip
def test_compiler_options(platform, options):
    assert ftmesh.compiler_options(platform) == options
    extra = ftmesh.compiler_options(platform, overlap=True).items() - options.items()
    is_tpu = platform not in ("cpu", "gpu", "cuda")
    assert extra == ({("xla_tpu_use_aggressive_scheduling", "true")} if is_tpu else set())


@pytest.mark.parametrize("platform", ["banana", "", "tpu", "vx"])
def test_an_unknown_platform_is_refused(platform):
    with pytest.raises(ArgumentError, match=r"is not known: give one of v2, v3, .*v6e, tpu7x, cpu"):
        ftmesh.compiler_options(platform)


@pytest.mark.parametrize("platform", ["TPU v98 lite", "tpu97x", "v96e:4x4"])
def test_a_tpu_newer_than_the_options_gets_none_and_a_warning_once(platform):
    with pytest.warns(TopologyWarning, match=re.escape(repr(platform))) as said:
        assert [ftmesh.compiler_options(platform, overlap=yes) for yes in (True, False)] == [{}, {}]
    assert len(said) == 1
    assert ftmesh.compiler_options(platform) == {}


def test_options_are_a_fresh_value():
    ftmesh.compiler_options("v6e").clear()
    assert ftmesh.compiler_options("v6e")


def test_missing_libtpu_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setattr(slices, "has_libtpu", lambda: False)
    with pytest.raises(FtmeshError, match=r"pip install libtpu \(x86_64 Linux only\)"):
        slices.tpu_devices("v6e:16x16")


@pytest.mark.parametrize("name", ["", "v6e", "16x16", "v6e:16by16", "v6e:999x999", "v6e:4x4 "])
def test_what_is_no_slice_is_refused_before_anything_is_loaded(name):
    with pytest.raises(TopologyError, match=r"is not a TPU slice.*v6e:16x16"):
        slices.tpu_devices(name)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("compile v6e:16x16", "pip install libtpu"),
        ("compile 16x16", "'16x16' is not a TPU slice"),
        ("compile v6e:0x4", "1 or more chips"),
        ("compile v6e:16x16 --payload much", "'much' is not a size"),
        ("compile v6e:16x16 --algorithm fastest", "invalid choice: 'fastest'"),
        ("compile v6e:16x16 --executor mine", "invalid choice: 'mine'"),
        ("compile v6e:16x16 --executor pallas --fit", "leave --executor out"),
        ("compile", "the following arguments are required: SLICE"),
    ],
)
def test_bad_input_gets_one_line_and_a_status(capsys, monkeypatch, argv, says):
    monkeypatch.setattr(slices, "has_libtpu", lambda: False)
    try:
        status = main(argv.split())
    except SystemExit as stop:
        status = stop.code
    out, error = capsys.readouterr()
    assert (status, out) == (69 if "libtpu" in says else 2, "")
    assert says in error
    assert error.count("\n") == 1


def in_a_process(*argv, **variables):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def report_for(payload, devices):
    """The report for a payload and devices, both written in Python, in a process of its own."""
    return in_a_process(
        "-c",
        "import json, sys, jax, ftmesh\n"
        "from ftmesh.tpu.report import compile_report\n"
        "from ftmesh.tpu.slices import tpu_devices\n"
        "from ftmesh.testing import cpu_grid\n"
        f"plan = ftmesh.plan({devices}, 'row_pair')\n"
        f"report = compile_report(plan, {payload})\n"
        "print(report, file=sys.stderr)\n"
        "print(json.dumps(report.as_dict()))",
    )


def tree(shapes):
    """A pytree of float32 arrays of the given shapes, written in Python."""
    return f"[jax.ShapeDtypeStruct(shape, 'float32') for shape in {list(shapes)}]"


CPU_GRID = "cpu_grid('4x4', failed='2x2@0,0')"


def test_a_report_for_cpu_devices():
    found = report_for("100_000", CPU_GRID)
    assert (found["accepted"], found["platform"], found["num_devices"]) == (True, "cpu", 12)
    assert [loop["name"] for loop in found["loops"]] == [
        "row-pair rings, reduce-scatter", "row-pair rings, all-gather",
    ]  # fmt: skip
    assert all(loop["permutations"] == 4 and loop["synchronous"] for loop in found["loops"])
    assert found["temporary_ratio"] == found["temporary_bytes"] / 100_000


@pytest.mark.slow
def test_a_report_for_a_pytree():
    shapes = {"loss": (), "conv": (3, 3, 64, 64), "bias": (64,)}
    found = report_for(tree(shapes.values()), CPU_GRID)
    assert (found["accepted"], found["payload_bytes"]) == (True, 4 * (1 + 36_864 + 64))


def test_a_report_reads_well():
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
        "  ring: 2 permutations a round, 2 in flight at once",
        "  lax.psum on the same devices: StrategyRing{colors:1 phases:1}",
    ]


# Real compilations ------------------------------------------------------------------------------

LANES = {"ring": 2, "row_pair": 4}


def compile_for(name, failed, algorithm, *options):
    """The report of the command, in a process of its own."""
    return in_a_process(
        "-m", "ftmesh", "compile", name, "--failed", failed, "--algorithm", algorithm,
        "--payload", "100MB", "--json", *options,
    )  # fmt: skip


def permutations(report):
    """The permutations of each loop that goes round the mesh, not between two cores of a chip."""
    return {
        loop["permutations"] for loop in report["loops"] if not loop["name"].startswith("between")
    }


def travels_at_once(report):
    """Whether every permutation of a round starts before the first is waited for."""
    return all(
        loop["in_flight"] == loop["permutations"] and not loop["synchronous"]
        for loop in report["loops"]
    )


@needs_libtpu
@pytest.mark.parametrize("algorithm", LANES)
@pytest.mark.parametrize(
    ("name", "failed", "devices"),
    [("v2:8x8", "2x2@2,2", 120), ("v3:16x32", "4x2@6,14", 1008), ("v3:32x32", "4x2@14,14", 2032)],
)
def test_two_cores_a_chip(name, failed, devices, algorithm):
    report = compile_for(name, failed, algorithm)
    assert report["accepted"], report["refusal"]
    assert report["num_devices"] == devices
    assert report["compile_seconds"] < 30
    assert permutations(report) == {LANES[algorithm]}
    assert travels_at_once(report)
    assert report["lax_psum"] == "StrategyRing{colors:1 phases:1}"


@needs_libtpu
@pytest.mark.parametrize("algorithm", LANES)
def test_memory_for_little_more_than_the_payload(algorithm):
    report = compile_for("v6e:16x16", "2x2@2,2", algorithm)
    assert report["accepted"], report["refusal"]
    assert report["num_devices"] == 252
    assert report["temporary_ratio"] < 1.3
    assert permutations(report) == {LANES[algorithm]}
    assert travels_at_once(report)
    assert report["lax_psum"] == "StrategyRing{colors:1 phases:1}"


@needs_libtpu
def test_cycles_beside_the_permutations():
    report = compile_for("v6e:16x16", "2x2@2,2", "row_pair")
    rounds = [loop["cycles"] for loop in report["loops"]]
    assert [each["rounds"] for each in rounds] == [32, 6, 6, 32]
    assert not any(each["unknown"] for each in rounds)
    assert min(each["exposed"] for each in rounds) > 1000
    # Four chunks across, and seven times as many along the rings.
    along, across, _, _ = (each["sent_bytes"] for each in rounds)
    assert 4 * 100e6 / 448 <= across <= 1.1 * 4 * 100e6 / 448
    assert along == 7 * across
    cycles = [each["rounds"] * (each["exposed"] + each["hidden"]) for each in rounds]
    assert report["cycles"] == sum(cycles)
    assert report["packing"]["exposed"] > 100_000


@needs_libtpu
def test_an_executor_is_fitted():
    found = in_a_process(
        "-m", "ftmesh", "compile", "v6e:4x4", "--failed", "2x2@0,0", "--fit", "--json"
    )
    assert {each["lanes"] for each in found["rounds"]} == {2, 4}
    assert found["per_round"] + 2 * found["per_lane"] > 1000
    assert 1e-4 < found["per_byte"] < 0.1
    assert 1e-4 < found["packing"] < 0.1


def resnet50():
    """The shapes of the parameters of a ResNet-50."""
    shapes, inputs = [(7, 7, 3, 64), (64,), (64,)], 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels = [(1, 1, inputs, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            kernels += [(1, 1, inputs, 4 * width)] * (block == 0)
            shapes += [shape for kernel in kernels for shape in (kernel, kernel[3:], kernel[3:])]
            inputs = 4 * width
    return [*shapes, (1000,), (2048, 1000)]


@needs_libtpu
def test_memory_for_little_more_than_the_gradients_of_a_model():
    slice_ = "ftmesh.Topology.from_devices(tpu_devices('v6e:4x4'), failed='2x2@0,0')"
    report = report_for(tree(resnet50()), slice_)
    assert report["accepted"], report["refusal"]
    assert report["payload_bytes"] == 102_228_128
    assert report["temporary_ratio"] < 1.3
    assert travels_at_once(report)


# Cycles of a round beside its permutations, at most, in the order of loops; and temporary memory in
# payloads. To move what a round of `row_pair` rings moves through the memory of a v6e takes 21,000.
SPENT = ("exposed", "hidden")
CYCLES = {
    ("v6e:16x16", "2x2@2,2", "row_pair"): ([32_000, 16_000, 16_000, 32_000], 1.05),
    ("v6e:16x16", "2x2@2,2", "ring"): ([7_826, 7_826], 1.05),
    ("v3:16x32", "4x2@6,14", "row_pair"): ([150_000, 42_193, 6_020, 6_020, 42_193, 150_000], 1.7),
    ("v3:16x32", "4x2@6,14", "ring"): ([160_000, 2_089, 2_089, 160_000], 1.7),
}


@needs_libtpu
@pytest.mark.parametrize("case", CYCLES, ids=" ".join)
def test_what_a_round_costs_beside_its_permutations(case):
    slice_, failed, algorithm = case
    report = compile_for(slice_, failed, algorithm)
    most, memory = CYCLES[case]
    found = [sum(loop["cycles"][what] for what in SPENT) for loop in report["loops"]]
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), found
    assert report["temporary_ratio"] <= memory
    if slice_.startswith("v6e"):
        assert sum(report["packing"][what] for what in SPENT) <= 600_000, report["packing"]


@needs_libtpu
@pytest.mark.parametrize("algorithm", LANES)
def test_whole_slices_with_idle_chips(algorithm):
    report = compile_for("v5e:16x16", "2x2@2,2", algorithm, "--idle")
    assert report["accepted"], report["refusal"]
    assert (report["num_devices"], report["with_idle"]) == (256, True)
    *loops, last = report["loops"]
    assert {loop["permutations"] for loop in loops} == {LANES[algorithm]}
    assert travels_at_once({"loops": loops})
    assert last["permutations"] <= LANES[algorithm] + 4  # results go on to idle chips as well
    assert last["in_flight"] >= 4  # as many as a chip has links


@needs_libtpu
def test_a_refusal_is_reported():
    report = compile_for("v5e:16x16", "2x2@2,2", "ring")
    assert not report["accepted"]
    assert "should include all slice devices" in report["refusal"]
    assert "should include all slice devices" in report["lax_psum"]


@needs_libtpu
def test_a_slice_that_libtpu_does_not_know():
    done = subprocess.run(
        [sys.executable, "-m", "ftmesh", "compile", "v99:4x4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "ftmesh: 'v99:4x4' is not a TPU slice" in done.stderr
