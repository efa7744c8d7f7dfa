"""Every cable is in one turn, and no turn asks twice for the same chip."""

from itertools import chain

import pytest

from ftmesh import Topology
from ftmesh.health.probe_links import cables, turns

MESHES = [
    ("16x32", {}, 4),
    ("16x32", {"failed": "4x2@6,14"}, 4),
    ("4x4", {"wrap": True}, 4),
    ("5x3", {"wrap": True}, 6),  # a ring of odd length takes three
    ("4x4x4", {}, 6),
    ("4x4", {"failed_links": "1,1-1,2"}, 4),
]


@pytest.mark.parametrize(("shape", "options", "most"), MESHES)
def test_every_link_has_one_turn(shape, options, most):
    topology = Topology.grid(shape, **options)
    found = turns(cables(topology), lambda cable: cable)
    every = [*chain.from_iterable(found)]
    assert len(every) == len(set(every)) == len(topology.links) // 2
    both = {*every, *((b, a) for a, b in every)}
    assert both == set(topology.links)
    assert len(found) <= most
    for turn in found:
        chips = [*chain.from_iterable(turn)]
        assert len(chips) == len(set(chips))


def test_what_needs_the_same_takes_turns():
    some = cables(Topology.grid("4x1"))
    assert [len(turn) for turn in turns(some, lambda cable: ["the only process"])] == [1, 1, 1]
