"""One rank's part of a loss: its value and gradients, and the means that a plan makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ftmesh.collectives.all_reduce import pmean
from ftmesh.collectives.partitioning import WHOLE, names_in, spread
from ftmesh.collectives.reduce_scatter import all_gather, psum_scatter
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat

if TYPE_CHECKING:
    from ftmesh.planning.plan import Plan

BUFFERS = "bucket_bytes", "slab_bytes"  # options of sums that what is scattered has not


@dataclass(frozen=True)
class Examples:
    """The examples that a rank was given of a batch of known size."""

    weights: Any  # 1 for an example and 0 for padding
    scale: float  # makes of a sum over this rank's examples its part of the mean
    has_padding: bool  # at some rank that counts


@dataclass(frozen=True)
class Loss:
    """A loss, what it is differentiated by, and what it returns."""

    function: Callable[..., Any]
    kwargs: dict[str, Any]
    argnums: tuple[int, ...]
    has_aux: bool
    weighted: bool

    def value_and_grads(self, args: tuple[Any, ...], rows: Examples | None) -> Any:
        """A number to be averaged, its weight if any, gradients by each argument, and aux."""

        def numbers(*args: Any) -> Any:
            found, aux = self.value_and_aux(args)
            total, weight = self._read(found, rows)
            return total, (weight, aux)

        run = jax.value_and_grad(numbers, argnums=self.argnums, has_aux=True)
        (total, (weight, aux)), grads = run(*args)
        return total, weight, grads, aux

    def value_and_aux(self, args: tuple[Any, ...]) -> Any:
        """What the loss returns; aux is None for one that has none."""
        args = jax.tree.map(lambda leaf: leaf, args)  # modules made anew may be changed in there
        before = [jax.tree.leaves(args[i]) for i in self.argnums]
        found = self.function(*args, **self.kwargs)
        for i, leaves in zip(self.argnums, before, strict=True):
            if list(map(id, jax.tree.leaves(args[i]))) != list(map(id, leaves)):
                raise ArgumentError(
                    f"the loss changes its argument {i}, as a module with batch norms does, and "
                    "that would be lost: split off what changes (nnx.split), give it as another "
                    "argument, named in replicated=, and return what it comes to as aux"
                )
        return found if self.has_aux else (found, None)

    def _read(self, found: Any, rows: Examples | None) -> tuple[Any, Any]:
        """What a loss has returned, as a number to be averaged and its weight."""
        if self.weighted:
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                raise ArgumentError(
                    f"a weighted loss returns (sum, weight), not {_shown(found)}; with has_aux "
                    "((sum, weight), aux)"
                )
            total, weight = (_total(each, rows) for each in found)
            return total, weight
        total = _total(found, rows)
        if jnp.ndim(found) == 0:
            return total, None
        return total * (1 / len(found) if rows is None else rows.scale), None


def _total(found: Any, rows: Examples | None) -> Any:
    """The sum of a vector without padding; a number as it is."""
    if jnp.ndim(found) == 0:
        if rows is not None and rows.has_padding:
            raise ArgumentError(
                "this batch cannot be shared out equally, so that the mean of the ranks' losses is "
                "not the loss: have it return one number for each example instead of a single one "
                "(the mean over all of them is taken for you), or take a batch that is a multiple "
                "of the number of ranks"
            )
        return found
    if jnp.ndim(found) != 1 or (rows is not None and len(found) != len(rows.weights)):
        given = "a batch" if rows is None else f"{len(rows.weights)} examples"
        raise ArgumentError(
            f"the loss returned {_shown(found)} for {given}: it must be one number, or a vector "
            "with one for each example"
        )
    return jnp.sum(found if rows is None else jnp.where(rows.weights > 0, found, 0))


def _shown(found: Any) -> str:
    """What a loss returned, in a few words."""
    if hasattr(found, "shape"):
        return f"an array of shape {found.shape}"
    return f"a {type(found).__name__}"


@dataclass(frozen=True)
class OverRanks:
    """How means over ranks are made: by a plan, along an axis, with options of `pmean`."""

    plan: Plan
    axis_name: Any
    options: dict[str, Any]

    def mean(self, x: Any, specs: Any = None) -> Any:
        """The mean over ranks; of leaves cut along the axis, if specs say so, this rank's part."""
        leaves, tree = jax.tree.flatten(x)
        leaves = [_compat.as_varying(jnp.asarray(leaf), self.axis_name) for leaf in leaves]
        if specs is None:
            return tree.unflatten(self._whole(leaves, None))
        each = jax.tree.leaves(spread(specs, x))
        cut = {i: at for i, spec in enumerate(each) if (at := self.cut_at(spec)) is not None}
        rest = [i for i in range(len(leaves)) if i not in cut]
        means = self._whole([leaves[i] for i in rest], [each[i] for i in rest])
        for i, mean in zip(rest, means, strict=True):
            leaves[i] = mean
        for i, at in cut.items():
            leaves[i] = psum_scatter(
                leaves[i] / len(self.plan.program.live),
                self.axis_name,
                scatter_dimension=at,
                tiled=True,
                plan=self.plan,
                specs=each[i],
                **{k: v for k, v in self.options.items() if k not in BUFFERS},
            )
        return tree.unflatten(leaves)

    def _whole(self, leaves: list[Any], specs: Any) -> list[Any]:
        found: list[Any] = pmean(
            leaves, self.axis_name, plan=self.plan, specs=specs, **self.options
        )
        return found

    def gathered(self, x: Any, specs: Any) -> Any:
        """Leaves that are cut along the axis put together again; others as they are."""

        def one(leaf: Any, spec: PartitionSpec) -> Any:
            at = self.cut_at(spec)
            if at is None:
                return leaf
            return all_gather(leaf, self.axis_name, axis=at, tiled=True, plan=self.plan, specs=spec)

        return jax.tree.map(one, x, spread(specs, x))

    def cut_at(self, spec: PartitionSpec) -> int | None:
        """The dimension that is cut along the axis; None where none is."""
        for at, entry in enumerate(spec):
            names = names_in(entry)
            if self.axis_name in names:
                if len(names) > 1:
                    raise ArgumentError(
                        f"weights are cut along {names} in one dimension, and the plan can gather "
                        f"along {self.axis_name!r} alone: cut another dimension along the others"
                    )
                return at
        return None


def means_of_rank(
    loss: Loss,
    ranks: OverRanks,
    args: tuple[Any, ...],
    specs: Any,
    rows: Examples | None = None,
    value_and_grads: Callable[..., Any] | None = None,
) -> tuple[Any, tuple[Any, ...], Any]:
    """The value and the gradients as means over all ranks, and this rank's aux."""

    def own(leaf: Any) -> Any:
        return _compat.as_varying(leaf, ranks.axis_name)

    args = tuple(jax.tree.map(own, arg) if i in loss.argnums else arg for i, arg in enumerate(args))
    total, weight, grads, aux = (value_and_grads or loss.value_and_grads)(args, rows)
    every = None if specs is None else (WHOLE, WHOLE, spread(specs, grads))
    value, weight, grads = ranks.mean((total, weight, grads), every)
    if weight is not None:
        value, grads = jax.tree.map(lambda mean: (mean / weight).astype(mean.dtype), (value, grads))
    return value, grads, aux


def check_bound(axis_name: Any, specs: Any, mesh: Any) -> None:
    """Refuses what is known already where the axis is bound."""
    if mesh is not None:
        raise ArgumentError(f"axis {axis_name!r} is bound here, and its mesh known: leave out mesh")
    named = jax.tree.leaves(specs, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    if any(axis_name in names_in(entry) for spec in named for entry in getattr(spec, "spec", spec)):
        raise ArgumentError(
            f"axis {axis_name!r} is bound here, where a rank has its own part of what is cut along "
            f"it: gather the weights with plan.all_gather, or leave {axis_name!r} out of the specs"
        )
