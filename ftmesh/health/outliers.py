"""Which members of a group differ from the others, in value or in time."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

_MIN_PEERS = 2  # to compare a time with


def find_outliers(values: Mapping[K, Hashable]) -> list[K]:
    """Return the keys whose value is not the most common one; all keys if there is a tie.

    >>> find_outliers({"a": 1, "b": 2, "c": 1}), find_outliers({"a": 1, "b": 2})
    (['b'], ['a', 'b'])
    """
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return []
    (common, count), (_, second_count) = counts
    return [key for key, value in values.items() if value != common or count == second_count]


def find_slow(
    seconds: Mapping[K, float],
    kinds: Mapping[K, Hashable],
    *,
    slow: float,
    margin: float,
    among: Iterable[K] | None = None,
) -> dict[K, float]:
    """Return the keys that took much longer than their peers, with the median of those peers.

    Args:
        seconds: How long each key took.
        kinds: The kind of each key; its peers are the other keys of the same kind. With fewer than
            two peers a key is not judged.
        slow: A slow key takes more than `slow` times the median of its peers.
        margin: And at least this many seconds more.
        among: Judge only these keys; the others are their peers.

    >>> find_slow({"a": 1.0, "b": 1.1, "c": 4.0}, dict.fromkeys("abc"), slow=3, margin=0.1)
    {'c': 1.05}
    """
    judged = set(seconds if among is None else among)
    outliers = {}
    for key in judged & set(seconds):
        peers = [
            seconds[other]
            for other in seconds
            if other != key
            and kinds[other] == kinds[key]
            and (among is None or other not in judged)
        ]
        if len(peers) >= _MIN_PEERS:
            usual = statistics.median(peers)
            if seconds[key] > max(slow * usual, usual + margin):
                outliers[key] = usual
    return outliers
