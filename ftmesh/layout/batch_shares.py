"""Divide a global batch among the ranks, with padding where they do not divide it.

The mesh alone, in jit: `pad_batch` pads at the end, and the loss leaves padding out by the mask.

    batch, mask = ftmesh.pad_batch((tokens, labels), plan)  # to be sharded along the axis
    loss = losses.mean(where=mask)                          # the mean over the examples alone

In shard_map, where each rank has a loss of its own: the ranks' numbers of examples differ by at
most one, and ranks with fewer have one example of padding with weight zero.

    shares = BatchShares.for_ranks(plan, 4096)
    batch, weights = shares.pad_batch(batch)  # to be sharded along the axis

    def loss_fn(params):
        num_examples = plan.psum(weights.sum(), "data")
        return shares.mean_contribution(losses(params, batch), weights, num_examples)

    loss, grads = plan.pmean(jax.value_and_grad(loss_fn)(params), "data")

The global batch keeps its size, whatever the number of live ranks. If every batch is full, as in
training, leave out `num_examples`. Padding repeats the last example, so that a model computes
nothing with it that it would not compute anyway: token ids are valid, norms are not zero, nothing
is infinite. Leave it out with ``where`` instead of a product: zero times infinity is no number.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError, BatchSizeWarning
from ftmesh.schedule.transfers import Ints
from ftmesh.topology.ranks import HasTopology, Ranks
from ftmesh.topology.topology import Topology

RanksLike = HasTopology | Topology | int


# In shard_map ------------------------------------------------------------------------------------


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


# In jit ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchPadding:
    """What padding a batch costs; `print` it. `batch_padding` makes it.

    Attributes:
        num_examples: Examples in the batch.
        num_ranks: Ranks that share it.
        num_microbatches: Equal parts that it is cut into, one after another.

    >>> print(BatchPadding(256, 60))
    256 examples on 60 ranks: 300 rows, 5 a rank, of which 44 (15%) are padding; 240 examples need \
none
    >>> print(BatchPadding(240, 60))
    240 examples on 60 ranks: 4 rows a rank, no padding
    """

    num_examples: int
    num_ranks: int
    num_microbatches: int = 1

    @property
    def rows_per_rank(self) -> int:
        """Rows that each rank computes, in all microbatches together."""
        parts = self.num_microbatches
        return parts * math.ceil(self.num_examples / (self.num_ranks * parts))

    @property
    def num_rows(self) -> int:
        """Rows of the padded batch."""
        return self.rows_per_rank * self.num_ranks

    @property
    def num_padding(self) -> int:
        """Rows of padding. Without microbatches there are fewer than ranks."""
        return self.num_rows - self.num_examples

    @property
    def nearest_size(self) -> int:
        """The batch size nearest to `num_examples` that needs no padding, the larger of two."""
        unit = self.num_ranks * self.num_microbatches
        return max(1, (2 * self.num_examples + unit) // (2 * unit)) * unit

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True for each row with an example; padding comes last."""
        return np.arange(self.num_rows) < self.num_examples

    def __str__(self) -> str:
        text = f"{self.num_examples} examples on {self.num_ranks} ranks"
        if self.num_microbatches > 1:
            text += f" in {self.num_microbatches} microbatches"
        if not self.num_padding:
            return f"{text}: {self.rows_per_rank} rows a rank, no padding"
        return (
            f"{text}: {self.num_rows} rows, {self.rows_per_rank} a rank, of which "
            f"{self.num_padding} ({self.num_padding / self.num_rows:.0%}) are padding; "
            f"{self.nearest_size} examples need none"
        )


def batch_padding(num_examples: int, ranks: RanksLike, *, microbatches: int = 1) -> BatchPadding:
    """Return how many rows of padding a batch needs; print it to see what that costs.

    Args:
        num_examples: Examples in the batch.
        ranks: A plan, a topology, or the number of ranks: ``mesh.shape["data"]``.
        microbatches: Equal parts that the batch is cut into, for gradient accumulation.

    >>> print(batch_padding(256, 252))
    256 examples on 252 ranks: 504 rows, 2 a rank, of which 248 (49%) are padding; 252 examples \
need none
    """
    sizes = {"batch size": num_examples, "number of microbatches": microbatches}
    num_ranks = _num_ranks(ranks)
    for name, size in {**sizes, "number of ranks": num_ranks}.items():
        if not hasattr(size, "__index__") or isinstance(size, bool) or size < 1:
            raise ArgumentError(f"the {name} must be a whole number, 1 or more, not {size!r}")
    return BatchPadding(num_examples, num_ranks, microbatches)


def nearest_batch_size(num_examples: int, ranks: RanksLike, *, microbatches: int = 1) -> int:
    """Return the batch size nearest to `num_examples` that the number of ranks divides.

    A batch of another size is another training run: the mean is over more or fewer examples, and an
    epoch has fewer or more steps. So a `BatchSizeWarning` says when the size changes. `pad_batch`
    keeps it.

    Args:
        num_examples: The batch size wanted.
        ranks: A plan, a topology, or the number of ranks: ``mesh.shape["data"]``.
        microbatches: Equal parts that the batch is cut into, for gradient accumulation.

    >>> nearest_batch_size(4096, 256)
    4096
    """
    padding = batch_padding(num_examples, ranks, microbatches=microbatches)
    size = padding.nearest_size
    if size != num_examples:
        parts = f" in {microbatches} microbatches" if microbatches > 1 else ""
        warnings.warn(
            f"the batch has {size} examples instead of {num_examples}, so that "
            f"{padding.num_ranks} ranks{parts} get {size // padding.num_ranks} each: scale the "
            "learning rate if it depends on the batch size, or keep the size with ftmesh.pad_batch",
            BatchSizeWarning,
            stacklevel=2,
        )
    return size


def pad_batch(
    batch: Any, ranks: RanksLike, *, axis: int = 0, microbatches: int = 1
) -> tuple[Any, NDArray[np.bool_]]:
    """Pad every array of a batch to a multiple of the number of ranks, and return the mask.

    Works in host code and under jit. NumPy arrays stay NumPy arrays, and a batch that needs no
    padding is returned as it is. Every mean over the batch must leave padding out, or it is
    averaged in: see docs/loops.md for plain means, masked losses and gradient accumulation.

    Args:
        batch: A pytree of arrays that all have one row per example.
        ranks: A plan, a topology, or the number of ranks: ``mesh.shape["data"]``.
        axis: The dimension of examples.
        microbatches: Pad so that the rows can be cut into this many equal parts, each of which the
            number of ranks divides.

    Returns:
        The padded batch, in which the last example is repeated, and the mask: True for each
        row that is an example, False for padding, which comes last.

    Raises:
        ArgumentError: Arrays have different numbers of examples, or none; or the plan keeps idle
            devices in the program, which must have no examples: use `BatchShares.pad_batch`.

    >>> pad_batch({"x": np.array([3, 4, 5]), "weight": None}, 2)
    ({'weight': None, 'x': array([3, 4, 5, 5])}, array([ True,  True,  True, False]))
    """
    padding = batch_padding(_num_examples(batch, axis), ranks, microbatches=microbatches)
    if not padding.num_padding:
        return batch, padding.mask
    return jax.tree.map(lambda x: _pad(x, axis, padding.num_padding), batch), padding.mask


def _num_ranks(ranks: RanksLike) -> int:
    if isinstance(ranks, int | np.integer):
        return int(ranks)
    if not isinstance(ranks, Topology) and not hasattr(ranks, "topology"):
        raise ArgumentError(
            f"ranks must be a plan, a topology or a number, not {type(ranks).__name__}: of a mesh, "
            'give mesh.shape["data"]'
        )
    axis = Ranks.from_plan(ranks)
    if axis.num_live < axis.num_ranks:
        raise ArgumentError(
            f"{axis.num_ranks - axis.num_live} of the {axis.num_ranks} devices of this plan are "
            "idle and must have no examples: use ftmesh.collectives.BatchShares.for_ranks(plan, "
            "batch_size).pad_batch(batch)"
        )
    return axis.num_ranks


def _num_examples(batch: Any, axis: int) -> int:
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        name = f"the array at batch{jax.tree_util.keystr(path)}"
        shape = np.shape(leaf)
        if not -len(shape) <= axis < len(shape):
            raise ArgumentError(
                f"{name} has shape {shape}, without dimension {axis}: every array of a batch must "
                "have a row for each example; keep others outside of it"
            )
        sizes[name] = shape[axis]
    if not sizes:
        raise ArgumentError("the batch has no arrays")
    (first, size), *others = sizes.items()
    for name, other in others:
        if other != size:
            raise ArgumentError(
                f"{first} has {size} examples and {name} has {other}: all arrays of a batch must "
                f"have the same size along dimension {axis}"
            )
    if size == 0:
        raise ArgumentError("the batch has no examples, so none can be repeated as padding")
    return size


def _pad(array: Any, axis: int, count: int) -> Any:
    """Repeat the last row `count` times after the end."""
    if isinstance(array, jax.Array):
        last = jax.lax.slice_in_dim(array, array.shape[axis] - 1, None, axis=axis)
        shape = [*array.shape]
        shape[axis] = count
        return jnp.concatenate([array, jnp.broadcast_to(last, shape)], axis)
    host = np.asarray(array)
    last_row = np.take(host, [-1], axis)
    return np.concatenate([host, np.repeat(last_row, count, axis)], axis)
