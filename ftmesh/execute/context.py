"""Setting: where a program runs and how its chunks travel, as every executor is told.

Idle: ranks that take no part, kept out of sums or let into them, and given something to do.

Placement: whether a mesh has the devices of a plan along its axis, in the plan's order.

A program knows ranks only. On other devices, or in another order, it would still sum right, over
links that the plan never meant to use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.lowering import Program


@dataclass(frozen=True)
class Wire:
    """The dtypes in which partial sums and results travel; None for the buffer's own."""

    partials: Any = None
    results: Any = None


OWN = Wire()


@dataclass(frozen=True)
class Setting:
    """Where a program runs: along which axis, how chunks travel, and whether a vmap stands in."""

    axis_name: Any
    num_ranks: int
    wire: Wire
    emulated: bool


def of_live(x: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """`x` at live ranks, and zeros at idle ones."""
    if len(program.live) == program.num_ranks:
        return x
    is_live = np.isin(np.arange(program.num_ranks), program.live)
    here = jnp.asarray(is_live)[lax.axis_index(axis_name)]
    return jnp.where(here, x, jnp.zeros((), x.dtype))


def with_idle_ones(x: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """`x`, to which live ranks have added that of idle ones, each taking some."""
    idle = np.setdiff1d(np.arange(program.num_ranks), program.live)
    for start in range(0, len(idle), len(program.live)):
        some = idle[start : start + len(program.live)]
        pairs = tuple(zip(some.tolist(), program.live.tolist(), strict=False))
        with _compat.own_scope("from_idle_ones"):
            moved = lax.ppermute(x, axis_name, completed(pairs, program.num_ranks))
        takes = np.isin(np.arange(program.num_ranks), program.live[: len(some)])
        here = jnp.asarray(takes)[lax.axis_index(axis_name)]
        x = jnp.where(here, x + moved, x)
    return x


def completed(
    permutation: tuple[tuple[int, int], ...], num_ranks: int
) -> tuple[tuple[int, int], ...]:
    """A partial permutation with the ranks left over paired up; what those get is ignored."""
    sources, targets = ({pair[end] for pair in permutation} for end in (0, 1))
    idle = [r for r in range(num_ranks) if r not in sources]
    waiting = [r for r in range(num_ranks) if r not in targets]
    return (*permutation, *zip(idle, waiting, strict=True))


Devices = NDArray[np.object_]


def check_devices(
    devices: Devices, axis_names: Sequence[Any], axis_name: Any, *expected: Sequence[Any]
) -> None:
    """Refuses a mesh along whose axis the `expected` devices, if known, do not stand in order.

    With more axes the mesh has several lines along this one. The plan's must be among them: it has
    one, or on tiles one for each position. The others must lie as those do, elsewhere, which is
    looked at where devices have coordinates.
    """
    if not any(expected) or axis_name not in axis_names:
        return
    along = list(axis_names).index(axis_name)
    lines = np.moveaxis(devices, along, 0).reshape(len(expected[0]), -1).T
    make = f"plan.jax_mesh({axis_name!r})"
    if len(expected) > 1:
        make = f"plan.jax_mesh({tuple(axis_names)!r}, along={axis_name!r})"
    for own in expected:
        shared = [sum(map(_is, line, own)) for line in lines]
        for rank, (want, have) in enumerate(zip(own, lines[int(np.argmax(shared))], strict=True)):
            if want != have:
                raise CollectiveError(
                    f"the plan is for other devices, or another order, than the mesh of axis "
                    f"{axis_name!r}: rank {rank} should be {want} and is {have}; make the mesh "
                    f"with {make}"
                )
    first = expected[0]
    for line in lines.tolist():
        if (astray := _first_astray(line, first)) is not None:
            raise CollectiveError(
                f"axis {axis_name!r} of the mesh has several lines of devices, and each must lie "
                f"as the plan's does: from {line[0]} to {line[astray]} is another way than from "
                f"{first[0]} to {first[astray]}; stack meshes made with {make}"
            )


def _is(one: Any, other: Any) -> bool:
    return bool(one == other)


def _first_astray(line: Sequence[Any], expected: Sequence[Any]) -> int | None:
    """The first rank of a line that does not stand to rank 0 as in the plan, where that is known.

    Chips of another slice have their own coordinates, so only differences count.
    """
    places, wanted = (_offsets(devices) for devices in (line, expected))
    if places is None or wanted is None or places.shape != wanted.shape:
        return None
    astray = (places != wanted).any(axis=1)
    return int(astray.argmax()) if astray.any() else None


def _offsets(devices: Sequence[Any]) -> NDArray[np.int_] | None:
    """Where devices are, seen from the first: slice, coordinates, and core of the chip."""
    if any(getattr(device, "coords", None) is None for device in devices):
        return None
    places = [
        (getattr(one, "slice_index", 0) or 0, *one.coords, getattr(one, "core_on_chip", 0) or 0)
        for one in devices
    ]
    offsets: NDArray[np.int_] = np.array(places) - np.array(places[0])
    return offsets
