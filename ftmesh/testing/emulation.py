"""Emulates meshes: a grid of CPU devices, or a thousand logical ranks on one device."""

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
    wrap: bool | Sequence[bool] | None = None,
    threads_per_device: int = 1,
) -> Topology:
    """Build a topology of emulated CPU devices, one for each chip of `shape`.

    JAX fixes the number of CPU devices when it is first used. Call this before, or set
    ``XLA_FLAGS=--xla_force_host_platform_device_count=64`` in the environment.

    Args:
        shape: The mesh, such as ``"8x8"``; failed chips get a device too.
        failed, failed_links: As for `Topology.from_devices`.
        wrap: Which axes wrap around; none unless given.
        threads_per_device: Create this many CPU devices, hence threads, for each chip. Interpreted
            Pallas kernels that overlap other collectives need several.

    Raises:
        TopologyError: The mesh has more than 4,096 chips, or JAX was used before with fewer
            devices.
    """
    sizes = parse_shape(shape)
    num_chips = math.prod(sizes)
    if num_chips > MAX_DEVICES:
        raise TopologyError(
            f"mesh {format_shape(sizes)} has {num_chips:,} chips, and at most {MAX_DEVICES:,} "
            "devices can be emulated: use a smaller mesh, or all ranks on one device"
        )
    request_cpu_devices(num_chips * threads_per_device)
    devices = jax.devices("cpu")
    if len(devices) < num_chips:
        raise TopologyError(
            f"mesh {format_shape(sizes)} needs {num_chips} devices, and JAX has already created "
            f"{len(devices)}: {_remedy(num_chips)}"
        )
    return Topology.from_devices(
        devices[:num_chips], shape=sizes, failed=failed, failed_links=failed_links, wrap=wrap
    )


def _remedy(num_chips: int) -> str:
    if "FTMESH_NUM_PROCESSES" in os.environ:
        return (
            "under 'ftmesh launch' a process has only its own devices; use those of all, by "
            "Topology.from_devices(jax.devices()) after ftmesh.elastic.initialize()"
        )
    return (
        "call cpu_grid before anything else uses JAX, or set "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={num_chips}"
    )


def request_cpu_devices(count: int) -> None:
    """Have JAX create `count` CPU devices; does nothing if it has created its devices already."""
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has its devices already
            jax.config.update("jax_num_cpu_devices", count)


def on_one_device(function: Callable[..., Any], axis_name: str = "data") -> Callable[..., Any]:
    """Run `function` for all ranks at once on one device.

    Much faster than emulated devices for a thousand ranks and small payloads. The arguments and
    results of the jitted function that is returned have a leading dimension of ranks.

    >>> import ftmesh, jax.numpy as jnp
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x4", failed="2x2@0,0"))
    >>> total = on_one_device(lambda x: plan.psum(x, "data"))(jnp.arange(12))
    >>> int(total[0]), int(total[11])
    (66, 66)
    """
    all_ranks: Callable[..., Any] = jax.jit(jax.vmap(function, axis_name=axis_name))
    return all_ranks


def shard_map_on_one_device(
    function: Callable[..., Any], *, num_ranks: int, axis_name: str, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Emulate ``jax.shard_map`` with all `num_ranks` ranks on one device.

    Takes and returns global arrays, as ``jax.shard_map`` does. A result whose spec does not name
    the axis is the first rank's.
    """

    def all_ranks(*args: Any) -> Any:
        shards = _map_specs(partial(_split, num_ranks, axis_name), in_specs, args)
        axes = _map_specs(lambda spec, _: 0 if axis_name in spec else None, in_specs, args)
        run = jax.vmap(function, in_axes=axes, axis_name=axis_name, axis_size=num_ranks)
        return _map_specs(partial(_join, axis_name), out_specs, run(*shards))

    return all_ranks


def _map_specs(function: Callable[[Any, Any], Any], specs: Any, tree: Any) -> Any:
    """Map `function(spec, leaf)` over a tree; `specs` may be a prefix of it."""
    return jax.tree.map(
        lambda spec, subtree: jax.tree.map(partial(function, spec), subtree),
        specs,
        tree,
        is_leaf=lambda spec: isinstance(spec, PartitionSpec),
    )


def _split(num_ranks: int, axis_name: str, spec: Any, array: Any) -> Any:
    """Stack the shards of an array; replicated arrays stay as they are."""
    if axis_name not in spec:
        return array
    dim = tuple(spec).index(axis_name)
    length = array.shape[dim] // num_ranks
    shards = array.reshape(*array.shape[:dim], num_ranks, length, *array.shape[dim + 1 :])
    return jnp.moveaxis(shards, dim, 0)


def _join(axis_name: str, spec: Any, shards: Any) -> Any:
    """Invert `_split`."""
    if axis_name not in spec:
        return shards[0]
    dim = tuple(spec).index(axis_name)
    array = jnp.moveaxis(shards, 0, dim)
    return array.reshape(*array.shape[:dim], -1, *array.shape[dim + 2 :])
