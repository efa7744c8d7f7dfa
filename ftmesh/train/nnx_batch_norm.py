"""Batch normalization over groups of neighbouring chips, for NNX.

norm = NnxGroupBatchNorm(64, groups=Groups.of(plan, 4), axis_name="data", rngs=rngs)
y = norm(x, weights=weights)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ftmesh.collectives.groups import Groups
from ftmesh.errors import ArgumentError
from ftmesh.train.batch_norm import group_statistics, normalized


class NnxGroupBatchNorm(nnx.Module):
    """As `flax.nnx.BatchNorm` over the last dimension, with the statistics of a group of ranks.

    Without `groups` every rank is alone, whatever `axis_name` is.

    The arithmetic, the weights of examples and the running statistics are those of
    `ftmesh.train.GroupBatchNorm`. ``model.train()`` and ``model.eval()`` set `use_running_average`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool = False,
        groups: Groups | None = None,
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
