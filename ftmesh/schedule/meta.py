"""Meta: what a schedule file says in JSON beside its columns, and what is taken of that."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from ftmesh.errors import ScheduleFileError

FORMAT = "ftmesh.schedule/1"
MAX_MOVES = 2**31 - 1  # chunks moved in all; more is a damaged file, or an attack
LONGEST_NAME = 200  # characters

Form = tuple[Callable[[Any], bool], str]  # whether a value has it, and what it is called


def read_meta(array: NDArray[Any]) -> dict[str, Any]:
    """What the array `meta` says, every entry of the form that it must have."""
    try:
        meta = json.loads(str(array))
    except (ValueError, RecursionError) as error:
        raise ScheduleFileError(f"'meta' is not JSON: {error}") from error
    found = meta.get("format") if isinstance(meta, dict) else None
    if found != FORMAT:
        raise ScheduleFileError(f"is of format {found!r}; this ftmesh reads {FORMAT!r}")
    return checked({"phases": [], **meta}, MESH | _SCHEDULE)


def checked(meta: Any, wanted: dict[str, Form]) -> dict[str, Any]:
    """`meta` with every entry that is `wanted`, of the form that it must have."""
    found = {"devices_per_chip": 1, **(meta if isinstance(meta, dict) else {})}
    for key, (fits, form) in wanted.items():
        if key not in found:
            raise ScheduleFileError(f"'meta' has no {key!r}")
        if not fits(found[key]):
            raise ScheduleFileError(f"'meta' has {key} {found[key]!r:.60}, which is not {form}")
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_MOVES


def _is_coord(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int for n in value)


def _is_name(value: Any) -> bool:
    """What is printed as it is; a terminal may obey other characters."""
    return isinstance(value, str) and value.isprintable() and len(value) <= LONGEST_NAME


def _is_phase(value: Any) -> bool:
    return (
        isinstance(value, dict) and _is_name(value.get("name")) and _is_count(value.get("rounds"))
    )


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


MESH: dict[str, Form] = {
    "shape": (lambda v: _list_of(_is_count)(v) and len(v) > 0, "a list of sizes"),
    "wrap": (_list_of(lambda v: isinstance(v, bool)), "a list of true and false"),
    "failed": (_list_of(_is_coord), "a list of coords"),
    "failed_links": (
        _list_of(lambda v: _list_of(_is_coord)(v) and len(v) == 2),
        "a list of pairs of coords",
    ),
    "devices_per_chip": (lambda v: type(v) is int and v in (1, 2), "1 or 2"),
}
_SCHEDULE: dict[str, Form] = {
    "algorithm": (_is_name, "a name of printable characters"),
    "num_chunks": (_is_count, "a number of chunks"),
    "phases": (_list_of(_is_phase), "a list of names and numbers of rounds"),
}
