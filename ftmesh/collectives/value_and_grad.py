"""`jax.value_and_grad` over the whole batch, each rank computing its share of the examples.

    loss, grads = plan.value_and_grad(loss_fn)(params, images, labels)

is ``jax.value_and_grad(loss_fn)(params, images, labels)`` with the plan's all-reduce. Where the
axis is bound, as in shard_map, it is that of this rank's examples, followed by `plan.pmean`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from operator import eq
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from ftmesh.collectives.all_reduce import BUCKET_BYTES, psum
from ftmesh.collectives.local_loss import (
    LocalExamples,
    Loss,
    MeanOverRanks,
    check_bound_axis,
    mean_value_and_grads,
)
from ftmesh.collectives.partitioning import REPLICATED, MeshContext, restrict_spec, typed_spec
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.batch_shares import BatchShares

SAME, MEAN, ROWS = "same", "mean", "rows"  # what becomes of an array of aux


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    plan: PlanLike,
    axis_name: AxisName = "data",
    weighted: bool = False,
    replicated: int | Sequence[int] = (),
    specs: Specs = None,
    mesh: Any = None,
    reduce_aux: Callable[[PyTree], PyTree] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
) -> Callable[..., Any]:
    """Return a function as `jax.value_and_grad` does, with means over all examples on the plan.

    In jit, where the axis is not bound, arguments are whole arrays: weights and `replicated`
    arguments go to every rank, and ranks share the first dimension of all others, the batch. Where
    the axis is bound, arguments are those of this rank.

    Args:
        loss: Called with some of the examples. Returns their mean, or a vector with one number for
            each; only with a vector may the batch have any size. Keyword arguments go to it as
            they are.
        argnums: The arguments to differentiate by, the weights.
        has_aux: Whether `loss` returns ``(loss, aux)``. In jit, arrays of aux with a row for each
            example are put together. Others that depend on the batch, such as batch statistics, are
            averaged over ranks, even if they are sums or maxima. Where the axis is bound, aux is
            the rank's own.
        axis_name: The mesh axis of the plan.
        weighted: Whether `loss` returns ``(sum, weight)``, two numbers or two vectors. The value
            is the sum of sums over the sum of weights. Weights count as constants in the
            derivative.
        replicated: Further arguments that every rank gets whole, such as a random key.
        specs: How weights are sharded: a spec or sharding, or a pytree of them, as for
            `jax.device_put`. Each device sums its own shard along other axes. Weights that are
            sharded along `axis_name` are gathered by the plan, and their gradients are scattered.
            Explicit axes need no `specs`.
        mesh: The mesh to run on in jit. By default that of `jax.set_mesh`, of the arguments, or of
            the plan. Arrays stay sharded along axes other than `axis_name`.
        reduce_aux: Called on each rank with its aux; returns what is the same on all ranks.
        bucket_bytes, wire_dtype, accumulate_dtype: As for `ftmesh.pmean`. Weights sharded along
            `axis_name` are in no bucket.

    Raises:
        ArgumentError: When called, if it is not clear which arguments are the batch, or if ranks
            cannot compute their part of the result from their share of it.
    """
    weight_argnums = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    replicated = (replicated,) if isinstance(replicated, int) else tuple(replicated)
    ranks = MeanOverRanks(plan, axis_name, bucket_bytes, wire_dtype, accumulate_dtype)
    specs = (specs,) if isinstance(argnums, int) and specs is not None else specs

    @wraps(loss)
    def run(*args: PyTree, **kwargs: Any) -> Any:
        roles = ArgumentRoles.assign(len(args), weight_argnums, replicated)
        known = Loss(loss, kwargs, roles.weights, has_aux=has_aux, weighted=weighted)
        if _compat.axis_exists(axis_name):
            check_bound_axis(axis_name, specs, mesh)
            value, grads, aux = mean_value_and_grads(known, ranks, args, specs)
            aux = aux if reduce_aux is None else reduce_aux(aux)
        else:
            context = MeshContext.find(plan, axis_name, args, mesh)
            shares = BatchShares.for_ranks(plan, roles.batch_size(args))
            _check_keywords(kwargs, shares.global_batch)
            aux_reduction = AuxReduction(ranks, shares, reduce_aux)
            value, grads, aux = _over_whole_batch(known, roles, context, aux_reduction, args, specs)
        grad = grads[0] if isinstance(argnums, int) else grads
        return ((value, aux), grad) if has_aux else (value, grad)

    return run


@dataclass(frozen=True)
class ArgumentRoles:
    """Which arguments of a loss are weights, which are replicated, and which are the batch."""

    weights: tuple[int, ...]
    replicated: tuple[int, ...]
    batch: tuple[int, ...]

    @staticmethod
    def assign(num_args: int, weights: Sequence[int], replicated: Sequence[int]) -> ArgumentRoles:
        """Resolve negative positions; arguments that are not named are the batch."""
        wrong = [i for i in (*weights, *replicated) if not -num_args <= i < num_args]
        if wrong:
            raise ArgumentError(
                f"the loss was given {num_args} arguments, and argnums or replicated name {wrong}"
            )
        weights, replicated = ([i % num_args for i in some] for some in (weights, replicated))
        if both := set(weights) & set(replicated):
            raise ArgumentError(f"arguments {sorted(both)} are both in argnums and in replicated")
        batch = (i for i in range(num_args) if i not in {*weights, *replicated})
        return ArgumentRoles(tuple(weights), tuple(replicated), tuple(batch))

    def batch_size(self, args: Sequence[PyTree]) -> int:
        sizes = set()
        for i in self.batch:
            for leaf in jax.tree.leaves(args[i]):
                if jnp.ndim(leaf) == 0:
                    raise ArgumentError(
                        f"argument {i} of the loss is taken as part of the batch, and contains a "
                        "single number: if all ranks should have it, such as a random key, give "
                        f"replicated={i}"
                    )
                sizes.add(leaf.shape[0])
        if not sizes:
            raise ArgumentError(
                "the loss has no arguments that could be the batch: pass its arrays as arguments, "
                "since arrays that a function closes over go whole to every rank"
            )
        if len(sizes) > 1:
            raise ArgumentError(
                f"arrays of the batch have first dimensions of {sorted(sizes)}, and must have one "
                "entry for each example: name in replicated= the arguments that are not the batch"
            )
        return int(sizes.pop())


def _check_keywords(kwargs: dict[str, Any], batch_size: int) -> None:
    """Reject keyword arguments that look like a batch: every rank gets them whole."""
    for name, arg in kwargs.items():
        if any(jnp.shape(leaf)[:1] == (batch_size,) for leaf in jax.tree.leaves(arg)):
            raise ArgumentError(
                f"argument {name!r} of the loss has an array with {batch_size} entries, as many as "
                "the batch has examples, and keyword arguments go whole to every rank: pass it by "
                "position, and if it is not the batch, name the position in replicated="
            )


def _over_whole_batch(
    loss: Loss,
    roles: ArgumentRoles,
    context: MeshContext,
    aux_reduction: AuxReduction,
    args: tuple[PyTree, ...],
    specs: Specs,
) -> Any:
    """Return the value, the gradients and aux of a loss where no axis is bound."""
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

    def value_and_grads(args: tuple[PyTree, ...], examples: LocalExamples) -> Any:
        """Call the loss with Explicit axes as Explicit again."""

        def run(args: tuple[PyTree, ...], weights: Any) -> Any:
            return loss.value_and_grads(args, replace(examples, weights=weights))

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

    ranks: MeanOverRanks
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
