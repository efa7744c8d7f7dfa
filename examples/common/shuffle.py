"""Shuffling without a table: where an example stands in an epoch's order, computed by itself.

An order is a product of rounds (Hoang, Morris and Rogaway, "An Enciphering Scheme Based on a Card
Shuffle", 2012). A round pairs every number x with key - x, modulo their number, and swaps the two
or not, by a bit that is a hash of the larger. That is a bijection for any number of examples.
Integers alone are computed with, so the order is the same everywhere.
"""

from __future__ import annotations

from hashlib import shake_256

import numpy as np
from numpy.typing import NDArray

NUM_ROUNDS = 32
_U64 = np.uint64


def shuffled(places: NDArray[np.int64], num_examples: int, *, seed: int) -> NDArray[np.int64]:
    """The examples at some places of an endless row of epochs, each in an order of its own.

    >>> shuffled(np.arange(10), 5, seed=0).reshape(2, 5).tolist()
    [[0, 3, 4, 2, 1], [1, 0, 3, 4, 2]]
    """
    if not len(places):
        return np.zeros(0, np.int64)
    epochs, within = np.divmod(np.asarray(places, np.int64), num_examples)
    distinct, which = np.unique(epochs, return_inverse=True)
    keys = np.stack([_keys(seed, epoch) for epoch in distinct.tolist()], axis=-1)
    if len(distinct) > 1:
        keys = keys[..., which]
    number, x = _U64(num_examples), within.astype(_U64)
    for key, salt in keys:
        difference = key % number - x
        partner = np.minimum(difference, difference + number)  # what is below 0 wraps to the top
        x = np.where(_bit(np.maximum(x, partner) ^ salt), partner, x)
    return x.astype(np.int64)


def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Two numbers of 64 bits for each round."""
    digest = shake_256(f"ftmesh.shuffle/1 {seed} {epoch}".encode()).digest(16 * NUM_ROUNDS)
    return np.frombuffer(digest, "<u8").astype(_U64).reshape(NUM_ROUNDS, 2)


def _bit(x: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """A bit of each number that depends on all of its bits (as SplitMix64 mixes them)."""
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x >= _U64(1 << 63)
