"""Optimizer: any optax transformation, its state and its work shared out among the owning chips.

    optimizer = ShardedOptimizer(optax.adamw(1e-3), plan, "data")
    state = optimizer.init(params)  # on the plan's mesh; optimizer.specs(params) for shard_map

    def step(params, state, batch):  # inside shard_map
        grads = jax.grad(loss)(params, batch)
        return optimizer.update(grads, state, params)

An update stands between the two halves of an all-reduce: gradients are summed to the owners of
chunks, each owner updates its shard of the weights, and the new weights go to everyone, chips off
the main rings too. As much travels as in a plain all-reduce, and of the state a device keeps its
shard: about one part in as many as there are owners. `shards` tells of those that own nothing.

With ``overlap=True`` the first half is in the backward pass, if that is the optimizer's own:

    def step(params, state, batch):
        value, means = optimizer.value_and_grad(loss)(params, batch)
        return optimizer.update(means, state, params)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ftmesh import collectives
from ftmesh.collectives.gradients import (
    BUCKET_BYTES,
    Means,
    backward_order,
    value_and_own_grad,
)
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.optim.elementwise import NotElementwiseError, require_elementwise
from ftmesh.optim.layerwise import squares
from ftmesh.optim.shards import Shards, with_mean_shards
from ftmesh.plans import Plan


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ShardedState:
    """A state as optax makes it, with shards in place of tensors, and a mark of who owns what."""

    inner: Any
    owners: str = field(metadata={"static": True})


@dataclass(frozen=True)
class ShardedOptimizer:
    """An optax transformation whose state is sharded over the owners of a plan's chunks.

    The transformation must treat every element alike, or take its norms from `ftmesh.train`'s
    `lars`, `lamb` and `clip_by_global_norm`; any other is refused.

    Gradients travel in `wire_dtype`, in buckets of up to `bucket_bytes`. With `overlap` each sets
    out during the backward pass that `value_and_grad` makes, and buckets are smaller, unless said;
    new weights go out in large ones. The sum of norms, a few numbers, is made on `norm_plan` where
    a quicker one than `plan` is given.
    """

    transformation: optax.GradientTransformation
    plan: Plan
    axis_name: Any
    wire_dtype: Any = None
    bucket_bytes: int | None = None
    norm_plan: Plan | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        _ = self._shards  # refuses a plan without owners

    def init(self, params: Any) -> ShardedState:
        """The first state: of a rank where the axis is bound, else of all, on the plan's mesh."""
        if not self._axis_is_bound():
            run = self._on_mesh(self.init, PartitionSpec(), self.specs(params))
            made: ShardedState = run(params)
            return made
        self._check(self.transformation.init, (params,), (True,))
        return self._marked(self.transformation.init(jax.tree.map(self._shards.own, params)))

    def value_and_grad(self, loss: Callable[..., Any], *, has_aux: bool = False) -> Any:
        """As `jax.value_and_grad`: the value of a rank, and gradients for `update`.

        With `overlap` those are `Means`, the rank's shards of them; else they are the rank's own.
        """
        if not self.overlap:
            return value_and_own_grad(loss, self.axis_name, has_aux=has_aux)

        def run(params: Any, *args: Any) -> Any:
            shards = replace(
                self._shards,
                plan=self.plan.as_unrolled,  # nothing runs beside a loop
                bucket_bytes=self.bucket_bytes or BUCKET_BYTES,
            )
            order = backward_order(loss, params, *args, has_aux=has_aux)

            def of_slots(slots: Any) -> Any:
                return loss(with_mean_shards(params, slots, shards=shards, order=order), *args)

            slots = jax.tree.map(shards.empty, params)
            value, tree = jax.value_and_grad(of_slots, has_aux=has_aux)(slots)
            return value, Means(tree, self._owners)

        return run

    def update(
        self,
        grads: Any,
        state: ShardedState,
        params: Any,
        *,
        reduce: Literal["mean", "sum", "none"] = "mean",
        **extra: Any,
    ) -> tuple[Any, ShardedState]:
        """The new parameters and the new state, from the gradients of every rank.

        `reduce` says what is made of them: their mean over all ranks, or their sum; with "none"
        they are the same at all ranks already, as `with_mean_gradients` leaves them. `Means` are
        taken for what they are. `extra` goes to the transformation.
        """
        reduced = self._reduced(grads, params, reduce)
        shapes = {path: leaf.shape for path, leaf in _with_paths(params)}
        transform = optax.with_extra_args_support(self.transformation).update
        self._check(
            partial(transform, norms=_no_norms, **extra),
            (_with_dtypes(params, reduced), self._whole_state(params), params),
            (True, self._is_sharded(params), True),
        )
        shards = jax.tree.map(self._shards.own, params)
        updates, inner = transform(
            reduced,
            self._inner(state),
            shards,
            norms=self._norms(shapes),
            **extra,
        )
        leaves, tree = jax.tree.flatten(optax.apply_updates(shards, updates))
        new = tree.unflatten(self._shards.gather(leaves, list(shapes.values())))
        return new, self._marked(inner)

    def specs(self, params: Any) -> Any:
        """How the state lies on a mesh: a ``PartitionSpec`` for each leaf, as shard_map wants."""

        def spec(leaf: Any, sharded: bool) -> PartitionSpec:
            if not sharded:
                return PartitionSpec()
            return PartitionSpec(*(None for _ in leaf.shape[1:]), self.axis_name)

        return self._marked(
            jax.tree.map(spec, self._sharded_state(params), self._is_sharded(params))
        )

    def gather_state(self, state: ShardedState, params: Any) -> Any:
        """The state as the transformation alone would have it, whole at every rank.

        For checkpoints, and to go on with another plan, which has other owners: see `shard_state`.
        """
        if not self._axis_is_bound():
            everywhere = PartitionSpec()
            specs = self.specs(params), everywhere
            return self._on_mesh(self.gather_state, specs, everywhere)(state, params)
        leaves, tree = jax.tree.flatten(self._inner(state))
        sharded = jax.tree.leaves(self._is_sharded(params))
        shapes = [leaf.shape for leaf in jax.tree.leaves(self._whole_state(params))]
        places = [i for i, is_sharded in enumerate(sharded) if is_sharded]
        wholes = self._shards.gather([leaves[i] for i in places], [shapes[i] for i in places])
        for i, whole in zip(places, wholes, strict=True):
            leaves[i] = whole
        return tree.unflatten(leaves)

    def shard_state(self, state: Any, params: Any) -> ShardedState:
        """The inverse of `gather_state`: the shards of a whole state."""
        if not self._axis_is_bound():
            run = self._on_mesh(self.shard_state, PartitionSpec(), self.specs(params))
            made: ShardedState = run(state, params)
            return made
        sharded = self._is_sharded(params)
        return self._marked(
            jax.tree.map(lambda x, yes: self._shards.own(x) if yes else x, state, sharded)
        )

    # Inside -----------------------------------------------------------------------------------

    @property
    def _shards(self) -> Shards:
        size = None if self.overlap else self.bucket_bytes
        return Shards(self.plan, self.axis_name, size or collectives.BUCKET_BYTES, self.wire_dtype)

    @property
    def _owners(self) -> str:
        return hashlib.sha256(self.plan.program.owned.tobytes()).hexdigest()[:16]

    def _marked(self, inner: Any) -> ShardedState:
        return ShardedState(inner, self._owners)

    def _inner(self, state: ShardedState) -> Any:
        """What the transformation has to do with, if it is sharded for these owners."""
        if not isinstance(state, ShardedState) or state.owners != self._owners:
            raise ArgumentError(
                "this state is not sharded for the owners of this plan: take gather_state of the "
                "optimizer that it comes from, if it is sharded, and then shard_state of this one"
            )
        return state.inner

    def _axis_is_bound(self) -> bool:
        return _compat.axis_exists(self.axis_name)

    def _on_mesh(self, run: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        mesh = self.plan.jax_mesh(self.axis_name)
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        )

    def _shard_type(self, leaf: Any, times: int = 1) -> jax.ShapeDtypeStruct:
        *ones, length = self._shards.shape(leaf.shape)
        return jax.ShapeDtypeStruct((*ones, times * length), leaf.dtype)

    def _sharded_state(self, params: Any, times: int = 1) -> Any:
        """The types of a state for shards, or for shards so many times as long."""
        types = jax.tree.map(lambda leaf: self._shard_type(leaf, times), _types(params))
        return jax.eval_shape(self.transformation.init, types)

    def _whole_state(self, params: Any) -> Any:
        return jax.eval_shape(self.transformation.init, _types(params))

    def _is_sharded(self, params: Any) -> Any:
        """Which leaves of the state are shards: those that are longer for longer shards."""
        once, twice = (self._sharded_state(params, times) for times in (1, 2))
        sharded = jax.tree.map(lambda a, b: a.shape != b.shape, once, twice)
        for is_sharded, shard, whole in zip(
            *map(jax.tree.leaves, (sharded, once, self._whole_state(params))), strict=True
        ):
            expected = self._shards.shape(whole.shape) if is_sharded else whole.shape
            if shard.shape != expected:
                raise NotElementwiseError(
                    f"this optimizer cannot be sharded: it keeps a state of shape {whole.shape} "
                    f"for whole tensors, and of shape {shard.shape}, not {expected}, for shards"
                )
        return sharded

    def _reduced(self, grads: Any, params: Any, reduce: str) -> Any:
        """The shards that a rank owns of what is made of the gradients."""
        if reduce not in ("mean", "sum", "none"):
            raise ArgumentError(f"reduce is 'mean', 'sum' or 'none', not {reduce!r}")
        if isinstance(grads, Means):
            if reduce != "mean":
                raise ArgumentError(f"these gradients are means already, and reduce is {reduce!r}")
            if grads.owners == self._owners:
                return grads.tree
            if grads.owners:
                raise ArgumentError("these gradients are sharded for the owners of another plan")
            grads, reduce = grads.tree, "none"
        if jax.tree.map(jnp.shape, grads) != jax.tree.map(jnp.shape, params):
            raise ArgumentError("gradients must have the structure and shapes of the parameters")
        leaves, tree = jax.tree.flatten(grads)
        shards = self._shards
        if reduce == "none":
            return tree.unflatten([shards.own(leaf) for leaf in leaves])
        scatter = shards.scatter_mean if reduce == "mean" else shards.scatter_sum
        return tree.unflatten(scatter(leaves))

    def _norms(self, shapes: dict[Any, Any]) -> Callable[..., tuple[Any, ...]]:
        """As `squared_norms`, of tensors whose shards are given, in one sum over all ranks."""

        def norms(*trees: Any) -> tuple[Any, ...]:
            mine = [
                jnp.sum(jnp.where(self._shards.is_real(shapes[path]), squares(leaf), 0))
                for tree in trees
                for path, leaf in _with_paths(tree)
            ]
            plan = self.norm_plan or self.plan
            totals = list(plan.psum(jnp.stack(mine), self.axis_name))
            every: tuple[Any, ...] = jax.tree.unflatten(jax.tree.structure(trees), totals)
            return every

        return norms

    def _check(self, function: Any, arguments: Any, is_sharded: Any) -> None:
        """Refuses a function that would do something else with shards; see `elementwise`."""
        wholes = _types(arguments)
        flags = jax.tree.map(
            lambda flag, part: jax.tree.map(lambda _: flag, part), is_sharded, wholes
        )
        shards = jax.tree.map(
            lambda leaf, flag: self._shard_type(leaf) if flag else leaf, wholes, flags
        )
        require_elementwise(function, wholes, shards, flags)


def _types(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def _with_dtypes(tree: Any, other: Any) -> Any:
    """The types of `tree`, with the dtypes of `other`."""
    return jax.tree.map(
        lambda x, y: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(y)), tree, other
    )


def _with_paths(tree: Any) -> list[tuple[Any, Any]]:
    leaves: list[tuple[Any, Any]] = jax.tree.leaves_with_path(tree)
    return leaves


def _no_norms(*trees: Any) -> tuple[Any, ...]:
    """In place of norms, where only the shape of a computation is looked at."""
    return tuple(jax.tree.map(lambda _: jnp.float32(1), tree) for tree in trees)
