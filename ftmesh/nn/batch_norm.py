"""Batch normalization over groups of neighbouring chips, by the examples they have.

    norm = partial(GroupBatchNorm, groups=ChipGroups.for_examples(plan, 64, batch), axis_name="data")
    y = norm()(x, use_running_average=False, weights=weights)

With few examples per chip, statistics of a chip's own are poor ones; of the whole batch, they cost
a sum over all chips in every layer. `nnx_batch_norm` has the same for NNX.

Batch normalization over groups of neighbouring chips, for NNX.

norm = NnxGroupBatchNorm(64, groups=ChipGroups.of_size(plan, 4), axis_name="data", rngs=rngs)
y = norm(x, weights=weights)
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import lax

from ftmesh.collectives.all_reduce import pmean
from ftmesh.collectives.group_sum import ChipGroups
from ftmesh.errors import ArgumentError
from ftmesh.execute import _compat
from ftmesh.execute.types import PlanLike


class GroupBatchNorm(nn.Module):
    """As `flax.linen.BatchNorm` over the last dimension, with the statistics of a group of ranks.

    Statistics and arithmetic are in float32; `dtype` is that of the result, and the input's where
    it is not given. Examples of weight zero, padding, count for nothing. Without `groups` every
    rank is alone. Running statistics differ from group to group: give them to a step and take them
    from it split along the axis, and `mean_batch_stats` of them for evaluation.
    """

    use_running_average: bool | None = None
    groups: ChipGroups | None = None
    axis_name: Any = None
    momentum: float = 0.9
    epsilon: float = 1e-5
    dtype: Any = None
    param_dtype: Any = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Any = nn.initializers.zeros
    scale_init: Any = nn.initializers.ones

    @nn.compact
    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, weights: Any = None
    ) -> jax.Array:
        """`x` normalized. Its first dimension is that of examples; `weights` has one for each."""
        use_running_average = nn.merge_param(
            "use_running_average", self.use_running_average, use_running_average
        )
        width, wide = (x.shape[-1],), jnp.promote_types(x.dtype, jnp.float32)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, width, wide)
        running_var = self.variable("batch_stats", "var", jnp.ones, width, wide)
        if use_running_average:
            mean, var = running_mean.value, running_var.value
        else:
            groups = None if self.is_initializing() else self.groups
            mean, var = group_statistics(x.astype(wide), weights, groups, self.axis_name)
            if not self.is_initializing():
                for running, new in ((running_mean, mean), (running_var, var)):
                    running.value = self.momentum * running.value + (1 - self.momentum) * new
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, width, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, width, self.param_dtype)
        return normalized(x, mean, var, scale, bias, epsilon=self.epsilon, dtype=self.dtype)


def normalized(
    x: jax.Array, mean: Any, var: Any, scale: Any, bias: Any, *, epsilon: float, dtype: Any
) -> jax.Array:
    """`x` with these statistics taken out, times `scale`, plus `bias`, where there are such."""
    factor = lax.rsqrt(var + epsilon)
    if scale is not None:
        factor = factor * scale
    y = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) - mean) * factor
    if bias is not None:
        y = y + bias
    return y.astype(x.dtype if dtype is None else dtype)


def group_statistics(
    x: jax.Array, weights: Any, groups: ChipGroups | None, axis_name: Any
) -> tuple[jax.Array, jax.Array]:
    """Mean and variance, over all dimensions but the last, of the examples of a rank's group."""
    if weights is None:
        weights = jnp.ones(len(x), x.dtype)
    if jnp.shape(weights) != x.shape[:1]:
        raise ArgumentError(
            f"weights of shape {jnp.shape(weights)} for {len(x)} examples: give one for each"
        )
    each = weights.astype(x.dtype).reshape(-1, *(1 for _ in x.shape[1:]))
    axes = tuple(range(x.ndim - 1))
    number = jnp.sum(weights, dtype=x.dtype, keepdims=True) * math.prod(x.shape[1:-1])
    sums = jnp.concatenate([jnp.sum(x * each, axes), jnp.sum(x * x * each, axes), number])
    if groups is not None:
        if axis_name is None:
            raise ArgumentError("groups are groups of ranks along an axis: give axis_name too")
        sums = groups.sum(sums, axis_name)
    number = jnp.where(sums[-1] > 0, sums[-1], 1)  # an idle rank has no example, nor a NaN
    mean, mean_square = jnp.split(sums[:-1] / number, 2)
    return mean, jnp.maximum(mean_square - mean * mean, 0)


def mean_batch_stats(batch_stats: Any, axis_name: Any, *, plan: PlanLike) -> Any:
    """Running statistics averaged over all ranks, the same everywhere: for evaluation."""
    varying = jax.tree.map(lambda leaf: _compat.as_varying(leaf, axis_name), batch_stats)
    return pmean(varying, axis_name, plan=plan)


class NnxGroupBatchNorm(nnx.Module):
    """As `flax.nnx.BatchNorm` over the last dimension, with the statistics of a group of ranks.

    Without `groups` every rank is alone, whatever `axis_name` is.

    The arithmetic, the weights of examples and the running statistics are those of
    `ftmesh.nn.GroupBatchNorm`. ``model.train()`` and ``model.eval()`` set `use_running_average`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool = False,
        groups: ChipGroups | None = None,
        axis_name: Any = None,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Any = nnx.initializers.zeros,
        scale_init: Any = nnx.initializers.ones,
        rngs: nnx.Rngs,
    ) -> None:
        width = (num_features,)
        self.mean = nnx.BatchStat(jnp.zeros(width, jnp.float32))
        self.var = nnx.BatchStat(jnp.ones(width, jnp.float32))
        self.scale = nnx.data(
            nnx.Param(scale_init(rngs.params(), width, param_dtype)) if use_scale else None
        )
        self.bias = nnx.data(
            nnx.Param(bias_init(rngs.params(), width, param_dtype)) if use_bias else None
        )
        self.use_running_average = use_running_average
        self.groups = groups
        self.axis_name = axis_name
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, weights: Any = None
    ) -> jax.Array:
        """`x` normalized. Its first dimension is that of examples; `weights` has one for each."""
        if x.shape[-1] != self.mean.shape[-1]:
            raise ArgumentError(
                f"the last dimension of {x.shape} has {x.shape[-1]} features, and this batch norm "
                f"is for {self.mean.shape[-1]}: make it with that number"
            )
        if use_running_average is None:
            use_running_average = self.use_running_average
        if use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            mean, var = group_statistics(wide, weights, self.groups, self.axis_name)
            for running, new in ((self.mean, mean), (self.var, var)):
                mixed = self.momentum * running[...] + (1 - self.momentum) * new
                running[...] = jax.lax.stop_gradient(mixed)
        scale, bias = (None if each is None else each[...] for each in (self.scale, self.bias))
        return normalized(x, mean, var, scale, bias, epsilon=self.epsilon, dtype=self.dtype)

    def set_view(self, use_running_average: bool | None = None) -> None:
        """For `nnx.view`: whether the running statistics are used, where that is said."""
        if use_running_average is not None:
            self.use_running_average = use_running_average
