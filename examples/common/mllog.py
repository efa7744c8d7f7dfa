"""Logs in the format of MLPerf: lines ``:::MLLOG {...}`` that its compliance checker reads.

log = MLLog("run.log")
log.event("global_batch_size", 32768)
with log.interval("epoch", epoch_num=1):
    ...
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MLLog:
    """A writer of such lines. Without a path, as on all processes but the first, it writes none."""

    def __init__(self, path: str | os.PathLike[str] | None, *, append: bool = False) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None and not append:
            self._path.write_text("")

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Something that is so, or happens, now."""
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, what: str, **metadata: Any) -> None:
        """The beginning of `what`: "init", "run", "block", "epoch" or "eval"."""
        self._write("INTERVAL_START", f"{what}_start", None, metadata)

    def stop(self, what: str, **metadata: Any) -> None:
        """The end of `what`. That of a run must say status="success" or "aborted"."""
        self._write("INTERVAL_END", f"{what}_stop", None, metadata)

    @contextmanager
    def interval(self, what: str, **metadata: Any) -> Iterator[None]:
        """Start before a block of code, and stop after it unless it fails."""
        self.start(what, **metadata)
        yield
        self.stop(what, **metadata)

    def submission(
        self,
        benchmark: str,
        *,
        platform: str,
        settings: Mapping[str, Any],
        train_samples: int,
        eval_samples: int,
        org: str = "ftmesh",
        division: str = "closed",
        status: str = "research",
    ) -> None:
        """Who runs what, where, on how much data, and with which `settings` of the benchmark.

        These are the keys that MLPerf 0.7 asks of every benchmark, "resnet" or "bert"; `settings`
        has those that it asks of this one, such as "global_batch_size".
        """
        self.event("submission_benchmark", benchmark)
        self.event("submission_org", org)
        self.event("submission_division", division)
        self.event("submission_status", status)
        self.event("submission_platform", platform)
        self.event("train_samples", train_samples)
        self.event("eval_samples", eval_samples)
        for key, value in settings.items():
            self.event(key, value)

    def _write(self, event_type: str, key: str, value: Any, metadata: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        line = {
            "namespace": "",
            "time_ms": time.time_ns() // 1_000_000,
            "event_type": event_type,
            "key": key,
            "value": value,
            "metadata": metadata,
        }
        with self._path.open("a", encoding="utf-8") as file:  # at once, whatever happens next
            file.write(f":::MLLOG {json.dumps(line, default=_plain)}\n")


def _plain(value: Any) -> Any:
    """A number of NumPy or JAX as one of Python."""
    return value.item()
