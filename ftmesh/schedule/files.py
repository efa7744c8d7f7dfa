"""Schedule files: an ``.npz`` of plain integer columns that anyone can replay with NumPy.

The columns ``round, lane, src, dst, chunk, count, op`` have one row per transfer, sorted by round,
with nothing left to expand. Beside them: ``coords`` (rank to coord), ``owner`` (chunk to rank, or
-1), ``rounds_in_reduce_scatter``, and ``meta``, a JSON string.

Meta: what a schedule file says in JSON beside its columns, and what is taken of that.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import (
    USAGE,
    ArgumentError,
    FtmeshError,
    ScheduleFileError,
    ScheduleNotFoundError,
)
from ftmesh.files import NotNpzError, Npz, write_atomic
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule, check_schedule
from ftmesh.schedule.transfers import COLUMN_NAMES, Transfers
from ftmesh.schedule.verify import verify as _verify
from ftmesh.topology.notation import parse_shape
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes

MAX_BYTES = 2**31  # unpacked; a ring through 4,096 chips has half of it
MAX_META_BYTES = 2**26
_NUMBERS = (*COLUMN_NAMES, "coords", "owner", "rounds_in_reduce_scatter")
_ARRAYS = (*_NUMBERS, "meta")


def dump(schedule: Schedule) -> bytes:
    """What a file of `schedule` holds."""
    topology = schedule.topology
    meta: dict[str, Any] = {
        "format": FORMAT,
        **_written(topology),
        "algorithm": schedule.algorithm,
        "num_chunks": schedule.num_chunks,
        "phases": [{"name": p.name, "rounds": p.num_rounds} for p in schedule.phases],
    }
    if isinstance(topology, TiledTopology):
        meta |= {"tile": topology.tile, "chips": _written(topology.chips)}
    arrays: dict[str, Any] = dict(zip(COLUMN_NAMES, schedule.transfers, strict=True))
    arrays["coords"] = np.array(topology.coords, np.int32)
    owner, half = np.full(schedule.num_chunks, -1, np.int32), 0
    if isinstance(schedule, SplitSchedule):
        owner, half = schedule.owner, schedule.rounds_in_reduce_scatter
    arrays["owner"] = owner
    arrays["rounds_in_reduce_scatter"] = np.int32(half)
    arrays["meta"] = np.array(json.dumps(meta))
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write `schedule` to `path`, whole or not at all."""
    check_schedule(schedule)
    try:
        write_atomic(path, [dump(schedule)])
    except OSError as error:
        raise ScheduleFileError(f"cannot write {path}: {error.strerror}") from error


def _written(topology: Topology) -> dict[str, Any]:
    return {
        "shape": topology.shape,
        "wrap": topology.wrap,
        "failed": sorted(topology.failed),
        "failed_links": sorted(topology.failed_links),
        "devices_per_chip": topology.devices_per_chip,
    }


def load(path: str | os.PathLike[str] | bytes, *, verify: bool = True) -> Schedule:
    """Read a schedule file, or what one holds, and, unless told otherwise, prove it right."""
    if not isinstance(path, (str, os.PathLike, bytes)):
        raise ArgumentError(f"a schedule is loaded from a path or from bytes, not from {path!r}")
    try:
        arrays = _read(path)
        schedule = _build(arrays)
        if verify:
            _verify(schedule)
    except FtmeshError as error:
        name = "the schedule" if isinstance(path, bytes) else path
        kind = ScheduleFileError if error.status == USAGE else type(error)  # the file's, not ours
        raise kind(f"{name}: {error}") from error
    return schedule


def _read(path: str | os.PathLike[str] | bytes) -> dict[str, NDArray[Any]]:
    try:
        if not isinstance(path, bytes) and os.path.exists(path) and not os.path.isfile(path):
            raise ScheduleFileError("is a folder" if os.path.isdir(path) else "is not a file")
        with io.BytesIO(path) if isinstance(path, bytes) else open(path, "rb") as raw:
            return _unpacked(raw)
    except FileNotFoundError:
        raise ScheduleNotFoundError("there is no such file") from None
    except ScheduleFileError:
        raise
    except OSError as error:
        raise ScheduleFileError(f"cannot be read: {error.strerror or error}") from error
    except NotNpzError as error:
        raise ScheduleFileError(
            f"{error}, and a schedule never is; plan it again with 'ftmesh plan ... --out'"
        ) from error
    except Exception as error:  # zip, zlib and NumPy raise many kinds over damaged bytes
        raise ScheduleFileError(f"is damaged or cut short ({error}); plan it again") from error


def _unpacked(raw: IO[bytes]) -> dict[str, NDArray[Any]]:
    """The arrays of a file, once their headers tell that they can be those of a schedule."""
    with Npz(raw) as file:
        headers = file.headers
        missing = [name for name in _ARRAYS if name not in headers]
        if missing:
            raise ScheduleFileError(f"has no {missing[0]!r}: it is not a schedule file")
        for name in _NUMBERS:
            if headers[name].dtype != np.int32:
                raise ScheduleFileError(f"column {name!r} is {headers[name].dtype}, not int32")
        if len({headers[name].shape for name in COLUMN_NAMES}) != 1:
            raise ScheduleFileError("the columns differ in length")
        unpacked = sum(headers[name].num_bytes for name in _ARRAYS)
        if unpacked > MAX_BYTES or headers["meta"].num_bytes > MAX_META_BYTES:
            raise ScheduleFileError(
                f"would unpack to {format_bytes(unpacked)}, {format_bytes(MAX_META_BYTES)} of them "
                f"'meta' at most, and {format_bytes(MAX_BYTES)} are taken: it is no schedule file"
            )
        return {name: file.read(name) for name in _ARRAYS}


def _build(arrays: dict[str, NDArray[Any]]) -> Schedule:
    meta = read_meta(arrays["meta"])
    columns = Transfers(*(arrays[name] for name in COLUMN_NAMES))
    _check_columns(columns, meta["num_chunks"], len(arrays["coords"]))
    if arrays["rounds_in_reduce_scatter"].shape != ():
        raise ScheduleFileError("'rounds_in_reduce_scatter' must be a single number")
    topology = _topology(meta)
    if "tile" in meta:
        tiles = TiledTopology.from_topology(_topology(checked(meta.get("chips"), MESH)), meta["tile"])
        if _written(tiles) != _written(topology):
            raise ScheduleFileError(f"'shape' and what has failed are not those of {tiles}")
        topology = tiles
    if arrays["coords"].tolist() != [list(coord) for coord in topology.coords]:
        raise ScheduleFileError(
            f"'coords' are not the live chips of {topology} in order, x fastest"
        )
    half = int(arrays["rounds_in_reduce_scatter"])
    owner = arrays["owner"]
    phases = _phases(columns, meta["phases"] or _halves(columns, half))
    if half == 0 and owner.shape == (meta["num_chunks"],) and (owner == -1).all():
        return Schedule(topology, meta["algorithm"], meta["num_chunks"], phases)
    return SplitSchedule(topology, meta["algorithm"], meta["num_chunks"], phases, owner, half)


def _topology(meta: dict[str, Any]) -> Topology:
    return Topology(
        shape=parse_shape(meta["shape"]),
        wrap=tuple(meta["wrap"]),
        failed=frozenset(map(tuple, meta["failed"])),
        failed_links=frozenset((tuple(a), tuple(b)) for a, b in meta["failed_links"]),
        devices_per_chip=meta["devices_per_chip"],
    )


def _check_columns(c: Transfers, num_chunks: int, num_ranks: int) -> None:
    """Refuse columns that do not fit together, or ask for absurd amounts of work."""
    lengths = {len(column) for column in c if column.ndim == 1}
    if len(lengths) != 1 or any(column.ndim != 1 for column in c):
        raise ScheduleFileError("the columns differ in length")
    (rows,) = lengths
    if rows == 0:
        raise ScheduleFileError("there are no transfers")
    if c.round[0] < 0 or (np.diff(c.round) < 0).any():
        raise ScheduleFileError("the rows are not sorted by round, from 0 on")
    for name, column in (("rounds", c.round), ("lanes", c.lane)):
        if column.max() >= rows:
            raise ScheduleFileError(f"{rows} transfers cannot fill {int(column.max()) + 1} {name}")
    last = int((c.chunk.astype(np.int64) + c.count).max())
    if last > num_chunks:
        raise ScheduleFileError(f"a transfer moves chunk {last - 1} of {num_chunks}")
    moved = int(c.count.sum(dtype=np.int64))
    if moved > MAX_MOVES:
        raise ScheduleFileError(f"it moves {moved:,} chunks, more than the {MAX_MOVES:,} taken")
    if moved < num_chunks * num_ranks:
        raise ScheduleFileError(
            f"it moves {moved:,} chunks, and {num_ranks} chips that are to receive each of "
            f"{num_chunks:,} need {num_chunks * num_ranks:,} or more"
        )


def _halves(columns: Transfers, half: int) -> list[dict[str, Any]]:
    """The phases of a file that does not name any: what comes before `half`, and the rest."""
    rounds = int(columns.round.max(initial=-1)) + 1
    parts = [("reduce-scatter", half), ("all-gather" if half else "all-reduce", rounds - half)]
    return [{"name": name, "rounds": count} for name, count in parts if count]


def _phases(columns: Transfers, named: list[dict[str, Any]]) -> tuple[Phase, ...]:
    phases, start = [], 0
    for entry in named:
        stop = start + entry["rounds"]
        low, high = np.searchsorted(columns.round, [start, stop])
        if low == high:
            raise ScheduleFileError(f"phase {entry['name']!r} has no transfers")
        phase = Phase(entry["name"], columns.take(slice(low, high)).shifted(rounds=-start))
        if phase.num_rounds != stop - start:
            raise ScheduleFileError(
                f"round {stop - 1}, the last of {phase.name!r}, has no transfer"
            )
        phases.append(phase)
        start = stop
    if start != int(columns.round.max(initial=-1)) + 1:
        raise ScheduleFileError(f"the phases named in 'meta' end at round {start}, the rows do not")
    return tuple(phases)


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
