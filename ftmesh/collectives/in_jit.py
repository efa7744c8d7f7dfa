"""In jit: a loss over a whole batch, no axis bound; every rank takes its share of the examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh.collectives.auxiliary import Auxiliary
from ftmesh.collectives.meshes import Site
from ftmesh.collectives.of_rank import Examples, Loss, OverRanks, means_of_rank
from ftmesh.collectives.pieces import WHOLE, only, typed_spec
from ftmesh.errors import ArgumentError
from ftmesh.layout.batch_shares import Shares


@dataclass(frozen=True)
class Roles:
    """Which arguments of a loss are weights, which are the same for all ranks, which the batch."""

    by: tuple[int, ...]
    whole: tuple[int, ...]
    batch: tuple[int, ...]

    @staticmethod
    def of(num_args: int, by: Sequence[int], whole: Sequence[int]) -> Roles:
        """The roles of so many arguments; what is not named is the batch."""
        wrong = [i for i in (*by, *whole) if not -num_args <= i < num_args]
        if wrong:
            raise ArgumentError(
                f"the loss was given {num_args} arguments, and argnums or replicated name {wrong}"
            )
        weights, same = ([i % num_args for i in some] for some in (by, whole))
        if both := set(weights) & set(same):
            raise ArgumentError(f"arguments {sorted(both)} cannot be in argnums and in replicated")
        rest = (i for i in range(num_args) if i not in {*weights, *same})
        return Roles(tuple(weights), tuple(same), tuple(rest))

    def batch_size(self, args: Sequence[Any]) -> int:
        """How many examples the batch has."""
        sizes = set()
        for i in self.batch:
            for leaf in jax.tree.leaves(args[i]):
                if jnp.ndim(leaf) == 0:
                    raise ArgumentError(
                        f"argument {i} of the loss is taken for a part of the batch, and has a "
                        "single number in it: if all ranks are to have it, as for a random key, "
                        f"give replicated={i}"
                    )
                sizes.add(leaf.shape[0])
        if not sizes:
            raise ArgumentError(
                "the loss has no arguments that could be the batch: pass its arrays as arguments, "
                "since those that a function finds around it go whole to every rank"
            )
        if len(sizes) > 1:
            raise ArgumentError(
                f"arrays of the batch have first dimensions of {sorted(sizes)}, and must have one "
                "entry for each example: name in replicated= the arguments that are not the batch"
            )
        return int(sizes.pop())


def _check_keywords(kwargs: dict[str, Any], size: int) -> None:
    """Refuses arrays of the batch that are given by name: those go whole to every rank."""
    for name, arg in kwargs.items():
        if any(jnp.ndim(leaf) and jnp.shape(leaf)[0] == size for leaf in jax.tree.leaves(arg)):
            raise ArgumentError(
                f"argument {name!r} of the loss has an array with {size} entries, as many as the "
                "batch has examples, and what is given by name goes whole to every rank: give it "
                "by its position, and if it is not the batch, name that in replicated="
            )


def over_whole_batch(
    loss: Loss,
    ranks: OverRanks,
    roles: Roles,
    args: tuple[Any, ...],
    *,
    specs: Any,
    mesh: Any,
    reduce_aux: Callable[[Any], Any] | None,
) -> tuple[Any, tuple[Any, ...], Any]:
    """The value, the gradients and aux, of a loss that each rank computes for its examples."""
    site = Site.of(ranks.plan, ranks.axis_name, args, mesh)
    shares = Shares.of(ranks.plan, roles.batch_size(args))
    _check_keywords(loss.kwargs, shares.global_batch)
    lie = site.specs_of(tuple(args[i] for i in roles.by), specs)
    types = tuple(jax.tree.map(typed_spec, arg) for arg in args)
    split = PartitionSpec(ranks.axis_name) if shares.are_equal else WHOLE

    def own(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Examples]:
        """The arguments of this rank: whole weights, and its rows of the batch."""
        here = list(args)
        for i, how in zip(roles.by, lie, strict=True):
            here[i] = ranks.gathered(args[i], how)
        positions = jnp.asarray(shares.positions())[lax.axis_index(ranks.axis_name)]
        if not shares.are_equal:  # padding repeats the last example
            for i in roles.batch:
                here[i] = jax.tree.map(lambda leaf: leaf[positions], args[i])
        num_live = len(shares.live)
        scale = num_live / shares.global_batch
        has_padding = bool(shares.global_batch % num_live)
        return tuple(here), Examples(positions >= 0, scale, has_padding)

    def value_and_grads(args: tuple[Any, ...], rows: Examples) -> Any:
        """Those of the loss, which finds Explicit axes as it would have without us."""

        def run(args: tuple[Any, ...], weights: Any) -> Any:
            return loss.value_and_grads(args, replace(rows, weights=weights))

        return site.explicit(run, (types, WHOLE))(args, rows.weights)

    def probe(*args: Any) -> tuple[()]:
        here, _ = own(args)
        look = partial(auxiliary.look, loss, batch=roles.batch)
        site.explicit(look, (types,))(here)
        return ()

    def every_rank(*args: Any) -> Any:
        here, rows = own(args)
        value, grads, aux = means_of_rank(loss, ranks, here, lie, rows, value_and_grads)
        return value, grads, auxiliary.reduced(aux)

    cut = partial(jax.tree.map, lambda spec: only(spec, {ranks.axis_name}))
    places = {i: cut(how) for i, how in zip(roles.by, lie, strict=True)}
    places |= dict.fromkeys(roles.whole, WHOLE) | dict.fromkeys(roles.batch, split)
    in_specs = tuple(places[i] for i in range(len(args)))
    auxiliary = Auxiliary(ranks, shares, reduce_aux)
    if loss.has_aux:
        jax.eval_shape(site.shard_map(probe, in_specs, (), ()), *args)
    out_specs = (WHOLE, cut(lie), auxiliary.out_specs)
    out_types = (WHOLE, lie, auxiliary.out_specs)
    found: tuple[Any, tuple[Any, ...], Any] = site.shard_map(
        every_rank, in_specs, out_specs, out_types
    )(*args)
    return found
