"""The two changed lines: a plain Flax loop trains the same on a plan as with `lax.pmean`."""

from pathlib import Path

import numpy as np

import ftmesh
from ftmesh.testing import cpu_grid

SOURCE = (Path(__file__).parents[1] / "flax_loop.py").read_text()
CHANGES = {
    'mesh = Mesh(np.array(devices), ("data",))': 'mesh = plan.jax_mesh("data")',
    'lax.pmean((loss, grads), "data")': 'plan.pmean((loss, grads), "data")',
}
README = (Path(__file__).parents[2] / "README.md").read_text()


def train(source, *args):
    scope = {"__name__": "flax_loop"}
    exec(source, scope)
    return np.array(scope["train"](*args))


def test_two_lines_make_a_loop_run_around_the_damage():
    changed = SOURCE
    for before, after in CHANGES.items():
        assert changed.count(before) == 1
        assert after in README
        changed = changed.replace(before, after)
    lines = zip(SOURCE.splitlines(), changed.splitlines(), strict=True)
    assert sum(before != after for before, after in lines) == 2

    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"))
    plain = train(SOURCE, plan.topology.devices)
    ours = train(changed, plan.topology.devices, plan)
    assert len(ours) == 50
    assert plain[-10:].mean() < 0.3 * plain[0], "the loop must learn for the test to mean something"
    # Only the order of additions differs: one rounding error of float32, 6e-8, in each sum, which
    # 50 steps of training may amplify; a thousandfold is far below what a wrong sum would show.
    np.testing.assert_allclose(ours, plain, rtol=1e-4)
