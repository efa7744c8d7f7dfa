"""Reads and writes schedule files (docs/files.md): columns that NumPy alone can replay."""

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
from ftmesh.files import NotNpzError, NpzReader, check_local, write_atomic
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule, check_schedule
from ftmesh.schedule.transfers import COLUMN_NAMES, Transfers
from ftmesh.schedule.verify import verify as _verify
from ftmesh.topology.notation import parse_shape
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes

FORMAT = "ftmesh.schedule/1"
RENAMED_ALGORITHMS = {"colours": "multi_ring", "line": "chain"}  # old name -> name
MAX_BYTES = 2**31  # unpacked; a ring through 4,096 chips has half of it
MAX_META_BYTES = 2**26
MAX_MOVES = 2**31 - 1  # chunks moved in all; a file with more is damaged, or an attack
MAX_NAME_LENGTH = 200  # characters
_INTEGER_ARRAYS = (*COLUMN_NAMES, "coords", "owner", "rounds_in_reduce_scatter")
_ARRAYS = (*_INTEGER_ARRAYS, "meta")

MetaRule = tuple[Callable[[Any], bool], str]  # whether a value is valid, and what it must be


def save(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write `schedule` to `path` atomically; raises `ScheduleFileError` if that fails."""
    check_schedule(schedule)
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"save takes a path, not {path!r:.60}")
    check_local(path)
    content = dumps(schedule)
    try:
        write_atomic(path, [content])
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise ScheduleFileError(f"cannot write {path}: {reason}") from error


def load(path: str | os.PathLike[str] | bytes, *, verify: bool = True) -> Schedule:
    """Read a schedule file and prove the schedule.

    Args:
        path: the file, or its bytes.
        verify: whether to prove the schedule; see `ftmesh.verify`.

    Raises:
        ScheduleFileError: if the file cannot be read or is not a schedule file.
        ScheduleError: if its rounds are invalid.
        VerificationError: if it does not compute the sum.
    """
    if not isinstance(path, (str, os.PathLike, bytes)):
        raise ArgumentError(f"load takes a path or bytes, not {path!r}")
    if not isinstance(path, bytes):
        check_local(path)
    try:
        schedule = _build(_read(path))
        if verify:
            _verify(schedule)
    except FtmeshError as error:
        name = "the schedule" if isinstance(path, bytes) else path
        is_usage = error.status == USAGE  # the file is wrong, not the call
        kind = ScheduleFileError if is_usage else type(error)
        raise kind(f"{name}: {error}") from error
    return schedule


def dumps(schedule: Schedule) -> bytes:
    topology = schedule.topology
    meta: dict[str, Any] = {
        "format": FORMAT,
        **_topology_meta(topology),
        "algorithm": schedule.algorithm,
        "num_chunks": schedule.num_chunks,
        "phases": [{"name": p.name, "rounds": p.num_rounds} for p in schedule.phases],
    }
    if isinstance(topology, TiledTopology):
        meta |= {"tile": topology.tile, "chips": _topology_meta(topology.chips)}
    owner, rounds = np.full(schedule.num_chunks, -1, np.int32), 0
    if isinstance(schedule, SplitSchedule):
        owner, rounds = schedule.owner, schedule.rounds_in_reduce_scatter
    further = np.array(topology.coords, np.int32), owner, np.int32(rounds), json.dumps(meta)
    file = io.BytesIO()
    arrays: dict[str, Any] = dict(zip(_ARRAYS, (*schedule.transfers, *further), strict=True))
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def _topology_meta(topology: Topology) -> dict[str, Any]:
    return {
        "shape": topology.shape,
        "wrap": topology.wrap,
        "failed": sorted(topology.failed),
        "failed_links": sorted(topology.failed_links),
        "devices_per_chip": topology.devices_per_chip,
    }


def _read(path: str | os.PathLike[str] | bytes) -> dict[str, NDArray[Any]]:
    try:
        if not isinstance(path, bytes) and os.path.exists(path) and not os.path.isfile(path):
            raise ScheduleFileError("is a folder" if os.path.isdir(path) else "is not a file")
        with io.BytesIO(path) if isinstance(path, bytes) else open(path, "rb") as file:
            return _unpack(file)
    except FileNotFoundError:
        raise ScheduleNotFoundError("there is no such file") from None
    except ScheduleFileError:
        raise
    except OSError as error:
        raise ScheduleFileError(f"cannot be read: {error.strerror or error}") from error
    except NotNpzError as error:
        raise ScheduleFileError(
            f"{error}, so it is not a schedule file; write one with 'ftmesh plan ... --out'"
        ) from error
    except Exception as error:  # zip, zlib and NumPy raise many types for damaged bytes
        raise ScheduleFileError(f"is damaged or truncated ({error}); plan it again") from error


def _unpack(file: IO[bytes]) -> dict[str, NDArray[Any]]:
    """The arrays, after checking from their headers that they can be a schedule."""
    with NpzReader(file) as npz:
        headers = npz.headers
        missing = [name for name in _ARRAYS if name not in headers]
        if missing:
            raise ScheduleFileError(f"has no {missing[0]!r}: it is not a schedule file")
        for name in _INTEGER_ARRAYS:
            if headers[name].dtype != np.int32:
                raise ScheduleFileError(f"column {name!r} is {headers[name].dtype}, not int32")
        shapes = {headers[name].shape for name in COLUMN_NAMES}
        if len(shapes) != 1 or len(shapes.pop()) != 1:
            raise ScheduleFileError("the columns differ in length")
        unpacked = sum(headers[name].num_bytes for name in _ARRAYS)
        if unpacked > MAX_BYTES or headers["meta"].num_bytes > MAX_META_BYTES:
            raise ScheduleFileError(
                f"would unpack to {format_bytes(unpacked)}; at most {format_bytes(MAX_BYTES)} are "
                f"accepted, and {format_bytes(MAX_META_BYTES)} for 'meta'"
            )
        return {name: npz.read(name) for name in _ARRAYS}


def _build(arrays: dict[str, NDArray[Any]]) -> Schedule:
    meta = _parse_meta(arrays["meta"])
    transfers = Transfers(*(arrays[name] for name in COLUMN_NAMES))
    _check_columns(transfers, meta["num_chunks"], len(arrays["coords"]))
    if arrays["rounds_in_reduce_scatter"].shape != ():
        raise ScheduleFileError("'rounds_in_reduce_scatter' must be a single number")
    topology = _build_topology(meta)
    if "tile" in meta:
        chips = _build_topology(_check_meta(meta.get("chips"), _TOPOLOGY_RULES))
        tiles = TiledTopology.from_topology(chips, meta["tile"])
        if _topology_meta(tiles) != _topology_meta(topology):
            raise ScheduleFileError(f"'shape' and the failures are not those of {tiles}")
        topology = tiles
    if arrays["coords"].tolist() != [list(coord) for coord in topology.coords]:
        raise ScheduleFileError(
            f"'coords' are not the live chips of {topology} in order, x fastest"
        )
    rounds = int(arrays["rounds_in_reduce_scatter"])
    owner, num_chunks = arrays["owner"], meta["num_chunks"]
    phases = _build_phases(transfers, meta["phases"] or _default_phases(transfers, rounds))
    algorithm = RENAMED_ALGORITHMS.get(meta["algorithm"], meta["algorithm"])
    if rounds == 0 and owner.shape == (num_chunks,) and (owner == -1).all():
        return Schedule(topology, algorithm, num_chunks, phases)
    return SplitSchedule(topology, algorithm, num_chunks, phases, owner, rounds)


def _build_topology(meta: dict[str, Any]) -> Topology:
    return Topology(
        shape=parse_shape(meta["shape"]),
        wrap=tuple(meta["wrap"]),
        failed=frozenset(map(tuple, meta["failed"])),
        failed_links=frozenset((tuple(a), tuple(b)) for a, b in meta["failed_links"]),
        devices_per_chip=meta["devices_per_chip"],
    )


def _check_columns(transfers: Transfers, num_chunks: int, num_ranks: int) -> None:
    """Reject columns that do not fit together, or that ask for absurd amounts of work."""
    t = transfers
    rows = len(t)
    if rows == 0:
        raise ScheduleFileError("there are no transfers")
    if t.round[0] < 0 or (np.diff(t.round) < 0).any():
        raise ScheduleFileError("the rows are not sorted by round, starting at 0")
    for name, column in (("rounds", t.round), ("lanes", t.lane)):
        if column.max() >= rows:
            raise ScheduleFileError(f"{rows} transfers cannot fill {int(column.max()) + 1} {name}")
    end = int((t.chunk.astype(np.int64) + t.count).max())
    if end > num_chunks:
        raise ScheduleFileError(f"a transfer moves chunk {end - 1} of {num_chunks}")
    moved = int(t.count.sum(dtype=np.int64))
    if moved > MAX_MOVES:
        raise ScheduleFileError(f"it moves {moved:,} chunks; at most {MAX_MOVES:,} are accepted")
    if moved < num_chunks * num_ranks:
        raise ScheduleFileError(
            f"it moves {moved:,} chunks, but {num_ranks} chips that each receive {num_chunks:,} "
            f"chunks need {num_chunks * num_ranks:,} or more"
        )


def _default_phases(transfers: Transfers, rounds_in_reduce_scatter: int) -> list[dict[str, Any]]:
    """The phases of a file that does not list any."""
    num_rounds = int(transfers.round.max(initial=-1)) + 1
    last = "all-gather" if rounds_in_reduce_scatter else "all-reduce"
    rounds = {"reduce-scatter": rounds_in_reduce_scatter}
    rounds[last] = num_rounds - rounds_in_reduce_scatter
    return [{"name": name, "rounds": number} for name, number in rounds.items() if number]


def _build_phases(transfers: Transfers, entries: list[dict[str, Any]]) -> tuple[Phase, ...]:
    phases, start = [], 0
    for entry in entries:
        stop = start + entry["rounds"]
        low, high = np.searchsorted(transfers.round, [start, stop])
        if low == high:
            raise ScheduleFileError(f"phase {entry['name']!r} has no transfers")
        phase = Phase(entry["name"], transfers.take(slice(low, high)).shifted(rounds=-start))
        if phase.num_rounds != stop - start:
            raise ScheduleFileError(
                f"round {stop - 1}, the last of {phase.name!r}, has no transfer"
            )
        phases.append(phase)
        start = stop
    if start != int(transfers.round.max(initial=-1)) + 1:
        raise ScheduleFileError(f"the phases in 'meta' end at round {start}, the rows do not")
    return tuple(phases)


def _parse_meta(array: NDArray[Any]) -> dict[str, Any]:
    try:
        meta = json.loads(str(array))
    except (ValueError, RecursionError) as error:
        raise ScheduleFileError(f"'meta' is not JSON: {error}") from error
    version = meta.get("format") if isinstance(meta, dict) else None
    if version != FORMAT:
        raise ScheduleFileError(f"has format {version!r}; this ftmesh reads {FORMAT!r}")
    return _check_meta({"phases": [], **meta}, _TOPOLOGY_RULES | _SCHEDULE_RULES)


def _check_meta(meta: Any, rules: dict[str, MetaRule]) -> dict[str, Any]:
    """`meta` with defaults, after checking the entries in `rules`."""
    checked = {"devices_per_chip": 1, **(meta if isinstance(meta, dict) else {})}
    for key, (is_valid, expected) in rules.items():
        if key not in checked:
            raise ScheduleFileError(f"'meta' has no {key!r}")
        if not is_valid(checked[key]):
            raise ScheduleFileError(
                f"'meta' has {key} {checked[key]!r:.60}, which is not {expected}"
            )
    return checked


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= MAX_MOVES


def _is_coord(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int for n in value)


def _is_name(value: Any) -> bool:
    """Names are printed, and a terminal may obey unprintable characters."""
    return isinstance(value, str) and value.isprintable() and len(value) <= MAX_NAME_LENGTH


def _is_phase(value: Any) -> bool:
    entry = value if isinstance(value, dict) else {}
    return _is_name(entry.get("name")) and _is_count(entry.get("rounds"))


def _list_of(is_valid: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


_TOPOLOGY_RULES: dict[str, MetaRule] = {
    "shape": (lambda v: _list_of(_is_count)(v) and len(v) > 0, "a list of sizes"),
    "wrap": (_list_of(lambda v: isinstance(v, bool)), "a list of true and false"),
    "failed": (_list_of(_is_coord), "a list of coords"),
    "failed_links": (
        _list_of(lambda v: _list_of(_is_coord)(v) and len(v) == 2),
        "a list of pairs of coords",
    ),
    "devices_per_chip": (lambda v: type(v) is int and v in (1, 2), "1 or 2"),
}
_SCHEDULE_RULES: dict[str, MetaRule] = {
    "algorithm": (_is_name, "a name of printable characters"),
    "num_chunks": (_is_count, "a number of chunks"),
    "phases": (_list_of(_is_phase), "a list of names and numbers of rounds"),
}
