"""Losses: `jax.value_and_grad` over the whole batch, where every rank has a share of it.

    loss, grads = plan.value_and_grad(loss_of)(params, images, labels)

is `jax.value_and_grad(loss_of)(params, images, labels)`, for loops that say nowhere how gradients
are to be summed: inside jit JAX would put its own sum in. Where the axis is bound, as in shard_map
and pmap, it is `jax.value_and_grad` of this rank's examples and a `plan.pmean` of both.

In jit: a loss over a whole batch, no axis bound; every rank takes its share of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh.collectives.aux_outputs import Auxiliary
from ftmesh.collectives.local_loss import Examples, Loss, OverRanks, check_bound, means_of_rank
from ftmesh.collectives.partitioning import WHOLE, Site, only, typed_spec
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.layout.batch_shares import Shares

if TYPE_CHECKING:
    from ftmesh.planning.plan import Plan


def value_and_grad(
    loss: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    plan: Plan,
    axis_name: Any = "data",
    weighted: bool = False,
    replicated: int | Sequence[int] = (),
    specs: Any = None,
    mesh: Any = None,
    reduce_aux: Callable[[Any], Any] | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """A function as `jax.value_and_grad` makes it, with means over all examples made by the plan.

    `loss` is given some of the examples and returns the mean over those; or a vector, one number
    for each of them, and then the batch may be of any size. With `weighted` it returns ``(sum,
    weight)``, two numbers or two such vectors, and the value is the sum of sums over the sum of
    weights; to the derivative weights are constants. Keyword arguments go to it as they are.
    `options` are those of `ftmesh.pmean`; its buckets and slabs are for gradients of weights that
    every rank has, and not of those that are cut along `axis_name`.

    Where the axis is not bound, in jit: arguments are whole arrays. What is differentiated by, and
    the arguments `replicated`, go whole to every rank; all others are the batch, and ranks have
    shares of their first dimension. `mesh` is the mesh to run on: unless given, that of
    `jax.set_mesh`, or of the arguments, or the plan's own. Axes other than `axis_name` stay as they
    are. `specs` then say how weights are cut along them: a spec or sharding, or a pytree of them,
    as for `jax.device_put`; each device sums its own piece. Weights that are cut along `axis_name`
    as well are gathered by the plan, and their gradients scattered. Explicit axes need no `specs`.

    With `has_aux` the loss returns ``(loss, aux)``. In jit, arrays of aux with a row for each
    example are put together, and others that depend on the batch, as batch statistics do, are means
    over ranks, also where for the batch they would be sums, or largest numbers. `reduce_aux`, if
    given, is called by each rank with its aux instead, and makes of it what is the same everywhere.
    Where the axis is bound aux is the rank's own, unless `reduce_aux` is given.
    """
    by = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    whole = (replicated,) if isinstance(replicated, int) else tuple(replicated)
    ranks = OverRanks(plan, axis_name, options)
    specs = (specs,) if isinstance(argnums, int) and specs is not None else specs

    @wraps(loss)
    def run(*args: Any, **kwargs: Any) -> Any:
        roles = Roles.of(len(args), by, whole)
        of = Loss(loss, kwargs, roles.by, has_aux=has_aux, weighted=weighted)
        if _compat.axis_exists(axis_name):
            check_bound(axis_name, specs, mesh)
            value, grads, aux = means_of_rank(of, ranks, args, specs)
            aux = aux if reduce_aux is None else reduce_aux(aux)
        else:
            value, grads, aux = over_whole_batch(
                of, ranks, roles, args, specs=specs, mesh=mesh, reduce_aux=reduce_aux
            )
        found = grads[0] if isinstance(argnums, int) else grads
        return ((value, aux), found) if has_aux else (value, found)

    return run


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
