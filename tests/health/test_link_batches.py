"""Every link is in one batch, and no batch uses a chip twice."""

from itertools import chain

import pytest

from ftmesh import Topology
from ftmesh.health.doctor import batches, undirected_links

MESHES = [
    ("16x32", {}, 4),
    ("16x32", {"failed": "4x2@6,14"}, 4),
    ("4x4", {"wrap": True}, 4),
    ("5x3", {"wrap": True}, 6),  # a ring of odd length takes three
    ("4x4x4", {}, 6),
    ("4x4", {"failed_links": "1,1-1,2"}, 4),
]


@pytest.mark.parametrize(("shape", "options", "max_batches"), MESHES)
def test_every_link_is_in_one_batch(shape, options, max_batches):
    topology = Topology.grid(shape, **options)
    batched = batches(undirected_links(topology), lambda link: link)
    links = [*chain.from_iterable(batched)]
    assert len(links) == len(set(links)) == len(topology.links) // 2
    both = {*links, *((b, a) for a, b in links)}
    assert both == set(topology.links)
    assert len(batched) <= max_batches
    for batch in batched:
        chips = [*chain.from_iterable(batch)]
        assert len(chips) == len(set(chips))


def test_links_that_share_a_resource_are_in_different_batches():
    links = undirected_links(Topology.grid("4x1"))
    assert [len(batch) for batch in batches(links, lambda link: ["process"])] == [1, 1, 1]
