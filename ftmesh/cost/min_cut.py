"""The tightest cut and the weakest partition of a graph, exactly.

A graph is a number of vertices and a list of edges, as pairs of vertices from 0 on; it must be
connected, and edges may be parallel. All arithmetic is in integers. `ftmesh.cost.lower_bounds` says
what these mean for a mesh.

>>> square_with_a_tail = [(0, 1), (1, 2), (2, 3), (3, 0), (3, 4)]
>>> weakest_partition(5, square_with_a_tail), tightest_cut(5, square_with_a_tail)
([0, 0, 0, 0, 1], [4])
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fractions import Fraction

Edge = tuple[int, int]
Capacity = Sequence[dict[int, int]]
Reached = dict[int, int | None]  # from where each vertex was reached


def weakest_partition(num_vertices: int, edges: Sequence[Edge]) -> list[int]:
    """The part of every vertex in a partition with the fewest edges between parts per join.

    With k parts there are k - 1 joins, and the least ratio of edges to joins is the strength of the
    graph. The search starts with each vertex in its own part. Each step finds the partition that
    falls furthest short of the current ratio. It never has to split a part that an earlier step
    merged, so steps work on fewer and fewer vertices, and the search ends when there is none.
    """
    parts = list(range(num_vertices))
    while joins := max(parts):
        between = [(parts[a], parts[b]) for a, b in edges if parts[a] != parts[b]]
        ratio = Fraction(len(between), joins)
        merged = _merged(joins + 1, between, ratio)
        crossing = sum(merged[a] != merged[b] for a, b in between)
        if crossing >= ratio * max(merged):
            break
        parts = [merged[part] for part in parts]
    return parts


def _merged(num_vertices: int, edges: Iterable[Edge], ratio: Fraction) -> list[int]:
    """The part of every vertex in a partition P that minimises E(P) - ratio * (|P| - 1)."""
    game = _PebbleGame(num_vertices, per_vertex=ratio.numerator, per_edge=ratio.denominator)
    for a, b in edges:
        game.add_edge(a, b)
    roots = [game.root(vertex) for vertex in range(num_vertices)]
    number = {root: part for part, root in enumerate(dict.fromkeys(roots))}
    return [number[root] for root in roots]


class _PebbleGame:
    """The pebble game of Lee and Streinu, with many pebbles at a time.

    Every vertex has `per_vertex` pebbles, and every edge takes `per_edge` from its two ends, in
    shares that may change later. Of the pebbles of any set A at least `per_vertex` stay unused, so
    A gives at most ``per_vertex * (|A| - 1)`` to the edges inside it. Every edge gets all of its
    pebbles if this allows.

    An edge that does not takes what there is; that exhausts a set around it, and the set is merged
    into one vertex. In the end all edges between vertices have all of their pebbles, so
    ``per_edge * E(P) + per_vertex * (n - |P|)`` pebbles are used, where P is the partition into
    merged sets. For no partition is that expression less than the pebbles used, so P minimises it.
    """

    def __init__(self, num_vertices: int, *, per_vertex: int, per_edge: int) -> None:
        self.per_vertex = per_vertex
        self.per_edge = per_edge
        self.unused = [per_vertex] * num_vertices
        self.used: list[dict[int, int]] = [{} for _ in range(num_vertices)]  # by the other end
        self.parent = list(range(num_vertices))

    def root(self, vertex: int) -> int:
        """The vertex that `vertex` has been merged into."""
        parent = self.parent
        while parent[vertex] != vertex:
            parent[vertex] = parent[parent[vertex]]
            vertex = parent[vertex]
        return vertex

    def add_edge(self, a: int, b: int) -> None:
        """Give an edge its pebbles, or merge the set that does not have them."""
        u, v = self.root(a), self.root(b)
        if u == v:
            return
        exhausted = self._gather(u, v)
        if exhausted:
            self._merge(exhausted)
            return
        share = min(self.per_edge, self.unused[u])
        for giver, other, pebbles in ((u, v, share), (v, u, self.per_edge - share)):
            self.unused[giver] -= pebbles
            self.used[giver][other] = self.used[giver].get(other, 0) + pebbles

    def _gather(self, u: int, v: int) -> Collection[int]:
        """Move pebbles to `u` and `v` until an edge is possible; else return the exhausted set."""
        unused, used = self.unused, self.used

        def can_take_over(vertex: int) -> Iterator[int]:
            return (other for other, pebbles in used[vertex].items() if pebbles)

        missing = self.per_vertex + self.per_edge - unused[u] - unused[v]
        while missing > 0:
            before = missing
            reached: Reached = {u: None, v: None}
            for path in _paths(reached, can_take_over, unused.__getitem__):
                giver = path[0][1]
                pebbles = min(missing, unused[giver], *(used[a][b] for a, b in path))
                if not pebbles:
                    break
                for vertex, other in path:
                    used[vertex][other] -= pebbles
                    used[other][vertex] += pebbles
                    unused[vertex] += pebbles
                    unused[other] -= pebbles
                missing -= pebbles
                if not missing:
                    break
            if missing == before:
                return reached
        return ()

    def _merge(self, exhausted: Collection[int]) -> None:
        """Make one vertex of a set that gives no pebble to an edge that leaves it."""
        into = min(exhausted)
        outside = {x: 0 for v in exhausted for x in self.used[v] if x not in exhausted}
        for v in exhausted:
            self.parent[v] = into
            for x in self.used[v].keys() & outside:
                self.used[x][into] = self.used[x].pop(v) + self.used[x].get(into, 0)
        self.used[into] = outside
        self.unused[into] = self.per_vertex


def tightest_cut(num_vertices: int, edges: Sequence[Edge]) -> list[int]:
    """The set R, neither empty nor everything, with most vertices outside per edge that leaves it.

    The search starts from the vertex of least degree. A set with d edges leaving it and s vertices
    outside is beaten by R if ``d * |R| + s * d(R)`` is below ``d * n``. The left side is the cut
    around R once every edge has capacity s and a hub is joined to each vertex with capacity d.
    """
    neighbours: list[list[int]] = [[] for _ in range(num_vertices)]
    for a, b in edges:
        neighbours[a].append(b)
        neighbours[b].append(a)
    hub = num_vertices
    best = [min(range(num_vertices), key=lambda vertex: len(neighbours[vertex]))]
    while True:
        inside = set(best)
        leaving = sum((a in inside) != (b in inside) for a, b in edges)
        outside = num_vertices - len(best)
        capacity = [
            {**{other: outside * near.count(other) for other in near}, hub: leaving}
            for near in neighbours
        ]
        better = _cut_below(leaving * num_vertices, capacity, wide=outside)
        if not better:
            return best
        best = sorted(better)


def _cut_below(limit: int, capacity: Capacity, *, wide: int) -> Collection[int]:
    """A set with a cut below `limit`, if any, in a graph whose last vertex is a hub.

    A flow of `limit` from vertex 0 to the hub shows that no such set contains vertex 0. Others
    follow, neighbour after neighbour, each with a flow to the hub and to those before it.
    """
    hub = len(capacity)
    excluded = {hub}
    queue = deque([0])
    seen = {0}
    while queue:
        vertex = queue.popleft()
        side = _side_below(limit, capacity, vertex, excluded, wide=wide)
        if side:
            return side
        excluded.add(vertex)
        fresh = capacity[vertex].keys() - excluded - seen
        queue.extend(sorted(fresh))
        seen |= fresh
    return ()


def _side_below(
    limit: int, capacity: Capacity, source: int, sinks: Collection[int], *, wide: int
) -> Collection[int]:
    """The source's side of a cut below `limit` between `source` and `sinks`, if any.

    The flow first uses edges of capacity `wide`, since they lead to sinks close by, and then
    whatever is left.
    """
    flow: dict[Edge, int] = {}
    least = wide

    def residual(a: int, b: int) -> int:
        return capacity[a][b] - flow.get((a, b), 0)

    def onward(a: int) -> Iterator[int]:
        return (b for b in capacity[a] if residual(a, b) >= least)

    while True:
        before = limit
        reached: Reached = {source: None}
        for path in _paths(reached, onward, sinks.__contains__):
            amount = min(residual(a, b) for a, b in path)
            if not amount:
                break
            for a, b in path:
                flow[a, b] = flow.get((a, b), 0) + amount
                flow[b, a] = flow.get((b, a), 0) - amount
            limit -= amount
            if limit <= 0:
                return ()
        if limit == before:
            if least == 1:
                return reached
            least = 1


def _paths(
    reached: Reached, onward: Callable[[int], Iterable[int]], is_goal: Callable[[int], object]
) -> Iterator[list[Edge]]:
    """Paths from `reached` to goals, the shortest first, each from its last edge back.

    Every vertex on the way is added to `reached`. Goals are not, so there may be several paths to
    one. Capacity that is used up after a vertex was reached is not noticed.
    """
    queue = deque(reached)
    while queue:
        a = queue.popleft()
        for b in onward(a):
            if b in reached:
                continue
            if is_goal(b):
                path = [(a, b)]
                while (start := reached[path[-1][0]]) is not None:
                    path.append((start, path[-1][0]))
                yield path
            else:
                reached[b] = a
                queue.append(b)
