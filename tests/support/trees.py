"""Random tree schedules, whose lanes mix additions and copies."""

import numpy as np

from ftmesh import Phase, Schedule
from ftmesh.schedule.transfers import ADD, COPY, make_transfers


def tree_schedule(topology, num_chunks, *, seed=0):
    """An all-reduce with a random spanning tree per chunk, each edge used once each way.

    A chip sends its sum to a neighbour in the tree once all its other neighbours have sent theirs.
    The sum is copied if the neighbour has sent already, else added.
    """
    rng = np.random.default_rng(seed)
    waiting = {}  # link -> chunk -> messages that must be sent before
    for chunk in range(num_chunks):
        edges = _spanning_tree(topology, rng)
        neighbours = {rank: [v for u, v in edges if u == rank] for rank in range(topology.num_live)}
        for u, v in edges:
            before = [(chunk, w, u) for w in neighbours[u] if w != v]
            waiting.setdefault((u, v), {})[chunk] = before
    sent = {}  # chunk, source, destination -> round
    rows = []
    for index in range(num_chunks * topology.num_live):
        taken = []
        for (u, v), messages in waiting.items():
            ready = [c for c, before in messages.items() if all(m in sent for m in before)]
            if ready:
                taken.append((int(rng.choice(ready)), u, v))
        for chunk, u, v in taken:
            op = COPY if (chunk, v, u) in sent else ADD
            rows.append((index, _lane(topology, u, v), u, v, chunk, op))
            del waiting[u, v][chunk]
        sent.update(dict.fromkeys(taken, index))
        if len(rows) == 2 * num_chunks * (topology.num_live - 1):
            break
    names = ("round", "lane", "src", "dst", "chunk", "op")
    transfers = make_transfers(**dict(zip(names, np.array(rows).T, strict=True)))
    return Schedule(topology, "tree", num_chunks, (Phase("trees", transfers),))


def _spanning_tree(topology, rng):
    """The edges of a random spanning tree, both ways, as ranks."""
    tree_of = {rank: {rank} for rank in range(topology.num_live)}
    links = [
        (rank, topology.rank(other))
        for rank, coord in enumerate(topology.coords)
        for other in topology.neighbours(coord)
    ]
    edges = []
    for i in rng.permutation(len(links)):
        u, v = links[i]
        if tree_of[u] is not tree_of[v]:
            edges += [(u, v), (v, u)]
            both = tree_of[u] | tree_of[v]
            tree_of.update(dict.fromkeys(both, both))
    return edges


def _lane(topology, u, v):
    """The direction of a link."""
    a, b = topology.coords[u], topology.coords[v]
    (axis,) = np.flatnonzero(np.array(a) != b)
    return 2 * axis + (a[axis] < b[axis])
