"""The report of a run: metrics, the plot, and a loss that is not finite."""

import json
import re

import jax.numpy as jnp
import pytest

from examples.common.report import (
    EVALUATION_COLOURS,
    LOSS_COLOUR,
    Report,
    metrics_lines,
    plot_run,
    read_generations,
    read_metrics,
)
from ftmesh.errors import TrainingError


def test_metrics_and_plot(tmp_path):
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


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    def run():
        with Report(tmp_path, total_steps=9) as report:
            for step in range(1, 10):
                report.step(step, jnp.nan if step == 2 else 1.0, examples=1)

    with pytest.raises(TrainingError, match=r"the loss of step 2 is nan"):
        run()
    assert read_metrics(tmp_path / "metrics.jsonl")[0][1] == 1.0


def test_the_loss_of_the_last_step_is_written(tmp_path):
    with pytest.raises(TrainingError, match="step 1 is inf"), Report(None, total_steps=1) as report:
        report.step(1, jnp.inf, examples=1)


def test_a_resumed_run_appends(tmp_path):
    for first, resume in ((1, False), (3, True)):
        with Report(tmp_path, total_steps=4, first_step=first - 1, resume=resume) as report:
            for step in range(first, first + 2):
                report.step(step, float(step), examples=1)
    assert read_metrics(tmp_path / "metrics.jsonl")[0] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    assert plot_run(tmp_path / "metrics.jsonl", tmp_path / "again.svg")


@pytest.mark.parametrize("left", ['{"step": 2, "lo', '{"step": 2, "loss": 2.0}'])
def test_a_line_cut_short_does_not_damage_the_next(left, tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Report(tmp_path, total_steps=3) as report:
        report.step(1, 1.0, examples=1)
    with path.open("a") as file:
        file.write(left)
    with Report(tmp_path, total_steps=3, first_step=2, resume=True) as report:
        report.step(3, 3.0, examples=1)
    whole = {2: 2.0} if left.endswith("}") else {}
    assert read_metrics(path)[0] == {1: 1.0, **whole, 3: 3.0}
    assert path.read_text().splitlines()[1] == left
    assert plot_run(path, tmp_path / "again.svg")


def test_other_lines_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\n7\n[1]\n{"loss": 1}\n\xff\xfe{\n{"step": 4, "loss": 0.5}')
    assert list(metrics_lines(path)) == [{"step": 4, "loss": 0.5}]


def with_a_failure(folder):
    """Steps 1 to 5 on 16 chips, the last of them repeated, and 5 to 8 on 12."""
    with Report(folder, total_steps=8) as report:
        for step in range(1, 6):
            report.step(step, 1 / step, examples=1)
    with Report(folder, total_steps=8, title="soak on 4x4", resume=True) as report:
        report.generation(4, 2, live=12, source="devices")
        for step in range(5, 9):
            report.step(step, 2 / step, examples=1)
        report.evaluation(8, accuracy=0.5)
    return folder / "metrics.jsonl"


def test_a_generation_after_the_first_has_a_line(tmp_path):
    path = with_a_failure(tmp_path)
    (found,) = read_generations(path)
    assert found.pop("time") > 0
    assert found == {"step": 4, "epoch": 2, "live": 12, "source": "devices", "repeated": 1}
    losses, evaluations = read_metrics(path)
    assert losses == {step: (1 if step < 5 else 2) / step for step in range(1, 9)}
    assert evaluations == {8: {"accuracy": 0.5}}


def test_the_plot_has_a_title_and_the_number_of_chips(tmp_path):
    with_a_failure(tmp_path)
    texts = re.findall(r"<!-- (.*) -->", (tmp_path / "run.svg").read_text())
    assert {"soak on 4x4", "12 chips", "loss", "accuracy"} <= set(texts)


def test_losses_and_accuracies_have_different_colours(tmp_path):
    with_a_failure(tmp_path)
    picture = (tmp_path / "run.svg").read_text()
    lines = re.findall(r'<g id="line2d_\d+">\s*<path d="M[^"]*" [^>]*stroke: (#\w+)', picture)
    assert lines.count(LOSS_COLOUR) == 1
    assert lines.count(EVALUATION_COLOURS[0]) >= 1
    assert len({LOSS_COLOUR, *EVALUATION_COLOURS}) == 1 + len(EVALUATION_COLOURS)


def test_an_eager_report_reads_a_ready_loss_at_once(tmp_path):
    with Report(tmp_path, total_steps=2, eager=True) as report:
        report.step(1, jnp.float32(1.0).block_until_ready(), examples=1)
        assert read_metrics(tmp_path / "metrics.jsonl")[0] == {1: 1.0}
