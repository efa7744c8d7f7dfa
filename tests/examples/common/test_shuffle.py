"""The shuffle: every epoch has each example once, in a random order."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest

from examples.common.reader import shuffled


def epochs(num_examples, number, seed=0):
    """The orders of some epochs, one row each."""
    places = np.arange(num_examples * number)
    return shuffled(places, num_examples, seed=seed).reshape(number, num_examples)


def test_each_example_once_for_every_size():
    for number in range(1, 2001):
        order = shuffled(np.arange(number), number, seed=number)
        assert (np.bincount(order, minlength=number) == 1).all(), number


@pytest.mark.parametrize(
    "number",
    [1 << 20, 1_281_167, pytest.param(10_000_000, marks=pytest.mark.slow)],
)
def test_each_example_once_in_a_large_set(number):
    seen = np.zeros(number, bool)
    for start in range(0, number, 1 << 16):
        seen[shuffled(np.arange(start, min(start + (1 << 16), number)), number, seed=0)] = True
    assert seen.all()


@pytest.mark.parametrize("number", [2**32 - 5, 2**32, 2**32 + 15, 2**45 + 1, 2**62 + 9])
def test_beyond_four_billion(number):
    places = np.concatenate([np.arange(50_000), number - 1 - np.arange(50_000)])
    order = shuffled(places, number, seed=1)
    assert 0 <= order.min() <= order.max() < number
    assert len(np.unique(order)) == len(places)
    # Tenths of the examples are met as often as each other; 27.9 is exceeded once in a thousand.
    counts = np.bincount(order // (number // 10 + 1), minlength=10)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 27.9


def test_a_position_does_not_depend_on_the_others():
    places = np.arange(3 * 1000)
    whole = shuffled(places, 1000, seed=4)
    some = np.random.default_rng(0).permutation(places)[:500]
    np.testing.assert_array_equal(shuffled(some, 1000, seed=4), whole[some])
    assert shuffled(places[:0], 1000, seed=4).size == 0


def test_epochs_and_seeds_have_different_orders():
    first = epochs(1000, 3, seed=0)
    others = np.concatenate([first[1:], epochs(1000, 3, seed=1), epochs(1000, 3, seed=-1)])
    for other in others:  # two random orders agree at one place, and hardly ever at eight
        assert (first[0] == other).sum() < 8
    np.testing.assert_array_equal(first, epochs(1000, 3, seed=0))


def test_all_orders_of_four_are_equally_frequent():
    orders = np.concatenate([epochs(4, 240, seed) for seed in range(20)])
    counts = Counter(map(tuple, orders.tolist()))
    assert set(counts) == set(permutations(range(4)))
    # 23 degrees of freedom: 49.7 is exceeded once in a thousand.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 49.7


@pytest.mark.parametrize("number", [10, 1000, 100_003])
def test_well_mixed(number):
    orders = epochs(number, 200_000 // number)
    places = np.arange(number)
    # Positions and examples are uncorrelated: 0 on average, with a standard deviation of
    # 1 over the root of their number.
    centred = (orders - orders.mean()) * (places - places.mean())
    correlation = centred.mean() / places.var()
    assert abs(correlation) < 4 / np.sqrt(orders.size)
    # Neighbours are neighbours again twice in an epoch, and one example stays, as chance has it.
    neighbours = (np.abs(np.diff(orders, axis=1)) == 1).sum(axis=1).mean()
    assert abs(neighbours - 2 * (number - 1) / number) < 4 * np.sqrt(2 / len(orders))
    assert abs((orders == places).sum(axis=1).mean() - 1) < 4 / np.sqrt(len(orders))


def test_known_orders():
    # Runs are resumed in them: whoever changes one changes what an old run would have seen next.
    assert epochs(7, 3, seed=0).tolist() == [
        [1, 0, 2, 3, 6, 5, 4],
        [3, 6, 4, 0, 1, 5, 2],
        [1, 5, 0, 6, 3, 2, 4],
    ]
    large = shuffled(np.array([0, 1, 156_725_652, 156_725_653]), 156_725_653, seed=7)
    assert large.tolist() == [94316097, 107443052, 131864450, 145994526]
    assert shuffled(np.array([0, 2**40]), 2**40 + 1, seed=0).tolist() == [
        430194057448,
        915430084321,
    ]
