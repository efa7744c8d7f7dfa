"""Emulation: grids of CPU devices, and a thousand logical ranks on one device.

For tests and examples, in the library because users' own tests want the same.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from ftmesh.errors import TopologyError
from ftmesh.notation import Failed, format_shape, parse_shape
from ftmesh.topology import Topology


def cpu_grid(shape: str, *, failed: Failed = None, wrap: bool = False) -> Topology:
    """A topology of emulated CPU devices, as many as `shape` has chips, live and failed.

    JAX decides how many CPU devices there are when it is first used; call this before, or set
    ``XLA_FLAGS=--xla_force_host_platform_device_count=64`` in the environment.
    """
    sizes = parse_shape(shape)
    wanted = math.prod(sizes)
    devices = _cpu_devices(wanted)
    if len(devices) < wanted:
        raise TopologyError(
            f"mesh {format_shape(sizes)} needs {wanted} devices and JAX has made {len(devices)} "
            "already: call cpu_grid before anything else uses JAX, or set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
        )
    return Topology.from_devices(devices[:wanted], shape=sizes, failed=failed, wrap=wrap)


def on_one_device(run: Callable[..., Any], axis_name: str = "data") -> Callable[..., Any]:
    """`run`, as every rank would, for all ranks at once on one device.

    Arguments and results have a leading dimension of ranks. Quick for a thousand ranks and small
    payloads, where emulated devices would take minutes.

    >>> import ftmesh, jax.numpy as jnp
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x4", failed="2x2@0,0"))
    >>> total = on_one_device(lambda x: plan.psum(x, "data"))(jnp.arange(12))
    >>> int(total[0]), int(total[11])
    (66, 66)
    """
    every_rank: Callable[..., Any] = jax.jit(jax.vmap(run, axis_name=axis_name))
    return every_rank


def _cpu_devices(wanted: int) -> list[Any]:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # too late: JAX has its devices already
            jax.config.update("jax_num_cpu_devices", wanted)
    return list(jax.devices("cpu"))
