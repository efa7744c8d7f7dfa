"""The TPU compiler: its options for a step that runs a plan, and devices to compile for.

It needs no TPU: `tpu_devices` describes those of any slice.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
from jax.experimental import topologies

from ftmesh.command_line import one_line
from ftmesh.errors import ArgumentError, FtmeshError, TopologyError, TopologyWarning
from ftmesh.topology.damage import CoordFrame
from ftmesh.topology.devices import slice_wraps, tpu_generation
from ftmesh.topology.notation import parse_shape, parse_wrap

# To have one permutation in flight for each link of a chip, of which there are four, or six with
# three axes: v2 and v3 keep permutations synchronous by default; v5p, v6e and 7x wait for one
# before they start the next; v4 has five in flight by default, and v5e all of its four.
_ASYNC = {"xla_enable_async_collective_permute": "true"}
_MAX_IN_FLIGHT = "xla_max_concurrent_async_collective_permutes"
_FOUR, _SIX = {_MAX_IN_FLIGHT: "4"}, {_MAX_IN_FLIGHT: "6"}
# To overlap permutations with other computation: the scheduler then looks for the longest chains of
# them, where otherwise it keeps to its initial order.
_OVERLAP = {"xla_tpu_use_aggressive_scheduling": "true"}
# To have more VMEM for large buffers: a single instruction of a v6e gets 30 MiB and not 32, which
# leaves 98 of 128 MiB, so that 100 MB stay there with the padding of their chunks.
_SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
_VMEM = {"v6e": {_SCOPED_VMEM: str(30 * 1024)}}
_OPTIONS: dict[str, dict[str, str]] = {
    "v2": _ASYNC, "v3": _ASYNC, "v4": _SIX, "v5e": {}, "v5p": _SIX, "v6e": _FOUR, "v7x": _SIX,
    "cpu": {}, "gpu": {},
}  # fmt: skip
_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def compiler_options(platform: str, *, overlap: bool = False) -> dict[str, str]:
    """The compiler options for a step, so that all permutations of a round are in flight at once.

    For the outermost jit: ``jax.jit(step, compiler_options=ftmesh.compiler_options("tpu v6e"))``.
    On a v6e they also let a payload of up to 98 MiB, not 96, stay in VMEM: a single instruction, or
    a Pallas kernel that sets no limit of its own, gets 30 MiB and not 32. That option is left out
    if ``LIBTPU_INIT_ARGS`` sets it.

    Args:
        platform: A TPU generation, ``cpu`` or ``gpu``, or ``jax.devices()[0].device_kind``.
        overlap: Overlap the backward pass with the sums of its gradients.

    Returns:
        The options; empty if there is nothing to set. A TPU that is newer than this module gets
        none, and a `TopologyWarning`, once.

    Raises:
        ArgumentError: The platform is not known.

    >>> compiler_options("tpu v5p")
    {'xla_max_concurrent_async_collective_permutes': '6'}
    >>> compiler_options("cpu")
    {}
    """
    words = re.split(r"[:-]", str(platform).lower())[0].replace(" ", "")
    name = tpu_generation(words) or _ALIASES.get(words, words)
    options = _OPTIONS.get(name)
    if options is None:
        if not re.fullmatch(r"tpu\w+|v[0-9]+\w*", words):
            known = ", ".join("tpu7x" if name == "v7x" else name for name in _OPTIONS)
            raise ArgumentError(f"platform {platform!r} is not known: give one of {known}")
        _warn_unknown(str(platform))
        return {}
    is_set = re.search(rf"\b{_SCOPED_VMEM}\b", os.environ.get("LIBTPU_INIT_ARGS", ""))
    vmem = {} if is_set else _VMEM.get(name, {})
    scheduling = _OVERLAP if overlap and name not in ("cpu", "gpu") else {}
    return {**options, **scheduling, **vmem}


@cache
def _warn_unknown(platform: str) -> None:
    """Warn once: a step is compiled several times."""
    warnings.warn(
        f"the compiler options for {platform!r} are not known, so none are set: the permutations "
        "of a round may run one after another; `ftmesh compile` shows whether they do",
        TopologyWarning,
        stacklevel=3,
    )


# The devices of a slice -------------------------------------------------------------------------

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
