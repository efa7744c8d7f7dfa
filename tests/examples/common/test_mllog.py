"""MLPerf logs: their lines, and MLPerf's compliance checker."""

import dataclasses
import json

import numpy as np
import pytest

from examples.common.lr_schedules import poly_decay
from examples.common.mllog import MLLog
from examples.resnet50.config import PRESETS
from ftmesh.errors import ArgumentError


def lines(path):
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def write_run(path, config, accuracy):
    """The log of a run of two epochs."""
    log = MLLog(path)
    log.event("cache_clear", True)
    with log.interval("init"):
        log.submission(
            "resnet",
            platform="8x8 less 2x2@2,2",
            settings=config.mlperf_settings(),
            train_samples=config.train_images,
            eval_samples=config.eval_images,
        )
    log.start("run")
    with log.interval("block", first_epoch_num=1, epoch_count=2):
        pass
    with log.interval("eval", epoch_num=2):
        log.event("eval_accuracy", accuracy, epoch_num=2)
    log.stop("run", status="success")


def complaints(path):
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", "0.7.0", False, False)
    checker.check_file(str(path), "training_0.7.0/common.yaml")
    return [*checker.warnings.values(), *checker.overwritable.values(), *checker.not_overwritable]


class TestChecker:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_only_the_accuracy_is_wrong(self, tmp_path, preset):
        write_run(tmp_path / "log", PRESETS[preset], accuracy=0.1)
        (complaint,) = complaints(tmp_path / "log")
        assert complaint.startswith("Failed checks for eval_accuracy")

    def test_nothing_is_wrong(self, tmp_path):
        write_run(tmp_path / "log", PRESETS["mlperf-32768"], accuracy=0.7591)
        assert complaints(tmp_path / "log") == []

    def test_a_wrong_setting_is_found(self, tmp_path):
        config = dataclasses.replace(PRESETS["mlperf-32768"], end_lr=0.0)
        write_run(tmp_path / "log", config, accuracy=0.7591)
        (complaint,) = complaints(tmp_path / "log")
        assert "lars_opt_end_learning_rate" in complaint

    def test_bert_has_its_own_settings(self, tmp_path):
        log = MLLog(tmp_path / "log")
        log.submission(
            "bert",
            platform="8x8",
            settings={"global_batch_size": 8192},
            train_samples=1,
            eval_samples=10_000,
        )
        said = "\n".join(complaints(tmp_path / "log"))
        assert "opt_lamb_beta_1" in said
        assert "submission" not in said


class TestLines:
    def test_fields(self, tmp_path):
        log = MLLog(tmp_path / "log")
        log.event("eval_accuracy", np.float32(0.5), epoch_num=np.int64(4))
        (line,) = lines(tmp_path / "log")
        assert line.pop("time_ms") > 1.6e12  # milliseconds since 1970
        assert line == {
            "namespace": "",
            "event_type": "POINT_IN_TIME",
            "key": "eval_accuracy",
            "value": 0.5,
            "metadata": {"epoch_num": 4},
        }

    def test_an_interval_that_raises_has_no_end(self, tmp_path):
        log = MLLog(tmp_path / "log")
        with log.interval("epoch", epoch_num=1):
            pass
        with pytest.raises(ZeroDivisionError), log.interval("epoch", epoch_num=2):
            raise ZeroDivisionError
        assert [(line["key"], line["event_type"]) for line in lines(tmp_path / "log")] == [
            ("epoch_start", "INTERVAL_START"),
            ("epoch_stop", "INTERVAL_END"),
            ("epoch_start", "INTERVAL_START"),
        ]

    def test_a_second_run_overwrites_or_appends(self, tmp_path):
        for append, count in ((False, 1), (True, 2), (False, 1)):
            MLLog(tmp_path / "log", append=append).event("cache_clear", True)
            assert len(lines(tmp_path / "log")) == count

    def test_without_a_path(self):
        MLLog(None).event("cache_clear", True)


class TestPresets:
    @pytest.mark.parametrize("preset", PRESETS)
    def test_learning_rate(self, preset):
        config = PRESETS[preset]
        lr_schedule = poly_decay(
            config.base_lr, warmup_steps=config.warmup_steps, total_steps=config.total_steps
        )
        half = (config.warmup_steps + config.total_steps) / 2
        assert float(lr_schedule(0)) == 0
        assert float(lr_schedule(config.warmup_steps)) == pytest.approx(config.base_lr)
        assert float(lr_schedule(half)) == pytest.approx(config.base_lr / 4, rel=0.01)
        assert float(lr_schedule(config.total_steps)) == pytest.approx(1e-4)

    def test_steps(self):
        config = PRESETS["mlperf-32768"]
        assert (config.warmup_steps, config.total_steps) == (704, 2503)

    def test_too_long_a_warmup(self):
        with pytest.raises(ArgumentError, match="20 steps of warm-up do not fit in 20"):
            poly_decay(1.0, warmup_steps=20, total_steps=20)
