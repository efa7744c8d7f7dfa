"""Emulates meshes, and unhealthy chips and links.

A mesh is a grid of CPU devices, or a thousand logical ranks on one device.

``FTMESH_SICK="wrong@1,2;slow@0,3;silent@2,2;link-wrong@0,0-1,0"`` makes the doctor's probes
misbehave on those chips and links, inside the program and on the device, so that tests see
`ftmesh.health` find them. A link is unhealthy in the direction in which it is written. Programs for
healthy chips are compiled without any of this. Chips are identified by their index in the grid,
`Topology.grid_index(coord)`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.topology.notation import (
    Coord,
    Failed,
    format_shape,
    parse_coord,
    parse_link,
    parse_shape,
)
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


# Unhealthy chips and links ----------------------------------------------------------------------

UNHEALTHY_VARIABLE = "FTMESH_SICK"
SLOW_CHIP, SLOW_LINK = 0.3, 0.1  # seconds that a slow one adds; a link adds them each way
_KINDS = ("wrong", "slow", "silent")
_Links = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class UnhealthySpec:
    """Which chips and directed links are wrong, slow or silent, by grid index."""

    wrong: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    wrong_links: _Links = frozenset()
    slow_links: _Links = frozenset()
    silent_links: _Links = frozenset()
    released: threading.Event | None = None  # set: the silent ones answer

    @staticmethod
    def parse(text: str, topology: Topology) -> UnhealthySpec:
        """Parse the text form, such as ``wrong@1,2;link-silent@0,0-1,0``."""
        fields: dict[str, set[Any]] = {}
        for part in filter(None, (part.strip() for part in text.split(";"))):
            name, _, where = part.partition("@")
            kind = name.removeprefix("link-")
            if kind not in _KINDS or not where:
                raise ArgumentError(
                    f"{part!r} is not a fault of a chip or link: write wrong@1,2, slow@1,2, "
                    "silent@1,2, or for a link link-wrong@0,0-1,0, and join several with ';'"
                )
            if name == kind:
                fields.setdefault(kind, set()).add(_live_index(topology, parse_coord(where)))
            else:
                a, b = parse_link(where)
                if b not in topology.neighbours(a):
                    raise ArgumentError(f"{part!r}: {topology} has no such link")
                ends = _live_index(topology, a), _live_index(topology, b)
                fields.setdefault(f"{kind}_links", set()).add(ends)
        frozen: dict[str, Any] = {name: frozenset(members) for name, members in fields.items()}
        spec = UnhealthySpec(**frozen)
        return replace(spec, released=_released) if spec.silent or spec.silent_links else spec

    @staticmethod
    def from_environment(topology: Topology) -> UnhealthySpec:
        """Parse the environment variable ``FTMESH_SICK``; unset means all are healthy."""
        return UnhealthySpec.parse(os.environ.get(UNHEALTHY_VARIABLE, ""), topology)

    def restricted_to(self, indices: Iterable[int]) -> UnhealthySpec:
        """Keep only these chips and the links between them."""
        chips = frozenset(indices)

        def between(links: _Links) -> _Links:
            return frozenset(ends for ends in links if chips.issuperset(ends))

        links = (between(self.wrong_links), between(self.slow_links), between(self.silent_links))
        spec = UnhealthySpec(self.wrong & chips, self.slow & chips, self.silent & chips, *links)
        return replace(spec, released=self.released) if spec.silent or spec.silent_links else spec

    # Inside a program. `index` is the grid index of the chip that runs it. ---------------------

    def silence(self, x: Any, index: Any) -> Any:
        """Return `x`; on a silent chip, never."""
        return _wait_if(_is_in(self.silent, index), self._block, x) if self.silent else x

    def delay(self, x: Any, index: Any) -> Any:
        """Return `x`; on a slow chip, late."""
        wait = partial(time.sleep, SLOW_CHIP)
        return _wait_if(_is_in(self.slow, index), wait, x) if self.slow else x

    def corrupt(self, x: Any, index: Any) -> Any:
        """Return `x`; on a chip that computes wrongly, with a bit flipped."""
        return jnp.where(_is_in(self.wrong, index), _flip_bit(x), x) if self.wrong else x

    def apply_to_link(self, x: Any, source: Any, index: Any) -> Any:
        """Return `x` as it arrives over the link from chip `source` to chip `index`."""
        waits = (
            (self.slow_links, partial(time.sleep, SLOW_LINK)),
            (self.silent_links, self._block),
        )
        for links, wait in waits:
            if links:
                x = _wait_if(_is_in(links, source, index), wait, x)
        links = self.wrong_links
        return jnp.where(_is_in(links, source, index), _flip_bit(x), x) if links else x

    def _block(self) -> None:
        (self.released or threading.Event()).wait()


HEALTHY = UnhealthySpec()
_released = threading.Event()  # shared by all specs parsed until `release_silent` is called


def release_silent() -> None:
    """Make the silent chips and links of all specs parsed so far answer from now on."""
    global _released
    _released.set()
    _released = threading.Event()


def _live_index(topology: Topology, coord: Coord) -> int:
    topology.rank(coord)  # raises unless the chip is live
    return topology.grid_index(coord)


def _is_in(members: frozenset[Any], *indices: Any) -> Any:
    """Whether a chip, by its index, or a link, by those of its ends, is one of the members."""
    rows = np.array(sorted(members), np.int32).reshape(len(members), -1)
    return jnp.any(jnp.all(rows == jnp.stack(indices), axis=1))


def _wait_if(condition: Any, wait: Callable[[], object], x: Any) -> Any:
    """Return `x`, after the host has waited where `condition` holds."""

    def wait_and_return(x: Any) -> Any:
        wait()
        return x

    def call_host(x: Any) -> Any:
        return jax.pure_callback(wait_and_return, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return lax.cond(condition, call_host, lambda x: x, x)


def _flip_bit(x: Any) -> Any:
    """Flip the lowest bit of the first element."""
    uint = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, uint).reshape(-1)
    return lax.bitcast_convert_type(bits.at[0].set(bits[0] ^ 1), x.dtype).reshape(x.shape)
