"""The loop: when the host waits for the device, resuming, and what is never saved."""

import json
import os
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from examples.common.lr_schedules import poly_decay
from examples.common.trainer import StepOptions
from ftmesh import Topology
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.errors import CheckpointError, TrainingError
from tests.support.linear import RATE, descent, first, linear_job, linear_trainer, train

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOLE = Topology.grid("4x4", failed="2x2@0,0")


@pytest.fixture(scope="module")
def trainer(quick_compiler):
    return linear_trainer(HOLE)


@pytest.fixture
def watched(monkeypatch):
    """A trainer, and a list of what the host waits for between steps.

    An entry is the number of steps that were started, and the step whose loss was looked at; None
    for any other value of a device.
    """
    made, looks = [], []

    def note(array):
        step = next((i for i, loss in enumerate(made, 1) if loss is array), None)
        if not looks or looks[-1] != (len(made), step):
            looks.append((len(made), step))

    def noting(function):
        return lambda array, *args, **options: (note(array), function(array, *args, **options))[1]

    kind = type(jnp.zeros(()))
    for name in ("__array__", "__float__", "__int__", "__bool__", "__index__", "item", "tolist"):
        monkeypatch.setattr(kind, name, noting(getattr(kind, name)))
    monkeypatch.setattr(kind, "_value", property(noting(kind._value.fget)))
    monkeypatch.setattr(kind, "block_until_ready", noting(kind.block_until_ready))
    for name in ("device_get", "block_until_ready"):
        monkeypatch.setattr(jax, name, noting(getattr(jax, name)))
    trainer = linear_trainer(
        HOLE, lr_schedule=poly_decay(RATE, warmup_steps=2, total_steps=9, end=0, power=1)
    )

    def step(state, batch):
        state, loss = trainer.step(state, batch)
        made.append(loss)
        return state, loss

    return replace(trainer, step=step), looks


@pytest.mark.slow
def test_between_two_steps_only_the_previous_loss_is_read(watched):
    trainer, looks = watched
    train(linear_job(trainer, steps=6))
    between = [(started, step) for started, step in looks if 1 <= started < 6]
    assert between == [(2, 1), (3, 2), (4, 3), (5, 4)]
    assert (6, 5) in looks
    assert (6, 6) in looks


def test_logged_learning_rates_match_the_steps(watched, tmp_path):
    trainer, _ = watched
    train(linear_job(trainer, steps=4), "--out", str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if "lr" in line]
    assert rates == pytest.approx([0, RATE / 2, RATE, RATE * 6 / 7])
    # The first step has no rate, and its weights are the first ones: so has the second its loss.
    losses = [line["loss"] for line in lines if "lr" in line]
    x_y = linear_job(trainer, steps=2).train
    whole = [x_y[step][0] for step in (0, 1)]
    (params, _) = first()
    for loss, batch in zip(losses, whole, strict=False):
        assert loss == pytest.approx(np.mean((params["b"] - batch.y) ** 2), rel=1e-5)


@pytest.fixture(scope="module")
def with_moments(quick_compiler):
    """Trainers with moments, and the losses of an uninterrupted run."""
    trainers = {
        "sharded": linear_trainer(Topology.grid("2x1"), kind=optax.adam),
        "whole": linear_trainer(
            Topology.grid("3x1"), StepOptions(algorithm="psum"), kind=optax.adam
        ),
    }
    return trainers, train(linear_job(trainers["whole"], steps=8)).losses


class TestResume:
    """From a checkpoint, on other chips and with the optimizer sharded or replicated."""

    def argv(self, folder, *more):
        return ("--checkpoint-dir", str(folder), "--checkpoint-every", "2", *more)

    def test_losses_match_one_run(self, with_moments, tmp_path):
        trainers, wanted = with_moments
        found = dict(train(linear_job(trainers["sharded"], steps=2), *self.argv(tmp_path)).losses)
        for steps, name in ((4, "whole"), (8, "sharded")):
            job = linear_job(trainers[name], steps=steps)
            found |= train(job, *self.argv(tmp_path, "--resume")).losses
        assert list(found) == list(range(1, 9))
        np.testing.assert_allclose(list(found.values()), list(wanted.values()), rtol=1e-5)

    def test_a_torn_last_checkpoint(self, with_moments, tmp_path, capsys):
        trainers, wanted = with_moments
        train(linear_job(trainers["sharded"], steps=5), *self.argv(tmp_path))
        os.truncate(tmp_path / "5" / "0.bin", 100)
        job = linear_job(trainers["sharded"], steps=6)
        report = train(job, *self.argv(tmp_path, "--resume"))
        assert list(report.losses) == [5, 6]
        assert report.losses[6] == pytest.approx(wanted[6], rel=1e-5)
        said = capsys.readouterr().err
        assert f"skipped the checkpoint of step 5 in {tmp_path}: its 0.bin has 100 by" in said

    def test_no_valid_checkpoint(self, with_moments, tmp_path):
        (tmp_path / "5").mkdir()
        job = linear_job(with_moments[0]["whole"], steps=6)
        with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
            train(job, *self.argv(tmp_path, "--resume"))

    def test_a_folder_that_is_a_file_is_an_early_error(self, with_moments, tmp_path):
        (tmp_path / "file").touch()
        job = linear_job(replace(with_moments[0]["whole"], step=None), steps=6)
        with pytest.raises(
            CheckpointError, match=r"cannot write checkpoints to .*file: File exists"
        ):
            train(job, *self.argv(tmp_path / "file"))


class TestNotFinite:
    """A run that diverges stops at the step, and resumes from the last good checkpoint."""

    def stopped(self, folder, job, message):
        with pytest.raises(TrainingError, match=message):
            train(job, "--checkpoint-dir", str(folder), "--checkpoint-every", "2")
        with Checkpoints(folder, resume=True) as checkpoints:
            assert checkpoints.latest_step == 2

    def goes_on(self, folder, trainer):
        argv = ("--checkpoint-dir", str(folder), "--checkpoint-every", "2", "--resume")
        report = train(linear_job(trainer, steps=6), *argv)
        assert list(report.losses) == [3, 4, 5, 6]
        np.testing.assert_allclose(list(report.losses.values()), descent(6)[1][2:], rtol=1e-4)

    @pytest.mark.slow
    def test_a_loss_at_the_step_of_a_checkpoint(self, trainer, tmp_path):
        job = linear_job(trainer, steps=6, nan_at=4)
        self.stopped(tmp_path, job, "the loss of step 4 is nan")
        self.goes_on(tmp_path, trainer)

    def test_a_loss_at_the_step_before(self, trainer, tmp_path):
        job = linear_job(trainer, steps=6, nan_at=3)
        self.stopped(tmp_path, job, "the loss of step 3 is nan")
        self.goes_on(tmp_path, trainer)

    @pytest.mark.slow
    def test_a_state_with_a_good_loss(self, trainer, tmp_path):
        def lr_schedule(step):
            return jnp.where(step == 3, jnp.inf, RATE)

        job = linear_job(linear_trainer(HOLE, lr_schedule=lr_schedule), steps=6)
        self.stopped(tmp_path, job, "the state after step 4 has values that are not finite")
        self.goes_on(tmp_path, trainer)

    def test_the_last_step(self, trainer, tmp_path):
        job = linear_job(trainer, steps=3, nan_at=3)
        self.stopped(tmp_path, job, "the loss of step 3 is nan")


def test_sigterm_saves_a_checkpoint(trainer, tmp_path):
    """Though none is due, the run continues from the step at which it was ended."""

    def step(state, batch):
        if len(made) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        made.append(batch)
        return trainer.step(state, batch)

    made = []
    job, argv = (
        linear_job(replace(trainer, step=step), steps=9),
        ("--checkpoint-dir", str(tmp_path)),
    )
    with pytest.raises(SystemExit) as caught:
        train(job, *argv)
    assert (caught.value.code, len(made)) == (128 + signal.SIGTERM, 4)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        assert checkpoints.latest_step == 3
        _, saved = checkpoints.restore(trainer.saved, full_types=trainer.full_types)
    for name, expected in descent(3)[0].items():
        np.testing.assert_allclose(trainer.from_saved(saved).params[name], expected, rtol=1e-5)
