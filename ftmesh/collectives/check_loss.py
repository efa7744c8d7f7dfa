"""Compare `Plan.value_and_grad` with `jax.value_and_grad` on data, and name what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ftmesh.collectives.local_loss import ArgumentRoles, Loss
from ftmesh.collectives.value_and_grad import value_and_grad
from ftmesh.errors import CollectiveError
from ftmesh.execute.types import AxisName, PlanLike, PyTree, Specs


@dataclass(frozen=True)
class Comparison:
    """One array of the result: on the plan, and without."""

    name: str  # such as "gradient['w']"
    difference: float  # the largest, in units of the largest number; inf if shapes differ
    tolerance: float

    @property
    def is_equal(self) -> bool:
        return self.difference <= self.tolerance  # False if it is not a number

    def __str__(self) -> str:
        if np.isinf(self.difference):
            return f"{self.name} has another shape or type"
        return f"{self.name} differs by {self.difference:.2g} of its largest number"


class LossCheck(tuple[Comparison, ...]):
    """The arrays that were compared, and as text what differs. True if nothing does."""

    __slots__ = ()

    @property
    def differing(self) -> tuple[Comparison, ...]:
        return tuple(entry for entry in self if not entry.is_equal)

    def __bool__(self) -> bool:
        return not self.differing

    def __str__(self) -> str:
        if self:
            largest = max(entry.difference for entry in self)
            return f"all {len(self)} arrays are those of JAX, up to {largest:.1g}"
        lines = [f"{len(self.differing)} of {len(self)} arrays are not those of JAX:"]
        return "\n  ".join([*lines, *map(str, self.differing)])

    def require_equal(self) -> None:
        """Raise CollectiveError if anything differs."""
        if not self:
            raise CollectiveError(str(self))


def check_loss(
    loss: Callable[..., Any],
    args: Sequence[PyTree],
    *,
    plan: PlanLike,
    tolerance: float = 1e-5,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    axis_name: AxisName = "data",
    weighted: bool = False,
    per_rank: bool = False,
    replicated: int | Sequence[int] = (),
    specs: Specs = None,
    mesh: Any = None,
    reduce_aux: Callable[[PyTree], PyTree] | None = None,
) -> LossCheck:
    """Compare the value, the gradients and aux of a loss on the plan with those of JAX alone.

    Both run on `args`, so use a small batch: ``print(plan.check(loss, params, x, y))`` names the
    arrays that differ. With ``per_rank=True`` it shows how far the mean of ranks is from the whole
    batch.

    Args:
        tolerance: The largest difference that counts as rounding, in units of the largest number
            of the array.
        loss, args, plan: The loss, what it is called with, and the plan.
        argnums, has_aux, axis_name, weighted, per_rank, replicated, specs, mesh, reduce_aux:
            As for `Plan.value_and_grad`.

    Raises:
        ArgumentError: The loss is rejected; the message names the line.
    """
    on_plan = value_and_grad(
        loss,
        argnums,
        has_aux,
        plan=plan,
        axis_name=axis_name,
        weighted=weighted,
        per_rank=per_rank,
        replicated=replicated,
        specs=specs,
        mesh=mesh,
        reduce_aux=reduce_aux,
    )
    outcome = on_plan(*args)
    (value, aux), grads = outcome if has_aux else ((outcome[0], None), outcome[1])
    weights = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    replicated = (replicated,) if isinstance(replicated, int) else tuple(replicated)
    roles = ArgumentRoles.assign(len(args), weights, replicated)
    known = Loss(loss, {}, roles.weights, has_aux=has_aux, weighted=weighted)
    batch_size = roles.batch_size(args, numbers_are_replicated=True)
    plain_value, plain_grads, plain_aux = jax.device_get(
        known.of_whole_batch(tuple(map(_on_one_device, args)), batch_size)
    )
    plain_grads = plain_grads[0] if isinstance(argnums, int) else plain_grads
    results = {"value": value, "gradient": grads, "aux": aux}
    expected = {"value": plain_value, "gradient": plain_grads, "aux": plain_aux}
    entries = []
    for name, tree in expected.items():
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for (path, want), have in zip(leaves, jax.tree.leaves(results[name]), strict=True):
            title = f"{name}{jax.tree_util.keystr(path)}"
            entries.append(Comparison(title, _difference(have, want), tolerance))
    return LossCheck(entries)


def _on_one_device(arg: PyTree) -> PyTree:
    """Arrays without their placement; everything else, such as keys, as it is."""

    def take(leaf: Any) -> Any:
        is_plain = isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.extended
        )
        return jax.numpy.asarray(np.asarray(leaf)) if is_plain else leaf

    return jax.tree.map(take, arg)


def _difference(have: Any, want: Any) -> float:
    have, want = np.asarray(have), np.asarray(want)
    if have.shape != want.shape or have.dtype.kind != want.dtype.kind:
        return np.inf
    if not want.size:
        return 0.0
    kind = complex if want.dtype.kind == "c" else float
    have, want = have.astype(kind), want.astype(kind)
    same = (have == want) | (np.isnan(have) & np.isnan(want))
    scale = max(np.max(np.abs(want[np.isfinite(want)]), initial=0.0), np.finfo(np.float32).tiny)
    return float(np.max(np.where(same, 0.0, np.abs(np.where(same, 0, have - want))) / scale))
