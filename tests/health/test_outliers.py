"""Members of a group that differ from the others, in value or in time."""

import pytest

from ftmesh.health.examination import find_slow
from ftmesh.health.replica_check import find_outliers


@pytest.mark.parametrize(
    ("values", "expected"),
    [("aaaa", []), ("aaba", [2]), ("abca", [1, 2]), ("aabb", [0, 1, 2, 3]), ("a", []), ("", [])],
)
def test_outliers(values, expected):
    assert find_outliers(dict(enumerate(values))) == expected


def test_slow_means_a_multiple_and_a_margin():
    def slow(seconds, **options):
        times = dict(enumerate(seconds))
        return find_slow(times, dict.fromkeys(times), slow=3, margin=0.05, **options)

    assert slow([0.1, 0.1, 0.1, 0.31]) == {3: 0.1}
    assert slow([0.1, 0.1, 0.1, 0.29]) == {}  # not three times
    assert slow([0.001, 0.001, 0.001, 0.05]) == {}  # fifty times, but less than 50 ms more
    assert slow([0.1, 0.9]) == {}  # one peer is too few
    assert slow([0.9, 0.1, 0.1, 0.1], among=[0]) == {0: 0.1}


def test_only_peers_of_the_same_kind_are_compared():
    seconds = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 9.0, "e": 9.0, "f": 9.0}
    kinds = dict(zip("abcdef", "111222", strict=True))
    assert find_slow(seconds, kinds, slow=3, margin=0.1) == {}
