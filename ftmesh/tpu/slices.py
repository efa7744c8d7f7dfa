"""TPU devices to compile for, on a machine with or without a TPU."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from ftmesh.command_line import one_line
from ftmesh.errors import FtmeshError, TopologyError
from ftmesh.topology.notation import parse_shape

# For processes without a TPU: libtpu then does not query a metadata server, and several processes
# may load it. It reads these variables when it is loaded.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

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


def tpu_devices(name: str) -> list[Any]:
    """The devices of a TPU slice such as ``v6e:16x16``, to compile for.

    For processes that do not use a TPU themselves: JAX does not look for one afterwards.

    Raises:
        TopologyError: `name` is not a TPU slice.
        LibtpuMissingError: The TPU compiler is not installed.
    """
    match = re.fullmatch(r"\w+:([0-9]+(?:x[0-9]+)*)", name)
    if not match or not 0 < math.prod(parse_shape(match[1])) <= _MAX_CHIPS:
        raise TopologyError(_NOT_A_SLICE.format(name, f"of at most {_MAX_CHIPS:,} chips"))
    if not has_libtpu():
        raise LibtpuMissingError(
            f"compiling for {name} needs the TPU compiler, which needs no TPU: "
            "pip install libtpu (x86_64 Linux only)"
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    try:
        description = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise TopologyError(_NOT_A_SLICE.format(name, f"({one_line(str(error))})")) from error
    return list(description.devices)
