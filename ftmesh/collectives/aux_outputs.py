"""Auxiliary outputs of a loss: combine those of the ranks into those of the whole batch."""

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
from ftmesh.collectives.local_loss import Loss, MeanOverRanks
from ftmesh.collectives.partitioning import REPLICATED
from ftmesh.errors import ArgumentError
from ftmesh.execute.types import PyTree, Specs
from ftmesh.layout.batch_shares import BatchShares

SAME, MEAN, ROWS = "same", "mean", "rows"


@dataclass
class AuxReduction:
    """How to combine the aux of all ranks. `inspect` finds it out.

    An array that does not depend on the batch is the same on all ranks. Of the others, an array
    whose shape does not depend on the number of examples is averaged over ranks, and any other must
    have a row for each example.
    """

    ranks: MeanOverRanks
    shares: BatchShares
    reduce_aux: Callable[[PyTree], PyTree] | None
    kinds: PyTree = None  # SAME, MEAN or ROWS, for each array

    def inspect(self, loss: Loss, args: tuple[PyTree, ...], batch: Sequence[int]) -> None:
        """Compare the aux for this rank's examples with that for the whole batch."""
        if self.reduce_aux is not None:
            return

        def aux_of(*batch_args: PyTree) -> PyTree:
            filled = list(args)
            for i, arg in zip(batch, batch_args, strict=True):
                filled[i] = arg
            return loss.value_and_aux(tuple(filled))[1]

        whole_args = [jax.tree.map(self._whole_type, args[i]) for i in batch]
        trace = jax.make_jaxpr(aux_of, return_shape=True)
        whole_program, whole_aux = trace(*whole_args)
        local_program, local_aux = trace(*(args[i] for i in batch))
        tree = jax.tree.structure(local_aux)
        varies = tree.unflatten(_depends_on_inputs(local_program.jaxpr))
        recipes = zip(_recipes(whole_program), _recipes(local_program), strict=True)
        is_alike = tree.unflatten([whole == local for whole, local in recipes])
        self.kinds = jax.tree_util.tree_map_with_path(
            self._kind, local_aux, whole_aux, varies, is_alike
        )

    def _whole_type(self, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.shares.global_batch, *leaf.shape[1:]), leaf.dtype)

    def _kind(self, path: Any, local: Any, whole: Any, varies: bool, is_alike: bool) -> str:
        name = f"aux{jax.tree_util.keystr(path)}"
        shares = self.shares
        if not varies and not is_alike:
            raise ArgumentError(
                f"{name} depends on the number of examples, and a rank has only a share of the "
                "batch: compute it outside the loss, or give reduce_aux= to say how to combine it"
            )
        if not varies:
            return SAME
        if local.shape == whole.shape:
            remedy = "return numbers for each example instead, or give reduce_aux="
            if not jnp.issubdtype(local.dtype, jnp.inexact):
                raise ArgumentError(
                    f"{name} has dtype {local.dtype}, and a mean over ranks would not be its value "
                    f"for the batch: {remedy} to say how to combine it"
                )
            if shares.global_batch % len(shares.live):
                raise ArgumentError(
                    f"{name} has no row for each example, and {len(shares.live)} ranks do not "
                    f"divide a batch of {shares.global_batch}: padding would count in it; {remedy}"
                )
            return MEAN
        if (local.shape, whole.shape) != (
            (shares.per_rank, *local.shape[1:]),
            (shares.global_batch, *local.shape[1:]),
        ):
            raise ArgumentError(
                f"{name} has shape {local.shape} for {shares.per_rank} examples and {whole.shape} "
                f"for {shares.global_batch}: examples must be its first dimension, or give "
                "reduce_aux= to say how to combine it"
            )
        return ROWS

    @property
    def out_specs(self) -> Specs:
        """The specs of what `reduce` returns."""
        if self.kinds is None:
            return REPLICATED
        rows = PartitionSpec(self.ranks.axis_name) if self.shares.is_even else REPLICATED
        return jax.tree.map(lambda kind: rows if kind == ROWS else REPLICATED, self.kinds)

    def reduce(self, aux: PyTree) -> PyTree:
        """Combine this rank's aux with that of the others."""
        if self.reduce_aux is not None:
            return self.reduce_aux(aux)
        leaves, tree = jax.tree.flatten(aux)
        kinds = tree.flatten_up_to(self.kinds)
        averaged = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == MEAN]
        means = iter(self.ranks.mean(averaged))
        combine = {SAME: lambda leaf: leaf, MEAN: lambda _: next(means), ROWS: self._gather_rows}
        return tree.unflatten(combine[kind](leaf) for leaf, kind in zip(leaves, kinds, strict=True))

    def _gather_rows(self, leaf: Any) -> Any:
        """Gather rows on every rank if some are padding; otherwise they stay where they are."""
        if self.shares.is_even:
            return leaf
        numbers = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        positions = jnp.asarray(self.shares.positions())[lax.axis_index(self.ranks.axis_name)]
        positions = jnp.where(positions < 0, self.shares.global_batch, positions)
        rows = jnp.zeros((self.shares.global_batch, *leaf.shape[1:]), numbers.dtype)
        rows = rows.at[positions].set(numbers, mode="drop")
        total = psum(rows, self.ranks.axis_name, plan=self.ranks.plan)
        return total.astype(leaf.dtype)


def _depends_on_inputs(jaxpr: Any) -> list[bool]:
    """Whether each result of a program may depend on its inputs or on the rank."""
    varying = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        operands = {var for var in equation.invars if not isinstance(var, Literal)}
        if operands & varying or equation.effects:  # asking for the rank is an effect
            varying.update(equation.outvars)
    return [not isinstance(var, Literal) and var in varying for var in jaxpr.outvars]


def _recipes(closed: Any) -> list[Any]:
    """For each result of a program a value that is equal if it is computed in the same way."""
    jaxpr = closed.jaxpr
    recipes: dict[Any, Any] = {var: ("input", i) for i, var in enumerate(jaxpr.invars)}
    for var, constant in zip(jaxpr.constvars, closed.consts, strict=True):
        recipes[var] = ("constant", id(constant))

    def recipe(var: Any) -> Any:
        return ("literal", str(var.val)) if isinstance(var, Literal) else recipes[var]

    for equation in jaxpr.eqns:
        operands = tuple(map(recipe, equation.invars))
        key = hash((equation.primitive.name, str(equation.params), operands))
        recipes |= {var: (key, i) for i, var in enumerate(equation.outvars)}
    return [recipe(var) for var in jaxpr.outvars]
