"""Auxiliary output of a loss: what it is for a whole batch, when each rank has its own of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from ftmesh.collectives.all_reduce import psum
from ftmesh.collectives.local_loss import Loss, OverRanks
from ftmesh.collectives.partitioning import WHOLE
from ftmesh.errors import ArgumentError
from ftmesh.layout.batch_shares import Shares

SAME, MEAN, ROWS = "same", "mean", "rows"


@dataclass
class Auxiliary:
    """How to make of the ranks' aux that of the batch; `look` finds it out.

    An array that does not depend on the batch is the same at all ranks. Of the others, those that
    are as large for the whole batch as for a share are means over ranks; or else they must have a
    row for each example.
    """

    ranks: OverRanks
    shares: Shares
    reduce: Callable[[Any], Any] | None
    kinds: Any = None  # SAME, MEAN or ROWS, for each array

    def look(self, loss: Loss, args: tuple[Any, ...], batch: Sequence[int]) -> None:
        """Compare what the loss returns for this rank's examples with what it does for all."""
        if self.reduce is not None:
            return
        whole = list(args)
        for i in batch:
            whole[i] = jax.tree.map(self._of_all, args[i])

        def aux_of(*some: Any) -> Any:
            return loss.value_and_aux(_filled(args, batch, some))[1]

        trace = jax.make_jaxpr(aux_of, return_shape=True)
        of_all, of_batch = trace(*(whole[i] for i in batch))
        traced, of_rank = trace(*(args[i] for i in batch))
        tree = jax.tree.structure(of_rank)
        varies = tree.unflatten(_vary(traced.jaxpr))
        alike = tree.unflatten([a == b for a, b in zip(_told(of_all), _told(traced), strict=True)])
        self.kinds = jax.tree_util.tree_map_with_path(self._kind, of_rank, of_batch, varies, alike)

    def _of_all(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.shares.global_batch, *leaf.shape[1:]), leaf.dtype)

    def _kind(self, path: Any, own: Any, whole: Any, varies: bool, is_alike: bool) -> str:
        name = f"aux{jax.tree_util.keystr(path)}"
        if not varies and not is_alike:
            raise ArgumentError(
                f"{name} depends on how many examples there are, and a rank has only a share of "
                "the batch: compute it outside the loss, or give reduce_aux= to say what becomes "
                "of it"
            )
        if not varies:
            return SAME
        if own.shape == whole.shape:
            remedy = "return numbers for each example instead, or give reduce_aux="
            if not jnp.issubdtype(own.dtype, jnp.inexact):
                raise ArgumentError(
                    f"{name} has dtype {own.dtype}, and a mean over ranks would not be what it is "
                    f"for the batch: {remedy} to say what becomes of it"
                )
            if self.shares.global_batch % len(self.shares.live):
                raise ArgumentError(
                    f"{name} has no row for each example, and a batch of "
                    f"{self.shares.global_batch} cannot be shared out equally among "
                    f"{len(self.shares.live)} ranks: padding would count in it; {remedy}"
                )
            return MEAN
        if (own.shape, whole.shape) != (
            (self.shares.per_rank, *own.shape[1:]),
            (self.shares.global_batch, *own.shape[1:]),
        ):
            raise ArgumentError(
                f"{name} has shape {own.shape} for {self.shares.per_rank} examples and "
                f"{whole.shape} for {self.shares.global_batch}: examples must be its first "
                "dimension, or give reduce_aux= to say what becomes of it"
            )
        return ROWS

    @property
    def out_specs(self) -> Any:
        """Where what `reduced` returns lies."""
        if self.kinds is None:
            return WHOLE
        rows = PartitionSpec(self.ranks.axis_name) if self.shares.are_equal else WHOLE
        return jax.tree.map(lambda kind: rows if kind == ROWS else WHOLE, self.kinds)

    def reduced(self, aux: Any) -> Any:
        """What this rank gives to aux of the whole batch."""
        if self.reduce is not None:
            return self.reduce(aux)
        leaves, tree = jax.tree.flatten(aux)
        kinds = tree.flatten_up_to(self.kinds)
        own = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == MEAN]
        means = iter(self.ranks.mean(own))
        become = {SAME: lambda leaf: leaf, MEAN: lambda _: next(means), ROWS: self._rows}
        return tree.unflatten(become[kind](leaf) for leaf, kind in zip(leaves, kinds, strict=True))

    def _rows(self, leaf: Any) -> Any:
        """Rows as they are; where some are padding, all those that are not, at every rank."""
        if self.shares.are_equal:
            return leaf
        numbers = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        positions = jnp.asarray(self.shares.positions())[lax.axis_index(self.ranks.axis_name)]
        positions = jnp.where(positions < 0, self.shares.global_batch, positions)
        every = jnp.zeros((self.shares.global_batch, *leaf.shape[1:]), numbers.dtype)
        every = every.at[positions].set(numbers, mode="drop")
        total = psum(every, self.ranks.axis_name, plan=self.ranks.plan)
        return total.astype(leaf.dtype)


def _vary(jaxpr: Any) -> list[bool]:
    """Of each result of a program, whether it may depend on its arguments or on the rank."""
    varying = set(jaxpr.invars)
    for step in jaxpr.eqns:
        given = {var for var in step.invars if not isinstance(var, Literal)}
        if given & varying or step.effects:  # asking for the rank is an effect
            varying.update(step.outvars)
    return [not isinstance(var, Literal) and var in varying for var in jaxpr.outvars]


def _told(closed: Any) -> list[Any]:
    """How each result of a program is made, in something that is equal if it is made alike."""
    jaxpr = closed.jaxpr
    told: dict[Any, Any] = {var: ("given", i) for i, var in enumerate(jaxpr.invars)}
    told |= {
        var: ("found", id(const)) for var, const in zip(jaxpr.constvars, closed.consts, strict=True)
    }

    def tell(var: Any) -> Any:
        return ("number", str(var.val)) if isinstance(var, Literal) else told[var]

    for step in jaxpr.eqns:
        made = hash((step.primitive.name, str(step.params), tuple(map(tell, step.invars))))
        told |= {var: (made, i) for i, var in enumerate(step.outvars)}
    return [tell(var) for var in jaxpr.outvars]


def _filled(args: tuple[Any, ...], batch: Sequence[int], some: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with those of the batch exchanged."""
    every = list(args)
    for i, arg in zip(batch, some, strict=True):
        every[i] = arg
    return tuple(every)
