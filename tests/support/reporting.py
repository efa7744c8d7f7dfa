"""Reports on compiled programs, made in processes of their own."""

import json
import os
import subprocess
import sys


def in_a_process(*argv, **variables):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": "", **variables}
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
        "from ftmesh.tpu.compile_report import compile_report\n"
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
