"""The BERT trainer, smaller than its tiny preset: losses, resuming, logs and errors."""

import argparse
import json
from dataclasses import replace
from functools import cache

import jax
import numpy as np
import optax
import pytest

import examples.bert.train
from examples.bert.config import PRESETS
from examples.bert.data import Batches, open_sequences
from examples.bert.model import init, predict
from examples.bert.published import to_published
from examples.bert.train import add_bert, main, train
from examples.bert.trainer import bert_options, bert_trainer, make_model
from examples.common.arguments import add_run, start_attempts, step_options
from examples.common.records import make_example, write_records
from ftmesh import Topology
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic import ElasticGroup
from ftmesh.testing import cpu_grid
from tests.support.more import more

pytestmark = pytest.mark.usefixtures("quick_compiler")

# Small enough to compile in seconds.
SMALL = replace(
    PRESETS["tiny"], batch=24, num_layers=1, hidden=8, length=16, predictions=3, total_steps=20,
    warmup_steps=2, train_sequences=96, eval_sequences=50, sequences_per_eval=240,
)  # fmt: skip
HOLE = Topology.grid("4x4", failed="2x2@0,0")


@pytest.fixture(scope="module", autouse=True)
def trainers_made_once():
    """Share trainers between runs with the same settings, to trace them once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.bert.train.bert_trainer", cache(bert_trainer))
        yield


def arguments(*argv):
    parser = argparse.ArgumentParser()
    add_bert(parser)
    add_run(parser, PRESETS)
    return parser.parse_args([*argv, "--emulate", "one"])


def run(*argv, config=SMALL, topology=HOLE):
    args = arguments(*argv)
    for attempt in start_attempts(ElasticGroup(), args, lambda group: topology):
        with attempt:
            report = train(config, attempt, args)
    return report


def losses(*argv, **settings):
    return run(*argv, **settings).losses


@pytest.fixture(scope="module")
def exact(quick_compiler, tmp_path_factory):
    """A run in float32: its report and its log."""
    log = tmp_path_factory.mktemp("exact") / "run.log"
    return run("--wire-dtype", "float32", "--mllog", str(log)), log


@pytest.mark.slow
def test_sharded_lamb_on_a_plan_matches_replicated_lamb_on_psum(exact):
    # Same sequences, weights and chips; only the order of additions differs, in sums and in norms.
    # Rounding at 6e-8 is grown by Adam, which divides by roots of squares that are near zero at
    # first, and by twenty steps.
    ours = exact[0].losses
    theirs = losses("--wire-dtype", "float32", "--algorithm", "psum", "--whole-optimizer")
    assert len(ours) == 20
    np.testing.assert_allclose(list(ours.values()), list(theirs.values()), rtol=1e-4)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-6)
    assert ours[20] < ours[1]


@more
@pytest.mark.slow
def test_overlap_changes_the_losses_little(exact):
    """Only the order of additions changes."""
    overlap = ("--overlap", "--bucket", "100kB", "--unrolled", "--whole-optimizer")
    other = losses("--wire-dtype", "float32", "--steps", "4", *overlap)
    np.testing.assert_allclose(list(other.values()), list(exact[0].losses.values())[:4], rtol=1e-4)


@pytest.mark.slow
def test_bfloat16_on_the_wire_changes_the_losses_little(exact):
    # With the state shared out, only partial sums travel, which on this mesh are too deep for that.
    half = losses("--steps", "7", "--whole-optimizer")
    assert all(half[step] != exact[0].losses[step] for step in range(4, 8))
    # bfloat16 rounds every gradient by up to 0.4 %, each its own way; a loss sees their mean.
    for step, loss in half.items():
        assert loss == pytest.approx(exact[0].losses[step], rel=2e-3)


@pytest.mark.slow  # tests/examples/common/test_loop.py resumes a smaller model
def test_an_interrupted_run_resumes_with_the_same_losses(exact, tmp_path):
    saved = ["--wire-dtype", "float32", "--checkpoint-dir", str(tmp_path), "--checkpoint-every"]
    first, second = losses(*saved, "2", "--steps", "3"), losses(*saved, "9", "--resume")
    assert list(first) == [1, 2, 3]
    assert list(second) == list(range(4, 21))
    for step, loss in {**first, **second}.items():
        assert loss == pytest.approx(exact[0].losses[step], rel=1e-5)


@more
@pytest.mark.slow
def test_idle_devices_do_not_change_the_losses(exact):
    exactly = ("--wire-dtype", "float32", "--steps", "3", "--idle")
    found = losses(*exactly, topology=cpu_grid("4x4", failed="2x2@0,0"))
    np.testing.assert_allclose(list(found.values()), list(exact[0].losses.values())[:3], rtol=1e-5)


@pytest.mark.slow
def test_the_moments_match_one_device(tmp_path):
    """LAMB's updates do not depend on the scale of a gradient; its moments do.

    In float32, whose rounding is 6e-8 of what is added up, of which little may be left where it
    cancels.
    """
    argv = ["--wire-dtype", "float32", "--steps", "1", "--checkpoint-dir", str(tmp_path)]
    run(*argv)
    args = arguments(*argv)
    whole = replace(step_options(args), sharded=False)
    trainer = examples.bert.train.bert_trainer(SMALL, HOLE, whole, **bert_options(args))
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        _, saved = checkpoints.restore(trainer.saved, full_types=trainer.full_types)
    found = trainer.from_saved(saved)
    adam = found.optimizer[0]
    assert int(adam.count) == 1

    sizes = {"length": SMALL.length, "predictions": SMALL.predictions}
    sequences = open_sequences(
        None, "train", vocabulary=SMALL.vocabulary, num_sequences=SMALL.train_sequences, **sizes
    )
    batch, _ = Batches(sequences, batch=SMALL.batch, num_steps=1, seed=0, **sizes)[0]
    model = make_model(SMALL)

    def loss_of(params):
        words, sentences = predict(model, params, *batch[:4])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        of_words = cross_entropy(words, batch.targets)[batch.targets >= 0]
        return of_words.mean() + cross_entropy(sentences, batch.is_random).mean()

    grads = jax.jit(jax.grad(loss_of))(init(model, seed=0))
    most = max(float(np.abs(grad).max()) for grad in jax.tree.leaves(grads))
    assert most > 0.01
    for grad, mean, square in zip(*map(jax.tree.leaves, (grads, adam.mu, adam.nu)), strict=True):
        np.testing.assert_allclose(mean / (1 - SMALL.beta_1), grad, rtol=1e-3, atol=1e-5 * most)
        np.testing.assert_allclose(
            square / (1 - SMALL.beta_2), np.square(grad), rtol=1e-2, atol=1e-5 * most**2
        )


@pytest.mark.slow  # tests/examples/common/test_mllog.py checks a log
def test_the_log_lacks_nothing_but_accuracy(exact):
    from mlperf_logging.compliance_checker import mlp_compliance

    report, log = exact
    assert list(report.evaluations) == [10, 20]
    checker = mlp_compliance.make_checker("training", "0.7.0", False, False)
    checker.check_file(str(log), "training_0.7.0/common.yaml")
    (complaint,) = [
        *checker.warnings.values(), *checker.overwritable.values(), *checker.not_overwritable,
    ]  # fmt: skip
    assert "eval_accuracy" in complaint
    keys = [json.loads(line.split(" ", 1)[1])["key"] for line in log.read_text().splitlines()]
    assert keys[0] == "cache_clear"
    assert keys.count("eval_accuracy") == 2
    assert keys[-1] == "run_stop"


@more
@pytest.mark.slow
def test_rows_for_two_sequences_with_one_in_them(exact):
    found = losses("--steps", "2", "--wire-dtype", "float32", "--packed", "2")
    for step, loss in found.items():
        assert loss == pytest.approx(exact[0].losses[step], rel=1e-5)


def test_starting_from_published_arrays(tmp_path, capsys):
    path = tmp_path / "first.npz"
    params = init(make_model(SMALL), seed=5)
    np.savez(path, **to_published(jax.tree.map(lambda x: 0 * x, params)))
    (loss,) = losses("--steps", "1", "--wire-dtype", "float32", "--init", str(path)).values()
    # A model of zeros finds all words equally likely, and all sentences.
    assert loss == pytest.approx(np.log(SMALL.vocabulary) + np.log(2), rel=1e-5)
    assert "always predicting the commonest word has accuracy" in capsys.readouterr().out


def test_presets_match_mlperf():
    settings = PRESETS["mlperf-8192"].mlperf_settings()
    assert settings["opt_base_learning_rate"] == 0.00288293
    assert settings["opt_learning_rate_training_steps"] == 560
    assert settings["num_warmup_steps"] == 287
    assert settings["opt_lamb_beta_1"] == settings["opt_lamb_beta_2"] == 0.88
    assert settings["opt_lamb_weight_decay_rate"] == 0.0166629
    evaluated = [
        PRESETS[f"mlperf-{batch}"].steps_per_eval * batch // 25_000 for batch in (448, 4096, 8192)
    ]
    assert evaluated == [6, 7, 8]


# What is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message", "status"),
    [
        (["--data", "FOLDER"], "has 9 numbers in input_ids, not 32", 69),
        (["--data", "no-such-folder"], "there is no folder no-such-folder", 66),
        (["--init", "no-such-file"], "no-such-file cannot be read as an .npz file", 66),
        (["--batch", "8"], "a global batch of 8 is too small for 12 live ranks", 2),
        (["--resume"], "--resume needs --checkpoint-dir", 2),
        (["--algorithm", "two_dim"], "two_dim cannot run on 4x4 less 2x2@0,0", 69),
        (["--mllog", "no/such/run.log"], "cannot write no/such/run.log: there is no folder", 2),
        (["--out", "FILE"], "Not a directory", 2),
        (["--checkpoint-dir", "FILE"], "Not a directory", 2),
    ],
)
def test_bad_input_is_an_early_one_line_error(tmp_path, capsys, argv, message, status):
    write_records(tmp_path / "train-00000-of-00001", [make_example({"input_ids": [1] * 9})])
    mesh = ["--emulate", "one", "--mesh", "4x4", "--failed", "2x2@0,0"]
    names = {"FOLDER": str(tmp_path), "FILE": str(tmp_path / "train-00000-of-00001")}
    argv = [names.get(word, word) for word in argv]
    assert main([*mesh, *argv]) == status
    error = capsys.readouterr().err
    assert error.startswith("bert: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", "-1"], "-1 is not from 0 to 4,294,967,295"),
        (["--batch", "1000000000000"], "is not a whole number from 1 to 16,777,216"),
        (["--steps", "9" * 5000], "is not a whole number from 1 to"),
        (["--max-damaged", "1"], "'1' is not a number from 0 to 0.999"),
    ],
)
def test_numbers_out_of_range_are_one_line_errors(capsys, argv, message):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
