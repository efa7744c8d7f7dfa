"""Steps of a trainer against gradient descent in NumPy, with every kind of sum."""

import re

import jax
import numpy as np
import pytest

import ftmesh
from examples.common.trainer import StepOptions
from ftmesh import CollectiveError, Topology
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic.step_commit import HeldStep
from ftmesh.testing import cpu_grid
from tests.support.known_state import assert_same_bits
from tests.support.linear import (
    CLOSE,
    PointBatches,
    descent,
    first,
    linear_job,
    linear_trainer,
    train,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOLE = Topology.grid("4x4", failed="2x2@0,0")
DEVICES = cpu_grid("4x4", failed="2x2@0,0")


CASES = {
    "sharded": (HOLE, {}),
    "sharded on devices": (DEVICES, {"algorithm": "row_pair"}),
    "replicated": (HOLE, {"algorithm": "ring", "sharded": False}),
    "overlap": (HOLE, {"overlap": True, "bucket_bytes": 8}),
    "replicated overlap": (HOLE, {"overlap": True, "sharded": False}),
    "psum": (HOLE, {"algorithm": "psum"}),
    "psum idle": (HOLE, {"algorithm": "psum", "with_idle": True}),
    "psum idle on devices": (DEVICES, {"algorithm": "psum", "with_idle": True}),
    "idle": (HOLE, {"with_idle": True}),
    "idle on devices": (DEVICES, {"with_idle": True}),
    "replicated idle on devices": (DEVICES, {"with_idle": True, "sharded": False}),
    "two in a line": (cpu_grid("2x1"), {"algorithm": "psum"}),
    "disconnected": (Topology.from_drawing("..X..\n..X.."), {"algorithm": "psum"}),
    "two on a chip": (Topology((1,), (False,), devices_per_chip=2), {}),
    "one": (cpu_grid("1x1"), {}),
}


QUICK = {"sharded on devices", "replicated", "psum", "idle", "one"}


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] * (name not in QUICK))
        for name, case in CASES.items()
    ],
)
def test_three_steps_match_gradient_descent(topology, options, tmp_path):
    """In float32, whose rounding error of 6e-8 grows little in three steps."""
    trainer = linear_trainer(topology, StepOptions(**options))
    state, losses = trainer.first(*first()), []
    rows = trainer.parallel.local_rows(trainer.shares)
    batches = PointBatches(batch=24, num_steps=3, rows=rows)
    for step in range(3):
        batch = batches[step][0]
        state, loss = trainer.step(state, trainer.parallel.feed(batch))
        losses.append(float(loss))
    params, expected = descent(3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name in params:
        np.testing.assert_allclose(state.params[name], params[name], rtol=1e-5)
    # Every live rank has the mean of its own points; the mean of those is saved.
    points, weights = batch.x.reshape(trainer.parallel.num_ranks, -1, 3), batch.weights
    live = trainer.parallel.ranks.live
    own = points.sum(axis=1)[live] / weights.reshape(len(points), -1).sum(axis=1)[live, None]
    with Checkpoints(tmp_path) as checkpoints:
        HeldStep(3, trainer.to_saved(state), trainer.full_types).save(checkpoints, topology)
        step, saved = checkpoints.restore(trainer.saved, full_types=trainer.full_types)
        restored = trainer.from_saved(saved)
    assert step == 3
    assert restored.stats["mean"].shape == (trainer.parallel.num_ranks, 3)
    for rank in live:
        mean = restored.stats["mean"][rank]
        np.testing.assert_allclose(mean, own.mean(axis=0), rtol=1e-5, atol=1e-6)
    for leaf, saved in zip(*map(jax.tree.leaves, (restored, state)), strict=True):
        assert leaf.shape == saved.shape
        assert leaf.sharding.is_equivalent_to(saved.sharding, leaf.ndim)
    assert_same_bits(restored.params, state.params)
    assert_same_bits(restored.optimizer, state.optimizer)


def test_points_of_weight_zero_do_not_count():
    """With half of the weights 0, the mean loss is not half as large."""
    trainer = linear_trainer(HOLE)
    (batch, _) = PointBatches(batch=24, num_steps=1)[0]
    batch.weights[::2] = 0
    _, loss = trainer.step(trainer.first(*first()), trainer.parallel.feed(batch))
    assert float(loss) == pytest.approx(np.mean((0.5 - batch.y[1::2]) ** 2), rel=1e-5)


def test_a_run_evaluates_all_of_the_validation_data():
    job = linear_job(linear_trainer(HOLE), steps=8, steps_per_eval=4)
    report = train(job)
    params, losses = descent(8)
    np.testing.assert_allclose(list(report.losses.values()), losses, rtol=1e-4)
    points = PointBatches(batch=48)[0][0]
    right = np.abs(points.x @ params["w"] + params["b"] - points.y) < CLOSE
    assert 0 < right.mean() < 1
    assert report.evaluations[8]["accuracy"] == pytest.approx(right.mean())
    assert list(report.evaluations) == [4, 8]


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize(("wire_dtype", "kinds"), [("bfloat16", {"bf16", "f32"}), (None, {"f32"})])
def test_gradients_are_sent_in_the_wire_dtype(sharded, wire_dtype, kinds):
    """Losses, counts and new weights are sent in their own dtype.

    Partial sums of many additions are too; those of four chips, with a sharded optimizer, are not.
    """
    topology = cpu_grid("2x2") if sharded else DEVICES
    options = StepOptions(algorithm="auto" if sharded else "row_pair", sharded=sharded)
    trainer = linear_trainer(topology, options, wire_dtype=wire_dtype)
    text = trainer.step.lower(*trainer.inputs).as_text()
    assert set(re.findall(r"collective_permute.*-> tensor<\w*x(\w+)>", text)) == kinds


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"overlap": True, "sharded": False}, marks=pytest.mark.slow)],
    ids=["sharded", "replicated overlap"],
)
def test_every_collective_of_a_step_is_on_the_plan(options):
    trainer = linear_trainer(DEVICES, StepOptions(executor="ppermute", **options))
    program = trainer.step.lower(*trainer.inputs).compile()
    assert "collective-permute" in program.as_text()
    ftmesh.audit(program, "data").require_none()


def test_the_audit_finds_psum_in_a_step():
    trainer = linear_trainer(DEVICES, StepOptions(algorithm="psum"))
    with pytest.raises(CollectiveError, match=r"all-reduce of .* along data, from"):
        ftmesh.audit(trainer.step.lower(*trainer.inputs), "data").require_none()
