"""Emulates unhealthy chips and links, to test that `ftmesh.health` finds them.

``FTMESH_SICK="wrong@1,2;slow@0,3;silent@2,2;link-wrong@0,0-1,0"`` makes the doctor's probes
misbehave on those chips and links, inside the program and on the device. A link is unhealthy in the
direction in which it is written. Programs for healthy chips are compiled without any of this.

Chips are identified by their index in the grid, `Topology.grid_index(coord)`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.errors import ArgumentError
from ftmesh.topology.notation import Coord, parse_coord, parse_link
from ftmesh.topology.topology import Topology

VARIABLE = "FTMESH_SICK"
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
        return UnhealthySpec.parse(os.environ.get(VARIABLE, ""), topology)

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
