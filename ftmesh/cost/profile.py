"""Profiles: sums that were timed on one mesh of one kind of chips, and the network fitted to them.

A profile is a JSON file. It is written by ``ftmesh selftest`` and read by `ftmesh.plan`, which then
chooses by what was measured there. A file is checked field by field before anything uses it, and
`Profile.obstacle` says whether it was measured on the chips that a plan is for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from ftmesh.algorithms import registry
from ftmesh.cost.links import Network
from ftmesh.cost.profile_fit import (
    PALLAS,
    HopTimes,
    SumLoad,
    TimedSum,
    check_enough,
    fit_network,
    fitted_seconds,
)
from ftmesh.errors import ArgumentError, FtmeshError
from ftmesh.files import read_bounded, write_text
from ftmesh.topology.devices import tpu_generation
from ftmesh.topology.notation import Coord, format_shape, parse_shape
from ftmesh.topology.topology import Topology

FORMAT, FORMAT_VERSION = "ftmesh.profile", 1
MAX_FILE_BYTES = 4_000_000
MAX_SUMS = 5_000
MAX_TEXT = 200  # characters of a string
MAX_BLOCKS = 2_000  # characters of failed chips
STALE = timedelta(days=180)
CLOCK_SKEW = timedelta(minutes=10)  # between the machine that measured and this one
MEASURE_AGAIN = "run ftmesh selftest here"

T = TypeVar("T")


class FitError(NamedTuple):
    """How far a fit is from the sums that were timed, relative to their times."""

    median: float
    worst: float

    def __str__(self) -> str:
        return f"the fit is {self.median:.0%} off in the median, and {self.worst:.0%} at worst"


@dataclass(frozen=True)
class Profile:
    """What was measured on one mesh, and by which software.

    Attributes:
        device_kind, platform: As JAX names the devices: ``"TPU v6 lite"`` and ``"tpu"``.
        shape, wrap: The mesh of chips, and which of its axes wrap.
        num_devices, num_processes: That took part.
        measured_at: In UTC, such as ``"2026-11-18T13:45:00+00:00"``.
        hop_times: A link as measured between neighbours; None where links cannot be told apart.
        sums: The sums that were timed.
        kernel_passed: Algorithms whose Pallas kernel summed rightly. Plans take the kernel for
            these if some of `sums` were timed in it.
    """

    device_kind: str
    platform: str
    shape: Coord
    wrap: tuple[bool, ...]
    devices_per_chip: int
    num_devices: int
    num_processes: int
    ftmesh_version: str
    jax_version: str
    measured_at: str
    hop_times: HopTimes | None
    sums: tuple[TimedSum, ...]
    kernel_passed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("device_kind", "platform", "ftmesh_version", "jax_version", "measured_at"):
            _check_text(getattr(self, name), name)
        _check_mesh(self.shape, self.wrap)
        _check_whole(self.devices_per_chip, "devices_per_chip", 2)
        most = self.devices_per_chip * registry.MAX_RANKS
        _check_whole(self.num_devices, "num_devices", most)
        _check_whole(self.num_processes, "num_processes", self.num_devices)
        _ = self._time
        unknown = [name for name in self.kernel_passed if name not in [*registry.ALGORITHMS]]
        if unknown or len({*self.kernel_passed}) < len(self.kernel_passed):
            names = ", ".join(registry.ALGORITHMS)
            raise ArgumentError(f"kernel_passed must have some of {names}, each once")
        if len(self.sums) > MAX_SUMS:
            raise ArgumentError(f"it has {len(self.sums):,} sums, and {MAX_SUMS:,} are the most")
        for failed in {one.failed for one in self.sums}:
            _check_text(failed, "failed", MAX_BLOCKS, is_optional=True)
            Topology.grid(self.shape, failed=failed)
        check_enough(self.sums)

    # The network ----------------------------------------------------------------------------

    def network(self) -> Network:
        """Return the network whose simulated costs are closest to the sums that were timed."""
        return self._network

    @cached_property
    def _network(self) -> Network:
        return fit_network(
            self.sums,
            self.hop_times,
            device_kind=self.device_kind,
            devices_per_chip=self.devices_per_chip,
            kernel_passed=self.kernel_passed,
            source=f"measured on {self.mesh_name}, {self._time:%Y-%m-%d}",
        )

    def fit_error(self) -> FitError:
        """Return how far the costs of `network` are from the times of `sums`."""
        network = self._network
        errors = [
            abs(fitted_seconds(one, network, self.hop_times) / one.median_s - 1)
            for one in self.sums
            if one.executor != PALLAS or network.kernel
        ]
        return FitError(float(np.median(errors)), max(errors))

    # Where it may be used -------------------------------------------------------------------

    @property
    def mesh_name(self) -> str:
        """The chips and their mesh: ``TPU v6e 16x16``."""
        return f"{_kind_name(self.device_kind)} {_mesh_name(self.shape, self.wrap)}"

    def age(self, now: datetime | None = None) -> timedelta:
        """Return how long ago it was measured."""
        return (now or datetime.now(UTC)) - self._time

    def describe(self, now: datetime | None = None) -> str:
        """Return where and when it was measured: ``measured on TPU v6e 16x16, 3 days ago``."""
        days = max(0, self.age(now).days)
        when = {0: "today", 1: "1 day ago"}.get(days, f"{days} days ago")
        return f"measured on {self.mesh_name}, {when}"

    def is_stale(self, now: datetime | None = None) -> bool:
        """Whether it is so old that only a user who names it should have it."""
        return self.age(now) > STALE

    def obstacle(self, topology: Topology, now: datetime | None = None) -> str:
        """Return why plans for `topology` cannot use it, with what to do; empty if they can.

        Of a topology without devices, only the shape and the wrap links are compared.
        """
        chips = topology.physical
        kind, per_chip = self.device_kind, self.devices_per_chip
        if chips.devices:
            kind = str(getattr(chips.devices[0], "device_kind", ""))
            per_chip = chips.devices_per_chip
        own = (self.device_kind, self.shape, self.wrap, self.devices_per_chip)
        if own != (kind, chips.shape, chips.wrap, per_chip):
            here = f"{_kind_name(kind)} {_mesh_name(chips.shape, chips.wrap)}"
            if here == self.mesh_name:
                here += f" with {per_chip} devices a chip"
            return f"measured on {self.mesh_name}, and this is {here}: {MEASURE_AGAIN}"
        current = installed_version()
        if current and _minor(current) != _minor(self.ftmesh_version):
            return (
                f"measured with ftmesh {self.ftmesh_version}, and this is {current}: "
                f"{MEASURE_AGAIN} again"
            )
        if self.age(now) < -CLOCK_SKEW:
            return (
                f"measured in the future, at {self.measured_at}: set the clock of this machine, or "
                f"{MEASURE_AGAIN} again"
            )
        return ""

    @cached_property
    def _time(self) -> datetime:
        try:
            time: datetime | None = datetime.fromisoformat(self.measured_at)
        except ValueError:
            time = None
        if time is None or time.utcoffset() != timedelta(0) or time.year < 2020:
            example = "2026-11-18T13:45:00+00:00"
            given = f"{self.measured_at!r:.60}"
            raise ArgumentError(f"measured_at must be a time in UTC, as {example}, not {given}")
        return time

    # Files ----------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the profile to `path`, as `load` reads it."""
        content = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        text = json.dumps(content, indent=1, allow_nan=False)
        try:
            write_text(path, text + "\n")
        except OSError as error:
            raise ArgumentError(f"cannot write {path}: {error.strerror}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read a profile; raise ArgumentError, which says why, unless all of it is well-formed."""
        try:
            return _from_json(_parse(read_bounded(path, MAX_FILE_BYTES)))
        except FtmeshError as error:
            advice = "measure it again with ftmesh selftest"
            raise ArgumentError(f"{path} is not a profile: {error}; {advice}") from error
        except (OSError, ValueError) as error:  # of a name that no file can have
            reason = getattr(error, "strerror", None) or error
            raise ArgumentError(f"cannot read profile {path}: {reason}") from error


def installed_version(package: str = "ftmesh") -> str:
    """The version of a package that is installed; empty if none is."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _minor(text: str) -> list[str]:
    return text.split(".")[:2]


def _kind_name(device_kind: str) -> str:
    generation = tpu_generation(device_kind)
    return f"TPU {generation}" if generation else device_kind


def _mesh_name(shape: Coord, wrap: tuple[bool, ...]) -> str:
    axes = "".join("xyz"[axis] for axis, wraps in enumerate(wrap) if wraps)
    return format_shape(shape) + (f" (wrapping in {axes})" if axes else "")


# Checks of what a file says -----------------------------------------------------------------


def _check_text(value: Any, name: str, most: int = MAX_TEXT, *, is_optional: bool = False) -> None:
    if not isinstance(value, str) or not (value or is_optional):
        raise ArgumentError(f"{name} must be text, not {value!r:.40}")
    if len(value) > most or not value.isprintable():
        raise ArgumentError(f"{name} must be printable and have at most {most:,} characters")


def _check_whole(value: Any, name: str, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ArgumentError(f"{name} must be a whole number from 1 to {most:,}, not {value!r:.40}")


def _check_mesh(shape: Any, wrap: Any) -> None:
    is_shape = isinstance(shape, tuple) and all(type(size) is int for size in shape)
    if not is_shape or parse_shape(shape) != shape:
        raise ArgumentError(f"shape must be the sizes of the mesh, not {shape!r:.60}")
    if not isinstance(wrap, tuple) or [type(wraps) for wraps in wrap] != [bool] * len(shape):
        raise ArgumentError(f"wrap must have true or false for each axis, not {wrap!r:.60}")
    if Topology.grid(shape).num_chips > registry.MAX_RANKS:
        raise ArgumentError(f"the mesh has more than {registry.MAX_RANKS:,} chips")


def _parse(content: bytes) -> dict[str, Any]:
    def reject(constant: str) -> NoReturn:
        raise ArgumentError(f"it has the number {constant}")

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in pairs}) < len(pairs):
            raise ArgumentError("it has a field twice")
        return dict(pairs)

    try:
        data = json.loads(content, parse_constant=reject, object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError("it is not JSON") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ArgumentError(f"its format is not {FORMAT!r}")
    number = data.get("format_version")
    if type(number) is int and number > FORMAT_VERSION:
        raise ArgumentError(f"its format is {FORMAT}/{number:.0f}, of a newer version of ftmesh")
    if type(number) is not int or number != FORMAT_VERSION:
        raise ArgumentError(f"its format_version is {number!r:.40}, and {FORMAT_VERSION} is known")
    return {name: value for name, value in data.items() if name not in ("format", "format_version")}


def _from_json(data: dict[str, Any]) -> Profile:
    def sums(entries: Any) -> tuple[TimedSum, ...]:
        if len(_list(entries)) > MAX_SUMS:
            raise ArgumentError(f"it has {len(entries):,} sums, and {MAX_SUMS:,} are the most")
        load = {"load": lambda value: _build(SumLoad, value, "load")}
        return tuple(_build(TimedSum, one, f"sum {i}", load) for i, one in enumerate(entries))

    def hop_times(value: Any) -> HopTimes | None:
        return None if value is None else _build(HopTimes, value, "hop_times")

    def as_tuple(value: Any) -> tuple[Any, ...]:
        return tuple(_list(value))

    convert = dict.fromkeys(("shape", "wrap", "kernel_passed"), as_tuple)
    return _build(Profile, data, "", {**convert, "sums": sums, "hop_times": hop_times})


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ArgumentError(f"a list is expected, and not {value!r:.40}")
    return value


def _build(
    kind: type[T],
    data: Any,
    where: str,
    convert: Mapping[str, Callable[[Any], Any]] | None = None,
) -> T:
    """Build the dataclass `kind` from an object with exactly its fields."""
    prefix, convert = f"{where}: " if where else "", convert or {}
    if not isinstance(data, dict):
        raise ArgumentError(f"{prefix}an object is expected, and not {data!r:.40}")
    names = {one.name for one in fields(kind)}  # type: ignore[arg-type]
    for text, wrong in (("lacks", names - data.keys()), ("has unknown", data.keys() - names)):
        if wrong:
            raise ArgumentError(f"{prefix}it {text} {min(wrong)!r:.40}")
    try:
        return kind(**{name: convert.get(name, _same)(value) for name, value in data.items()})
    except FtmeshError as error:
        raise ArgumentError(f"{prefix}{error}") from error


def _same(value: Any) -> Any:
    return value
