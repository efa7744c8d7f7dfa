"""Plans compiled for damaged TPU slices."""

import re
import subprocess
import sys

import pytest

from ftmesh.tpu import compiler
from tests.support.more import more_case
from tests.support.reporting import report_for, run_json, tree_source

needs_libtpu = pytest.mark.skipif(
    not compiler.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)

LANES = {"ring": 2, "row_pair": 4}


def compile_for(name, failed, algorithm, *options):
    """The report of the command, from a process of its own."""
    return run_json(
        "-m", "ftmesh", "compile", name, "--failed", failed, "--algorithm", algorithm,
        "--payload", "100MB", "--json", *options,
    )  # fmt: skip


def all_in_flight(report, algorithm):
    """True if every lane of a round starts before the program waits for the first.

    Loops between the two cores of a chip have one lane, those across row pairs that wrap have two,
    and others those of their algorithm.
    """
    for loop in report["loops"]:
        lanes = 1 if loop["name"].startswith("between") else LANES[algorithm]
        if loop["name"].startswith("across") and "wrapping in xy" in report["mesh"]:
            lanes = 2
        if loop["permutations"] != lanes or loop["in_flight"] < lanes or loop["synchronous"]:
            return False
    return True


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("algorithm", LANES)
@pytest.mark.parametrize(
    ("name", "failed", "devices"),
    [("v2:8x8", "2x2@2,2", 120), more_case("v3:32x32", "4x2@14,14", 2032)],
)
def test_two_cores_per_chip(name, failed, devices, algorithm):
    report = compile_for(name, failed, algorithm)
    assert report["accepted"], report["refusal"]
    assert report["num_devices"] == devices
    assert report["compile_seconds"] < 30
    assert all_in_flight(report, algorithm)
    assert report["lax_psum"] == "StrategyRing{colors:1 phases:1}"


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


@pytest.mark.slow
@needs_libtpu
def test_the_gradients_of_a_model_need_little_temporary_memory():
    devices = "ftmesh.Topology.from_devices(tpu_devices('v6e:4x4'), failed='2x2@0,0')"
    report = report_for(tree_source(resnet50()), devices)
    assert report["accepted"], report["refusal"]
    assert report["payload_bytes"] == 102_228_128
    assert report["temporary_ratio"] < 1.3
    assert all_in_flight(report, report["algorithm"])


# Limits: cycles of a round besides its permutations, by loop, and temporary memory in payloads.
# Moving what a round of `row_pair` rings moves through the memory of a v6e takes 21,000 cycles; its
# buffer, with the padding of chunks, takes 96.3 of the 98 MiB of VMEM that there are for it.
SPENT = ("exposed", "hidden")
CYCLES = {
    ("v6e:16x16", "2x2@2,2", "row_pair"): ([28_000, 12_000, 12_000, 28_000], 0.2),
    ("v6e:16x16", "2x2@2,2", "ring"): ([7_000, 7_000], 0.05),
    ("v3:16x32", "4x2@6,14", "row_pair"): ([150_000, 42_193, 6_020, 6_020, 42_193, 150_000], 1.7),
    ("v3:16x32", "4x2@6,14", "ring"): ([160_000, 2_089, 2_089, 160_000], 1.7),
}


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("case", CYCLES, ids=" ".join)
def test_the_cost_of_a_round_besides_its_permutations(case):
    slice_, failed, algorithm = case
    report = compile_for(slice_, failed, algorithm)
    limits, memory = CYCLES[case]
    assert report["accepted"], report["refusal"]
    assert all_in_flight(report, algorithm)
    assert report["lax_psum"] == "StrategyRing{colors:1 phases:1}"
    cycles = [sum(loop["cycles"][what] for what in SPENT) for loop in report["loops"]]
    assert all(c <= limit for c, limit in zip(cycles, limits, strict=True)), cycles
    assert report["temporary_ratio"] <= memory
    if slice_.startswith("v6e"):
        assert report["num_devices"] == 252
        assert sum(report["packing"][what] for what in SPENT) <= 400_000, report["packing"]
    if slice_.startswith("v6e") and algorithm == "row_pair":
        assert_cycles_add_up(report)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_a_hundred_megabytes_in_a_kernel_stay_in_vmem(algorithm):
    report = compile_for("v6e:16x16", "2x2@2,2", algorithm, "--executor", "pallas")
    assert report["accepted"], report["refusal"]
    assert (report["num_devices"], report["loops"]) == (252, [])
    assert sum(report["packing"][what] for what in SPENT) <= 450_000, report["packing"]
    assert report["temporary_ratio"] <= 0.05


SHARDED_UPDATE = """
import json, re, jax, optax, ftmesh
from jax.sharding import NamedSharding, PartitionSpec as P
from ftmesh.execute.hlo_text import parse_computations, type_bytes
from ftmesh.tpu.estimated_cycles import estimate
from ftmesh.tpu.compiler import tpu_devices

topology = ftmesh.Topology.from_devices(tpu_devices("v6e:4x4"), failed="2x2@2,2")
plan = ftmesh.plan(topology, executor="xla")
shapes = [(30_522, 1024), (1024, 4096)]

def step(*leaves):
    optimizer = plan.shard(optax.sgd(0.1), "data")
    return optimizer.update(list(leaves), optimizer.init(list(leaves)), list(leaves))[0]

ranks = NamedSharding(plan.jax_mesh("data"), P())
held = [jax.ShapeDtypeStruct(shape, "float32", sharding=ranks) for shape in shapes]
run = jax.shard_map(step, mesh=ranks.mesh, in_specs=P(), out_specs=P(), check_vma=False)
text = jax.jit(run).lower(*held).compile(compiler_options=ftmesh.compiler_options("v6e")).as_text()
computations, entry = parse_computations(text)
cycles = {}
for i in computations[entry]:
    if type_bytes(i.type) > 10**8:
        target = re.search('target="(AllocateBuffer)"', i.config)
        key = target[1] if target else i.opcode
        cycles.setdefault(key, []).append(estimate(i).total)
print(json.dumps(cycles))
"""


@pytest.mark.slow
@needs_libtpu
def test_a_sharded_update_neither_pads_nor_slices():
    """Besides the sum and the gather, an array of 125 MB is copied once, and nothing else."""
    cycles = run_json("-c", SHARDED_UPDATE)
    assert set(cycles) <= {"parameter", "all-reduce", "all-gather", "bitcast", "copy", "tuple"}
    assert [len(cycles[kind]) for kind in ("all-reduce", "all-gather", "copy")] == [1, 1, 1]
    assert 300_000 < cycles["copy"][0] < 400_000


def assert_cycles_add_up(report):
    """Check a report of `row_pair` for 100 MB on 16x16, which wraps."""
    rounds = [loop["cycles"] for loop in report["loops"]]
    assert [r["rounds"] for r in rounds] == [32, 6, 6, 32]
    assert not any(r["unknown"] for r in rounds)
    assert min(r["exposed"] for r in rounds) > 1000
    # A chunk in each of two lanes across, and seven in each of four along the rings.
    along, across, _, _ = (r["sent_bytes"] for r in rounds)
    assert 2 * 100e6 / 448 <= across <= 1.1 * 2 * 100e6 / 448
    assert along == 14 * across
    cycles = [r["rounds"] * (r["exposed"] + r["hidden"]) for r in rounds]
    assert report["cycles"] == sum(cycles)
    assert report["packing"]["exposed"] > 100_000


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("algorithm", LANES)
def test_whole_slices_with_idle_chips(algorithm):
    report = compile_for("v5e:16x16", "2x2@2,2", algorithm, "--idle")
    assert report["accepted"], report["refusal"]
    assert (report["num_devices"], report["with_idle"]) == (256, True)
    *loops, last = report["loops"]
    assert all_in_flight({"loops": loops, "mesh": report["mesh"]}, algorithm)
    assert last["permutations"] <= LANES[algorithm] + 4  # results are sent on to idle chips as well
    assert last["in_flight"] >= 4  # as many as a chip has links


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("options", "mesh", "lanes"),
    [((), "16x16 (wrapping in xy)", 2), (("--wrap", "none"), "16x16", 4)],
)
def test_wrap_links_are_those_of_the_slice_or_as_given(options, mesh, lanes):
    report = compile_for("v6e:16x16", "2x2@2,2", "row_pair", *options)
    assert report["accepted"], report["refusal"]
    assert report["mesh"] == f"{mesh} less 2x2@2,2"
    across = [loop for loop in report["loops"] if loop["name"].startswith("across")]
    assert [loop["permutations"] for loop in across] == [lanes, lanes]


@pytest.mark.slow
@needs_libtpu
def test_a_rejected_program_is_reported():
    report = compile_for("v5e:16x16", "2x2@2,2", "ring")
    assert not report["accepted"]
    assert "should include all slice devices" in report["refusal"]
    assert "should include all slice devices" in report["lax_psum"]


@needs_libtpu
def test_a_slice_unknown_to_libtpu():
    done = subprocess.run(
        [sys.executable, "-m", "ftmesh", "compile", "v99:4x4"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "ftmesh: 'v99:4x4' is not a TPU slice" in done.stderr


@pytest.mark.slow
@needs_libtpu
def test_a_language_model_in_bfloat16_adds_gradients_in_float32():
    """Its audit lists sums in 16 bits. On CPU devices it cannot: XLA makes them 32 bits there."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "examples.llm.compile_step", "v6e:4x4"),
            *("--failed", "2x2@2,2", "--replica", "2x1", "--set", "dtype=bfloat16"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for axis in ("data", "fsdp"):
        assert f"along '{axis}' do not: none" in done.stdout
    ((cycles, unknown),) = re.findall(r"  ([\d,]+) cycles besides collectives(.*)", done.stdout)
    assert "while" not in unknown  # how often each loop runs is known
    assert 1e5 < int(cycles.replace(",", "")) < 1e8
