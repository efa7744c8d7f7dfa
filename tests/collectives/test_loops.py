"""Common training loops train the same on a plan, with one or two lines changed."""

from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import ftmesh
from ftmesh import ArgumentError, Topology
from tests.support.compiled_text import collectives, moved

pytestmark = pytest.mark.usefixtures("quick_compiler")

PAGE = (Path(__file__).parents[2] / "docs" / "loops.md").read_text()
FOLDER = Path(__file__).parents[1] / "loops"
MESH = 'Mesh(np.array(devices), ("data",))', 'plan.jax_mesh("data")'
GRADS = "jax.value_and_grad(loss_of)", "plan.value_and_grad(loss_of)"
PMEAN = "lax.pmean((loss", "plan.pmean((loss"
CHANGES = {
    "jit_linen": [MESH, GRADS],
    "jit_explicit": [GRADS],
    "jit_nnx": [MESH, ("nnx.value_and_grad(loss_of", "plan.value_and_grad(loss_of")],
    "jit_two_axes": [(GRADS[0], "plan.value_and_grad(loss_of, specs=SPECS)")],
    "over_shard_map": [
        MESH,
        ('jax.value_and_grad(lambda p: lax.pmean(loss_of(p), "data"))', GRADS[1]),
    ],
    "over_pmap": [
        PMEAN,
        ("devices=list(devices)", 'devices=list(plan.jax_mesh("batch").devices)'),
    ],
}


@pytest.mark.parametrize("name", ["jit_linen", "over_shard_map", "over_pmap"])
def test_docs_show_the_changed_lines(name):
    source = (FOLDER / f"{name}.py").read_text()
    for before, after in CHANGES[name]:
        (line,) = (line for line in source.splitlines() if before in line)
        assert f"-{line}\n+{line.replace(before, after)}\n" in PAGE


def train(name, changes, *args, **options):
    """Train a loop with some of its source changed; returns the losses and the lowered step."""
    source = (FOLDER / f"{name}.py").read_text()
    for before, after in changes:
        assert source.count(before) == 1
        source = source.replace(before, after)
    scope = {"__name__": name}
    exec(source, scope)
    losses, lowered = scope["train"](*args, **options)
    return np.array(losses), lowered


def plan_and_shape(name, even):
    """A plan, and the shape of the mesh that the loop runs on."""
    if name != "jit_two_axes":
        return even, {"data": 12}
    column = Topology.from_devices(even.topology.devices[::2], shape="3x2")
    return ftmesh.plan(column, "ring"), {"data": 6, "model": 2}


SLOW = {"jit_explicit", "jit_nnx", "over_pmap"}  # what is in them is tested small


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CHANGES]
)
def test_loop_trains_the_same(even, name):
    plan, shape = plan_and_shape(name, even)
    devices = even.topology.devices
    plain, _ = train(name, [], devices)
    result, lowered = train(name, CHANGES[name], devices, plan)
    assert len(result) == 20
    assert result[-5:].mean() < 0.8 * result[0], "it must learn for the test to mean something"
    # Only the order of additions differs, by a rounding of float32 in each sum.
    np.testing.assert_allclose(result, plain, rtol=1e-5)
    program = lowered.compile()
    ftmesh.audit(program, "batch" if name == "over_pmap" else "data").require_none()
    if name == "jit_two_axes":
        # Each device sends its own half of the weights, and nothing more is gathered than before.
        size = (64 * 32 + 32 + 32 * 10) // 2 + 10 + 1
        assert max(moved(program, "data", shape)) < size / plan.program.num_chunks + 128
        gathers = [op for op in collectives(program) if op.kind == "all-gather"]
        assert gathers == []


@pytest.mark.slow
def test_batch_that_ranks_do_not_divide(even):
    """50 examples on 12 devices, which JAX cannot place; the losses are those of one device."""
    plain, _ = train("jit_linen", [], even.topology.devices[:1], size=50)
    not_placed = "images, labels = jax.device_put(batch, sharded)", "images, labels = batch"
    per_example = "labels).mean()", "labels)"
    result, lowered = train(
        "jit_linen",
        [*CHANGES["jit_linen"], not_placed, per_example],
        even.topology.devices,
        even,
        size=50,
    )
    np.testing.assert_allclose(result, plain, rtol=1e-5)
    ftmesh.audit(lowered.compile(), "data").require_none()


class Normed(nnx.Module):
    """A module whose calls change statistics and a random counter."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(1e-9, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(x))


def test_module_changed_by_its_call_raises(even):
    def loss_of(model, x):
        return model(x).mean()

    with pytest.raises(ArgumentError, match=r"changes its argument 0.*nnx.split"):
        jax.eval_shape(
            even.value_and_grad(loss_of),
            nnx.BatchNorm(3, rngs=nnx.Rngs(0)),
            np.zeros((24, 3), np.float32),
        )


@pytest.mark.parametrize("per_rank", [False, True])
def test_batch_statistics_as_aux(even, per_rank):
    """Statistics are those of the batch, or of each rank's examples, averaged over ranks."""
    model = Normed(nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)

    @nnx.jit
    def step(model, x):
        graph, params, rest = nnx.split(model, nnx.Param, ...)

        def loss_of(params, rest, x):
            model = nnx.merge(graph, params, rest)
            return (model(x) ** 3).mean(), nnx.state(model, nnx.Not(nnx.Param))

        run = even.value_and_grad(loss_of, has_aux=True, replicated=1, per_rank=per_rank)
        (_, stats), grads = run(params, rest, x)
        nnx.update(model, stats)
        return grads

    grads = step(model, x)
    ranks = x.reshape(12 if per_rank else 1, -1, 3)
    assert model.dropout.rngs.count[...] == 1
    np.testing.assert_allclose(model.norm.mean[...], 0.01 * x.mean(axis=0), rtol=1e-4, atol=1e-7)
    var = 0.99 + 0.01 * ranks.var(axis=1).mean(axis=0)
    np.testing.assert_allclose(model.norm.var[...], var, rtol=1e-5)
    normed = (ranks - ranks.mean(1, keepdims=True)) / np.sqrt(ranks.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(
        grads["norm"]["scale"][...], (normed**3).mean((0, 1)), rtol=1e-3, atol=1e-5
    )
