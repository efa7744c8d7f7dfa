"""Faults to plant in the workers of a self-test, by a sitecustomize.py of their own.

The parents, and the package itself, know nothing of them.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAD = """
import os, signal, sys, time
if "ftmesh.selftest.worker" in sys.orig_argv:
    import jax
    import jax.numpy as jnp
    from ftmesh.planning import plan as planning
    Plan = planning.Plan

    def replace_psum(executor, algorithm, psum):
        own = Plan.psum
        def chosen(self, x, axis_name, **options):
            total = own(self, x, axis_name, **options)
            if (self.executor, self.algorithm) != (executor, algorithm):
                return total
            return psum(total, axis_name)
        Plan.psum = chosen
"""
WRONG = """
    def add_one(total, axis_name):
        at = jax.lax.axis_index(axis_name) == 2
        return jax.tree.map(lambda x: x.at[3].add(jnp.where(at, 1, 0).astype(x.dtype)), total)
    replace_psum("ppermute", "tree", add_one)
"""
HANG = """
    def wait(x):
        time.sleep(1e6)
        return x
    def wait_at_one(total, axis_name):
        def one(x):
            kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
            late = lambda x: jax.pure_callback(wait, kind, x)
            return jax.lax.cond(jax.lax.axis_index(axis_name) == 1, late, lambda x: x, x)
        return jax.tree.map(one, total)
    replace_psum("ppermute", "ring", wait_at_one)
"""
KILL = """
    def kill(total, axis_name):
        if os.environ.get("FTMESH_PROCESS_ID", "1") == "1":
            print("about to be killed", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return total
    replace_psum("ppermute", "flood", kill)
"""
VANISH = """
    def vanish(total, axis_name):
        if os.environ["FTMESH_PROCESS_ID"] == "1":
            os.kill(os.getppid(), signal.SIGKILL)  # whose reaper kills this process
            time.sleep(60)
        return total
    replace_psum("ppermute", "flood", vanish)
"""
SWAP = """
    import numpy as np
    right = planning.jax_mesh
    def swapped(*args, **options):
        mesh = right(*args, **options)
        devices = mesh.devices.copy()
        devices[[1, 2]] = devices[[2, 1]]
        return jax.sharding.Mesh(devices, mesh.axis_names)
    planning.jax_mesh = swapped
"""


def environment(folder, *faults, **variables):
    """The environment of a self-test whose workers have these faults."""
    (folder / "sitecustomize.py").write_text(HEAD + "".join(faults))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTMESH_", "XLA_", "JAX_"))}
    return {
        **kept,
        "FTMESH_CACHE_DIR": os.environ.get("FTMESH_CACHE_DIR", ""),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
        **variables,
    }
