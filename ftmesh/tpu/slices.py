"""TPU devices to compile for, on a machine with or without a TPU."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from ftmesh.command_line import one_line
from ftmesh.errors import FtmeshError, TopologyError
from ftmesh.topology.damage import CoordFrame
from ftmesh.topology.devices import slice_wraps, tpu_generation
from ftmesh.topology.notation import parse_shape, parse_wrap

# For processes without a TPU: libtpu then does not query a metadata server, and several processes
# may load it. It reads these variables when it is loaded.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_LIBTPU_NAMES = {"v7x": "tpu7x"}  # of generations, where they differ from ours
_MAX_CHIPS = 65_536  # libtpu takes many minutes to reject more
_NOT_A_SLICE = (
    "{!r} is not a TPU slice: give a generation and a shape, such as v3:16x32, v6e:16x16 or "
    "v5p:4x4x4, {}"
)


class LibtpuMissingError(FtmeshError):
    """The TPU compiler is not installed."""


def has_libtpu() -> bool:
    """True if the TPU compiler is installed."""
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def parse_slice(name: str) -> tuple[str, CoordFrame]:
    """Return the generation of a slice such as ``v6e:16x16``, and the grid that its chips fill.

    Raises:
        TopologyError: `name` is not a TPU slice.
    """
    match = re.fullmatch(r"(\w+):([0-9]+(?:x[0-9]+)*)", name)
    if not match or not 0 < math.prod(parse_shape(match[2])) <= _MAX_CHIPS:
        raise TopologyError(_NOT_A_SLICE.format(name, f"of at most {_MAX_CHIPS:,} chips"))
    return match[1], CoordFrame.for_slice(parse_shape(match[2]))


def tpu_devices(name: str, *, wrap: bool | Sequence[bool] | None = None) -> list[Any]:
    """The devices of a TPU slice such as ``v6e:16x16``, to compile for.

    For processes that do not use a TPU themselves: JAX does not look for one afterwards.

    Args:
        name: Generation and shape.
        wrap: Whether axes have wrap links, as the compiler is told. Give `Topology.from_devices`
            the same; by default both know it by generation and shape.

    Raises:
        TopologyError: `name` is not a TPU slice.
        LibtpuMissingError: The TPU compiler is not installed.
    """
    generation, frame = parse_slice(name)
    if not has_libtpu():
        raise LibtpuMissingError(
            f"compiling for {name} needs the TPU compiler, which needs no TPU: "
            "pip install libtpu (x86_64 Linux only)"
        )
    wraps = slice_wraps(generation, frame.shape) if wrap is None else parse_wrap(wrap, frame.shape)
    if len(wraps) != len(frame.shape):
        raise TopologyError(
            f"wrap {wraps} needs one entry for each axis of {name} of more than one chip"
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    known_as = _LIBTPU_NAMES.get(tpu_generation(generation) or "", generation)
    try:
        description = topologies.get_topology_desc(
            platform="tpu",
            topology_name=f"{known_as}:{name.partition(':')[2]}",
            **wrap_options(frame, wraps),
        )
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise TopologyError(_NOT_A_SLICE.format(name, f"({one_line(str(error))})")) from error
    return list(description.devices)


def wrap_options(frame: CoordFrame, wraps: Sequence[bool]) -> dict[str, tuple[int, ...]]:
    """What libtpu must be told of a slice with wrap links, on three axes; nothing without any.

    They are given together with the chips of a host, 2x2 in every slice that wraps, as in MaxText.
    """
    if not any(wraps):
        return {}
    hosts, wide = [1, 1, 1], [False] * 3
    for axis, wrapping in zip(frame.kept, wraps, strict=True):
        hosts[axis], wide[axis] = 2 if axis < 2 else 1, wrapping
    return {"chips_per_host_bounds": tuple(hosts), "wrap": tuple(wide)}
