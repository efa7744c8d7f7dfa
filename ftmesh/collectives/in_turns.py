"""In turns: sums that are made one after the other, and not at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ftmesh.execute import _compat


def in_turns(
    buckets: Sequence[list[Any]], reduce: Callable[[int, list[Any]], list[Any]]
) -> list[list[Any]]:
    """What `reduce` makes of each bucket, given its number and its arrays, one after the other."""
    found: list[list[Any]] = []
    for at, bucket in enumerate(buckets):
        now = bucket
        if found:
            # All that comes out must be used: nothing waits for an operand that is not.
            passed = _compat.barrier([*now, *found[-1]])
            now, found[-1] = passed[: len(now)], passed[len(now) :]
        found.append(reduce(at, now))
    return found
