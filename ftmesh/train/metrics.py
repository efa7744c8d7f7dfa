"""Metrics: the file of JSON lines that a run leaves, written to by one process after another.

A process may be killed while it writes. So the next one begins a line of its own, and readers skip
what is no JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO


def open_metrics(path: Path, *, append: bool) -> TextIO:
    """The file, to write whole lines to."""
    file = path.open("a" if append else "w")
    if file.tell():
        with path.open("rb") as before:
            before.seek(-1, os.SEEK_END)
            is_cut = before.read() != b"\n"
        if is_cut:
            print(file=file, flush=True)
    return file


def metrics_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of metrics, less those that were cut."""
    for text in Path(path).read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and "step" in line:
            yield line


def read_metrics(path: str | Path) -> tuple[dict[int, float], dict[int, dict[str, float]]]:
    """Losses by step and evaluations by step, from a file of metrics; the last of each counts."""
    losses, evaluations = {}, {}
    for line in metrics_lines(path):
        if "eval" in line:
            evaluations[line["step"]] = line["eval"]
        elif "loss" in line:
            losses[line["step"]] = line["loss"]
    return dict(sorted(losses.items())), dict(sorted(evaluations.items()))


def read_epochs(path: str | Path) -> list[dict[str, Any]]:
    """The epochs after the first, from a file of metrics: "epoch", "step" and what else is known.

    Each begins with the state after its "step", on "live" chips.
    """
    return [line for line in metrics_lines(path) if "epoch" in line]
