"""Compile reports, from processes of their own."""

import json
import os
import subprocess
import sys


def run_json(*argv, **variables):
    """Run Python with `argv` and parse its JSON output."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": "", **variables}
    done = subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def report_for(payload, topology):
    """The report for a payload and a topology, both given as Python source."""
    return run_json(
        "-c",
        "import json, sys, jax, ftmesh\n"
        "from ftmesh.tpu.compile_report import compile_report\n"
        "from ftmesh.tpu.compiler import tpu_devices\n"
        "from ftmesh.testing import cpu_grid\n"
        f"plan = ftmesh.plan({topology}, 'row_pair')\n"
        f"report = compile_report(plan, {payload})\n"
        "print(report, file=sys.stderr)\n"
        "print(json.dumps(report.as_dict()))",
    )


def tree_source(shapes):
    """A pytree of float32 arrays of the given shapes, as Python source."""
    return f"[jax.ShapeDtypeStruct(shape, 'float32') for shape in {list(shapes)}]"
