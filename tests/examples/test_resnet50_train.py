"""The ResNet-50 trainer with its tiny preset: losses, resuming, logs and errors."""

import argparse
import io
import json
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image

import examples.resnet50.train
from examples.common.arguments import add_run, start_attempts, step_options
from examples.common.records import make_example, write_records
from examples.common.report import read_metrics
from examples.resnet50.config import PRESETS
from examples.resnet50.data import Batches
from examples.resnet50.images import open_images
from examples.resnet50.model import init, normalise
from examples.resnet50.train import main, train
from examples.resnet50.trainer import make_lr_schedule, make_model, make_optimizer, resnet50_trainer
from ftmesh import FtmeshError, Topology
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic import ElasticGroup
from ftmesh.errors import TrainingError
from ftmesh.testing import cpu_grid
from tests.support.more import more

pytestmark = pytest.mark.usefixtures("quick_compiler")

# Small enough to compile in seconds.
SMALL = replace(
    PRESETS["tiny"], batch=24, stage_sizes=(1,), width=4, train_images=96, eval_images=50,
    epochs_per_eval=2, image_size=8,
)  # fmt: skip
HOLE = Topology.grid("4x4", failed="2x2@0,0")


@pytest.fixture(scope="module", autouse=True)
def trainers_made_once():
    """Share trainers between runs with the same settings, to trace them once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.resnet50.train.resnet50_trainer", cache(resnet50_trainer))
        yield


def arguments(*argv):
    parser = argparse.ArgumentParser()
    add_run(parser, PRESETS)
    return parser.parse_args([*argv, "--emulate", "one"])


def losses(*argv, config=SMALL, topology=HOLE):
    args = arguments(*argv)
    for attempt in start_attempts(ElasticGroup(), args, lambda group: topology):
        with attempt:
            report = train(config, attempt, args)
    return report.losses


@pytest.mark.slow
def test_losses_match_psum_on_the_same_chips():
    # Same examples, weights and chips; only the order of additions differs. Rounding at 6e-8, grown
    # by some fifty steps of a network that is far from its end.
    topology = Topology.grid("8x8", failed="2x2@2,2")
    config = replace(SMALL, batch=96, train_images=960)
    ours, theirs = (
        losses("--steps", "50", "--algorithm", name, config=config, topology=topology)
        for name in ("auto", "psum")
    )
    assert len(ours) == 50
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)


@pytest.fixture(scope="module")
def whole(quick_compiler):
    """The losses of six uninterrupted steps."""
    return losses("--steps", "6")


@pytest.mark.slow
def test_an_interrupted_run_resumes_with_the_same_losses(whole, tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "2"]
    out = ["--out", str(tmp_path)]
    losses("--steps", "4", *saved, *out)
    rest = losses("--steps", "6", *saved, *out, "--resume")
    assert list(rest) == [5, 6]
    found = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert list(found) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(found.values()), list(whole.values()), rtol=1e-5)


@more
@pytest.mark.slow
def test_overlap_does_not_change_the_losses(whole):
    other = losses("--steps", "4", "--overlap", "--bucket", "10kB")
    np.testing.assert_allclose(list(other.values()), list(whole.values())[:4], rtol=1e-5)


@pytest.mark.slow
def test_psum_needs_no_plan():
    """The same losses on two chips and on one, with norms over the whole batch."""
    config = replace(SMALL, norm_group=SMALL.batch)
    two, one = (
        losses("--steps", "3", "--algorithm", "psum", config=config, topology=Topology.grid(mesh))
        for mesh in ("2x1", "1x1")
    )
    assert len(two) == 3
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=1e-4)


@more
@pytest.mark.slow
def test_idle_devices_do_not_change_the_losses(whole):
    found = losses("--steps", "3", "--idle", topology=cpu_grid("4x4", failed="2x2@0,0"))
    np.testing.assert_allclose(list(found.values()), list(whole.values())[:3], rtol=1e-5)


@pytest.mark.slow
def test_a_state_that_is_not_finite_is_not_saved(whole, tmp_path, monkeypatch):
    """The learning rate of step 4 is infinite: its loss is finite, and its state is not."""
    saved = ["--steps", "6", "--checkpoint-dir", str(tmp_path), "--checkpoint-every", "2"]
    with monkeypatch.context() as patch:
        real = make_lr_schedule(SMALL)
        patch.setattr(
            "examples.resnet50.trainer.make_lr_schedule",
            lambda config: lambda step: real(step) + jnp.where(step == 3, jnp.inf, 0),
        )
        patch.setattr("examples.resnet50.train.resnet50_trainer", resnet50_trainer)
        with pytest.raises(
            TrainingError, match="the state after step 4 has values that are not finite"
        ):
            losses(*saved)
    rest = losses(*saved, "--resume")
    assert list(rest) == [3, 4, 5, 6]
    np.testing.assert_allclose(list(rest.values()), list(whole.values())[2:], rtol=1e-5)


@more
@pytest.mark.slow
def test_the_first_update_matches_one_device(tmp_path):
    """Momentum and parameters after a step; those without a layerwise rate follow the gradient.

    With norms over the whole batch, one device computes the same but for rounding: 6e-8 of what is
    added up, of which little may be left where it cancels.
    """
    config = replace(SMALL, warmup_epochs=0, norm_group=SMALL.batch)
    losses("--steps", "1", "--checkpoint-dir", str(tmp_path), config=config)
    options = step_options(arguments())
    trainer = examples.resnet50.train.resnet50_trainer(config, HOLE, options)
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        _, saved = checkpoints.restore(trainer.saved, full_types=trainer.full_types)
    found = trainer.from_saved(saved)

    images = open_images(None, "train", size=8, num_classes=10, num_images=config.train_images)
    batch, _ = Batches(images, size=8, batch=config.batch, num_steps=1, seed=0)[0]
    model = make_model(config)
    variables = init(model, image_size=8, seed=0)

    def loss_of(params):
        logits, _ = model.apply(
            {**variables, "params": params},
            normalise(batch.images, model.dtype),
            train=True,
            mutable=["batch_stats"],
        )
        smooth = optax.smooth_labels(jax.nn.one_hot(batch.labels, 10), config.label_smoothing)
        return optax.softmax_cross_entropy(logits, smooth).mean()

    params = variables["params"]
    grads = jax.grad(loss_of)(params)
    transformation = make_optimizer(config, make_lr_schedule(config))
    updates, _ = transformation.update(grads, transformation.init(params), params)
    plain = 0.0  # the largest gradient of those that have no layerwise rate
    for got, old, update, grad in zip(
        *map(jax.tree.leaves, (found.params, params, updates, grads)), strict=True
    ):
        np.testing.assert_allclose(got - old, update, rtol=1e-3, atol=1e-4)
        if grad.ndim < 2:
            np.testing.assert_allclose(got - old, -config.base_lr * grad, rtol=1e-3, atol=1e-4)
            plain = max(plain, float(np.abs(grad).max()))
    assert plain > 0.01


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--overlap", "--bucket", "0"), "a bucket of 0 bytes holds no gradients"),
        (("--overlap", "--bucket", "big"), "'big' is not a size"),
        (("--overlap", "--algorithm", "psum"), "lax.psum does not"),
    ],
)
def test_bad_buckets(argv, message):
    with pytest.raises(FtmeshError, match=message):
        losses("--steps", "1", *argv)


# Real data --------------------------------------------------------------------------------------


def jpeg(seed, size=20):
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def write_shards(folder, *, labels=10, spoil=0):
    """Two shards of training images and one of validation images; the first few are damaged."""
    for split, shards in (("train", 2), ("validation", 1)):
        for shard in range(shards):
            records = []
            for i in range(24):
                image = jpeg(i)[: 40 if i < spoil and split == "train" else None]
                label = [i % labels + 1]
                records.append(make_example({"image/encoded": [image], "image/class/label": label}))
            write_records(folder / f"{split}-{shard:05}-of-{shards:05}", records)


@pytest.mark.slow
def test_training_on_records_leaves_damaged_images_out_and_writes_a_log(tmp_path, caplog):
    write_shards(tmp_path, spoil=2)
    log = tmp_path / "run.log"
    found = losses("--steps", "8", "--data", str(tmp_path), "--mllog", str(log))
    assert len(found) == 8
    assert all(np.isfinite(loss) for loss in found.values())
    assert "left out" in caplog.text
    assert all("eval_accuracy" in complaint for complaint in complaints(log))
    keys = [json.loads(line.split(" ", 1)[1])["key"] for line in log.read_text().splitlines()]
    assert keys[0] == "cache_clear"
    assert keys.count("eval_accuracy") == 2
    assert keys[-1] == "run_stop"


def complaints(log):
    """The output of MLPerf's compliance checker for a log."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", "0.7.0", False, False)
    checker.check_file(str(log), "training_0.7.0/common.yaml")
    return [*checker.warnings.values(), *checker.overwritable.values(), *checker.not_overwritable]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("shard", "train-00001-of-00002"),
        ("label", "labels of 10 classes go from 1 to 10"),
        ("folder", "no-such-folder"),
        ("batch", "a global batch of 8 is too small for 12 live ranks"),
        ("resume", "--resume needs --checkpoint-dir"),
        ("mesh", "--emulate needs --mesh"),
        ("algorithm", "two_dim cannot run on 4x4 less 2x2@0,0"),
    ],
)
def test_bad_input_is_an_early_one_line_error(tmp_path, capsys, spoil, message):
    write_shards(tmp_path, labels=12 if spoil == "label" else 10)
    argv = ["--emulate", "one", "--steps", "1"]
    if spoil != "mesh":
        argv += ["--mesh", "4x4", "--failed", "2x2@0,0"]
    if spoil == "shard":
        (tmp_path / "train-00001-of-00002").unlink()
    if spoil in ("shard", "label"):
        argv += ["--data", str(tmp_path)]
    argv += {
        "folder": ["--data", str(tmp_path / "no-such-folder")],
        "batch": ["--batch", "8"],
        "resume": ["--resume"],
        "algorithm": ["--algorithm", "two_dim"],
    }.get(spoil, [])
    assert main(argv) == {"shard": 69, "label": 69, "folder": 66, "algorithm": 69}.get(spoil, 2)
    error = capsys.readouterr().err
    assert error.startswith("resnet50: ")
    assert message in error
    assert error.count("\n") == 1
