"""Emulation: grids of CPU devices, and a thousand logical ranks on one device.

For tests and examples, in the library because users' own tests want the same.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ftmesh.errors import TopologyError
from ftmesh.topology.notation import Failed, format_shape, parse_shape
from ftmesh.topology.topology import Topology

MAX_DEVICES = 4096


def cpu_grid(
    shape: str,
    *,
    failed: Failed = None,
    failed_links: str | Iterable[Sequence[Sequence[int]]] = (),
    wrap: bool | Sequence[bool] = False,
    threads_each: int = 1,
) -> Topology:
    """A topology of emulated CPU devices, as many as `shape` has chips, live and failed.

    JAX decides how many CPU devices there are when it is first used; call this before, or set
    ``XLA_FLAGS=--xla_force_host_platform_device_count=64`` in the environment. It then makes as
    many threads; a Pallas kernel that is interpreted beside other collectives takes several for
    each device.
    """
    sizes = parse_shape(shape)
    wanted = math.prod(sizes)
    if wanted > MAX_DEVICES:
        raise TopologyError(
            f"mesh {format_shape(sizes)} has {wanted:,} chips, and {MAX_DEVICES:,} are emulated at "
            "most, a device each: take a smaller mesh, or all ranks on one device"
        )
    ask_for_cpu_devices(wanted * threads_each)
    devices = jax.devices("cpu")
    if len(devices) < wanted:
        raise TopologyError(
            f"mesh {format_shape(sizes)} needs {wanted} devices and JAX has made {len(devices)} "
            f"already: {_remedy(wanted)}"
        )
    return Topology.from_devices(
        devices[:wanted], shape=sizes, failed=failed, failed_links=failed_links, wrap=wrap
    )


def _remedy(wanted: int) -> str:
    """What to do where JAX has fewer devices than a mesh."""
    if "FTMESH_NUM_PROCESSES" in os.environ:
        return (
            "ftmesh launch gave each process its own; take those of all, by "
            "Topology.from_devices(jax.devices()) after ftmesh.distributed.join()"
        )
    return (
        "call cpu_grid before anything else uses JAX, or set "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={wanted}"
    )


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


def shard_map_on_one_device(
    run: Callable[..., Any], *, num_ranks: int, axis_name: str, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """As ``jax.shard_map``, with all `num_ranks` ranks on one device.

    Arrays go in and come out whole, as they do there; of results that are the same at every rank,
    the first rank's.
    """

    def every_rank(*args: Any) -> Any:
        parts = _map_specs(partial(_split, num_ranks, axis_name), in_specs, args)
        axes = _map_specs(lambda spec, _: None if axis_name not in spec else 0, in_specs, args)
        found = jax.vmap(run, in_axes=axes, axis_name=axis_name, axis_size=num_ranks)(*parts)
        return _map_specs(partial(_joined, axis_name), out_specs, found)

    return every_rank


def _map_specs(function: Callable[[Any, Any], Any], specs: Any, tree: Any) -> Any:
    """`function` of every leaf and its spec; `specs` may be a prefix of the tree."""
    return jax.tree.map(
        lambda spec, part: jax.tree.map(partial(function, spec), part),
        specs,
        tree,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def _split(num_ranks: int, axis_name: str, spec: Any, array: Any) -> Any:
    """The parts of an array one after another, or all of it."""
    if axis_name not in spec:
        return array
    at = tuple(spec).index(axis_name)
    length = array.shape[at] // num_ranks
    parts = array.reshape(*array.shape[:at], num_ranks, length, *array.shape[at + 1 :])
    return jnp.moveaxis(parts, at, 0)


def _joined(axis_name: str, spec: Any, parts: Any) -> Any:
    """The inverse of that."""
    if axis_name not in spec:
        return parts[0]
    at = tuple(spec).index(axis_name)
    array = jnp.moveaxis(parts, 0, at)
    return array.reshape(*array.shape[:at], -1, *array.shape[at + 2 :])


def ask_for_cpu_devices(wanted: int) -> None:
    """Have so many CPU devices, if JAX has not made its devices yet; other devices stay as are."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # too late: JAX has its devices already
            jax.config.update("jax_num_cpu_devices", wanted)
