"""StepSampler: computes the examples of every step, for any number of hosts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Self

import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError
from ftmesh.layout.batch_shares import batch_padding

Indices = NDArray[np.int64]


class StepSampler(Sequence[Indices]):
    """The indices of the examples of each step; each example is used once in every epoch.

    The examples of a step depend on the step alone, so a run that continues on fewer hosts or
    more uses the examples of an undisturbed run. Batches continue from one epoch to the next. The
    examples after the last whole batch of the last epoch are not used.

    A sampler is a sequence over steps, and so a source for ``grain.MapDataset.source``.

    Args:
        num_examples: Examples in the data.
        batch_size: Examples per step, over all processes.
        num_epochs: Number of epochs.
        seed: Seed of the order, which differs between epochs.
        shuffle: Whether to shuffle.

    >>> sampler = StepSampler(10, 4, num_epochs=2, shuffle=False)
    >>> len(sampler), sampler[2]
    (5, array([8, 9, 0, 1]))
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        num_epochs: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        sizes = {"num_examples": num_examples, "batch_size": batch_size, "num_epochs": num_epochs}
        for name, size in sizes.items():
            if size < 1:
                raise ArgumentError(f"{name} is {size}: give 1 or more")
        if batch_size > num_examples * num_epochs:
            raise ArgumentError(
                f"batch_size is {batch_size}, and {num_epochs} epochs have "
                f"{num_examples * num_epochs} examples: there would be no step"
            )
        if seed < 0:
            raise ArgumentError(f"seed is {seed}: give 0 or more")
        self.num_examples, self.batch_size, self.num_epochs = sizes.values()
        self.seed, self.shuffle = seed, shuffle
        self.num_rows = batch_size  # of the batch, with padding
        self.rows: Indices = np.arange(batch_size)  # of the batch that this process has

    def for_sharding(self, sharding: NamedSharding, *, microbatches: int = 1) -> Self:
        """Return the sampler of this process's rows of batches that are laid out by `sharding`.

        Where the chips do not divide the batch, or each of its `microbatches`, it is padded with
        its last example, as by `ftmesh.pad_batch`. `jax.make_array_from_process_local_data(
        sharding, x[sampler[step]], (sampler.num_rows, *x.shape[1:]))` makes the array of the batch.
        """
        names = sharding.spec[0] if len(sharding.spec) else None
        rows = NamedSharding(sharding.mesh, P(names))
        parts = sharding.mesh.size // rows.shard_shape((sharding.mesh.size,))[0]
        padded = batch_padding(self.batch_size, parts, microbatches=microbatches)
        windows = rows.addressable_devices_indices_map((padded.num_rows,)).values()
        numbers = np.arange(padded.num_rows)
        sampler = copy.copy(self)
        sampler.num_rows = padded.num_rows
        sampler.rows = np.unique(np.concatenate([numbers[window] for window in windows]))
        return sampler

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True for each row of this process that is an example, False for padding."""
        return self.rows < self.batch_size

    def __len__(self) -> int:
        return self.num_examples * self.num_epochs // self.batch_size

    def __getitem__(self, step: int) -> Indices:  # type: ignore[override]
        """Return the indices of this process's examples of a step, which counts from 0."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step}: there are {len(self)}")
        places = step * self.batch_size + np.minimum(self.rows, self.batch_size - 1)
        if not self.shuffle:
            return places % self.num_examples
        epochs = places // self.num_examples
        indices = np.empty_like(places)
        for epoch in np.unique(epochs):
            order = _shuffled(self.num_examples, self.seed, int(epoch))
            indices[epochs == epoch] = order[places[epochs == epoch] % self.num_examples]
        return indices


@lru_cache(maxsize=2)
def _shuffled(num_examples: int, seed: int, epoch: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(num_examples)
