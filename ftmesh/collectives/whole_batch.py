"""The value and gradients of a loss of the whole batch, each rank computing with its examples.

The loss and its derivative are traced with the whole batch, as `jax.value_and_grad` runs them.
Ranks run that program with their examples; see `batch_program`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

# Modules of rules register them when they are imported.
from ftmesh.collectives import batch_control_flow as batch_control_flow
from ftmesh.collectives import batch_indexing as batch_indexing
from ftmesh.collectives import batch_reductions as batch_reductions
from ftmesh.collectives.batch_layout import PARTIAL, SAME, BatchLayout, RankUnits, Spread, UnitSplit
from ftmesh.collectives.batch_program import (
    LARGEST,
    NOTHING,
    Fact,
    MixedExamplesError,
    ResplitError,
    Section,
    is_index_dtype,
    partition,
)
from ftmesh.collectives.compiled_cache import fingerprint
from ftmesh.collectives.local_loss import ArgumentRoles, Loss, OverRanks, is_array
from ftmesh.collectives.partitioning import REPLICATED, MeshContext, restrict_spec
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, PyTree
from ftmesh.layout.batch_shares import BatchShares


@dataclass(frozen=True)
class TracedLoss:
    """The program of a loss and its gradients for the whole batch."""

    jaxpr: Any
    consts: tuple[Any, ...]  # what the loss closes over
    inputs: tuple[Any, ...]  # the arrays among the arguments
    is_rows: tuple[bool, ...]  # whether each of them has a row for each example
    weight_inputs: tuple[int, ...]  # which are weights, in the order of their gradients
    batch_size: int
    out_tree: Any  # of value, gradients and aux

    @staticmethod
    def trace(
        loss: Loss, roles: ArgumentRoles, args: tuple[PyTree, ...], axis_name: AxisName
    ) -> TracedLoss:
        """Trace `loss` and its derivative. Arguments that are no arrays stay as they are."""
        batch_size = roles.batch_size(args, numbers_are_replicated=True)
        flat, tree = jax.tree.flatten(args)
        arg_of_leaf = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
        dynamic = [n for n, i in enumerate(arg_of_leaf) if i in roles.weights or is_array(flat[n])]
        is_rows = [arg_of_leaf[n] in roles.batch and np.ndim(flat[n]) > 0 for n in dynamic]
        weight_inputs = [
            k for i in roles.weights for k, n in enumerate(dynamic) if arg_of_leaf[n] == i
        ]

        def run(*inputs: Any) -> Any:
            leaves = list(flat)
            for n, value in zip(dynamic, inputs, strict=True):
                leaves[n] = value
            return loss.of_whole_batch(tree.unflatten(leaves), batch_size)

        inputs = tuple(flat[n] for n in dynamic)
        try:
            closed, shapes = jax.make_jaxpr(run, return_shape=True)(*inputs)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise ArgumentError(
                f"the loss uses a mesh axis ({error}), and in jit it is that of the whole batch: "
                "leave out what depends on the rank (random numbers are those of the whole batch), "
                f"or give per_rank=True, where {axis_name!r} is bound"
            ) from error
        return TracedLoss(
            _compat.without_dead_code(closed.jaxpr),
            tuple(closed.consts),
            inputs,
            tuple(is_rows),
            tuple(weight_inputs),
            batch_size,
            jax.tree.structure(shapes),
        )

    def without_arrays(self) -> TracedLoss:
        """The program alone, which can be kept: with types instead of arrays."""
        is_known = self._is_known
        consts = tuple(const if is_known(const) else jax.typeof(const) for const in self.consts)
        return replace(self, inputs=tuple(map(jax.typeof, self.inputs)), consts=consts)

    @staticmethod
    def _is_known(const: Any) -> bool:
        """Whether a constant of the program may say which rows an index means."""
        is_small = isinstance(const, np.ndarray) and const.size <= LARGEST
        return is_small and is_index_dtype(const.dtype)

    @property
    def key(self) -> Hashable:
        """Equal for losses that ranks compute by the same program."""
        known = tuple(const.tobytes() if self._is_known(const) else None for const in self.consts)
        return fingerprint(self.jaxpr), self.is_rows, self.weight_inputs, known

    def const_facts(self) -> list[Fact]:
        """What is known of arrays that the loss closes over."""
        return [Fact(const) if self._is_known(const) else NOTHING for const in self.consts]


@dataclass(frozen=True)
class PartitionedLoss:
    """A traced loss as the program of a rank."""

    traced: TracedLoss
    section: Section
    split: UnitSplit
    units: RankUnits

    @staticmethod
    def find(
        traced: TracedLoss, ranks: OverRanks, shard_dims: Sequence[int | None]
    ) -> PartitionedLoss:
        """Share the examples among ranks so that each can compute its part, if there is a way.

        `shard_dims` has for each weight the dimension of which ranks have shards, or None.

        Raises:
            ArgumentError: An operation needs examples of several ranks.
        """
        num_units = traced.batch_size
        if _maps_over(traced.jaxpr, ranks.axis_name):
            num_units = math.gcd(num_units, ranks.plan.program.num_ranks)  # as it cuts any array
        splits, first_error = [UnitSplit(1, num_units, traced.batch_size // num_units)], None
        for split in splits:
            shares = BatchShares.for_ranks(ranks.plan, split.units)
            dtypes = ranks.wire_dtype, ranks.accumulate_dtype
            units = RankUnits(ranks.plan, ranks.axis_name, shares, *dtypes)
            layouts = [split.layout if is_rows else SAME for is_rows in traced.is_rows]
            for i, dim in zip(traced.weight_inputs, shard_dims, strict=True):
                layouts[i] = SAME if dim is None else BatchLayout(Spread.SHARD, dim)
            num_others = len(traced.jaxpr.outvars) - 1 - len(shard_dims)
            try:
                section = partition(
                    traced.jaxpr,
                    layouts,
                    units,
                    const_facts=traced.const_facts(),
                    scattered=[None, *shard_dims, *[None] * num_others],
                )
                return PartitionedLoss(traced, section, split, units)
            except MixedExamplesError as error:
                first_error = first_error or error
                if isinstance(error, ResplitError) and len(splits) < 8:
                    others = _possible_splits(error, split, len(shares.live))
                    splits += [other for other in others if other not in splits]
        assert first_error is not None
        _raise_mixed(first_error)
        raise AssertionError

    @property
    def is_sharded(self) -> bool:
        """Whether the batch can be sharded along the axis as it is."""
        return self.units.shares.is_even and self.split.outer == 1

    def out_spec(self, layout: BatchLayout, axis_name: AxisName) -> PartitionSpec:
        """How a result is sharded: rows stay where they are if all ranks have as many."""
        if not (layout.is_rows and self._stays(layout)):
            return REPLICATED
        return PartitionSpec(*[None] * layout.dim, axis_name)

    def _stays(self, layout: BatchLayout) -> bool:
        return self.units.shares.is_even and layout.outer == 1

    def rank_program(self, ranks: OverRanks, weight_specs: Sequence[Any]) -> RankProgram:
        """What each rank runs on the inputs and constants; `weight_specs` has one per weight."""
        axis_name, traced, layouts = ranks.axis_name, self.traced, self.section.out_layouts
        num_inputs = len(traced.inputs)
        spec_of = dict(zip(traced.weight_inputs, weight_specs, strict=True))
        rows_spec = PartitionSpec(axis_name) if self.is_sharded else REPLICATED
        in_specs = [
            spec_of.get(i, rows_spec if is_rows else REPLICATED)
            for i, is_rows in enumerate(traced.is_rows)
        ]
        grad_specs = dict(enumerate(weight_specs, 1))  # the value is the first result
        out_specs = [
            grad_specs[i] if i in grad_specs else self.out_spec(layout, axis_name)
            for i, layout in enumerate(layouts)
        ]

        weight_layouts = [self.section.in_layouts[i] for i in traced.weight_inputs]
        shard_of_grad = {i: x for i, x in enumerate(weight_layouts, 1) if x.is_shard}

        def run(*arrays: Any) -> list[Any]:
            inputs, consts = list(arrays[:num_inputs]), arrays[num_inputs:]
            for i, is_rows in enumerate(traced.is_rows):
                if i in spec_of and not self.section.in_layouts[i].is_shard:
                    inputs[i] = ranks.gather(inputs[i], spec_of[i])
                elif i not in spec_of and is_rows and not self.is_sharded:
                    inputs[i] = self.units.take_rows(jnp.asarray(inputs[i]), self.split.layout)
            results = dict(enumerate(self.section.run(inputs, consts)))
            parts = {}
            for i, layout in enumerate(layouts):
                is_grad, have = i in grad_specs, layout
                if is_grad and layout == shard_of_grad.get(i):
                    continue
                if layout.is_shard:
                    results[i], have = self.units.convert(results[i], layout, SAME), SAME
                if layout.is_rows and (is_grad or not self._stays(layout)):
                    results[i], have = self.units.gather_rows(results[i], layout), SAME
                if have.is_partial or (is_grad and ranks.is_scattered(grad_specs[i])):
                    parts[i] = self.units.convert(results[i], have, PARTIAL)
            return [*(results | ranks.sum_results(parts, grad_specs)).values()]

        return RankProgram(run, (*in_specs, *[REPLICATED] * len(traced.consts)), out_specs)


def _raise_mixed(error: MixedExamplesError) -> None:
    """Raise ArgumentError for a loss that ranks cannot compute from their shares."""
    raise ArgumentError(
        f"{error.describe()}, and a rank has only its share of the batch. Take "
        "jax.value_and_grad(loss) in jit on plan.jax_mesh, where XLA exchanges examples; or "
        "compute what needs the whole batch outside the loss; or give per_rank=True, which "
        "averages what ranks compute from their own examples"
    ) from error


def _possible_splits(error: ResplitError, split: UnitSplit, num_ranks: int) -> list[UnitSplit]:
    """Other ways to share the examples, which `error` asks for."""
    return [other for other in split.split_at(error.minor) if other.units >= num_ranks]


def _maps_over(program: Any, axis_name: AxisName) -> bool:
    """Whether a program has a shard_map over an axis."""
    for eqn in program.eqns:
        if eqn.primitive.name == "shard_map" and axis_name in _compat.mapped_axes(eqn.params):
            return True
        for param in eqn.params.values():
            parts = param if isinstance(param, (tuple, list)) else (param,)
            programs = [part for part in parts if _compat.is_program(part)]
            if any(_maps_over(getattr(part, "jaxpr", part), axis_name) for part in programs):
                return True
    return False


@dataclass(frozen=True)
class RankProgram:
    """The function that each rank runs, and how its arguments and results are sharded."""

    run: Callable[..., list[Any]]
    in_specs: tuple[PartitionSpec, ...]
    out_specs: list[PartitionSpec]

    def on_mesh(self, context: MeshContext) -> Callable[..., list[Any]]:
        """The function of whole arrays."""
        axes = {context.axis_name}
        in_specs = tuple(restrict_spec(spec, axes) for spec in self.in_specs)
        out_specs = [restrict_spec(spec, axes) for spec in self.out_specs]
        return context.shard_map(self.run, in_specs, out_specs, self.out_specs)


def on_native_path(
    traced: TracedLoss, context: MeshContext, weight_specs: Sequence[PartitionSpec]
) -> Callable[..., list[Any]]:
    """The program with a batch that is sharded along the axis: XLA sums along the plan's ring."""
    num_inputs, along_axis = len(traced.inputs), PartitionSpec(context.axis_name)

    def place(x: Any, spec: PartitionSpec) -> Any:
        is_placed = context.is_explicit or not any(spec)
        return (
            x if is_placed else lax.with_sharding_constraint(x, NamedSharding(context.mesh, spec))
        )

    def run(*arrays: Any) -> list[Any]:
        specs = [along_axis if is_rows else REPLICATED for is_rows in traced.is_rows]
        inputs = list(map(place, arrays[:num_inputs], specs))
        value, *results = _compat.eval_program(traced.jaxpr, arrays[num_inputs:], inputs)
        grads = map(place, results[: len(weight_specs)], weight_specs)
        return [value, *grads, *results[len(weight_specs) :]]

    return run
