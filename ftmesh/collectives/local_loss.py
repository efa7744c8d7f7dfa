"""A loss and its arguments; its value and gradients on one rank, and their means over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh.collectives.all_reduce import pmean, psum
from ftmesh.collectives.partitioning import REPLICATED, broadcast_specs, entry_axes, is_spec
from ftmesh.collectives.reduce_scatter import all_gather, psum_scatter
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs


@dataclass(frozen=True)
class LocalExamples:
    """The examples of a rank, in a batch whose size is known."""

    weights: Any  # 1 for an example and 0 for padding
    scale: float  # turns a sum over this rank's examples into its part of the mean
    has_padding: bool  # on any live rank


@dataclass(frozen=True)
class Loss:
    """A loss function, and what is known about its arguments and results."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    argnums: tuple[int, ...]
    has_aux: bool
    weighted: bool

    def value_and_grads(
        self, args: tuple[PyTree, ...], examples: LocalExamples | None, axis_name: AxisName
    ) -> Any:
        """Return a number to be averaged, its weight or None, the gradients, and aux."""

        def scalar_loss(*args: PyTree) -> Any:
            output, aux = self.value_and_aux(args)
            total, weight = self._reduce(output, examples)
            # Of a number that the loss has summed over ranks, JAX would take the derivative once,
            # and not once per rank.
            return _compat.as_varying(total, axis_name), (weight, aux)

        run = jax.value_and_grad(scalar_loss, argnums=self.argnums, has_aux=True)
        (total, (weight, aux)), grads = run(*args)
        return total, weight, grads, aux

    def of_whole_batch(self, args: tuple[PyTree, ...], batch_size: int) -> Any:
        """Return the value, the gradients and aux, as `jax.value_and_grad` does without ranks."""

        def scalar_loss(*args: PyTree) -> Any:
            output, aux = self.value_and_aux(args)
            total, weight = self._reduce(output, None, batch_size)
            if weight is not None:
                total = (total / lax.stop_gradient(weight)).astype(total.dtype)
            return total, aux

        run = jax.value_and_grad(scalar_loss, argnums=self.argnums, has_aux=True)
        (value, aux), grads = run(*args)
        return value, grads, aux

    def value_and_aux(self, args: tuple[PyTree, ...]) -> Any:
        """Call the function; aux is None if it has none."""
        args = jax.tree.map(lambda leaf: leaf, args)  # copies modules, which it may change
        before = [jax.tree.leaves(args[i]) for i in self.argnums]
        try:
            output = self.function(*args, **self.kwargs)
        except ValueError as error:
            if not _compat.names_manual_axis(error):
                raise
            raise ArgumentError(
                f"the sharding constraint at {_compat.raised_at(error)} names an axis along which "
                "the loss is that of a rank's own examples, as in shard_map and under "
                "per_rank=True: leave that axis out of it, or take plan.value_and_grad in jit "
                "without per_rank=True, where constraints along all axes are honoured"
            ) from error
        for i, leaves in zip(self.argnums, before, strict=True):
            if list(map(id, jax.tree.leaves(args[i]))) != list(map(id, leaves)):
                raise ArgumentError(
                    f"the loss changes its argument {i}, as a module with batch norms does, and "
                    "the change would be lost: split off what changes (nnx.split), pass it as "
                    "another argument, named in replicated=, and return the new value as aux"
                )
        return output if self.has_aux else (output, None)

    def _reduce(
        self, output: Any, examples: LocalExamples | None, batch_size: int | None = None
    ) -> tuple[Any, Any]:
        """Return a number to be averaged, and its weight or None."""
        if self.weighted:
            if not isinstance(output, (tuple, list)) or len(output) != 2:
                raise ArgumentError(
                    f"a weighted loss returns (sum, weight), not {_describe(output)}; with has_aux "
                    "((sum, weight), aux)"
                )
            total, weight = (_sum_examples(part, examples, batch_size) for part in output)
            return total, weight
        total = _sum_examples(output, examples, batch_size)
        if jnp.ndim(output) == 0:
            return total, None
        return (total / len(output) if examples is None else total * examples.scale), None


def _sum_examples(output: Any, examples: LocalExamples | None, batch_size: int | None) -> Any:
    """Sum a vector without its padding; a single number stays as it is."""
    if jnp.ndim(output) == 0:
        if examples is not None and examples.has_padding:
            raise ArgumentError(
                "the number of live ranks does not divide this batch, so the mean of the ranks' "
                "losses is not the loss: return one number for each example instead of a single "
                "one (their mean is taken for you), or make the batch a multiple of the number of "
                "ranks"
            )
        return output
    expected = batch_size if examples is None else len(examples.weights)
    if jnp.ndim(output) != 1 or (expected is not None and len(output) != expected):
        given = "a batch" if expected is None else f"{expected} examples"
        raise ArgumentError(
            f"the loss returned {_describe(output)} for {given}: it must be one number, or a "
            "vector with one for each example"
        )
    return jnp.sum(output if examples is None else jnp.where(examples.weights > 0, output, 0))


def _describe(output: Any) -> str:
    has_shape = hasattr(output, "shape")
    return f"an array of shape {output.shape}" if has_shape else f"a {type(output).__name__}"


@dataclass(frozen=True)
class OverRanks:
    """Sums and means over ranks: the plan, its axis, and the options of `pmean`."""

    plan: PlanLike
    axis_name: AxisName
    bucket_bytes: int
    wire_dtype: DTypeLike | None
    accumulate_dtype: DTypeLike | None

    @property
    def key(self) -> Hashable:
        """Equal for equal options on the same plan, which it keeps."""
        dtypes = str(self.wire_dtype), str(self.accumulate_dtype)
        return self.plan, self.axis_name, self.bucket_bytes, dtypes

    def mean(self, x: PyTree, specs: Specs = None, own: Sequence[bool] | None = None) -> PyTree:
        """Average over ranks. Leaves that are sharded along the axis are scattered.

        Those leaves for which `own` is true are this rank's alone, and are divided only.
        """
        return self._reduce(x, specs, own, pmean, len(self.plan.program.live))

    def sum(self, x: PyTree, specs: Specs = None) -> PyTree:
        """Sum over ranks. Leaves that are sharded along the axis are scattered."""
        return self._reduce(x, specs, None, psum, None)

    def sum_results(self, x: dict[int, Any], grad_specs: dict[int, Specs]) -> dict[int, Any]:
        """Sum gradients, at positions that have specs, and other results in their own dtype."""
        exact = x if self.wire_dtype is None else {i: x[i] for i in x if i in grad_specs}
        sums = self.sum(exact, {i: grad_specs.get(i, REPLICATED) for i in exact})
        others = {i: x[i] for i in x if i not in exact}
        return dict(sums | replace(self, wire_dtype=None).sum(others) if others else sums)

    def is_scattered(self, spec: PartitionSpec) -> bool:
        """True if an array with this spec is sharded along the axis."""
        return self._sharded_dimension(spec) is not None

    def _reduce(
        self,
        x: PyTree,
        specs: Specs,
        own: Sequence[bool] | None,
        reduce: Callable[..., Any],
        divisor: int | None,
    ) -> PyTree:
        leaves, tree = jax.tree.flatten(x)
        leaves = [_compat.as_varying(jnp.asarray(leaf), self.axis_name) for leaf in leaves]
        own = [False] * len(leaves) if own is None else own
        leaf_specs = jax.tree.leaves(broadcast_specs(REPLICATED if specs is None else specs, x))
        dimensions = [self._sharded_dimension(spec) for spec in leaf_specs]
        whole = [i for i, d in enumerate(dimensions) if d is None and not own[i]]
        reduced = reduce(
            {i: leaves[i] for i in whole},
            self.axis_name,
            plan=self.plan,
            wire_dtype=self.wire_dtype,
            accumulate_dtype=self.accumulate_dtype,
            bucket_bytes=self.bucket_bytes,
            specs=None if specs is None else {i: leaf_specs[i] for i in whole},
        )
        for i, dimension in enumerate(dimensions):
            if i in reduced:
                leaves[i] = reduced[i]
                continue
            leaves[i] = leaves[i] if divisor is None else leaves[i] / divisor
            if not own[i] and dimension is not None:
                leaves[i] = psum_scatter(
                    leaves[i],
                    self.axis_name,
                    scatter_dimension=dimension,
                    tiled=True,
                    plan=self.plan,
                    wire_dtype=self.wire_dtype,
                    accumulate_dtype=self.accumulate_dtype,
                    specs=leaf_specs[i],
                )
        return tree.unflatten(leaves)

    def gather(self, x: PyTree, specs: Specs) -> PyTree:
        """Gather the leaves that are sharded along the axis."""

        def gather_leaf(leaf: Any, spec: PartitionSpec) -> Any:
            dimension = self._sharded_dimension(spec)
            if dimension is None:
                return leaf
            name, plan = self.axis_name, self.plan
            return all_gather(leaf, name, axis=dimension, tiled=True, plan=plan, specs=spec)

        return jax.tree.map(gather_leaf, x, broadcast_specs(specs, x))

    def _sharded_dimension(self, spec: PartitionSpec) -> int | None:
        """The dimension that is sharded along the axis, or None."""
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        for dimension, entry in enumerate(map(entry_axes, spec)):
            names = tuple(n for n in entry if n == self.axis_name or sizes.get(n) != 1)
            if self.axis_name in names and len(names) > 1:
                raise ArgumentError(
                    f"one dimension of a weight is sharded along {names}, and the plan can gather "
                    f"along {self.axis_name!r} alone: shard another dimension along the others"
                )
            if self.axis_name in names:
                return dimension
        return None


def mean_value_and_grads(
    loss: Loss,
    ranks: OverRanks,
    args: tuple[PyTree, ...],
    specs: Specs,
    examples: LocalExamples | None = None,
    value_and_grads: Callable[..., Any] | None = None,
    is_own: Sequence[bool] | None = None,
) -> tuple[Any, tuple[PyTree, ...], PyTree]:
    """Return the value and the gradients as means over all ranks, and this rank's aux.

    `value_and_grads` replaces the method of `loss`, if given. A weight that varies along the axis,
    by its type or where `is_own` says so, keeps its own gradient: what other ranks add to it has
    come through the transpose of its gather.
    """
    local = list(args)
    for i in loss.argnums:  # JAX would sum the gradient of a replicated leaf itself
        local[i] = jax.tree.map(lambda leaf: _compat.as_varying(leaf, ranks.axis_name), args[i])
    run = value_and_grads or loss.value_and_grads
    total, weight, grads, aux = run(tuple(local), examples, ranks.axis_name)
    own = [False] * (1 if weight is None else 2) + list(is_own or [False] * _num_leaves(grads))
    if specs is not None:
        specs = (REPLICATED, REPLICATED, broadcast_specs(specs, grads))
    value, weight, grads = ranks.mean((total, weight, grads), specs, own)
    if weight is not None:
        value, grads = jax.tree.map(lambda mean: (mean / weight).astype(mean.dtype), (value, grads))
    return value, grads, aux


def _num_leaves(tree: PyTree) -> int:
    return len(jax.tree.leaves(tree))


def own_weights(weights: PyTree, axis_name: AxisName, specs: Specs) -> tuple[list[bool], Specs]:
    """Whether each weight is this rank's own shard, and specs along the other axes.

    Types say it under ``check_vma=True``, and otherwise `specs` that name the axis.

    Raises:
        ArgumentError: Specs name the axis for a weight that is the same on all ranks.
    """
    leaves = jax.tree.leaves(weights)
    varies = [axis_name in _compat.varying_axes(leaf) for leaf in leaves]
    if specs is None:
        return varies, None
    leaf_specs = jax.tree.leaves(broadcast_specs(specs, weights), is_leaf=is_spec)
    named = [axis_name in sum(map(entry_axes, spec), ()) for spec in leaf_specs]
    if _compat.checks_vma() and any(n and not v for n, v in zip(named, varies, strict=True)):
        raise ArgumentError(
            f"specs have {axis_name!r} for a weight that is the same on all ranks, and axis "
            f"{axis_name!r} is bound here, where a rank has only its own shard of weights that are "
            f"sharded along it: name {axis_name!r} in the in_specs of the shard_map too, and "
            "gather the weight in the loss with plan.all_gather"
        )
    own = varies if _compat.checks_vma() else named
    others = [PartitionSpec(*(_without(entry, axis_name) for entry in spec)) for spec in leaf_specs]
    return own, jax.tree.unflatten(jax.tree.structure(weights), others)


def _without(entry: Any, axis_name: AxisName) -> Any:
    names = tuple(name for name in entry_axes(entry) if name != axis_name)
    return names[0] if len(names) == 1 else names or None


def check_bound_axis(axis_name: AxisName, mesh: Any) -> None:
    """Raise ArgumentError for an argument that makes no sense where the axis is bound."""
    if mesh is not None:
        raise ArgumentError(
            f"axis {axis_name!r} is bound here, so its mesh is known: leave out mesh"
        )


# Arguments ----------------------------------------------------------------------------------------


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
        if len(set(weights)) < len(weights):
            raise ArgumentError(f"argnums {tuple(weights)} name an argument more than once")
        if both := set(weights) & set(replicated):
            raise ArgumentError(f"arguments {sorted(both)} are both in argnums and in replicated")
        batch = (i for i in range(num_args) if i not in {*weights, *replicated})
        return ArgumentRoles(tuple(weights), tuple(replicated), tuple(batch))

    def batch_size(self, args: Sequence[PyTree], *, numbers_are_replicated: bool) -> int:
        """The number of examples in the arrays of the batch."""
        sizes = set()
        for i in self.batch:
            for leaf in jax.tree.leaves(args[i]):
                if jnp.ndim(leaf) if is_array(leaf) else 0:
                    sizes.add(leaf.shape[0])
                elif not numbers_are_replicated:
                    raise ArgumentError(
                        f"argument {i} of the loss is taken as part of the batch, and contains a "
                        "single number: if all ranks should have it, such as a random key, give "
                        f"replicated={i}"
                    )
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


def is_array(leaf: Any) -> bool:
    """True for arrays of any kind, also traced ones; False for numbers of Python and others."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def check_keywords(kwargs: dict[str, Any], batch_size: int) -> None:
    """Reject keyword arguments that look like a batch: every rank gets them whole."""
    for name, arg in kwargs.items():
        if any(
            jnp.shape(leaf)[:1] == (batch_size,) for leaf in jax.tree.leaves(arg) if is_array(leaf)
        ):
            raise ArgumentError(
                f"argument {name!r} of the loss has an array with {batch_size} entries, as many as "
                "the batch has examples, and keyword arguments go whole to every rank: pass it by "
                "position, and if it is not the batch, name the position in replicated="
            )
