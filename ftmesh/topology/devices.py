"""Places JAX devices on a grid, without importing JAX: TPUs by coords, others row by row.

Devices do not say which axes of their slice have wrap links; `slice_wraps` knows it by generation
and shape.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftmesh.errors import TopologyError, TopologyWarning
from ftmesh.topology.damage import CoordFrame
from ftmesh.topology.notation import Block, Coord, format_shape, parse_blocks, parse_shape

MESH_VARIABLE = "FTMESH_MESH"  # the shape of this machine's mesh, for devices without coords
BLOCKS_VARIABLE = "FTMESH_BLOCKS"  # the block of that mesh that each process has

# Which axes wrap: the table of slices of MaxText (accelerator_to_spec_map.py); "How to Scale Your
# Model" (Austin et al., 2025), chapter 2.
_PODS = {"v2": 16, "v3": 32}  # chips along each axis of the whole pod, the only torus
_LONGEST_AXIS = {"v5e": 16, "v6e": 16}  # which wraps; no slice has a longer one
_OF_CUBES = ("v4", "v5p", "v7x")
_CUBE = 4  # chips along each axis of the cubes that larger slices are made of
WRAP_AS_GIVEN = "wrap links as given"  # where a user has said which axes wrap
TPU_GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7x")
_GENERATION_ALIASES = {
    "v5lite": "v5e", "v5litepod": "v5e", "v5": "v5p", "v6lite": "v6e", "7x": "v7x"
}  # fmt: skip


class DeviceLayout(NamedTuple):
    frame: CoordFrame
    devices_at: dict[Coord, tuple[Any, ...]]
    missing: frozenset[Coord]
    devices_per_chip: int


def read_layout(devices: Iterable[Any], shape: Coord | None) -> DeviceLayout:
    """Return where `devices` are on a grid; see `ftmesh.Topology.from_devices`."""
    if not isinstance(devices, Iterable):
        raise TopologyError(f"devices are a list, such as jax.devices(), not {devices!r:.60}")
    devices = list(devices.flat if isinstance(devices, np.ndarray) else devices)
    if not devices:
        raise TopologyError("no devices were given")
    if len({id(device) for device in devices}) < len(devices):
        raise TopologyError("a device was given more than once: pass each device once")
    with_coords = [d for d in devices if getattr(d, "coords", None) is not None]
    if not with_coords:
        return _layout_by_order(devices, shape)
    if len(with_coords) != len(devices):
        raise TopologyError(
            f"{len(devices) - len(with_coords)} of {len(devices)} devices have no coords: "
            "pass the devices of one platform only"
        )
    return _layout_by_coords(devices, shape)


def platform_of(device: Any) -> str:
    """Return ``"cpu"``, ``"gpu"``, or the kind of TPU, such as ``"TPU v6 lite"``."""
    return str(device.device_kind if device.platform == "tpu" else device.platform)


def process_of(device: Any) -> int:
    return int(device.process_index)


def tpu_generation(name: str) -> str | None:
    """Return the generation that a device kind or a name stands for; None if it is not known.

    >>> tpu_generation("TPU v6 lite"), tpu_generation("tpu7x"), tpu_generation("NVIDIA H200")
    ('v6e', 'v7x', None)
    """
    word = name.lower().replace(" ", "").removeprefix("tpu")
    word = _GENERATION_ALIASES.get(word, word)
    return word if word in TPU_GENERATIONS else None


def check_slice(generation: str, shape: Sequence[int]) -> None:
    """Raise `TopologyError` for a slice larger than its generation can have on two axes."""
    longest = _PODS.get(generation) or _LONGEST_AXIS.get(generation)
    sizes = [size for size in shape if size > 1]
    if longest and (len(sizes) > 2 or max(sizes, default=1) > longest):
        raise TopologyError(
            f"{generation}:{format_shape(tuple(shape))} is no slice: {generation} has two axes of "
            f"at most {longest} chips"
        )


def slice_wraps(generation: str, shape: Sequence[int]) -> tuple[bool, ...]:
    """Return which axes of a TPU slice have wrap links.

    Args:
        generation: ``"v6e"``, or a device kind such as ``"TPU v6 lite"``. Of one that is not known,
            no axis wraps.
        shape: the whole slice. Axes of size 1 make no difference.

    >>> slice_wraps("v6e", (8, 16)), slice_wraps("v5p", (4, 4, 8)), slice_wraps("v5p", (2, 2, 4))
    ((False, True), (True, True, True), (False, False, False))
    """
    known = tpu_generation(generation)
    sizes = [size for size in shape if size > 1]
    if known in _LONGEST_AXIS:
        longest = _LONGEST_AXIS[known]
        is_slice = len(sizes) <= 2 and max(shape) <= longest
        return tuple(is_slice and size == longest for size in shape)
    if known in _OF_CUBES:
        is_torus = len(sizes) == 3 and not any(size % _CUBE for size in sizes)
    else:
        is_torus = known in _PODS and sizes == [_PODS[known]] * 2
    return tuple(is_torus and size > 1 for size in shape)


def describe_slice_wraps(generation: str, shape: Sequence[int]) -> str:
    """Return the rule of `slice_wraps` in words; empty for a generation that is not known."""
    known = tpu_generation(generation)
    if known is None:
        return ""
    if known in _PODS:
        pod = format_shape([_PODS[known]] * 2)
        return f"a {known} slice has wrap links only if it is the whole pod, {pod}"
    if known in _LONGEST_AXIS:
        return f"{known} slices have wrap links on axes of {_LONGEST_AXIS[known]} chips"
    rule = f"{known} slices of whole {format_shape([_CUBE] * 3)} cubes have wrap links on all axes"
    low, middle, high = sorted([*shape, 1, 1])[-3:]
    can_twist = high == 2 * low and middle in (low, high)
    if can_twist and any(slice_wraps(known, shape)):
        rule += f"; {format_shape(shape)}, which may be twisted, is taken as untwisted"
    return rule


def device_wraps(devices: Iterable[Any], frame: CoordFrame) -> tuple[tuple[bool, ...], str]:
    """Return which axes of the grid of `devices` wrap, and the rule in words.

    The coords of a slice start at 0, so it reaches from there to the highest coords of the frame.
    An axis of which the lowest chips are missing does not wrap, as these would be in between.
    """
    kinds = {str(getattr(device, "device_kind", "")) for device in devices}
    kind = kinds.pop() if len(kinds) == 1 else ""
    low, high = frame.corners(len(frame.low))
    shape = tuple(top + 1 for top in high)
    wraps = slice_wraps(kind, shape)
    on_grid = tuple(wraps[axis] and low[axis] == 0 for axis in frame.kept)
    return on_grid, describe_slice_wraps(kind, shape)


def _layout_by_order(devices: Sequence[Any], shape: Coord | None) -> DeviceLayout:
    layout = _layout_from_environment(devices, shape)
    if layout is not None:
        return layout
    shape = shape or _shape_from_environment(len(devices)) or _near_square(len(devices))
    if math.prod(shape) != len(devices):
        raise TopologyError(
            f"{len(devices)} devices without coords cannot fill mesh {format_shape(shape)}, "
            f"which has {math.prod(shape)} chips: give one device for every chip, failed ones too"
        )
    return _one_per_chip(shape, _all_coords(shape), devices)


def _near_square(count: int) -> Coord:
    low = max(n for n in range(1, math.isqrt(count) + 1) if count % n == 0)
    return low, count // low


def _shape_from_environment(count: int) -> Coord | None:
    """The shape in the environment, if it has `count` chips."""
    text = os.environ.get(MESH_VARIABLE)
    try:
        shape = parse_shape(text) if text else ()
    except TopologyError as error:
        raise TopologyError(f"the environment variable {MESH_VARIABLE}: {error}") from error
    return shape if shape and math.prod(shape) == count else None


def _layout_from_environment(devices: Sequence[Any], shape: Coord | None) -> DeviceLayout | None:
    """The layout that gives each process its block, if those blocks have as many chips."""
    text, mesh = os.environ.get(BLOCKS_VARIABLE), os.environ.get(MESH_VARIABLE)
    if not text or not mesh:
        return None
    try:
        coords = [coord for block in parse_blocks(text) for coord in block.coords()]
        full = parse_shape(mesh)
    except TopologyError as error:
        raise TopologyError(f"the environment variable {BLOCKS_VARIABLE}: {error}") from error
    if len(coords) != len(devices) or shape not in (None, full):
        return None
    return _one_per_chip(full, coords, sorted(devices, key=process_of))


def _one_per_chip(shape: Coord, coords: list[Coord], devices: Sequence[Any]) -> DeviceLayout:
    devices_at = {coord: (device,) for coord, device in zip(coords, devices, strict=True)}
    return DeviceLayout(CoordFrame.for_grid(shape), devices_at, _missing(shape, devices_at), 1)


def _layout_by_coords(devices: Sequence[Any], shape: Coord | None) -> DeviceLayout:
    if len({len(device.coords) for device in devices}) > 1:
        raise TopologyError("devices have coords of different lengths: pass those of one slice")
    slices = sorted({int(getattr(device, "slice_index", None) or 0) for device in devices})
    if len(slices) > 1:
        raise TopologyError(
            f"the devices are of {len(slices)} slices ({', '.join(map(str, slices))}), which no "
            "links of chips join: make a topology of the devices of each slice_index"
        )
    cores_at: dict[Coord, dict[int, Any]] = {}
    for device in devices:
        device_coord = tuple(int(n) for n in device.coords)
        core = int(getattr(device, "core_on_chip", None) or 0)
        other = cores_at.setdefault(device_coord, {}).setdefault(core, device)
        if other is not device:
            raise TopologyError(
                f"two devices, {other} and {device}, claim core {core} of the chip at "
                f"{device_coord}: pass each device once"
            )
    frame = _frame(list(cores_at), shape)
    per_chip = max(len(cores) for cores in cores_at.values())
    devices_at = {}
    for device_coord, cores in cores_at.items():
        coord = frame.locate(device_coord)
        if coord is None:
            raise TopologyError(
                f"a device is at {device_coord}, outside the given shape "
                f"{format_shape(frame.shape)}"
            )
        if len(cores) == per_chip:
            devices_at[coord] = tuple(cores[core] for core in sorted(cores))
        else:
            warnings.warn(
                f"chip {coord} has {len(cores)} of {per_chip} devices "
                f"(core {', '.join(map(str, sorted(cores)))}): the whole chip counts as failed",
                TopologyWarning,
                stacklevel=4,
            )
    return DeviceLayout(frame, devices_at, _missing(frame.shape, devices_at), per_chip)


def _frame(coords: Sequence[Coord], shape: Coord | None) -> CoordFrame:
    """The box of `shape` from zero, or the smallest around `coords`, without axes of size 1."""
    num_axes = len(coords[0])
    if shape is None:
        low, high = (tuple(map(end, zip(*coords, strict=True))) for end in (min, max))
        shape = tuple(b - a + 1 for a, b in zip(low, high, strict=True))
    elif len(shape) <= num_axes:
        low, shape = (0,) * num_axes, shape + (1,) * (num_axes - len(shape))
    else:
        raise TopologyError(
            f"shape {format_shape(shape)} has more axes than the devices' coords, such as "
            f"{coords[0]}"
        )
    return CoordFrame.for_slice(shape, low)


def _missing(shape: Coord, present: Collection[Coord]) -> frozenset[Coord]:
    return frozenset(coord for coord in _all_coords(shape) if coord not in present)


def _all_coords(shape: Coord) -> list[Coord]:
    return Block(shape, (0,) * len(shape)).coords()
