"""Sharded: any optax transformation, its state and its work shared out among the owning chips.

    optimizer = plan.shard(optax.adamw(1e-3))
    state = optimizer.init(params)
    updates, state = optimizer.update(grads, state, params)
    params = optax.apply_updates(params, updates)

It is an optax transformation itself, for `flax.training.train_state`, `nnx.Optimizer` and
`optax.chain`. An update stands between the two halves of an all-reduce: gradients are summed to the
owners of chunks, each owner has the updates of its rows, and those go to everyone, chips off the
main rings too. As much travels as in a plain all-reduce, and of the state a device keeps its rows:
about one part in as many as there are owners.

Where the axis is bound, in shard_map or pmap, gradients are a rank's own, and their mean is made on
the way. Those that are the same at all ranks already, as types tell under ``check_vma=True``, are
taken as they are; so are all gradients outside, where arrays are those of the whole mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from ftmesh import collectives
from ftmesh.collectives.gradients import (
    BUCKET_BYTES,
    Means,
    check_order,
    reduced_on_the_way,
    value_and_own_grad,
)
from ftmesh.collectives.partitioning import WHOLE
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.layout.owned_buckets import Owned
from ftmesh.optim.communication import OnMesh, Reduce, Travel, held_of, turns
from ftmesh.optim.elementwise.trace import NotShardableError
from ftmesh.optim.state import Held, Rank, ShardedState, Slot, StateForm, form_of, rows_of
from ftmesh.planning.plan import Plan


class ShardedOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An optax transformation whose state is sharded over the owners of a plan's chunks."""

    work: Work

    def __new__(
        cls,
        transformation: optax.GradientTransformation,
        plan: Plan,
        axis_name: Any = "data",
        *,
        wire_dtype: Any = None,
        accumulate_dtype: Any = None,
        bucket_bytes: int | None = None,
        reduce: Reduce = "mean",
        norm_plan: Plan | None = None,
        overlap: bool = False,
        order: Sequence[int] | None = None,
        specs: Any = None,
        mesh: Any = None,
    ) -> ShardedOptimizer:
        """`transformation`, shared out among the owners of the chunks of `plan`.

        Where its algorithm has no owners, those of `Plan.with_reduce_scatter` are taken.

        It may do anything element by element, and take sums over whole tensors, as norms are; any
        other is refused. The sums of all tensors travel together, a few numbers, on the plan for
        their size, as `Plan.at` gives it, or on `norm_plan`. A state keeps the dtypes that it
        begins with.

        Gradients are added in `accumulate_dtype` and travel in `wire_dtype`, as for `ftmesh.psum`,
        in buckets of up to `bucket_bytes`, filled in `order`, the positions of leaves; updates
        travel in their own dtype. `reduce` says what is made of gradients that differ from rank to
        rank: their mean, their sum, or, with "none", nothing, since they do not. With `overlap`
        each bucket sets out during the backward pass that `value_and_grad` makes, and buckets are
        smaller, unless said; give `order` as `backward_order` finds it.

        On a mesh with more axes than the plan's, `specs` say how parameters lie on it, as for
        `Plan.value_and_grad`; so does `mesh`. Each piece then has its own sum, and a norm is that
        of all pieces of a tensor.
        """
        travel = Travel(plan.with_reduce_scatter, axis_name, wire_dtype, accumulate_dtype, reduce)
        if bucket_bytes is None:
            bucket_bytes = BUCKET_BYTES if overlap else collectives.BUCKET_BYTES
        work = Work(
            transformation,
            travel,
            OnMesh(plan, axis_name, specs, mesh),
            norm_plan or plan,
            bucket_bytes,
            overlap,
            order,
        )
        made: ShardedOptimizer = super().__new__(cls, work.init, work.update)
        made.work = work
        return made

    def value_and_grad(self, loss: Callable[..., Any], *, has_aux: bool = False) -> Any:
        """As `jax.value_and_grad`: the value of a rank, and gradients for `update`.

        With `overlap` those are `Means`, the rank's rows of them; else they are the rank's own.
        """
        return self.work.value_and_grad(loss, has_aux=has_aux)

    def specs(self, params: Any) -> Any:
        """How the state lies on a mesh: a ``PartitionSpec`` for each leaf, as shard_map wants."""
        return self.work.specs(params)

    def gather_state(self, state: ShardedState, params: Any) -> Any:
        """The state as the transformation alone would have it, whole at every rank.

        To go on with another plan, which has other owners: see `shard_state`. Checkpoints do
        without.
        """
        return self.work.gather_state(state, params)

    def shard_state(self, state: Any, params: Any) -> ShardedState:
        """The inverse of `gather_state`: the rows of a whole state."""
        return self.work.shard_state(state, params)

    def layout(self, params: Any) -> Owned:
        """Where every leaf of `params` lies in buckets, and who owns it."""
        return self.work.layout(params)

    def form(self, params: Any) -> StateForm:
        """The form of the state for `params`."""
        return self.work.form(params)


@dataclass(frozen=True, eq=False)
class Work:
    """What a `ShardedOptimizer` does; see there."""

    transformation: optax.GradientTransformation
    travel: Travel
    place: OnMesh
    norm_plan: Plan
    bucket_bytes: int
    overlap: bool
    order: Sequence[int] | None

    def init(self, params: Any) -> ShardedState:
        """The first state: of a rank where the axis is bound, else of all, on the mesh."""
        if not self.place.is_bound:
            in_specs = (self.place.specs_of(params),)
            made: ShardedState = self.place.run(self.init, params, in_specs, self.specs(params))(
                params
            )
            return made
        layout, tree = self.layout(params), jax.tree.structure(params)
        rank = self._rank(layout, params)
        traced = jax.make_jaxpr(self.transformation.init)(tree.unflatten(rank.types))
        values = rank.results(traced, rank.given("params", self.travel.owned(params, layout)))
        return rank.state(self.form(params), values)

    def update(
        self, updates: Any, state: ShardedState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        """Updates, the same at all ranks, from gradients; and the new state."""
        like = updates if params is None else params
        if not self.place.is_bound:
            return self._update_on_mesh(updates, state, params, extra)
        layout, tree, form = self.layout(like), jax.tree.structure(like), self.form(like)
        if any(self.place.axis_name in _compat.varying_axes(x) for x in jax.tree.leaves(extra)):
            raise ArgumentError(
                f"extra arguments must be the same at all ranks, and of {sorted(extra)} some "
                "differ: take their mean first, as plan.pmean makes it"
            )
        _check_owners(state, layout)
        rank = self._rank(layout, like)
        grads = self.travel.reduced(updates, layout, tree)
        inputs = rank.given("grads", grads) + rank.given_state(state, form)
        of_grads = _dtypes(grads, layout)
        types = [
            tree.unflatten(
                [jax.ShapeDtypeStruct(each.shape, of_grads[i]) for i, each in enumerate(rank.types)]
            ),
            form.tree.unflatten(form.types),
        ]
        if params is not None:
            inputs += rank.given("params", self.travel.owned(params, layout))
            types.append(tree.unflatten(rank.types))
        transform = optax.with_extra_args_support(self.transformation).update
        traced, (out, _) = jax.make_jaxpr(
            lambda *args: transform(*args, **extra), return_shape=True
        )(*types)
        if jax.tree.structure(out) != tree:
            raise NotShardableError("this optimizer gives updates of another structure")
        values = rank.results(traced, inputs)
        mine = rank.held(values[: tree.num_leaves], [x.dtype for x in jax.tree.leaves(out)])
        new = tree.unflatten(self.travel.gathered(mine, layout))
        return new, rank.state(form, values[tree.num_leaves :])

    def _update_on_mesh(
        self, updates: Any, state: ShardedState, params: Any, extra: dict[str, Any]
    ) -> tuple[Any, ShardedState]:
        like = updates if params is None else params
        of_params, of_state = self.place.specs_of(like), self.specs(like)
        _check_owners(state, self.layout(like))

        def run(updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> Any:
            work = replace(self, travel=replace(self.travel, reduce="none"))  # they are the same
            return work.update(updates, state, params, **extra)

        in_specs = (of_params, of_state, WHOLE if params is None else of_params, WHOLE)
        mapped = self.place.run(run, like, in_specs, (of_params, of_state))
        made: tuple[Any, ShardedState] = mapped(updates, state, params, extra)
        return made

    def value_and_grad(self, loss: Callable[..., Any], *, has_aux: bool = False) -> Any:
        """See `ShardedOptimizer`."""
        if not self.overlap:
            return value_and_own_grad(loss, self.place.axis_name, has_aux=has_aux)
        unrolled = self.travel.plan.unrolled_variant  # nothing runs beside a loop
        travel = replace(self.travel, plan=unrolled)

        def run(params: Any, *args: Any) -> Any:
            layout, tree = self.layout(params), jax.tree.structure(params)
            leaves = [jnp.asarray(leaf) for leaf in jax.tree.leaves(params)]

            def of_slots(slots: list[list[Any]]) -> Any:
                reduce = partial(travel.reduced_turn, layout)
                passed = reduced_on_the_way(leaves, turns(layout), slots, reduce, travel.axis_name)
                return loss(tree.unflatten(passed), *args)

            slots = travel.slots(leaves, layout)
            value, made = jax.value_and_grad(of_slots, has_aux=has_aux)(slots)
            return value, Means(held_of(made, layout), layout.fingerprint)

        return run

    def specs(self, params: Any) -> Any:
        """See `ShardedOptimizer`."""
        layout, form = self.layout(params), self.form(params)
        leaves = [x if isinstance(x, Slot) else WHOLE for x in form.leaves]
        split = PartitionSpec((self.place.axis_name, *self.place.other_axes(params)))
        rows = tuple(
            tuple(split if has else None for has in form.buckets(layout, row))
            for row in range(len(form.dtypes))
        )
        return ShardedState(form.tree.unflatten(leaves), rows, layout.fingerprint)

    def layout(self, params: Any) -> Owned:
        """See `ShardedOptimizer`."""
        types, program = self.place.types_of_rank(params), self.travel.plan.program
        order = self.order
        if order is None and self.overlap:
            order = range(len(types))[::-1]  # the last are there first
        if order is not None:
            check_order(order, len(types))
        return Owned.of(types, program.owned, program.num_chunks, self.bucket_bytes, order)

    def form(self, params: Any) -> StateForm:
        """See `ShardedOptimizer`."""
        types, tree = self.place.whole_types(params), jax.tree.structure(params)
        return form_of(self.transformation.init, self.layout(params), types, tree)

    def gather_state(self, state: ShardedState, params: Any) -> Any:
        """See `ShardedOptimizer`."""
        if not self.place.is_bound:
            specs = (self.specs(params), self.place.specs_of(params))
            return self.place.run(self.gather_state, params, specs, WHOLE)(state, params)
        layout, form = self.layout(params), self.form(params)
        _check_owners(state, layout)
        whole = {i: jnp.zeros((), layout.types[i].dtype) for i in layout.whole}
        rows = [self.travel.gathered(Held(row, whole), layout) for row in rows_of(state, layout)]
        plain = iter(jax.tree.leaves(state.inner))
        return form.tree.unflatten(
            [rows[x.row][x.leaf] if isinstance(x, Slot) else next(plain) for x in form.leaves]
        )

    def shard_state(self, state: Any, params: Any) -> ShardedState:
        """See `ShardedOptimizer`."""
        if not self.place.is_bound:
            in_specs = (WHOLE, self.place.specs_of(params))
            run = self.place.run(self.shard_state, params, in_specs, self.specs(params))
            made: ShardedState = run(state, params)
            return made
        layout, form = self.layout(params), self.form(params)
        zeros = [jnp.zeros(each.shape, each.dtype) for each in layout.types]
        rows = [[x.astype(dtype) for x in zeros] for dtype in form.dtypes]
        leaves = jax.tree.leaves(state)
        for x, leaf in zip(form.leaves, leaves, strict=True):
            if isinstance(x, Slot):
                rows[x.row][x.leaf] = leaf
        inner = [
            x if isinstance(x, Slot) else leaf for x, leaf in zip(form.leaves, leaves, strict=True)
        ]
        owned = [self.travel.owned(row, layout).rows for row in rows]
        kept = tuple(
            tuple(x if has else None for x, has in zip(row, form.buckets(layout, at), strict=True))
            for at, row in enumerate(owned)
        )
        return ShardedState(form.tree.unflatten(inner), kept, layout.fingerprint)

    def _rank(self, layout: Owned, params: Any) -> Rank:
        """What computes for the calling rank."""

        def total(vectors: list[jax.Array]) -> list[jax.Array]:
            others = self.place.other_axes(params)
            known = {self.place.axis_name, *others}
            for axis in sorted(set().union(*map(_compat.varying_axes, vectors)) - known, key=str):
                raise ArgumentError(
                    f"this optimizer takes sums over whole tensors, and tensors differ along "
                    f"{axis!r} too: give specs=, which say how they are cut along it"
                )
            sums: list[jax.Array] = self.norm_plan.psum(vectors, self.place.axis_name)
            for name, is_split in others.items():
                sums = [jnp.where(np.array(is_split), lax.psum(x, name), x) for x in sums]
            return sums

        rows = [bucket.rows(self.place.axis_name) for bucket in layout.buckets]
        return Rank(layout, self.place.whole_types(params), rows, total)


def _check_owners(state: Any, layout: Owned) -> None:
    if not isinstance(state, ShardedState) or state.owners != layout.fingerprint:
        raise ArgumentError(
            "this state is not sharded for the owners of this plan, or is of other parameters: "
            "take gather_state of the optimizer that it comes from, if it is sharded, and then "
            "shard_state of this one"
        )


def _dtypes(held: Held, layout: Owned) -> dict[int, Any]:
    """The dtype of each leaf that these are pieces of."""
    dtypes = {i: x.dtype for i, x in held.whole.items()}
    for bucket, row in zip(layout.buckets, held.rows, strict=True):
        dtypes |= dict.fromkeys(bucket.members, row.dtype)
    return dtypes
