"""What the TPU compiler makes of the Pallas executor's kernel."""

import json
import os
import subprocess
import sys

import pytest

from ftmesh.tpu import slices

pytestmark = pytest.mark.skipif(
    not slices.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)
HOLE = "2x2@2,2"


def compile_for(name, failed, algorithm, *options):
    """The report of a payload that fills all chunks, in a process of its own."""
    code = (
        "import json, sys, ftmesh\n"
        "from ftmesh.tpu.report import compile_report\n"
        "from ftmesh.tpu.slices import tpu_devices\n"
        f"topology = ftmesh.Topology.from_devices(tpu_devices({name!r}), failed={failed!r})\n"
        f"plan = ftmesh.plan(topology, {algorithm!r}, executor='pallas', **{dict(options)!r})\n"
        "whole = plan.program.num_chunks * 4096\n"
        "report = compile_report(plan, -(-100_000_000 // whole) * whole)\n"
        "print(json.dumps(report.as_dict()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("name", "algorithm", "devices"),
    [
        ("v6e:8x8", "ring", 60),
        ("v6e:16x16", "ring", 252),
        ("v6e:16x16", "row_pair", 252),
        ("v5p:4x4x1", "row_pair", 12),
        ("v4:4x4x1", "ring", 24),
        ("tpu7x:4x4x1", "row_pair", 24),
    ],
)
def test_one_kernel(name, algorithm, devices):
    """What is given to a kernel is a parameter here, which the compiler copies before and after."""
    report = compile_for(name, HOLE, algorithm)
    assert report["accepted"], report["refusal"]
    assert report["num_devices"] == devices
    assert report["temporary_ratio"] < 2.05
    assert report["loops"] == []  # of permutations


def test_whole_slices_with_idle_chips():
    report = compile_for("v5e:16x16", HOLE, "ring", ("with_idle", True))
    assert report["accepted"], report["refusal"]
