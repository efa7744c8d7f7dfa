"""Both trainers with the interpreted Pallas executor: the same losses, bit for bit."""

import argparse
from dataclasses import replace

import pytest

from examples.bert import train as bert
from examples.common.arguments import add_run, start_attempts
from examples.resnet50 import train as resnet50
from ftmesh.elastic import ElasticGroup
from ftmesh.testing import cpu_grid
from tests.support.more import more

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compiler")]


def losses(trainer, *argv, **smaller):
    """The losses of three steps of the tiny preset on four chips."""
    parser = argparse.ArgumentParser()
    if trainer is bert:
        bert.add_bert(parser)
    add_run(parser, trainer.PRESETS)
    args = parser.parse_args([*argv, "--steps", "3", "--emulate", "many"])
    config = replace(trainer.PRESETS["tiny"], batch=24, **smaller)
    for attempt in start_attempts(ElasticGroup(), args, lambda group: cpu_grid("2x2")):
        with attempt:
            report = trainer.train(config, attempt, args)
    return report.losses


@more
def test_resnet50_with_a_replicated_optimizer_and_overlap():
    how = ("--whole-optimizer", "--overlap", "--bucket", "10kB")
    small = {"stage_sizes": (1,), "width": 4, "image_size": 8, "norm_group": 12}
    one, other = (
        losses(resnet50, "--executor", executor, *how, **small, train_images=96, eval_images=50)
        for executor in ("ppermute", "pallas")
    )
    assert len(one) == 3
    assert one == other


@more
def test_bert_with_a_sharded_optimizer():
    small = {"num_layers": 1, "hidden": 8, "length": 16, "predictions": 3, "warmup_steps": 2}
    one, other = (
        losses(bert, "--executor", executor, **small, train_sequences=96, eval_sequences=50)
        for executor in ("ppermute", "pallas")
    )
    assert len(one) == 3
    assert one == other
