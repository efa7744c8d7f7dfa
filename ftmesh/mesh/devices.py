"""Read a grid of chips off a list of JAX devices, without importing JAX.

TPU devices, attached or compile-only, carry ``coords`` and ``core_on_chip``; CPU and GPU devices
do not, and are laid out row by row on a grid instead.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftmesh.errors import TopologyError, TopologyWarning
from ftmesh.mesh.notation import Coord, format_shape


class Layout(NamedTuple):
    """Where devices sit: the chips' grid, each chip's devices, and the chips that are missing.

    The grid starts at `low` in the devices' own coords.
    """

    shape: Coord
    devices_at: dict[Coord, tuple[Any, ...]]
    missing: frozenset[Coord]
    devices_per_chip: int
    low: Coord

    @property
    def reach(self) -> Coord:
        """The shape of the smallest grid from zero that has all of this one in it."""
        return tuple(start + size for start, size in zip(self.low, self.shape, strict=True))

    def moved(self, coords: frozenset[Coord]) -> frozenset[Coord]:
        """Coords of devices as coords of the grid, without those that lie outside it."""
        inside = {
            tuple(c - start for c, start in zip(coord, self.low, strict=True)) for coord in coords
        }
        return frozenset(coord for coord in inside if min(coord) >= 0)


def read_layout(devices: Iterable[Any], shape: Coord | None) -> Layout:
    """The grid `devices` sit on; `shape` states it where the coords alone would not."""
    devices = list(devices.flat if isinstance(devices, np.ndarray) else devices)
    if not devices:
        raise TopologyError("no devices were given")
    if len({id(device) for device in devices}) < len(devices):
        raise TopologyError("a device was given more than once: pass each device once")
    with_coords = [d for d in devices if getattr(d, "coords", None) is not None]
    if not with_coords:
        return _by_order(devices, shape)
    if len(with_coords) != len(devices):
        raise TopologyError(
            f"{len(devices) - len(with_coords)} of {len(devices)} devices have no coords: "
            "pass the devices of one platform only"
        )
    return _by_coords(devices, shape)


def platform_of(device: Any) -> str:
    """What a device is: ``"cpu"``, ``"gpu"``, or its kind of TPU, such as ``"TPU v6 lite"``."""
    return str(device.device_kind if device.platform == "tpu" else device.platform)


def near_square(count: int) -> Coord:
    """The factor pair of `count` that is nearest to a square, the smaller first."""
    low = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
    return low, count // low


def _by_order(devices: Sequence[Any], shape: Coord | None) -> Layout:
    shape = shape or near_square(len(devices))
    if math.prod(shape) != len(devices):
        raise TopologyError(
            f"{len(devices)} devices without coords cannot fill mesh {format_shape(shape)}, "
            f"which has {math.prod(shape)} chips: give one device for every chip, failed ones too"
        )
    coords = [_nth_coord(i, shape) for i in range(len(devices))]
    at = {coord: (device,) for coord, device in zip(coords, devices, strict=True)}
    return Layout(shape, at, frozenset(), 1, (0,) * len(shape))


def _by_coords(devices: Sequence[Any], shape: Coord | None) -> Layout:
    if len({len(device.coords) for device in devices}) > 1:
        raise TopologyError("devices have coords of different lengths: pass those of one slice")
    cores: dict[Coord, dict[int, Any]] = {}
    for device in devices:
        coord = tuple(int(n) for n in device.coords)
        core = int(getattr(device, "core_on_chip", None) or 0)
        other = cores.setdefault(coord, {}).setdefault(core, device)
        if other is not device:
            raise TopologyError(
                f"two devices, {other} and {device}, claim core {core} of the chip at {coord}: "
                "pass each device once"
            )
    low = tuple(map(min, zip(*cores, strict=True)))
    high = tuple(map(max, zip(*cores, strict=True)))
    if shape is None:
        kept = [axis for axis in range(len(low)) if high[axis] > low[axis]] or [0]
        cores = {tuple(c[a] - low[a] for a in kept): v for c, v in cores.items()}
        shape = tuple(high[axis] - low[axis] + 1 for axis in kept)
        low = tuple(low[axis] for axis in kept)
    else:
        cores = {_fit(coord, shape): v for coord, v in cores.items()}
        shape = tuple(n for n in shape if n > 1) or (1,)
        low = (0,) * len(shape)
    per_chip = max(len(found) for found in cores.values())
    at = {}
    for coord, found in cores.items():
        if len(found) == per_chip:
            at[coord] = tuple(found[core] for core in sorted(found))
        else:
            warnings.warn(
                f"chip {coord} shows {len(found)} of {per_chip} devices "
                f"(core {', '.join(map(str, sorted(found)))}): the whole chip is taken as failed",
                TopologyWarning,
                stacklevel=4,
            )
    every = (_nth_coord(i, shape) for i in range(math.prod(shape)))
    missing = frozenset(coord for coord in every if coord not in at)
    return Layout(shape, at, missing, per_chip, low)


def _fit(coord: Coord, shape: Coord) -> Coord:
    """`coord` with the axes that `shape` does not have (or has with size 1) dropped."""
    padded = shape + (1,) * (len(coord) - len(shape))
    if len(padded) != len(coord) or any(c >= n for c, n in zip(coord, padded, strict=True)):
        raise TopologyError(
            f"a device sits at {coord}, outside the shape {format_shape(shape)} that was given"
        )
    kept = [axis for axis, n in enumerate(padded) if n > 1] or [0]
    return tuple(coord[axis] for axis in kept)


def _nth_coord(index: int, shape: Coord) -> Coord:
    coord = []
    for size in shape:
        index, place = divmod(index, size)
        coord.append(place)
    return tuple(coord)
