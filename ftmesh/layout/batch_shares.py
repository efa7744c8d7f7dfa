"""Batches: a global batch that keeps its size, whatever the number of live ranks.

    shares = Shares.of(plan, 4096)
    batch, weights = shares.laid_out(batch)  # padded; to be split along the axis

    def loss_of(params):  # inside shard_map
        num_examples = plan.psum(weights.sum(), "data")
        return shares.part_of_mean(losses(params, batch), weights, num_examples)

    loss, grads = plan.pmean(jax.value_and_grad(loss_of)(params), "data")

Where every batch is full, as batches for training mostly are, `num_examples` can be left out.

The numbers of examples that ranks have differ by at most one. Arrays have the same shape at every
rank, so some have an example of padding, with weight zero. The mean over ranks of `part_of_mean` is
the mean over the examples of the batch, and the gradient is its gradient.

Evaluation goes the same way, and its last batch may be a smaller one:

    right, seen = plan.psum((weighted_sum(is_right, weights), weights.sum()), "data")
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError
from ftmesh.schedule.transfers import Ints
from ftmesh.topology.ranks import PlanLike, Ranks
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class Shares:
    """How many examples of a global batch, and which, each rank of an axis has.

    >>> shares = Shares.of(Topology.grid("4x2", failed="1x1@3,1"), 16)
    >>> shares.counts().tolist(), shares.rows(1)
    ([3, 3, 2, 2, 2, 2, 2], slice(3, 6, None))
    """

    global_batch: int
    live: Ints  # the ranks that have some
    num_ranks: int  # of the axis, with those of idle devices

    def __post_init__(self) -> None:
        if self.global_batch < len(self.live):
            raise ArgumentError(
                f"a global batch of {self.global_batch} is too small for {len(self.live)} live "
                "ranks, which need an example each: take a larger batch, or fewer chips"
            )

    @staticmethod
    def of(on: PlanLike | Topology, global_batch: int) -> Shares:
        """The shares of the ranks of a plan, or of a topology."""
        ranks = Ranks.of(on)
        return Shares(global_batch, ranks.live, ranks.num_ranks)

    @property
    def per_rank(self) -> int:
        """Examples in the arrays of each rank, padding included."""
        return math.ceil(self.global_batch / len(self.live))

    @property
    def are_equal(self) -> bool:
        """Whether every rank of the axis has as many examples as any other, and no padding."""
        return len(self.live) == self.num_ranks and self.global_batch % self.num_ranks == 0

    def counts(self, num_examples: int | None = None) -> Ints:
        """How many examples each rank has of a whole batch, or of one of `num_examples`.

        >>> Shares(8, np.arange(3), 3).counts().tolist()
        [3, 3, 2]
        """
        total = self.global_batch if num_examples is None else num_examples
        if not 0 < total <= self.global_batch:
            raise ArgumentError(
                f"{total} examples do not make a batch: give 1 to {self.global_batch}, which is "
                "the global batch"
            )
        least, more = divmod(total, len(self.live))
        counts = np.zeros(self.num_ranks, np.int32)
        counts[self.live] = least + (np.arange(len(self.live)) < more)
        return counts

    def rows(self, rank: int, num_examples: int | None = None) -> slice:
        """Which examples of the batch a rank has, for those who read them rank by rank."""
        counts = self.counts(num_examples)
        start = int(counts[:rank].sum())
        return slice(start, start + int(counts[rank]))

    def positions(self, num_examples: int | None = None) -> NDArray[np.int64]:
        """Which examples of the batch each rank has, in rows; -1 stands for padding.

        >>> Shares(5, np.arange(3), 3).positions().tolist()
        [[0, 1], [2, 3], [4, -1]]
        """
        counts = self.counts(num_examples)[:, None]
        place = np.arange(self.per_rank)
        return np.where(place < counts, np.cumsum(counts)[:, None] - counts + place, -1)

    def weights(self, num_examples: int | None = None) -> NDArray[np.float32]:
        """1 for an example and 0 for padding, all ranks end to end."""
        return (self.positions(num_examples) >= 0).astype(np.float32).reshape(-1)

    def laid_out(self, batch: Any) -> tuple[Any, NDArray[np.float32]]:
        """A pytree of arrays with an entry per example, padded for all ranks end to end; weights.

        Padding repeats the last example, so that nothing odd comes of computing with it.
        """
        sizes = {len(array) for array in jax.tree.leaves(batch)}
        if len(sizes) != 1:
            raise ArgumentError(
                f"the arrays of a batch must have as many examples as each other, not {sizes}"
            )
        (size,) = sizes
        rows = self.positions(size).reshape(-1)
        return jax.tree.map(lambda array: array[rows], batch), self.weights(size)

    def local_weights(self, axis_name: Any) -> jax.Array:
        """The weights that a rank has for a whole batch, where the axis is bound."""
        count = jnp.asarray(self.counts())[lax.axis_index(axis_name)]
        return (jnp.arange(self.per_rank) < count).astype(jnp.float32)

    def part_of_mean(self, values: Any, weights: Any, num_examples: Any = None) -> Any:
        """What this rank gives to the mean of `values` over the examples of a batch.

        The mean of this over live ranks is that mean. `num_examples` is how many examples all ranks
        have together: the global batch, unless given; it may be computed on the way. `values` are
        as for `weighted_sum`.
        """
        scale = len(self.live) / (self.global_batch if num_examples is None else num_examples)
        return jax.tree.map(lambda total: total * scale, weighted_sum(values, weights))


def weighted_sum(values: Any, weights: Any) -> Any:
    """The sum of one rank's values without those of padding; `values` may be a pytree.

    Each leaf has one number per example, padding included.
    """

    def one(leaf: Any) -> jax.Array:
        if jnp.shape(leaf) != jnp.shape(weights):
            raise ArgumentError(
                f"values of shape {jnp.shape(leaf)} and weights of shape {jnp.shape(weights)}: "
                "give one value for each example, not yet averaged"
            )
        return jnp.sum(jnp.where(weights > 0, leaf * weights, 0))

    return jax.tree.map(one, values)
