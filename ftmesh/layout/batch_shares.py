"""Split a global batch over the live ranks, with padding and weights.

    shares = BatchShares.for_ranks(plan, 4096)
    batch, weights = shares.pad_batch(batch)  # to be sharded along the axis

    def loss_fn(params):  # inside shard_map
        num_examples = plan.psum(weights.sum(), "data")
        return shares.mean_contribution(losses(params, batch), weights, num_examples)

    loss, grads = plan.pmean(jax.value_and_grad(loss_fn)(params), "data")

The global batch keeps its size, whatever the number of live ranks. The ranks' numbers of examples
differ by at most one, and ranks with fewer have one example of padding with weight zero. If every
batch is full, as in training, leave out `num_examples`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError
from ftmesh.schedule.transfers import Ints
from ftmesh.topology.ranks import HasTopology, Ranks
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class BatchShares:
    """How many examples of a global batch, and which, each rank of an axis has.

    >>> shares = BatchShares.for_ranks(Topology.grid("4x2", failed="1x1@3,1"), 16)
    >>> shares.counts().tolist()
    [3, 3, 2, 2, 2, 2, 2]
    """

    global_batch: int
    live: Ints  # the ranks that have examples
    num_ranks: int  # of the axis, idle devices included

    def __post_init__(self) -> None:
        if self.global_batch < len(self.live):
            raise ArgumentError(
                f"a global batch of {self.global_batch} is too small for {len(self.live)} live "
                "ranks, which need an example each: use a larger batch, or fewer chips"
            )

    @staticmethod
    def for_ranks(ranks: HasTopology | Topology, global_batch: int) -> BatchShares:
        """Split a batch over the ranks of a plan or a topology."""
        axis = Ranks.from_plan(ranks)
        return BatchShares(global_batch, axis.live, axis.num_ranks)

    @property
    def per_rank(self) -> int:
        """Examples in the arrays of each rank, padding included."""
        return math.ceil(self.global_batch / len(self.live))

    @property
    def is_even(self) -> bool:
        """True if all ranks of the axis have the same number of examples, and no padding."""
        return len(self.live) == self.num_ranks and self.global_batch % self.num_ranks == 0

    def counts(self, num_examples: int | None = None) -> Ints:
        """The number of examples of each rank, in a full batch or one of `num_examples`."""
        total = self.global_batch if num_examples is None else num_examples
        if not 0 < total <= self.global_batch:
            raise ArgumentError(
                f"a batch of {total} examples: give 1 to {self.global_batch}, the global batch"
            )
        least, more = divmod(total, len(self.live))
        counts = np.zeros(self.num_ranks, np.int32)
        counts[self.live] = least + (np.arange(len(self.live)) < more)
        return counts

    def positions(self, num_examples: int | None = None) -> NDArray[np.int64]:
        """The examples of each rank, one row per rank; -1 is padding.

        >>> BatchShares(5, np.arange(3), 3).positions().tolist()
        [[0, 1], [2, 3], [4, -1]]
        """
        counts = self.counts(num_examples)[:, None]
        index = np.arange(self.per_rank)
        return np.where(index < counts, np.cumsum(counts)[:, None] - counts + index, -1)

    def weights(self, num_examples: int | None = None) -> NDArray[np.float32]:
        """1 for an example and 0 for padding, all ranks concatenated."""
        return (self.positions(num_examples) >= 0).astype(np.float32).reshape(-1)

    def pad_batch(self, batch: Any) -> tuple[Any, NDArray[np.float32]]:
        """Pad a batch, a pytree of arrays with one entry per example, for all ranks.

        Returns it with the entries of all ranks concatenated, and their weights. Padding repeats
        the last example, so that computing with it is harmless.
        """
        sizes = {len(array) for array in jax.tree.leaves(batch)}
        if len(sizes) != 1:
            raise ArgumentError(
                f"all arrays of a batch must have the same number of examples, not {sizes}"
            )
        (size,) = sizes
        rows = self.positions(size).reshape(-1)
        return jax.tree.map(lambda array: array[rows], batch), self.weights(size)

    def mean_contribution(self, values: Any, weights: Any, num_examples: Any = None) -> Any:
        """What this rank contributes to the mean of `values` over the examples of a batch.

        Its mean over live ranks is that mean, and so is its gradient. `num_examples` counts those
        of all ranks and may be traced; by default it is the global batch.
        """
        scale = len(self.live) / (self.global_batch if num_examples is None else num_examples)
        return jax.tree.map(lambda total: total * scale, weighted_sum(values, weights))


def weighted_sum(values: Any, weights: Any) -> Any:
    """Sum one rank's values, a pytree of one value per example, without those of padding.

    Weights are 1 for an example and 0 for padding.
    """

    def leaf_sum(leaf: Any) -> jax.Array:
        if jnp.shape(leaf) != jnp.shape(weights):
            raise ArgumentError(
                f"values of shape {jnp.shape(leaf)} and weights of shape {jnp.shape(weights)}: "
                "give one value for each example, not yet averaged"
            )
        return jnp.sum(jnp.where(weights > 0, leaf * weights, 0))

    return jax.tree.map(leaf_sum, values)
