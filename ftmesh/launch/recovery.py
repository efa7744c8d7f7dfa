"""Recovery: how long it takes to go on after a failure, part by part, and what was lost by it."""

from __future__ import annotations

import time
from typing import Any


class Recovery:
    """A clock that runs from a failure to the next step that counts.

    `failed_at` is when it began, if it runs; `last_commit` when a step last counted, if any did, in
    an epoch before too.
    """

    def __init__(self, failed_at: float | None = None, last_commit: float | None = None) -> None:
        self.failed_at, self.last_commit = failed_at, last_commit
        self.repeated = 0  # steps
        self._parts: dict[str, float] = {}

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part so far."""
        return {name: round(took, 3) for name, took in self._parts.items()}

    def begin(self, noticed: float) -> None:
        """Something has failed, so many seconds before it was noticed; perhaps in a recovery."""
        began = time.monotonic() if self.failed_at is None else self.failed_at
        self.failed_at = began - noticed
        self._parts = {"noticed": self._parts.get("noticed", 0.0) + noticed}

    def reach(self, part: str) -> None:
        """All have come so far: a part that goes back to the failure."""
        if self.failed_at is not None:
            self._parts[part] = time.monotonic() - self.failed_at

    def took(self, parts: dict[str, Any]) -> None:
        """What parts took in one process; the slowest counts."""
        for name, seconds in parts.items():
            self._parts[str(name)] = max(self._parts.get(str(name), 0.0), float(seconds))

    def end(self, now: float, usual_step: float) -> dict[str, Any]:
        """A step counts again: what it has taken, and what was lost since the last one before."""
        assert self.failed_at is not None
        seconds = now - self.failed_at
        lost = seconds if self.last_commit is None else now - self.last_commit - usual_step
        first = max(seconds - sum(self._parts.values()), 0)
        facts = {
            "seconds": round(seconds, 3),
            "repeated": self.repeated,
            "lost": round(max(lost, 0) + self.repeated * usual_step, 3),
            "parts": {**self.parts, "first_step": round(first, 3)},
        }
        self.failed_at, self._parts = None, {}
        return facts
