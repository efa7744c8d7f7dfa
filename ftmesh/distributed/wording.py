"""Words: processes, seconds and differences, as messages have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_LONGEST = 200  # characters of a value in a message
_MOST = 8  # processes named one by one


def processes(numbers: Iterable[int]) -> str:
    """Which processes.

    >>> processes([3]), processes([2, 0, 1])
    ('process 3', 'processes 0, 1 and 2')
    """
    found = sorted(numbers)
    if len(found) == 1:
        return f"process {found[0]}"
    if len(found) > _MOST:
        some = ", ".join(map(str, found[:_MOST]))
        return f"processes {some} and {len(found) - _MOST} more"
    return f"processes {', '.join(map(str, found[:-1]))} and {found[-1]}"


def in_seconds(seconds: float) -> str:
    """So long.

    >>> in_seconds(30.0), in_seconds(0.5)
    ('30 s', '0.5 s')
    """
    return f"{seconds:g} s"


def difference(told: Mapping[int, Mapping[str, str]]) -> str | None:
    """What processes do not agree on, first of all, and who has what; None where they agree.

    >>> difference({0: {"failed chips": "none"}, 1: {"failed chips": "2x2@2,2"}})
    'failed chips: process 0 has none; process 1 has 2x2@2,2'
    """
    names = dict.fromkeys(name for facts in told.values() for name in facts)
    for name in names:
        by_value: dict[str, list[int]] = {}
        for process, facts in sorted(told.items()):
            by_value.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(by_value) > 1:
            parts = (
                f"{processes(who)} {'has' if len(who) == 1 else 'have'} {_clipped(value)}"
                for value, who in by_value.items()
            )
            return f"{name}: {'; '.join(parts)}"
    return None


def _clipped(value: str) -> str:
    value = " ".join(value.split())
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 3]}..."
