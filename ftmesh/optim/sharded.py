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
taken as they are; so are all outside, where arrays are whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from ftmesh import collectives
from ftmesh.collectives.gradients import BUCKET_BYTES, Means, in_turns, value_and_own_grad
from ftmesh.collectives.owners import check_owned, gather_chunks, own_chunks, scatter_chunks
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.layout.order import WIDTH
from ftmesh.layout.owned import Owned, OwnedBucket
from ftmesh.optim.leafwise import NotElementwiseError
from ftmesh.optim.rank import Pieces, Rank
from ftmesh.optim.states import ShardedState, Slot, StateForm, form_of
from ftmesh.plans import Plan

Reduce = Literal["mean", "sum", "none"]


class ShardedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation whose state is sharded over the owners of a plan's chunks.

    `transformation` may do anything element by element and take sums over whole tensors, as norms
    are; any other is refused. The sums of all tensors travel together, a few numbers, on the plan
    for their size, as `Plan.at` gives it, or on `norm_plan`.

    Gradients are added in `accumulate_dtype` and travel in `wire_dtype`, as for `ftmesh.psum`, in
    buckets of up to `bucket_bytes`, filled in `order`, the positions of leaves; updates travel in
    their own dtype. `reduce` says what is made of gradients that differ from rank to rank. With
    `overlap` each bucket sets out during the backward pass that `value_and_grad` makes, and buckets
    are smaller, unless said: give `order` as `backward_order` finds it.

    On a mesh with more axes than the plan's, give the `mesh`, and the `specs` of the parameters: a
    ``PartitionSpec`` or a pytree of them.
    """

    work: Work

    def __new__(
        cls, transformation: optax.GradientTransformation, plan: Plan, axis_name: Any = "data",
        **options: Any,
    ) -> ShardedOptimizer:  # fmt: skip
        """See `Plan.shard`."""
        work = Work(transformation, plan, axis_name, **options)
        made = super().__new__(cls, work.init, work.update)
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
    plan: Plan
    axis_name: Any = "data"
    wire_dtype: Any = None
    bucket_bytes: int | None = None
    norm_plan: Plan | None = None
    overlap: bool = False
    accumulate_dtype: Any = None
    order: Sequence[int] | None = None
    reduce: Reduce = "mean"
    param_specs: Any = None
    mesh: Mesh | None = None

    def __post_init__(self) -> None:
        check_owned(self.plan)
        if self.reduce not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduce is 'mean', 'sum' or 'none', not {self.reduce!r}")

    # An optax transformation ------------------------------------------------------------------

    def init(self, params: Any) -> ShardedState:
        """The first state: of a rank where the axis is bound, else of all, on the plan's mesh."""
        if not self._is_bound():
            run = self._on_mesh(self.init, (self._specs_of(params),), self.specs(params))
            made: ShardedState = run(params)
            return made
        layout, tree = self.layout(params), jax.tree.structure(params)
        rank = self._rank(layout, params)
        traced = jax.make_jaxpr(self.transformation.init)(tree.unflatten(layout.types))
        values = rank.results(traced, rank.given("params", self._owned(params, layout)))
        return rank.state(self.form(params), values)

    def update(
        self, updates: Any, state: ShardedState, params: Any = None, **extra: Any
    ) -> tuple[Any, ShardedState]:
        """Updates, the same at all ranks, from gradients; and the new state."""
        like = updates if params is None else params
        if not self._is_bound():
            specs = self._specs_of(like)
            whole = PartitionSpec()
            run = self._on_mesh(
                lambda updates, state, params, extra: self.update(updates, state, params, **extra),
                (specs, self.specs(like), whole if params is None else specs, whole),
                (specs, self.specs(like)),
            )
            made: tuple[Any, ShardedState] = run(updates, state, params, extra)
            return made
        layout, tree = self.layout(like), jax.tree.structure(like)
        form = self.form(like)
        if not isinstance(state, ShardedState) or state.owners != layout.fingerprint:
            raise ArgumentError(
                "this state is not sharded for the owners of this plan, or is of other parameters: "
                "take one of this optimizer's init, or one that a checkpoint has restored for it"
            )
        rank = self._rank(layout, like)
        grads = self._reduced(updates, layout, tree)
        given = [rank.given("grads", grads), rank.given_state(state, form)]
        types = [tree.unflatten(_types(grads, layout)), form.tree.unflatten(form.types)]
        if params is not None:
            given.append(rank.given("params", self._owned(params, layout)))
            types.append(tree.unflatten(layout.types))
        transform = optax.with_extra_args_support(self.transformation).update
        traced, (out, _) = jax.make_jaxpr(
            lambda *args: transform(*args, **extra), return_shape=True
        )(*types)
        if jax.tree.structure(out) != tree:
            raise NotElementwiseError("this optimizer gives updates of another structure")
        values = rank.results(traced, [value for values in given for value in values])
        mine = rank.pieces(values[: tree.num_leaves], [x.dtype for x in jax.tree.leaves(out)])
        new = tree.unflatten(self._gathered(mine, layout))
        return new, rank.state(form, values[tree.num_leaves :])

    # Around it --------------------------------------------------------------------------------

    def value_and_grad(self, loss: Callable[..., Any], *, has_aux: bool = False) -> Any:
        """See `ShardedOptimizer`."""
        own = value_and_own_grad(loss, self.axis_name, has_aux=has_aux)
        if not self.overlap:
            return own

        def run(params: Any, *args: Any) -> Any:
            value, grads = own(params, *args)
            layout, tree = self.layout(params), jax.tree.structure(params)
            return value, Means(self._reduced(grads, layout, tree), layout.fingerprint)

        return run

    def specs(self, params: Any) -> Any:
        """See `ShardedOptimizer`."""
        layout, form = self.layout(params), self.form(params)
        leaves = [x if isinstance(x, Slot) else PartitionSpec() for x in form.leaves]
        split = PartitionSpec((self.axis_name, *self._other_axes(params)))
        rows = tuple(
            tuple(split if has else None for has in form.buckets(layout, row))
            for row in range(len(form.dtypes))
        )
        return ShardedState(form.tree.unflatten(leaves), rows, layout.fingerprint)

    def layout(self, params: Any) -> Owned:
        """See `ShardedOptimizer`."""
        program, size = self.plan.program, self.bucket_bytes
        if size is None:
            size = BUCKET_BYTES if self.overlap else collectives.BUCKET_BYTES
        types = self._types_of_rank(params)
        order = self.order
        if order is None and self.overlap:
            order = range(len(types))[::-1]  # the last are there first
        return Owned.of(types, program.owned, program.num_chunks, size, order)

    def form(self, params: Any) -> StateForm:
        """See `ShardedOptimizer`."""
        return form_of(self.transformation.init, self.layout(params), jax.tree.structure(params))

    # Inside -----------------------------------------------------------------------------------

    def _is_bound(self) -> bool:
        return _compat.axis_exists(self.axis_name)

    def _on_mesh(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        mesh = self.mesh or self.plan.jax_mesh(self.axis_name)
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        )

    def _specs_of(self, params: Any) -> Any:
        """How parameters lie on the mesh: a spec for each."""
        specs = PartitionSpec() if self.param_specs is None else self.param_specs
        return jax.tree.map(
            lambda spec, part: jax.tree.map(lambda _: spec, part),
            specs,
            params,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

    def _axes_of(self, params: Any) -> list[set[Any]]:
        """For each leaf, the other axes that it is split over."""
        specs = jax.tree.leaves(
            self._specs_of(params), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        return [
            {name for part in spec if part for name in _names(part)} - {self.axis_name}
            for spec in specs
        ]

    def _other_axes(self, params: Any) -> tuple[Any, ...]:
        return tuple(sorted(set().union(*self._axes_of(params)), key=str))

    def _types_of_rank(self, params: Any) -> list[Any]:
        """The types of the leaves as a rank has them, of which others along more axes have more."""
        types = [jax.ShapeDtypeStruct(jnp.shape(x), x.dtype) for x in _arrays(params)]
        if self.param_specs is None or self._is_bound():
            return types
        if self.mesh is None:
            raise ArgumentError("specs are about a mesh with more axes: give mesh too")
        specs = jax.tree.leaves(
            self._specs_of(params), is_leaf=lambda x: isinstance(x, PartitionSpec)
        )
        return [
            jax.ShapeDtypeStruct(
                jax.NamedSharding(self.mesh, spec).shard_shape(type_.shape), type_.dtype
            )
            for type_, spec in zip(types, specs, strict=True)
        ]

    def _rank(self, layout: Owned, params: Any) -> Rank:
        plan, axes = self.norm_plan or self.plan, self._axes_of(params)

        def total(vectors: list[jax.Array]) -> list[jax.Array]:
            sums = plan.psum(vectors, self.axis_name)
            for name in self._other_axes(params):
                is_split = np.array([name in each for each in axes])
                sums = [jnp.where(is_split, lax.psum(x, name), x) for x in sums]
            return list(sums)

        rows = [bucket.rows(self.axis_name) for bucket in layout.buckets]
        return Rank(layout, rows, total)

    def _owned(self, tree: Any, layout: Owned) -> Pieces:
        """The rows that a rank owns of arrays that all ranks have."""
        leaves = _arrays(tree)

        def own(bucket: OwnedBucket) -> jax.Array:
            buffer = bucket.packing.pack(_alike([leaves[i] for i in bucket.members]))
            buffer = _compat.as_varying(buffer, self.axis_name)
            return own_chunks(buffer, self.axis_name, self.plan.program).reshape(-1, WIDTH)

        return Pieces([own(b) for b in layout.buckets], {i: leaves[i] for i in layout.whole})

    def _reduced(self, grads: Any, layout: Owned, tree: Any) -> Pieces:
        """The rows that a rank owns of what is made of the gradients."""
        if isinstance(grads, Means):
            if grads.owners == layout.fingerprint:
                pieces: Pieces = grads.tree
                return pieces
            if grads.owners:
                raise ArgumentError("these gradients are sharded for the owners of another plan")
            return self._owned(grads.tree, layout)
        leaves = _arrays(grads)
        shapes = [leaf.shape for leaf in leaves]
        if jax.tree.structure(grads) != tree or shapes != [t.shape for t in layout.types]:
            raise ArgumentError("gradients must have the structure and shapes of the parameters")
        if self.reduce == "none" or self._are_the_same(leaves):
            return self._owned(grads, layout)
        leaves = [_compat.as_varying(leaf, self.axis_name) for leaf in leaves]
        buckets = [[leaves[i] for i in bucket.members] for bucket in layout.buckets]
        if self.overlap:
            rows = in_turns(buckets, lambda at, arrays: self._scattered(layout, at, arrays))
        else:
            rows = [self._scattered(layout, at, arrays) for at, arrays in enumerate(buckets)]
        reduce = self.plan.pmean if self.reduce == "mean" else self.plan.psum
        few = reduce({i: leaves[i] for i in layout.whole}, self.axis_name)
        return Pieces([row for (row,) in rows], few)

    def _scattered(self, layout: Owned, at: int, arrays: list[jax.Array]) -> list[jax.Array]:
        """The rows of one bucket."""
        mine = scatter_chunks(
            layout.buckets[at].packing.pack(_alike(arrays)),
            self.axis_name,
            plan=self.plan.as_unrolled if self.overlap else self.plan,  # nothing runs beside loops
            mean=self.reduce == "mean",
            wire_dtype=self.wire_dtype,
            accumulate_dtype=self.accumulate_dtype,
        )
        return [mine.reshape(-1, WIDTH)]

    def _are_the_same(self, leaves: list[jax.Array]) -> bool:
        """Whether gradients are typed as the same at all ranks: they have been summed already."""
        return _compat.checks_varying() and not any(
            self.axis_name in _compat.varying_axes(leaf) for leaf in leaves
        )

    def _gathered(self, pieces: Pieces, layout: Owned) -> list[jax.Array]:
        """The leaves of which every rank has its rows."""
        leaves = dict(pieces.whole)
        for bucket, mine in zip(layout.buckets, pieces.rows, strict=True):
            chunks = mine.reshape(-1, bucket.packing.rows, WIDTH)
            buffer = gather_chunks(
                _compat.as_varying(chunks, self.axis_name), self.axis_name, plan=self.plan
            )
            leaves.update(zip(bucket.members, bucket.packing.unpack(buffer), strict=True))
        return [leaves[i] for i in range(len(layout.types))]


def _arrays(tree: Any) -> list[Any]:
    return [x if hasattr(x, "dtype") else jnp.asarray(x) for x in jax.tree.leaves(tree)]


def _alike(arrays: list[jax.Array]) -> list[jax.Array]:
    """The same arrays, in a dtype for all of them."""
    dtype = jnp.result_type(*arrays)
    return [array.astype(dtype) for array in arrays]


def _types(pieces: Pieces, layout: Owned) -> list[Any]:
    """The types of the leaves that these are pieces of."""
    types = {i: jax.ShapeDtypeStruct(x.shape, x.dtype) for i, x in pieces.whole.items()}
    for bucket, row in zip(layout.buckets, pieces.rows, strict=True):
        for i in bucket.members:
            types[i] = jax.ShapeDtypeStruct(layout.types[i].shape, row.dtype)
    return [types[i] for i in range(len(layout.types))]


def _names(part: Any) -> tuple[Any, ...]:
    """The axes that one dimension is split over."""
    return part if isinstance(part, tuple) else (part,)
