"""Batch normalization over groups of neighbouring chips, for Flax Linen and NNX.

    groups = ChipGroups.for_examples(plan, 64, global_batch)
    y = GroupBatchNorm(groups=groups, axis_name="data")(x, use_running_average=False)  # Linen
    norm = NnxGroupBatchNorm(64, groups=groups, axis_name="data", rngs=rngs)  # NNX

With few examples per chip, the statistics of one chip are noisy; those of the whole batch cost an
all-reduce over all chips in every layer. Groups are in between.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from ftmesh.collectives.all_reduce import ChipGroups, pmean
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree


class GroupBatchNorm(nn.Module):
    """As `flax.linen.BatchNorm` over the last dimension, with the statistics of a group of chips.

    Statistics and arithmetic are in float32. Running statistics differ between groups: pass them to
    and from a step sharded along the axis, and use `mean_batch_stats` for evaluation.

    Attributes:
        use_running_average: Normalize with the running statistics; may be given to the call.
        groups: The groups of ranks. Without them every rank is alone.
        axis_name: The mesh axis of the groups.
        dtype: The dtype of the result, by default that of the input.

    The others are as in Flax.
    """

    use_running_average: bool | None = None
    groups: ChipGroups | None = None
    axis_name: AxisName | None = None
    momentum: float = 0.9
    epsilon: float = 1e-5
    dtype: DTypeLike | None = None
    param_dtype: DTypeLike = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Any = nn.initializers.zeros
    scale_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize `x`.

        Args:
            x: Examples along the first dimension, features along the last.
            use_running_average: Overrides the attribute.
            weights: One for each example, 0 for padding, which then does not count. What padding
                holds must be finite.
        """
        given = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        width, wide = (x.shape[-1],), jnp.promote_types(x.dtype, jnp.float32)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, width, wide)
        running_var = self.variable("batch_stats", "var", jnp.ones, width, wide)
        if given:
            mean, var = running_mean.value, running_var.value
        else:
            groups = None if self.is_initializing() else self.groups
            mean, var = _group_statistics(x.astype(wide), weights, groups, self.axis_name)
            if not self.is_initializing():
                for running, new in ((running_mean, mean), (running_var, var)):
                    running.value = self.momentum * running.value + (1 - self.momentum) * new
        dtype = self.param_dtype
        scale = self.param("scale", self.scale_init, width, dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, width, dtype) if self.use_bias else None
        return _normalize(self, x, (mean, var), scale, bias)


class NnxGroupBatchNorm(nnx.Module):
    """As `flax.nnx.BatchNorm` over the last dimension, with the statistics of a group of chips.

    The arithmetic, the running statistics and the arguments are those of `GroupBatchNorm`.
    ``model.train()`` and ``model.eval()`` set `use_running_average`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool = False,
        groups: ChipGroups | None = None,
        axis_name: AxisName | None = None,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Any = nnx.initializers.zeros,
        scale_init: Any = nnx.initializers.ones,
        rngs: nnx.Rngs,
    ) -> None:
        width = (num_features,)
        self.mean = nnx.BatchStat(jnp.zeros(width, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(width, jnp.float32))
        scale = nnx.Param(scale_init(rngs.params(), width, param_dtype)) if use_scale else None
        bias = nnx.Param(bias_init(rngs.params(), width, param_dtype)) if use_bias else None
        self.scale, self.bias = nnx.data(scale), nnx.data(bias)
        self.use_running_average = use_running_average
        self.groups = groups
        self.axis_name = axis_name
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        weights: jax.Array | None = None,
    ) -> jax.Array:
        """Normalize `x`; the arguments are those of `GroupBatchNorm`."""
        if x.shape[-1] != self.mean.shape[-1]:
            raise ArgumentError(
                f"x has shape {x.shape}, with {x.shape[-1]} features, and this batch norm has "
                f"num_features={self.mean.shape[-1]}"
            )
        if self.use_running_average if use_running_average is None else use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            mean, var = _group_statistics(wide, weights, self.groups, self.axis_name)
            for running, new in ((self.mean, mean), (self.var, var)):
                mixed = self.momentum * running[...] + (1 - self.momentum) * new
                running[...] = lax.stop_gradient(mixed)
        scale, bias = (None if p is None else p[...] for p in (self.scale, self.bias))
        return _normalize(self, x, (mean, var), scale, bias)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Set `use_running_average`, for `nnx.view`."""
        if use_running_average is not None:
            self.use_running_average = use_running_average


def mean_batch_stats(batch_stats: PyTree, axis_name: AxisName, *, plan: PlanLike) -> PyTree:
    """Average running statistics over all ranks, where the axis is bound: for evaluation."""
    varying = jax.tree.map(lambda leaf: _compat.as_varying(leaf, axis_name), batch_stats)
    return pmean(varying, axis_name, plan=plan)


def _normalize(
    layer: GroupBatchNorm | NnxGroupBatchNorm,
    x: jax.Array,
    statistics: tuple[jax.Array, jax.Array],
    scale: jax.Array | None,
    bias: jax.Array | None,
) -> jax.Array:
    mean, var = statistics
    factor = lax.rsqrt(var + layer.epsilon)
    if scale is not None:
        factor = factor * scale
    y = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) - mean) * factor
    if bias is not None:
        y = y + bias
    return y.astype(x.dtype if layer.dtype is None else layer.dtype)


def _group_statistics(
    x: jax.Array, weights: jax.Array | None, groups: ChipGroups | None, axis_name: AxisName | None
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance over all dimensions but the last, of the examples of a rank's group."""
    weights = jnp.ones(len(x), x.dtype) if weights is None else jnp.asarray(weights)
    if jnp.shape(weights) != x.shape[:1]:
        raise ArgumentError(
            f"weights of shape {jnp.shape(weights)} for {len(x)} examples: give one for each"
        )
    columns = weights.astype(x.dtype).reshape(-1, *(1 for _ in x.shape[1:]))
    axes = tuple(range(x.ndim - 1))
    count = jnp.sum(weights, dtype=x.dtype, keepdims=True) * math.prod(x.shape[1:-1])
    sums = jnp.concatenate([jnp.sum(x * columns, axes), jnp.sum(x * x * columns, axes), count])
    if groups is not None:
        if axis_name is None:
            raise ArgumentError("groups are groups of ranks along an axis: give axis_name too")
        sums = groups.sum(sums, axis_name)
    count = jnp.where(sums[-1] > 0, sums[-1], 1)  # no NaN on an idle rank, without examples
    mean, mean_square = jnp.split(sums[:-1] / count, 2)
    return mean, jnp.maximum(mean_square - mean * mean, 0)
