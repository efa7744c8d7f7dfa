"""Sick: chips and links that are planted as wrong, slow or silent, to see that they are found.

``FTMESH_SICK="wrong@1,2;slow@0,3;silent@2,2;link-wrong@0,0-1,0"`` makes the programs that look for
such chips, and steps that call `Sick.spoil_tree`, misbehave there: in the program, on the device.
A link is sick in the direction in which it is written. A program without a sickness has no trace of
it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.errors import ArgumentError
from ftmesh.topology.notation import Coord, parse_coord, parse_link
from ftmesh.topology.topology import Topology

VARIABLE = "FTMESH_SICK"
SLOW_CHIP, SLOW_LINK = 0.3, 0.1  # seconds that a slow one takes longer, a link each way
_KINDS = ("wrong", "slow", "silent")


@dataclass(frozen=True)
class Sick:
    """What is sick: chips, and links from one chip to another, by their places in the grid."""

    wrong: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    wrong_links: frozenset[tuple[int, int]] = frozenset()
    slow_links: frozenset[tuple[int, int]] = frozenset()
    silent_links: frozenset[tuple[int, int]] = frozenset()
    alarm: threading.Event | None = None  # that wakes the silent; without it they never wake

    @staticmethod
    def parse(text: str, topology: Topology) -> Sick:
        """The sickness of chips of a mesh, as it is written."""
        found: dict[str, set[Any]] = {}
        for piece in filter(None, (piece.strip() for piece in text.split(";"))):
            name, _, where = piece.partition("@")
            kind = name.removeprefix("link-")
            if kind not in _KINDS or not where:
                raise ArgumentError(
                    f"{piece!r} is no sickness: write wrong@1,2, slow@1,2, silent@1,2, or a link "
                    "as link-wrong@0,0-1,0, and join several with ';'"
                )
            if name == kind:
                found.setdefault(kind, set()).add(_place(topology, parse_coord(where)))
            else:
                a, b = parse_link(where)
                if b not in topology.neighbours(a):
                    raise ArgumentError(f"{piece!r}: there is no link there on {topology}")
                ends = _place(topology, a), _place(topology, b)
                found.setdefault(f"{kind}_links", set()).add(ends)
        kinds: dict[str, Any] = {name: frozenset(places) for name, places in found.items()}
        parsed = Sick(**kinds)
        return replace(parsed, alarm=_alarm) if parsed.silent or parsed.silent_links else parsed

    @staticmethod
    def from_environment(topology: Topology) -> Sick:
        """What the environment variable ``FTMESH_SICK`` says, or nothing."""
        return Sick.parse(os.environ.get(VARIABLE, ""), topology)

    def among(self, places: Iterable[int]) -> Sick:
        """What is sick of some chips and of the links between them."""
        some = frozenset(places)

        def between(links: frozenset[tuple[int, int]]) -> frozenset[tuple[int, int]]:
            return frozenset(ends for ends in links if some.issuperset(ends))

        silent, silent_links = self.silent & some, between(self.silent_links)
        return Sick(
            self.wrong & some,
            self.slow & some,
            silent,
            between(self.wrong_links),
            between(self.slow_links),
            silent_links,
            self.alarm if silent or silent_links else None,
        )

    # Inside a program ---------------------------------------------------------------------------

    def answer(self, x: Any, place: Any) -> Any:
        """`x`, which never comes from a chip that is silent."""
        return _held_up(x, _is_in(self.silent, place), self._be_silent) if self.silent else x

    def delayed(self, x: Any, place: Any) -> Any:
        """`x`, which comes late from a chip that is slow."""
        return _held_up(x, _is_in(self.slow, place), _sleep(SLOW_CHIP)) if self.slow else x

    def computed(self, x: Any, place: Any) -> Any:
        """`x`, of which a bit is wrong at a chip that computes wrongly."""
        return jnp.where(_is_in(self.wrong, place), _flipped(x), x) if self.wrong else x

    def spoil(self, x: Any, place: Any) -> Any:
        """`x` as the chip at `place` gives it, with all that is the matter there."""
        return self.computed(self.delayed(self.answer(x, place), place), place)

    def spoil_tree(self, tree: Any, topology: Topology, axis_name: str) -> Any:
        """A tree as the chip of this rank gives it: its first array may be wrong, or late.

        For a training step, on what a chip computes by itself: its gradients, or parameters.
        """
        leaves, form = jax.tree.flatten(tree)
        if self == WELL or not leaves:
            return tree
        places = [topology.place(coord) for coord in topology.coords]
        of_rank = np.repeat(np.array(places, np.int32), topology.devices_per_chip)
        place = jnp.asarray(of_rank)[lax.axis_index(axis_name)]
        return jax.tree.unflatten(form, [self.spoil(leaves[0], place), *leaves[1:]])

    def carried(self, x: Any, source: Any, place: Any) -> Any:
        """`x` as it comes over the link from the chip at `source` to the one at `place`."""
        waits = ((self.slow_links, _sleep(SLOW_LINK)), (self.silent_links, self._be_silent))
        for links, wait in waits:
            if links:
                x = _held_up(x, _are_in(links, source, place), wait)
        links = self.wrong_links
        return jnp.where(_are_in(links, source, place), _flipped(x), x) if links else x

    def _be_silent(self, x: Any) -> Any:
        (self.alarm or threading.Event()).wait()
        return x


WELL = Sick()
_alarm = threading.Event()  # of whatever is planted next


def wake() -> None:
    """Have everything silent answer, so that a process that planted it can go on.

    What was planted before is silent no more, however often its programs come to it; what is
    planted after is.
    """
    global _alarm
    _alarm.set()
    _alarm = threading.Event()


def _place(topology: Topology, coord: Coord) -> int:
    topology.rank(coord)  # refuses one that is not there
    return topology.place(coord)


def _is_in(places: frozenset[int], place: Any) -> Any:
    return jnp.isin(place, np.array(sorted(places), np.int32))


def _are_in(links: frozenset[tuple[int, int]], source: Any, place: Any) -> Any:
    ends = np.array(sorted(links), np.int32)
    return jnp.any((ends[:, 0] == source) & (ends[:, 1] == place))


def _held_up(x: Any, is_so: Any, wait: Callable[[Any], Any]) -> Any:
    """`x`, after the host has waited where `is_so`."""

    def waited(x: Any) -> Any:
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    return lax.cond(is_so, waited, lambda x: x, x)


def _sleep(seconds: float) -> Callable[[Any], Any]:
    def be_slow(x: Any) -> Any:
        time.sleep(seconds)
        return x

    return be_slow


def _flipped(x: Any) -> Any:
    """`x` with the lowest bit of its first element flipped."""
    uint = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, uint).reshape(-1)
    return lax.bitcast_convert_type(bits.at[0].set(bits[0] ^ 1), x.dtype).reshape(x.shape)
