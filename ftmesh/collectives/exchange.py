"""Maxima, minima, all-to-all and permutations over the ranks of a plan, as in `jax.lax`.

XLA sends between any two chips by routes that know nothing of failures. So what it would send so is
sent from neighbour to neighbour along the ring of the plan's mesh. If that ring crosses a failure
itself, or XLA's would go over idle devices, all ranks gather everything on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ftmesh.collectives.all_reduce import psum
from ftmesh.collectives.operands import check_call
from ftmesh.collectives.reduce_scatter import all_gather, gather_rows
from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.types import AxisName, PlanLike, PyTree
from ftmesh.topology.notation import Coord
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.ring_order import RingOrder
from ftmesh.topology.topology import Topology

# XLA: between any chips. RING: between neighbours on the ring. GATHER: as the plan gathers.
Way = Literal["xla", "ring", "gather"]

XLA_SCOPE = "plan."  # of the name scopes around what a plan leaves to XLA

_SEGMENTS = 4  # in which blocks travel around the ring: fewer in each than in the one before


def pmax(
    x: PyTree, axis_name: AxisName, *, axis_index_groups: None = None, plan: PlanLike
) -> PyTree:
    """Take the maximum of `x` over all live ranks, as `jax.lax.pmax` does.

    XLA computes it along the ring of the plan's mesh. Like lax's it has no derivative.

    Args:
        x: An array or a pytree of arrays.
        axis_name, axis_index_groups, plan: As for `ftmesh.psum`.

    >>> import ftmesh
    >>> from ftmesh.testing import on_one_device
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x2", failed="2x2@2,0"))
    >>> on_one_device(lambda x: pmax(x, "data", plan=plan))(jnp.arange(4)).tolist()
    [3, 3, 3, 3]
    """
    axis_name = check_call("pmax", axis_name, axis_index_groups, plan)
    return jax.tree.map(lambda leaf: _extreme("max", leaf, axis_name, plan), x)


def pmin(
    x: PyTree, axis_name: AxisName, *, axis_index_groups: None = None, plan: PlanLike
) -> PyTree:
    """Take the minimum of `x` over all live ranks, as `jax.lax.pmin` does; see `pmax`."""
    axis_name = check_call("pmin", axis_name, axis_index_groups, plan)
    return jax.tree.map(lambda leaf: _extreme("min", leaf, axis_name, plan), x)


def all_to_all(
    x: PyTree,
    axis_name: AxisName,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: None = None,
    tiled: bool = False,
    plan: PlanLike,
) -> PyTree:
    """Send a block of `x` to each rank, as `jax.lax.all_to_all` does.

    On a mesh with failures blocks travel around the ring, both ways: a link carries about N / 6
    times the size of `x` on N chips.

    Args:
        x: An array or a pytree of arrays.
        split_axis: The dimension of which each rank gets a block.
        concat_axis: The dimension of the result along which blocks are stacked.
        tiled: Whether the dimensions stay, as in lax.
        plan: A plan without idle devices.
        axis_name, axis_index_groups: As for `ftmesh.psum`.
    """
    axis_name = check_call("all_to_all", axis_name, axis_index_groups, plan, needs_all_ranks=True)
    num_ranks, way = plan.program.num_ranks, _way_of(plan)

    def exchange(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        split = _dimension("split_axis", split_axis, leaf.ndim)
        concat = _dimension("concat_axis", concat_axis, leaf.ndim)
        _check_blocks(leaf.shape, split, num_ranks, tiled)
        leaf = primitives.on_mesh_of_plan(leaf, axis_name=axis_name, program=plan.program)
        if way == "xla" or not leaf.size:
            return lax.all_to_all(leaf, axis_name, split, concat, tiled=tiled)
        leaf = _compat.as_varying(leaf, axis_name)
        shape = list(leaf.shape)
        shape[split : split + 1] = [num_ranks, shape[split] // num_ranks]
        blocks = jnp.moveaxis(leaf.reshape(shape), split, 0)
        if way == "ring":
            blocks = _exchange_on_ring(blocks, axis_name)
        else:
            everything = _gather(blocks, axis_name, plan)
            rank = lax.axis_index(axis_name)
            blocks = lax.dynamic_index_in_dim(everything, rank, 1, keepdims=False)
        if not tiled:
            return jnp.moveaxis(jnp.squeeze(blocks, 1 + split), 0, concat)
        stacked = jnp.moveaxis(blocks, 0, concat)
        shape = list(blocks.shape[1:])
        shape[concat] *= num_ranks
        return stacked.reshape(shape)

    return jax.tree.map(exchange, x)


def ppermute(
    x: PyTree, axis_name: AxisName, perm: Sequence[tuple[int, int]], *, plan: PlanLike
) -> PyTree:
    """Send `x` from rank to rank, as `jax.lax.ppermute` does; who receives nothing gets zeros.

    On a mesh with failures what is sent d ranks further takes d steps along the ring, and all that
    is sent moves at once: permute between ranks that are near.

    Args:
        x: An array or a pytree of arrays.
        perm: Pairs of ranks, from and to, each at most once; live ones on a plan with idle devices.
        axis_name, plan: As for `ftmesh.psum`.
    """
    axis_name = check_call("ppermute", axis_name, None, plan)
    num_ranks = plan.program.num_ranks
    pairs = [(int(source), int(target)) for source, target in perm]
    _check_pairs(pairs, plan)
    num_live = len(plan.program.live)
    ahead = [(target - source) % num_live for source, target in pairs]
    steps = [d if d <= num_live // 2 else d - num_live for d in ahead]
    way = _way_of(plan)
    if way == "ring" and max(map(abs, steps), default=0) <= 1:
        way = "xla"

    def permute(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        leaf = primitives.on_mesh_of_plan(leaf, axis_name=axis_name, program=plan.program)
        if way == "xla" or not leaf.size:
            return lax.ppermute(leaf, axis_name, pairs)
        leaf, rank = _compat.as_varying(leaf, axis_name), lax.axis_index(axis_name)
        result = _compat.varying_like(jnp.zeros_like(leaf), leaf)
        if way == "gather":
            sources = np.full(num_ranks, num_ranks)
            sources[[target for _, target in pairs]] = [source for source, _ in pairs]
            source = jnp.asarray(sources)[rank]
            everything = _gather(leaf, axis_name, plan)
            taken = lax.dynamic_index_in_dim(everything, source, keepdims=False)
            return jnp.where(source < num_ranks, taken, result)
        distances = np.full(num_ranks, num_ranks)  # none is so far
        distances[[target for _, target in pairs]] = steps
        distance = jnp.asarray(distances)[rank]
        result = jnp.where(distance == 0, leaf, result)
        for by in (1, -1):
            count = max((by * step for step in steps), default=0)

            def move(state: Any, step: Any, by: int = by) -> Any:
                moving, result = state
                moving = _shift(moving, by, axis_name, num_live)
                return (moving, jnp.where(distance == by * step, moving, result)), None

            if count > 0:
                (_, result), _ = lax.scan(move, (leaf, result), np.arange(1, count + 1))
        return result

    return jax.tree.map(permute, x)


def _way_of(plan: PlanLike) -> Way:
    ranks = Ranks.from_plan(plan)
    topology = ranks.topology
    if not (topology.failed or topology.failed_links):
        return "xla"
    ring = tuple(ranks.coords[: topology.num_live])
    return "ring" if _is_clear(topology, ring) else "gather"


@lru_cache(maxsize=64)
def _is_clear(topology: Topology, coords: tuple[Coord, ...]) -> bool:
    """True if no step of the ring crosses a failure."""
    return not RingOrder(topology, coords).blocked


def _extreme(kind: Literal["max", "min"], leaf: Any, axis_name: AxisName, plan: PlanLike) -> Any:
    leaf, program = jnp.asarray(leaf), plan.program
    leaf = primitives.on_mesh_of_plan(leaf, axis_name=axis_name, program=program)
    if (plan.with_idle or _way_of(plan) == "gather") and leaf.size:
        number = leaf.astype(np.int32) if leaf.dtype == np.bool_ else leaf
        vector = _compat.as_varying(number.reshape(-1), axis_name)
        vector = lax.stop_gradient(vector)
        if plan.with_idle:
            rows = _gather(vector, axis_name, plan)[np.asarray(program.live)]
        else:
            rows = gather_rows(vector, axis_name, plan=plan)
        return getattr(jnp, kind)(rows, axis=0).astype(leaf.dtype).reshape(leaf.shape)
    with jax.named_scope(f"{XLA_SCOPE}p{kind}"):
        reduce: Callable[..., Any] = lax.pmax if kind == "max" else lax.pmin
        return reduce(leaf, axis_name)


def _gather(x: jax.Array, axis_name: AxisName, plan: PlanLike) -> jax.Array:
    """Return the arrays of all ranks; zeros for idle ones."""
    if not plan.with_idle:
        return cast(jax.Array, all_gather(x, axis_name, plan=plan))
    rows = jnp.zeros((plan.program.num_ranks, *x.shape), x.dtype)
    rows = _compat.varying_like(rows, x).at[lax.axis_index(axis_name)].set(x)
    return cast(jax.Array, psum(rows, axis_name, plan=plan).astype(x.dtype))


def _shift(x: Any, by: int, axis_name: AxisName, num_ranks: int) -> Any:
    """Send to the neighbour on the ring."""
    pairs = [(rank, (rank + by) % num_ranks) for rank in range(num_ranks)]
    with _compat.plan_scope("exchange"):
        return lax.ppermute(x, axis_name, pairs)


def _exchange_on_ring(blocks: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the block of each rank for this one, given those of this rank for each."""
    num_ranks, rank = lax.axis_size(axis_name), lax.axis_index(axis_name)
    ranks = np.arange(num_ranks)
    ahead = jnp.take(blocks, (rank + ranks) % num_ranks, axis=0)  # for this rank, the next, ...
    middle = num_ranks // 2
    behind = _pass_on(ahead[1 : middle + 1], 1, axis_name)  # from the one before, ...
    beyond = _pass_on(ahead[:middle:-1], -1, axis_name)  # from the next, ...
    received = jnp.concatenate([ahead[:1], behind, beyond[::-1]])
    return jnp.take(received, (rank - ranks) % num_ranks, axis=0)


def _pass_on(blocks: jax.Array, by: int, axis_name: AxisName) -> jax.Array:
    """Pass blocks around the ring, of which the rank after i + 1 steps takes block i."""
    length = max(1, -(-len(blocks) // _SEGMENTS))
    taken = [blocks[:0]]

    def step(moving: jax.Array, index: Any) -> tuple[jax.Array, jax.Array]:
        moving = _shift(moving, by, axis_name, lax.axis_size(axis_name))
        return moving, lax.dynamic_index_in_dim(moving, index, keepdims=False)

    while len(blocks):
        count = min(length, len(blocks))
        blocks, some = lax.scan(step, blocks, np.arange(count))
        taken.append(some)
        blocks = blocks[count:]
    return jnp.concatenate(taken)


def _dimension(name: str, dimension: int, ndim: int) -> int:
    if not -ndim <= dimension < ndim:
        raise CollectiveError(
            f"the {name} of all_to_all is {dimension}, and must be from {-ndim} to {ndim - 1}"
        )
    return dimension % ndim


def _check_blocks(shape: tuple[int, ...], split: int, num_ranks: int, tiled: bool) -> None:
    length = shape[split]
    if length % num_ranks or (not tiled and length != num_ranks):
        rule = f"a multiple of {num_ranks}" if tiled else f"{num_ranks}"
        raise CollectiveError(
            f"all_to_all(tiled={tiled}) of shape {shape}: dimension {split} has size {length}, and "
            f"must have {rule}, the number of ranks"
        )


def _check_pairs(pairs: Sequence[tuple[int, int]], plan: PlanLike) -> None:
    live = {int(rank) for rank in plan.program.live}
    for end, name in enumerate(("source", "target")):
        ranks = [pair[end] for pair in pairs]
        if len(set(ranks)) < len(ranks):
            twice = next(rank for rank in ranks if ranks.count(rank) > 1)
            raise CollectiveError(f"rank {twice} is a {name} of ppermute more than once")
        if unknown := set(ranks) - live:
            raise CollectiveError(
                f"rank {min(unknown)} is a {name} of ppermute, and the plan's ranks are "
                f"{min(live)} to {max(live)}"
                + (", without those of idle devices" if plan.with_idle else "")
            )
