"""Losses: `jax.value_and_grad` over the whole batch, where every rank has a share of it.

    loss, grads = plan.value_and_grad(loss_of)(params, images, labels)

is `jax.value_and_grad(loss_of)(params, images, labels)`, for loops that say nowhere how gradients
are to be summed: inside jit JAX would put its own sum in. Where the axis is bound, as in shard_map
and pmap, it is `jax.value_and_grad` of this rank's examples and a `plan.pmean` of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from ftmesh.collectives.in_jit import Roles, over_whole_batch
from ftmesh.collectives.of_rank import Loss, OverRanks, check_bound, means_of_rank
from ftmesh.execute import _compat

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
