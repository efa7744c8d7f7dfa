"""What the TPU compiler makes of damaged meshes."""

import subprocess
import sys

import pytest

from ftmesh.tpu import slices
from tests.support.reporting import in_a_process, report_for, tree

needs_libtpu = pytest.mark.skipif(
    not slices.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)

LANES = {"ring": 2, "row_pair": 4}


def compile_for(name, failed, algorithm, *options):
    """The report of the command, in a process of its own."""
    return in_a_process(
        "-m", "ftmesh", "compile", name, "--failed", failed, "--algorithm", algorithm,
        "--payload", "100MB", "--json", *options,
    )  # fmt: skip


def travels_at_once(report, algorithm):
    """Whether every lane of a round starts before the first is waited for, of each stream of it.

    Loops between two cores of a chip have one lane, others those of their algorithm. Where chunks
    travel as two streams, something is done while one of them does.
    """
    for loop in report["loops"]:
        lanes = 1 if loop["name"].startswith("between") else LANES[algorithm]
        streams, rest = divmod(loop["permutations"], lanes)
        hides = streams == 1 or (loop["cycles"] or {"hidden": 1})["hidden"] > 0
        if rest or streams not in (1, 2) or loop["in_flight"] < lanes or not hides:
            return False
    return not any(loop["synchronous"] for loop in report["loops"])


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("algorithm", LANES)
@pytest.mark.parametrize(
    ("name", "failed", "devices"),
    [("v2:8x8", "2x2@2,2", 120), ("v3:32x32", "4x2@14,14", 2032)],
)
def test_two_cores_a_chip(name, failed, devices, algorithm):
    report = compile_for(name, failed, algorithm)
    assert report["accepted"], report["refusal"]
    assert report["num_devices"] == devices
    assert report["compile_seconds"] < 30
    assert travels_at_once(report, algorithm)
    assert report["lax_psum"] == "StrategyRing{colors:1 phases:1}"


@needs_libtpu
@pytest.mark.slow
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


@pytest.mark.slow
@needs_libtpu
def test_memory_for_little_more_than_the_gradients_of_a_model():
    slice_ = "ftmesh.Topology.from_devices(tpu_devices('v6e:4x4'), failed='2x2@0,0')"
    report = report_for(tree(resnet50()), slice_)
    assert report["accepted"], report["refusal"]
    assert report["payload_bytes"] == 102_228_128
    assert report["temporary_ratio"] < 1.3
    assert travels_at_once(report, report["algorithm"])


# Cycles of a round beside its permutations, at most, in the order of loops; and temporary memory in
# payloads. To move what a round of `row_pair` rings moves through the memory of a v6e takes 21,000;
# its buffer, with what fills up chunks, takes 96.3 MiB of the 98 that VMEM has for it.
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
def test_what_a_round_costs_beside_its_permutations(case):
    slice_, failed, algorithm = case
    report = compile_for(slice_, failed, algorithm)
    most, memory = CYCLES[case]
    assert report["accepted"], report["refusal"]
    assert travels_at_once(report, algorithm)
    assert report["lax_psum"] == "StrategyRing{colors:1 phases:1}"
    found = [sum(loop["cycles"][what] for what in SPENT) for loop in report["loops"]]
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), found
    assert report["temporary_ratio"] <= memory
    streams = {loop["permutations"] // LANES[algorithm] for loop in report["loops"]} - {0}
    assert (2 in streams) == (case[0] == "v3:16x32" and algorithm == "row_pair")
    if 2 in streams:
        assert report["hidden_cycles"] > 0.4 * report["cycles"]
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


@pytest.mark.slow
@needs_libtpu
def test_more_of_vmem_where_that_is_asked_for():
    report = compile_for("v6e:16x16", "2x2@2,2", "row_pair", "--in-vmem")
    assert report["accepted"], report["refusal"]
    assert travels_at_once(report, "row_pair")
    found = [sum(loop["cycles"][what] for what in SPENT) for loop in report["loops"]]
    most = [20_000, 12_000, 12_000, 20_000]
    assert all(one <= limit for one, limit in zip(found, most, strict=True)), found
    assert sum(report["packing"][what] for what in SPENT) <= 500_000, report["packing"]
    assert report["temporary_ratio"] <= 0.05


SHARED = """
import json, re, jax, optax, ftmesh
from jax.sharding import NamedSharding, PartitionSpec as P
from ftmesh.execute.hlo_text import computations, num_bytes
from ftmesh.tpu.cycles import estimate
from ftmesh.tpu.slices import tpu_devices

topology = ftmesh.Topology.from_devices(tpu_devices("v6e:4x4"), failed="2x2@2,2")
plan = ftmesh.plan(topology, "row_pair")
shapes = [(30_522, 1024), (1024, 4096)]

def step(*leaves):
    optimizer = plan.shard(optax.sgd(0.1), "data")
    return optimizer.update(list(leaves), optimizer.init(list(leaves)), list(leaves))[0]

ranks = NamedSharding(plan.jax_mesh("data"), P())
held = [jax.ShapeDtypeStruct(shape, "float32", sharding=ranks) for shape in shapes]
run = jax.shard_map(step, mesh=ranks.mesh, in_specs=P(), out_specs=P(), check_vma=False)
text = jax.jit(run).lower(*held).compile(compiler_options=ftmesh.compiler_options("v6e")).as_text()
known, entry = computations(text)
found = {}
for each in known[entry]:
    if num_bytes(each.type) > 10**8:
        target = re.search('target="(AllocateBuffer)"', each.config)
        cycles = found.setdefault(target[1] if target else each.opcode, [])
        cycles.append(estimate(each).total)
print(json.dumps(found))
"""


@pytest.mark.slow
@needs_libtpu
def test_a_shared_update_fills_nothing_and_cuts_nothing_off():
    """Of a leaf that does not fill its tiles: both would take a TPU twice as long as a copy."""
    found = in_a_process("-c", SHARED)
    assert len(found["AllocateBuffer"]) == 1
    assert "broadcast" not in found
    assert "slice" not in found
    assert max(found["fusion"]) > 300_000  # a copy


def assert_cycles_add_up(report):
    """In a report of `row_pair` for 100 MB on 16x16."""
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


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("algorithm", LANES)
def test_whole_slices_with_idle_chips(algorithm):
    report = compile_for("v5e:16x16", "2x2@2,2", algorithm, "--idle")
    assert report["accepted"], report["refusal"]
    assert (report["num_devices"], report["with_idle"]) == (256, True)
    *loops, last = report["loops"]
    assert {loop["permutations"] for loop in loops} == {LANES[algorithm]}
    assert travels_at_once({"loops": loops}, algorithm)
    assert last["permutations"] <= LANES[algorithm] + 4  # results go on to idle chips as well
    assert last["in_flight"] >= 4  # as many as a chip has links


@pytest.mark.slow
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
