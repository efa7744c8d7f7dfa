"""The ResNet-50 trainer, its tiny preset: losses, resuming, logs, and what it refuses."""

import argparse
import io
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from PIL import Image

from examples.resnet50.config import PRESETS
from examples.resnet50.train import main, train
from examples.resnet50.trainer import resnet50_trainer
from ftmesh import FtmeshError, Topology
from ftmesh.train.arguments import add_run
from ftmesh.train.records import make_example, write_records
from ftmesh.train.report import read_metrics

pytestmark = pytest.mark.usefixtures("quick_compiler")

# Small enough to compile in seconds.
SMALL = replace(
    PRESETS["tiny"], batch=24, stage_sizes=(1,), width=4, train_images=96, eval_images=50,
    epochs_per_eval=2, image_size=8,
)  # fmt: skip
HOLE = Topology.grid("4x4", failed="2x2@0,0")


@pytest.fixture(scope="module", autouse=True)
def trainers_made_once():
    """Runs with the same settings have the same trainer, and need not trace it again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.resnet50.train.resnet50_trainer", cache(resnet50_trainer))
        yield


def arguments(*argv):
    parser = argparse.ArgumentParser()
    add_run(parser, PRESETS)
    return parser.parse_args([*argv, "--emulate", "one"])


def losses(*argv, config=SMALL, topology=HOLE):
    return train(config, topology, arguments(*argv)).losses


def test_the_losses_are_those_of_psum_on_the_same_chips():
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
    """The losses of six steps in one go."""
    return losses("--steps", "6")


def test_a_run_that_is_interrupted_goes_on_as_if_it_had_not_been(whole, tmp_path):
    saved = ["--checkpoint-dir", str(tmp_path / "c"), "--checkpoint-every", "2"]
    out = ["--out", str(tmp_path)]
    losses("--steps", "4", *saved, *out)
    rest = losses("--steps", "6", *saved, *out, "--resume")
    assert list(rest) == [5, 6]
    found = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert list(found) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(list(found.values()), list(whole.values()), rtol=1e-5)


def test_sums_in_the_backward_pass_change_nothing(whole):
    other = losses("--steps", "4", "--overlap", "--bucket", "10kB")
    np.testing.assert_allclose(list(other.values()), list(whole.values())[:4], rtol=1e-5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--overlap", "--bucket", "0"), "a bucket of 0 bytes holds no gradients"),
        (("--overlap", "--bucket", "big"), "'big' is not a size"),
        (("--overlap", "--algorithm", "psum"), "these are JAX's own"),
    ],
)
def test_buckets_that_cannot_be(argv, message):
    with pytest.raises(FtmeshError, match=message):
        losses("--steps", "1", *argv)


# Real data --------------------------------------------------------------------------------------


def jpeg(seed, size=20):
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG")
    return file.getvalue()


def write_shards(folder, *, labels=10, spoil=0):
    """Two shards of training images and one of validation images, the first few spoiled."""
    for split, shards in (("train", 2), ("validation", 1)):
        for shard in range(shards):
            records = []
            for i in range(24):
                image = jpeg(i)[: 40 if i < spoil and split == "train" else None]
                label = [i % labels + 1]
                records.append(make_example({"image/encoded": [image], "image/class/label": label}))
            write_records(folder / f"{split}-{shard:05}-of-{shards:05}", records)


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
    """What MLPerf's own checker says of a log."""
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", "0.7.0", False, False)
    checker.check_file(str(log), "training_0.7.0/common.yaml")
    return [*checker.warnings.values(), *checker.overwritable.values(), *checker.not_overwritable]


@pytest.mark.parametrize(
    ("spoil", "says"),
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
def test_bad_input_is_refused_in_a_line_before_the_first_step(tmp_path, capsys, spoil, says):
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
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("resnet50: ")
    assert says in error
    assert error.count("\n") == 1
