"""All-reduce: `psum` and `pmean` as in `jax.lax`, along a plan's routes; sums over `ChipGroups`.

    grads = ftmesh.pmean(grads, "data", plan=plan)

They run wherever the axis is bound: in shard_map (with check_vma on or off), pmap, or
``vmap(axis_name=...)``; under jit, grad, scan and remat. All ranks get the same bits, and the same
inputs always give the same bits. Numbers of 16 bits or fewer are added in float32, also by XLA.

`ChipGroups` are small groups of neighbouring chips, as batch normalization sums over them. The
groups of `jax.lax.psum` must have one size, which groups on a mesh with failed chips do not. Here
pairs of ranks exchange values, in all groups at once, in a few constant permutations. The first
2**k ranks of a group use recursive doubling; each of the others sends its value to one of them
before, and gets the sum after. All ranks of a group get the same bits.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.collectives.operands import (
    Precision,
    as_numbers,
    as_operand,
    check_call,
    choose_precision,
    is_constant,
)
from ftmesh.collectives.partitioning import map_local_shards
from ftmesh.errors import ArgumentError, CollectiveError, TopologyError
from ftmesh.execute import _compat, primitives
from ftmesh.execute.lowering import PALLAS, XLA, Program
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs
from ftmesh.layout.buckets import make_buckets, pack, unpack
from ftmesh.schedule.transfers import Ints
from ftmesh.topology.ranks import HasTopology, Ranks
from ftmesh.topology.topology import Topology

BUCKET_BYTES = 256 * 2**20


def psum(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: None = None,
    plan: PlanLike,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    specs: Specs = None,
) -> PyTree:
    """Sum `x` over all live ranks, as `jax.lax.psum` does.

    Leaves are packed into buckets, and each bucket is summed with the plan for its size
    (`Plan.for_payload`). Results have the dtype of their leaf; booleans are counted, as in lax.

    Args:
        x: An array or a pytree of arrays.
        axis_name: The axis of ``plan.jax_mesh(axis_name)``.
        axis_index_groups: Not supported. Plan for a smaller topology instead.
        plan: What `ftmesh.plan` returns.
        wire_dtype: The dtype in which results are sent, rounded once by their owner; the leaf's own
            by default. Partial sums are sent in it too if so few are added one after
            another that rounding each stays within 1 %; see `ftmesh.cost.wire_precision`.
        accumulate_dtype: The dtype in which floating-point leaves are added. By default float32
            for leaves of 16 bits or fewer, and their own dtype for others.
        bucket_bytes: The largest bucket. A larger leaf gets a bucket of its own.
        specs: How leaves are sharded along mesh axes that the surrounding shard_map leaves to the
            compiler: each device then sums its own shard. Explicit axes need none.

    Raises:
        CollectiveError: If the axis is not bound or does not fit the plan, or if a leaf is typed as
            the same on every device: it has been summed already.

    >>> import ftmesh
    >>> from ftmesh.testing import on_one_device
    >>> plan = ftmesh.plan(ftmesh.Topology.grid("4x2", failed="2x2@2,0"))
    >>> on_one_device(lambda x: psum(x, "data", plan=plan))(jnp.arange(4)).tolist()
    [6, 6, 6, 6]
    """
    axis_name = check_call("psum", axis_name, axis_index_groups, plan)
    options = (axis_name, plan, wire_dtype, accumulate_dtype, bucket_bytes)
    return map_local_shards(lambda x: _sum_leaves(x, *options, divisor=None), x, specs)


def pmean(
    x: PyTree,
    axis_name: AxisName,
    *,
    axis_index_groups: None = None,
    plan: PlanLike,
    wire_dtype: DTypeLike | None = None,
    accumulate_dtype: DTypeLike | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    specs: Specs = None,
) -> PyTree:
    """Average `x` over all live ranks, as `jax.lax.pmean` does. The arguments are those of `psum`.

    Sums are divided before they are rounded to 16 bits, so a mean is right even if the sum would
    overflow.
    """
    axis_name = check_call("pmean", axis_name, axis_index_groups, plan)
    num_live = len(plan.program.live)
    options = (axis_name, plan, wire_dtype, accumulate_dtype, bucket_bytes)
    means = map_local_shards(lambda x: _sum_leaves(x, *options, divisor=num_live), x, specs)
    return jax.tree.map(lambda leaf, mean: mean if _is_divided(leaf) else mean / num_live, x, means)


def bucket_plans(x: PyTree, plan: PlanLike) -> list[PlanLike]:
    """The plan of each bucket that `pmean` sums, largest first. `x` may have `ShapeDtypeStruct`."""
    leaves = jax.tree.leaves(x)
    kinds = [(choose_precision(leaf.dtype), _is_divided(leaf)) for leaf in leaves]
    buckets = make_buckets(leaves, kinds, BUCKET_BYTES)
    buckets.sort(key=lambda bucket: -sum(leaves[i].size for i in bucket.members))
    return [_plan_for([leaves[i] for i in b.members], b.kind[0], plan) for b in buckets]


def _sum_leaves(
    x: PyTree,
    axis_name: AxisName,
    plan: PlanLike,
    wire_dtype: DTypeLike | None,
    accumulate_dtype: DTypeLike | None,
    bucket_bytes: int,
    *,
    divisor: int | None,
) -> PyTree:
    """Sum the leaves of `x`; divide those by `divisor` that are divided before rounding."""
    leaves, tree = jax.tree.flatten(x)
    sums = [_constant_sum(leaf, plan) if is_constant(leaf) else leaf for leaf in leaves]
    traced = [i for i, leaf in enumerate(leaves) if not is_constant(leaf)]
    arrays = [as_operand(leaves[i], axis_name) for i in traced]
    kinds = [
        (choose_precision(array.dtype, wire_dtype, accumulate_dtype), _is_divided(array))
        for array in arrays
    ]
    for i, array in zip(traced, arrays, strict=True):
        if array.size == 0:
            sums[i] = _compat.zeros_like_psum(array, axis_name)

    for bucket in make_buckets(arrays, kinds, bucket_bytes):
        precision, is_divided = bucket.kind
        members = [arrays[i] for i in bucket.members]
        totals = _sum_bucket(members, axis_name, plan, precision, divisor if is_divided else None)
        for i, array, total in zip(bucket.members, members, totals, strict=True):
            sums[traced[i]] = _compat.weak_like_psum(total.astype(array.dtype), array, axis_name)
    return tree.unflatten(sums)


def _plan_for(arrays: list[Any], precision: Precision, plan: PlanLike) -> PlanLike:
    num_bytes = sum(array.size for array in arrays) * precision.result_dtype.itemsize
    return plan.for_payload(num_bytes, wire_dtype=precision.planning_dtype)


def _constant_sum(leaf: Any, plan: PlanLike) -> Any:
    """The sum of a leaf that is known while tracing, and so the same on all ranks."""
    number = as_numbers(leaf)
    is_bool = jnp.result_type(leaf) == np.bool_
    return _compat.scale_constant(number if is_bool else leaf, len(plan.program.live))


def _is_divided(leaf: Any) -> bool:
    """Whether `_sum_leaves` divides this leaf; `pmean` divides the others at the end."""
    return not is_constant(leaf) and jnp.issubdtype(leaf.dtype, np.inexact)


def _sum_bucket(
    leaves: list[jax.Array],
    axis_name: AxisName,
    plan: PlanLike,
    precision: Precision,
    divisor: int | None,
) -> list[jax.Array]:
    """Sum leaves of one precision in one buffer; the results have the dtype of sums."""
    program = _plan_for(leaves, precision, plan).program
    if program.executor == XLA:
        return [_sum_by_xla(leaf, axis_name, program, precision, divisor) for leaf in leaves]
    wide = [leaf.astype(precision.sum_dtype) for leaf in leaves]
    is_rounded = precision.sum_dtype != precision.result_dtype
    is_divided_after = divisor is not None and not is_rounded
    buffer = pack(wide, program.num_chunks, precision.result_dtype.itemsize)
    if is_divided_after and program.executor == PALLAS and buffer.size == wide[0].size:
        buffer = _as_computed(buffer, axis_name)
    total = primitives.all_reduce(
        buffer,
        axis_name=axis_name,
        program=program,
        wire=precision.wire(program.depth),
        divisor=divisor if is_rounded else None,
    )
    sums = unpack(total, [leaf.shape for leaf in leaves])
    # Dividing while unpacking takes no extra memory.
    return [leaf / divisor for leaf in sums] if is_divided_after else sums


def _sum_by_xla(
    x: jax.Array, axis_name: AxisName, program: Program, precision: Precision, divisor: int | None
) -> jax.Array:
    """Sum an array by `lax.psum`, on the mesh that the plan orders."""
    x = primitives.on_mesh_of_plan(x, axis_name=axis_name, program=program)
    total = lax.psum(x.astype(precision.sum_dtype), axis_name)
    return (total if divisor is None else total / divisor).astype(precision.result_dtype)


@partial(jax.custom_jvp, nondiff_argnums=(1,))  # identity for derivatives
def _as_computed(buffer: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return `buffer` unchanged, as a value that the compiler takes for computed.

    XLA copies a parameter before and after a kernel whose result is used in a computation. This is
    one pass instead, into the kernel's own buffer, and it fuses with what computes a gradient.
    """
    return jnp.where(lax.axis_index(axis_name) >= 0, buffer, jnp.zeros_like(buffer))


_as_computed.defjvp(
    lambda axis_name, primals, tangents: (_as_computed(*primals, axis_name), *tangents)
)


# Groups of chips --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ChipGroups:
    """Groups of ranks along one axis. A rank in none of them is a group of its own."""

    ranks: tuple[tuple[int, ...], ...]
    num_ranks: int

    def __post_init__(self) -> None:
        named = [rank for group in self.ranks for rank in group]
        if len(set(named)) < len(named) or not set(named) <= set(range(self.num_ranks)):
            raise ArgumentError(
                f"groups must name ranks from 0 to {self.num_ranks - 1}, each at most once: "
                f"{self.ranks}"
            )

    @staticmethod
    def of_size(plan: HasTopology | Topology, chips: int) -> ChipGroups:
        """Make groups of `chips` neighbours, with all their devices; see `Topology.groups`.

        Failed chips leave groups smaller.
        """
        ranks = Ranks.from_plan(plan)
        devices = ranks.of_chips.tolist()
        groups = ranks.topology.groups(chips)
        members = (tuple(rank for chip in group for rank in devices[chip]) for group in groups)
        return ChipGroups(tuple(members), ranks.num_ranks)

    @staticmethod
    def for_examples(plan: HasTopology | Topology, examples: int, global_batch: int) -> ChipGroups:
        """Make the smallest groups that have `examples` examples of a batch, if no chip failed."""
        topology = Ranks.from_plan(plan).topology
        for chips in range(1, topology.num_chips + 1):
            with suppress(TopologyError):  # not every size is possible
                if chips * global_batch >= examples * topology.num_live:
                    return ChipGroups.of_size(plan, chips)
        raise ArgumentError(
            f"a batch of {global_batch} has no groups of {examples} examples to normalise over: "
            f"use a batch of {examples} or more"
        )

    def sum(self, x: jax.Array, axis_name: AxisName) -> jax.Array:
        """Sum an array over the ranks of this rank's group."""
        if lax.axis_size(axis_name) != self.num_ranks:
            raise CollectiveError(
                f"axis {axis_name!r} has {lax.axis_size(axis_name)} ranks, and the groups are for "
                f"{self.num_ranks}"
            )
        rank = lax.axis_index(axis_name)
        for partner, adds, replaces in self.exchanges:
            with _compat.plan_scope("group_sum"):
                received = lax.ppermute(x, axis_name, list(enumerate(partner.tolist())))
            replaced = jnp.where(jnp.asarray(replaces)[rank], received, x)
            x = jnp.where(jnp.asarray(adds)[rank], x + received, replaced)
        return x

    @cached_property
    def exchanges(self) -> tuple[tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]], ...]:
        """The exchanges after which every rank has the sum of its group.

        Each rank's partner, or itself; whether it adds what it receives; and whether it keeps that.
        """
        exchanges = []
        for steps in itertools.zip_longest(*map(_steps, self.ranks), fillvalue=()):
            partner = np.arange(self.num_ranks, dtype=np.int32)
            adds, replaces = np.zeros((2, self.num_ranks), np.bool_)
            for rank, other, is_sum in itertools.chain(*steps):
                partner[rank], partner[other] = other, rank
                (adds if is_sum else replaces)[rank] = True
            exchanges.append((partner, adds, replaces))
        return tuple(exchanges)


def _steps(group: tuple[int, ...]) -> list[list[tuple[int, int, bool]]]:
    """For each exchange of a group: ranks, their partners, and whether they add what they get."""
    doublings = len(group).bit_length() - 1
    inner, outer = group[: 1 << doublings], group[1 << doublings :]
    steps = [
        [(rank, inner[i ^ 1 << n], True) for i, rank in enumerate(inner)] for n in range(doublings)
    ]
    if outer:
        pairs = list(zip(inner, outer, strict=False))
        steps.insert(0, [(a, b, True) for a, b in pairs])
        steps.append([(b, a, False) for a, b in pairs])
    return steps
