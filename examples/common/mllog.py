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
    """Writes an MLPerf log; without a path, as in all processes but one, nothing."""

    def __init__(self, path: str | os.PathLike[str] | None, *, append: bool = False) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None and not append:
            self._path.write_text("")

    def event(self, key: str, value: Any = None, **metadata: Any) -> None:
        """Log a point in time."""
        self._write("POINT_IN_TIME", key, value, metadata)

    def start(self, what: str, **metadata: Any) -> None:
        """Log the start of `what`: "init", "run", "block", "epoch" or "eval"."""
        self._write("INTERVAL_START", f"{what}_start", None, metadata)

    def stop(self, what: str, **metadata: Any) -> None:
        """Log the end of `what`; a "run" needs status="success" or "aborted"."""
        self._write("INTERVAL_END", f"{what}_stop", None, metadata)

    @contextmanager
    def interval(self, what: str, **metadata: Any) -> Iterator[None]:
        """Log the start and end of a block of code; no end if it raises."""
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
        """Log the keys that MLPerf 0.7 requires of every benchmark.

        `settings` has those of this benchmark, "resnet" or "bert", such as "global_batch_size".
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
        with self._path.open("a", encoding="utf-8") as file:  # flushed, whatever happens next
            file.write(f":::MLLOG {json.dumps(line, default=lambda x: x.item())}\n")
