"""Training steps compiled for devices present, and for TPUs that are not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import pytest

from examples.bert.compile_step import main as compile_bert
from examples.bert.config import PRESETS as BERT_PRESETS
from examples.bert.model import init as init_bert
from examples.bert.trainer import make_model as make_bert
from examples.common.compile_step import StepReport, compile_step
from examples.common.trainer import StepOptions
from examples.resnet50.compile_step import main as compile_resnet50
from examples.resnet50.config import PRESETS
from examples.resnet50.trainer import resnet50_trainer
from ftmesh import Topology
from ftmesh.errors import ArgumentError
from ftmesh.testing import cpu_grid
from ftmesh.tpu.compiled_rounds import CompiledLoop, Overlap
from ftmesh.tpu.compiler import has_libtpu
from ftmesh.tpu.estimated_cycles import Cycles, RoundCycles
from tests.support.more import more

pytestmark = pytest.mark.usefixtures("quick_compiler")

SMALL = replace(PRESETS["tiny"], batch=24, stage_sizes=(1,), width=4, image_size=8, norm_group=4)


@pytest.mark.slow
def test_a_sharded_state_takes_less_memory():
    topology = cpu_grid("4x4", failed="2x2@0,0")
    trainers = [
        resnet50_trainer(SMALL, topology, StepOptions(sharded=sharded)) for sharded in (True, False)
    ]
    shared, whole = map(compile_step, trainers)
    assert whole.num_devices == 12
    assert whole.batch == 24
    assert whole.sums_on.endswith("on 4x4 less 2x2@0,0")
    # The momentum of all weights at each device, or a share of it; the rest they have in common.
    momentum = sum(4 * leaf.size for leaf in jax.tree.leaves(trainers[0].inputs[0].params))
    share = shared.argument_bytes - (whole.argument_bytes - momentum)
    assert momentum / 12 <= share < momentum / 3
    assert whole.device_bytes > whole.temporary_bytes + 2 * momentum
    assert whole.overlap.permutations == 0
    assert {loop.cycles for loop in whole.loops} == {None}  # only TPU compilers estimate any
    assert whole.others is None
    assert f"global batch 24, gradients summed by {whole.sums_on}" in str(whole)
    assert json.loads(json.dumps(whole.as_dict()))["device_bytes"] == whole.device_bytes


def test_the_report_has_the_cycles_of_sums():
    rounds = [
        RoundCycles(1000, 50, (), 10, 4096),
        RoundCycles(200, 0, (("sort", 64),), 5, 64),
        None,
    ]
    loops = tuple(CompiledLoop("loop", 2, 2, False, cycles) for cycles in rounds)
    report = StepReport("TPU v6 lite", 12, "ring", 24, 1.0, 1, 1, 1, Overlap(0, 0, 0, 0), loops)
    rounds_line = (
        "  11,500 cycles besides the permutations of 3 loops, 500 of them hidden, by the "
        "compiler's estimate; without an estimate: 1 sort of 64 B"
    )
    assert str(report).splitlines()[-1] == rounds_line
    report = replace(report, others=Cycles(7_000_000, 0, (("custom-call", 4000),)))
    assert str(report).splitlines()[-2:] == [
        rounds_line,
        "  7,000,000 cycles for the rest; without an estimate: 1 custom-call of 4 kB",
    ]
    assert "permutations of 1 loop, " in str(replace(report, loops=loops[:1]))
    found = json.loads(json.dumps(report.as_dict()))
    assert found["loops"][0]["cycles"]["exposed"] == 1000
    assert found["others"]["exposed"] == 7_000_000


@pytest.mark.slow
@pytest.mark.usefixtures("unprinted")
def test_the_report_of_a_program_that_cannot_be_printed():
    report = compile_step(resnet50_trainer(SMALL, cpu_grid("2x2")))
    assert report.temporary_bytes > 0
    assert (report.overlap, report.loops) == (None, ())
    *_, last = str(report).splitlines()
    assert last.startswith("  this JAX cannot print what was compiled (INTERNAL: ")


def test_emulated_ranks_have_no_devices():
    with pytest.raises(ArgumentError, match="these ranks are emulated"):
        compile_step(resnet50_trainer(SMALL, Topology.grid("2x2")))


@pytest.mark.parametrize("main", [compile_resnet50, compile_bert])
def test_a_slice_that_does_not_exist(main, capsys):
    assert main(["16x16"]) == 2
    error = capsys.readouterr().err
    assert "is not a TPU slice" in error
    assert error.count("\n") == 1


# With the TPU compiler --------------------------------------------------------------------------

needs_libtpu = pytest.mark.skipif(
    not has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)


def report_of(example, *argv):
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{example}.compile_step", *argv, "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("optimizer", "least"), [((), 16), pytest.param(("--whole-optimizer",), 24, marks=more)]
)
def test_permutations_overlap_with_convolutions(optimizer, least):
    damaged = ("v6e:4x4", "--failed", "2x2@0,0", "--algorithm", "ring", "--preset", "tiny")
    report = report_of("resnet50", *damaged, "--overlap", "--bucket", "12kB", *optimizer)
    assert report["num_devices"] == 12
    # Of 29 convolutions 19 are of the backward pass; without the option for it 6 have company.
    assert report["overlap"]["beside_permutations"] > 12
    assert report["overlap"]["beside_convolutions"] > least
    halves = 2 if optimizer else 1  # of an all-reduce that are in the backward pass
    assert report["overlap"]["permutations"] == halves * 88
    assert report["others"]["exposed"] > 100_000


@more
@pytest.mark.slow
@needs_libtpu
def test_sharded_lamb_takes_less_memory():
    slice_ = ("v3:4x4", "--failed", "2x2@0,0", "--preset", "tiny", "--batch", "48")
    shared, whole = (report_of("bert", *slice_, *more) for more in ((), ("--whole-optimizer",)))
    assert shared["num_devices"] == 24
    config = BERT_PRESETS["tiny"]
    params = jax.eval_shape(partial(init_bert, make_bert(config), seed=0))
    moments = 2 * 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    # Two moments of every weight at one device, or shared among those that own chunks.
    assert whole["argument_bytes"] - shared["argument_bytes"] > 0.8 * moments


@more
@pytest.mark.slow
@needs_libtpu
def test_a_step_in_a_kernel():
    damaged = ("v6e:4x4", "--failed", "2x2@0,0", "--preset", "tiny")
    rounds = report_of("resnet50", *damaged)
    kernel = report_of("resnet50", *damaged, "--executor", "pallas")
    assert kernel["sums_on"].endswith("in a Pallas kernel on 4x4 less 2x2@0,0")
    # The convolutions, which are the same, and tables for the kernel.
    assert 0.5 < kernel["others"]["exposed"] / rounds["others"]["exposed"] < 2
    assert "custom-call" in [opcode for opcode, _ in kernel["others"]["unknown"]]
