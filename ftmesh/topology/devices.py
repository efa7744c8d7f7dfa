"""Read a grid of chips off a list of JAX devices, without importing JAX.

TPU devices, attached or compile-only, carry ``coords`` and ``core_on_chip``; CPU and GPU devices
do not, and are laid out row by row on a grid instead.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftmesh.errors import TopologyError, TopologyWarning
from ftmesh.topology.damage import CoordFrame
from ftmesh.topology.notation import Coord, format_shape, parse_blocks, parse_shape

MESH_VARIABLE = "FTMESH_MESH"  # the shape of this machine's mesh, for devices without coords
BLOCKS_VARIABLE = "FTMESH_BLOCKS"  # and which part of it each process has


class Layout(NamedTuple):
    """Where devices sit: the chips' grid, each chip's devices, and the chips that are missing."""

    frame: CoordFrame
    devices_at: dict[Coord, tuple[Any, ...]]
    missing: frozenset[Coord]
    devices_per_chip: int


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


def process_of(device: Any) -> int:
    """The process that has a device."""
    number: int = device.process_index
    return number


def near_square(count: int) -> Coord:
    """The factor pair of `count` that is nearest to a square, the smaller first."""
    low = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
    return low, count // low


def _by_order(devices: Sequence[Any], shape: Coord | None) -> Layout:
    blocks = _blocks_from_environment(devices, shape)
    if blocks is not None:
        return blocks
    shape = shape or _shape_from_environment(len(devices)) or near_square(len(devices))
    if math.prod(shape) != len(devices):
        raise TopologyError(
            f"{len(devices)} devices without coords cannot fill mesh {format_shape(shape)}, "
            f"which has {math.prod(shape)} chips: give one device for every chip, failed ones too"
        )
    coords = [_nth_coord(i, shape) for i in range(len(devices))]
    at = {coord: (device,) for coord, device in zip(coords, devices, strict=True)}
    return Layout(CoordFrame.for_grid(shape), at, frozenset(), 1)


def _shape_from_environment(count: int) -> Coord | None:
    """The mesh of this machine, where it says so and has as many devices as are meant."""
    text = os.environ.get(MESH_VARIABLE)
    try:
        shape = parse_shape(text) if text else ()
    except TopologyError as error:
        raise TopologyError(f"the environment variable {MESH_VARIABLE}: {error}") from error
    return shape if shape and math.prod(shape) == count else None


def _blocks_from_environment(devices: Sequence[Any], shape: Coord | None) -> Layout | None:
    """Where each process has a block of the mesh, and all of their devices are meant."""
    text, mesh = os.environ.get(BLOCKS_VARIABLE), os.environ.get(MESH_VARIABLE)
    if not text or not mesh:
        return None
    try:
        coords = [coord for block in parse_blocks(text) for coord in block.coords()]
        whole = parse_shape(mesh)
    except TopologyError as error:
        raise TopologyError(f"the environment variable {BLOCKS_VARIABLE}: {error}") from error
    if len(coords) != len(devices) or shape not in (None, whole):
        return None
    ordered = sorted(devices, key=process_of)
    at = {coord: (device,) for coord, device in zip(coords, ordered, strict=True)}
    every = (_nth_coord(i, whole) for i in range(math.prod(whole)))
    return Layout(CoordFrame.for_grid(whole), at, frozenset(c for c in every if c not in at), 1)


def _by_coords(devices: Sequence[Any], shape: Coord | None) -> Layout:
    if len({len(device.coords) for device in devices}) > 1:
        raise TopologyError("devices have coords of different lengths: pass those of one slice")
    cores: dict[Coord, dict[int, Any]] = {}
    for device in devices:
        written = tuple(int(n) for n in device.coords)
        core = int(getattr(device, "core_on_chip", None) or 0)
        other = cores.setdefault(written, {}).setdefault(core, device)
        if other is not device:
            raise TopologyError(
                f"two devices, {other} and {device}, claim core {core} of the chip at {written}: "
                "pass each device once"
            )
    frame = _bounding_box(list(cores)) if shape is None else _stated_box(list(cores), shape)
    per_chip = max(len(found) for found in cores.values())
    at = {}
    for written, found in cores.items():
        coord = frame.locate(written)
        if coord is None:
            raise TopologyError(
                f"a device sits at {written}, outside the shape {format_shape(frame.shape)} that "
                "was given"
            )
        if len(found) == per_chip:
            at[coord] = tuple(found[core] for core in sorted(found))
        else:
            warnings.warn(
                f"chip {coord} shows {len(found)} of {per_chip} devices "
                f"(core {', '.join(map(str, sorted(found)))}): the whole chip is taken as failed",
                TopologyWarning,
                stacklevel=4,
            )
    every = (_nth_coord(i, frame.shape) for i in range(math.prod(frame.shape)))
    missing = frozenset(coord for coord in every if coord not in at)
    return Layout(frame, at, missing, per_chip)


def _bounding_box(coords: Sequence[Coord]) -> CoordFrame:
    """The smallest box around `coords`, less the axes along which they do not differ."""
    low, high = (tuple(map(end, zip(*coords, strict=True))) for end in (min, max))
    return _without_flat_axes(low, tuple(b - a + 1 for a, b in zip(low, high, strict=True)))


def _stated_box(coords: Sequence[Coord], shape: Coord) -> CoordFrame:
    """The box of `shape` from zero; axes that it does not have are of size 1."""
    num_axes = len(coords[0])
    if len(shape) > num_axes:
        raise TopologyError(
            f"shape {format_shape(shape)} has more axes than the devices' coords, such as "
            f"{coords[0]}"
        )
    return _without_flat_axes((0,) * num_axes, shape + (1,) * (num_axes - len(shape)))


def _without_flat_axes(low: Coord, shape: Coord) -> CoordFrame:
    kept = tuple(axis for axis, size in enumerate(shape) if size > 1) or (0,)
    return CoordFrame(tuple(shape[axis] for axis in kept), low, kept)


def _nth_coord(index: int, shape: Coord) -> Coord:
    coord = []
    for size in shape:
        index, place = divmod(index, size)
        coord.append(place)
    return tuple(coord)
