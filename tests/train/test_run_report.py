"""What a run tells: metrics, the plot, and the end of one whose loss is not a number."""

import json

import jax.numpy as jnp
import pytest

from ftmesh.errors import TrainingError
from ftmesh.train.report import Report, plot_run, read_metrics


def test_metrics_are_lines_of_json_and_a_plot(tmp_path):
    with Report(tmp_path, total_steps=3, unit="images") as report:
        for step in (1, 2, 3):
            report.step(step, jnp.float32(4.0 / step), examples=8, lr=0.5)
        report.evaluation(3, accuracy=0.25)
    assert report.losses == {1: 4.0, 2: 2.0, 3: pytest.approx(4 / 3)}
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3]
    assert (lines[0]["loss"], lines[0]["examples"], lines[0]["lr"]) == (4.0, 8, 0.5)
    assert lines[0]["per_second"] > 0
    assert lines[3]["eval"] == {"accuracy": 0.25}
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")


def test_a_loss_that_is_not_a_number_ends_the_run_with_its_step(tmp_path):
    def run():
        with Report(tmp_path, total_steps=9) as report:
            for step in range(1, 10):
                report.step(step, jnp.nan if step == 2 else 1.0, examples=1)

    with pytest.raises(TrainingError, match=r"the loss of step 2 is nan"):
        run()
    assert read_metrics(tmp_path / "metrics.jsonl")[0][1] == 1.0


def test_the_loss_of_the_last_step_counts_too(tmp_path):
    with pytest.raises(TrainingError, match="step 1 is inf"), Report(None, total_steps=1) as report:
        report.step(1, jnp.inf, examples=1)


def test_a_run_that_is_resumed_goes_on_in_the_same_file(tmp_path):
    for first, resume in ((1, False), (3, True)):
        with Report(tmp_path, total_steps=4, first_step=first - 1, resume=resume) as report:
            for step in range(first, first + 2):
                report.step(step, float(step), examples=1)
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert plot_run(tmp_path / "metrics.jsonl", tmp_path / "again.svg")
