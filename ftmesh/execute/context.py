"""Where a program runs: the mesh axis, its idle ranks, and the check of the mesh's device order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.lowering import Permutation, Program


@dataclass(frozen=True)
class WireDtypes:
    """The dtypes in which partial sums and results travel; None for the buffer's own."""

    partials: Any = None
    results: Any = None


NO_CAST = WireDtypes()


@dataclass(frozen=True)
class ExecutionContext:
    """The axis that a program runs along, and the dtypes in which its chunks travel."""

    axis_name: Any
    num_ranks: int
    wire: WireDtypes
    emulated: bool  # the axis is that of a vmap on one device


# Idle ranks -------------------------------------------------------------------------------------


def zero_if_idle(x: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """`x` on live ranks, and zeros on idle ones."""
    if len(program.live) == program.num_ranks:
        return x
    is_live = np.isin(np.arange(program.num_ranks), program.live)
    here = jnp.asarray(is_live)[lax.axis_index(axis_name)]
    return jnp.where(here, x, jnp.zeros((), x.dtype))


def add_from_idle(x: jax.Array, axis_name: Any, program: Program) -> jax.Array:
    """Add the `x` of every idle rank to that of some live rank."""
    idle = np.setdiff1d(np.arange(program.num_ranks), program.live)
    for start in range(0, len(idle), len(program.live)):
        some = idle[start : start + len(program.live)]
        pairs = tuple(zip(some.tolist(), program.live.tolist(), strict=False))
        with _compat.plan_scope("add_from_idle"):
            moved = lax.ppermute(x, axis_name, complete_permutation(pairs, program.num_ranks))
        takes = np.isin(np.arange(program.num_ranks), program.live[: len(some)])
        here = jnp.asarray(takes)[lax.axis_index(axis_name)]
        x = jnp.where(here, x + moved, x)
    return x


def complete_permutation(permutation: Permutation, num_ranks: int) -> Permutation:
    """Pair up the ranks that a partial permutation leaves out; what those receive is ignored."""
    sources, targets = ({pair[end] for pair in permutation} for end in (0, 1))
    idle = [r for r in range(num_ranks) if r not in sources]
    waiting = [r for r in range(num_ranks) if r not in targets]
    return (*permutation, *zip(idle, waiting, strict=True))


# The order of devices ---------------------------------------------------------------------------


def check_mesh_devices(
    devices: NDArray[np.object_],
    axis_names: Sequence[Any],
    axis_name: Any,
    *expected: Sequence[Any],
) -> None:
    """Check that the plan's devices stand along a mesh axis in rank order.

    A program knows ranks only: on other devices, or in another order, it would still sum correctly,
    but over links that the plan does not use.

    `expected` are the plan's devices by rank: one line, or one per position of a tile. The mesh may
    have more lines along the axis; those must have the same shape elsewhere, which is checked if
    devices have coordinates. Nothing is checked if the lines are empty, or the mesh has no such
    axis.

    Raises:
        CollectiveError: A device is not where the plan has it.
    """
    if not any(expected) or axis_name not in axis_names:
        return
    axis = list(axis_names).index(axis_name)
    lines = np.moveaxis(devices, axis, 0).reshape(len(expected[0]), -1).T
    remedy = f"plan.jax_mesh({axis_name!r})"
    if len(expected) > 1:
        remedy = f"plan.jax_mesh({tuple(axis_names)!r}, along={axis_name!r})"
    for planned in expected:
        num_shared = [sum(bool(same) for same in map(eq, line, planned)) for line in lines]
        closest = lines[int(np.argmax(num_shared))]
        for rank, (want, have) in enumerate(zip(planned, closest, strict=True)):
            if want != have:
                raise CollectiveError(
                    f"the plan is for other devices, or another order, than the mesh of axis "
                    f"{axis_name!r}: rank {rank} should be {want} and is {have}; make the mesh "
                    f"with {remedy}"
                )
    first = expected[0]
    for line in lines.tolist():
        if (astray := _first_misplaced(line, first)) is not None:
            raise CollectiveError(
                f"axis {axis_name!r} of the mesh has several lines of devices, and each must have "
                f"the shape of the plan's: the offset from {line[0]} to {line[astray]} differs "
                f"from that of {first[0]} to {first[astray]}; stack meshes made with {remedy}"
            )


def _first_misplaced(line: Sequence[Any], planned: Sequence[Any]) -> int | None:
    """The first rank whose offset from rank 0 differs from the plan's; None if not known.

    Chips of another slice have coordinates of their own, so only differences count.
    """
    offsets, wanted = (_offsets(devices) for devices in (line, planned))
    if offsets is None or wanted is None or offsets.shape != wanted.shape:
        return None
    misplaced = (offsets != wanted).any(axis=1)
    return int(misplaced.argmax()) if misplaced.any() else None


def _offsets(devices: Sequence[Any]) -> NDArray[np.int_] | None:
    """Slice, coordinates and core of devices, relative to the first."""
    if any(getattr(device, "coords", None) is None for device in devices):
        return None
    locations = [
        (getattr(d, "slice_index", 0) or 0, *d.coords, getattr(d, "core_on_chip", 0) or 0)
        for d in devices
    ]
    offsets: NDArray[np.int_] = np.array(locations) - np.array(locations[0])
    return offsets
