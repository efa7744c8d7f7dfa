"""A loss of which each rank computes its own value, in jit: values and gradients are averaged.

This is not the loss of the whole batch unless that is a mean over examples: batch norms see a
rank's examples, and a random key is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import eq
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from ftmesh.collectives.all_reduce import psum
from ftmesh.collectives.local_loss import (
    ArgumentRoles,
    LocalExamples,
    Loss,
    OverRanks,
    mean_value_and_grads,
)
from ftmesh.collectives.partitioning import REPLICATED, MeshContext, restrict_spec, typed_spec
from ftmesh.errors import ArgumentError
from ftmesh.execute.types import AxisName, PyTree, Specs
from ftmesh.layout.batch_shares import BatchShares

SAME, MEAN, ROWS = "same", "mean", "rows"  # what becomes of an array of aux


def mean_over_ranks(
    loss: Loss,
    roles: ArgumentRoles,
    context: MeshContext,
    aux_reduction: AuxReduction,
    args: tuple[PyTree, ...],
    specs: Specs,
) -> Any:
    """Return the means over ranks of their values and gradients, and aux."""
    ranks, shares = aux_reduction.ranks, aux_reduction.shares
    weight_specs = context.weight_specs(tuple(args[i] for i in roles.weights), specs)
    types = tuple(jax.tree.map(typed_spec, arg) for arg in args)
    batch_spec = PartitionSpec(ranks.axis_name) if shares.is_even else REPLICATED

    def local_args(args: tuple[PyTree, ...]) -> tuple[tuple[PyTree, ...], LocalExamples]:
        """The arguments of this rank: whole weights, and its rows of the batch."""
        local = list(args)
        for i, spec in zip(roles.weights, weight_specs, strict=True):
            local[i] = ranks.gather(args[i], spec)
        positions = jnp.asarray(shares.positions())[lax.axis_index(ranks.axis_name)]
        if not shares.is_even:  # padding repeats the last example
            for i in roles.batch:
                local[i] = jax.tree.map(lambda leaf: leaf[positions], args[i])
        scale = len(shares.live) / shares.global_batch
        has_padding = bool(shares.global_batch % len(shares.live))
        return tuple(local), LocalExamples(positions >= 0, scale, has_padding)

    def value_and_grads(args: tuple[PyTree, ...], examples: LocalExamples, axis: AxisName) -> Any:
        """Call the loss with Explicit axes as Explicit again."""

        def run(args: tuple[PyTree, ...], weights: Any) -> Any:
            return loss.value_and_grads(args, replace(examples, weights=weights), axis)

        return context.with_explicit_axes(run, (types, REPLICATED))(args, examples.weights)

    def inspect_aux(*args: PyTree) -> tuple[()]:
        local, _ = local_args(args)
        inspect = partial(aux_reduction.inspect, loss, batch=roles.batch)
        context.with_explicit_axes(inspect, (types,))(local)
        return ()

    def run_on_rank(*args: PyTree) -> Any:
        local, examples = local_args(args)
        *means, aux = mean_value_and_grads(
            loss, ranks, local, weight_specs, examples, value_and_grads
        )
        return *means, aux_reduction.reduce(aux)

    along_axis = partial(jax.tree.map, lambda spec: restrict_spec(spec, {ranks.axis_name}))
    arg_specs = {i: along_axis(spec) for i, spec in zip(roles.weights, weight_specs, strict=True)}
    arg_specs |= dict.fromkeys(roles.replicated, REPLICATED)
    arg_specs |= dict.fromkeys(roles.batch, batch_spec)
    in_specs = tuple(arg_specs[i] for i in range(len(args)))
    if loss.has_aux:
        jax.eval_shape(context.shard_map(inspect_aux, in_specs, (), ()), *args)
    out_specs = (REPLICATED, along_axis(weight_specs), aux_reduction.out_specs)
    out_types = (REPLICATED, weight_specs, aux_reduction.out_specs)
    return context.shard_map(run_on_rank, in_specs, out_specs, out_types)(*args)


@dataclass
class AuxReduction:
    """How to combine the aux of all ranks. `inspect` finds it out.

    An array that does not depend on the batch is the same on all ranks. One whose shape does not
    depend on the number of examples is averaged; any other must have a row for each example.
    """

    ranks: OverRanks
    shares: BatchShares
    reduce_aux: Callable[[PyTree], PyTree] | None
    kinds: PyTree = None  # SAME, MEAN or ROWS, for each array

    def inspect(self, loss: Loss, args: tuple[PyTree, ...], batch: Sequence[int]) -> None:
        """Compare the aux for this rank's examples with that for the whole batch."""
        if self.reduce_aux is not None:
            return

        def aux_of(*batch_args: PyTree) -> PyTree:
            filled = dict(enumerate(args)) | dict(zip(batch, batch_args, strict=True))
            return loss.value_and_aux(tuple(filled.values()))[1]

        def whole_type(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.shares.global_batch, *leaf.shape[1:]), leaf.dtype)

        trace = jax.make_jaxpr(aux_of, return_shape=True)
        whole_program, whole_aux = trace(*(jax.tree.map(whole_type, args[i]) for i in batch))
        local_program, local_aux = trace(*(args[i] for i in batch))
        tree = jax.tree.structure(local_aux)
        varies = tree.unflatten(_depends_on_inputs(local_program.jaxpr))
        is_alike = tree.unflatten(map(eq, _recipes(whole_program), _recipes(local_program)))
        self.kinds = jax.tree.map_with_path(self._kind, local_aux, whole_aux, varies, is_alike)

    def _kind(self, path: Any, local: Any, whole: Any, varies: bool, is_alike: bool) -> str:
        name = f"aux{jax.tree_util.keystr(path)}"
        shares = self.shares
        if not varies and is_alike:
            return SAME
        if not varies:
            raise ArgumentError(
                f"{name} depends on the number of examples, and a rank has only a share of the "
                "batch: compute it outside the loss, or give reduce_aux= to say how to combine it"
            )
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
        rows = local.shape[1:]
        if local.shape != (shares.per_rank, *rows) or whole.shape != (shares.global_batch, *rows):
            raise ArgumentError(
                f"{name} has shape {local.shape} for {shares.per_rank} examples and {whole.shape} "
                f"for {shares.global_batch}: examples must be its first dimension, or give "
                "reduce_aux= to say how to combine it"
            )
        return ROWS

    @property
    def out_specs(self) -> Specs:
        if self.kinds is None:
            return REPLICATED
        rows = PartitionSpec(self.ranks.axis_name) if self.shares.is_even else REPLICATED
        return jax.tree.map(lambda kind: rows if kind == ROWS else REPLICATED, self.kinds)

    def reduce(self, aux: PyTree) -> PyTree:
        if self.reduce_aux is not None:
            return self.reduce_aux(aux)
        leaves, tree = jax.tree.flatten(aux)
        kinds = tree.flatten_up_to(self.kinds)
        averaged = {i: leaves[i] for i, kind in enumerate(kinds) if kind == MEAN}
        results = dict(enumerate(leaves)) | self.ranks.mean(averaged)
        if not self.shares.is_even:  # otherwise rows stay where they are
            results |= {i: self._gather_rows(x) for i, x in results.items() if kinds[i] == ROWS}
        return tree.unflatten(results.values())

    def _gather_rows(self, leaf: Any) -> Any:
        """Gather the rows of all ranks on every rank, without those of padding."""
        numbers = leaf.astype(jnp.int32) if leaf.dtype == jnp.bool_ else leaf
        positions = jnp.asarray(self.shares.positions())[lax.axis_index(self.ranks.axis_name)]
        positions = jnp.where(positions < 0, self.shares.global_batch, positions)
        rows = jnp.zeros((self.shares.global_batch, *leaf.shape[1:]), numbers.dtype)
        rows = rows.at[positions].set(numbers, mode="drop")
        return psum(rows, self.ranks.axis_name, plan=self.ranks.plan).astype(leaf.dtype)


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
