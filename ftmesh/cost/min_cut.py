"""Bottlenecks: the tightest cut and the weakest partition of a graph, exactly.

A graph is a number of vertices and a list of edges, as pairs of vertices from 0 on; it must be
connected, and edges may be parallel. Everything is counted in whole numbers. What the bottlenecks
mean for a mesh is the business of `ftmesh.cost.lower_bounds`.

>>> square_with_a_tail = [(0, 1), (1, 2), (2, 3), (3, 0), (3, 4)]
>>> weakest_partition(5, square_with_a_tail)
[0, 0, 0, 0, 1]
>>> tightest_cut(5, square_with_a_tail)
[4]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fractions import Fraction

Edge = tuple[int, int]
Capacity = Sequence[dict[int, int]]
Reached = dict[int, int | None]


def weakest_partition(num_vertices: int, edges: Sequence[Edge]) -> list[int]:
    """The part of every vertex in a partition with the fewest edges between parts per join.

    With k parts there are k - 1 joins, and the least ratio of edges to joins is the strength of the
    graph. The search starts with every vertex for itself. Each step asks which partition falls
    furthest short of the ratio at hand. That one need never split a part that an earlier step
    merged, so steps work on ever fewer vertices, and the first that finds none is the last.
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
    """The part of every vertex in a partition P for which E(P) - ratio * (|P| - 1) is least."""
    game = _CoinGame(num_vertices, purse=ratio.numerator, price=ratio.denominator)
    for a, b in edges:
        game.pay(a, b)
    roots = [game.root(vertex) for vertex in range(num_vertices)]
    number = {root: part for part, root in enumerate(dict.fromkeys(roots))}
    return [number[root] for root in roots]


class _CoinGame:
    """Vertices pay for the edges between them: the pebble game of Lee and Streinu, with amounts.

    Every vertex has `purse` coins, and every edge asks for `price` of its two ends, in shares that
    may change later. Of the coins of any set A at least one purse is never spent, so that A pays at
    most ``purse * (|A| - 1)`` for the edges inside it. Every edge is paid in full if this allows.

    One that is not takes what there is; that exhausts a set around it, and the set is merged into
    one vertex with one purse. In the end the edges between vertices have all been paid in full, so
    ``price * E(P) + purse * (n - |P|)`` has been spent, P being the partition into merged sets. For
    no partition is that expression less than what has been spent, so P makes it least.
    """

    def __init__(self, num_vertices: int, *, purse: int, price: int) -> None:
        self.purse = purse
        self.price = price
        self.left = [purse] * num_vertices
        self.paid: list[dict[int, int]] = [{} for _ in range(num_vertices)]
        self.parent = list(range(num_vertices))

    def root(self, vertex: int) -> int:
        """The vertex that `vertex` has been merged into."""
        parent = self.parent
        while parent[vertex] != vertex:
            parent[vertex] = parent[parent[vertex]]
            vertex = parent[vertex]
        return vertex

    def pay(self, a: int, b: int) -> None:
        """Pay for an edge, or merge the set that cannot."""
        u, v = self.root(a), self.root(b)
        if u == v:
            return
        exhausted = self._gather(u, v)
        if exhausted:
            self._merge(exhausted)
            return
        share = min(self.price, self.left[u])
        for payer, other, coins in ((u, v, share), (v, u, self.price - share)):
            self.left[payer] -= coins
            self.paid[payer][other] = self.paid[payer].get(other, 0) + coins

    def _gather(self, u: int, v: int) -> Collection[int]:
        """Bring a purse and a price to `u` and `v`; or all there is, and say whose that was."""
        left, paid = self.left, self.paid

        def relief(payer: int) -> Iterator[int]:
            return (other for other, coins in paid[payer].items() if coins)

        missing = self.purse + self.price - left[u] - left[v]
        while missing > 0:
            before = missing
            reached: Reached = {u: None, v: None}
            for steps in _ways(reached, relief, left.__getitem__):
                giver = steps[0][1]
                coins = min(missing, left[giver], *(paid[a][b] for a, b in steps))
                if not coins:
                    break
                for payer, other in steps:
                    paid[payer][other] -= coins
                    paid[other][payer] += coins
                    left[payer] += coins
                    left[other] -= coins
                missing -= coins
                if not missing:
                    break
            if missing == before:
                return reached
        return ()

    def _merge(self, exhausted: Collection[int]) -> None:
        """Make one vertex of a set that pays for no edge leaving it."""
        into = min(exhausted)
        beside = {x: 0 for v in exhausted for x in self.paid[v] if x not in exhausted}
        for v in exhausted:
            self.parent[v] = into
            for x in self.paid[v].keys() & beside:
                self.paid[x][into] = self.paid[x].pop(v) + self.paid[x].get(into, 0)
        self.paid[into] = beside
        self.left[into] = self.purse


def tightest_cut(num_vertices: int, edges: Sequence[Edge]) -> list[int]:
    """The set R, neither empty nor everything, with most vertices outside per edge that leaves it.

    The search starts from the vertex of least degree. A set with d edges leaving it and s vertices
    outside is beaten by R where ``d * |R| + s * d(R)`` is below ``d * n``. The left side is the cut
    around R once every edge has capacity s and a hub is joined to each vertex with capacity d.
    """
    beside: list[list[int]] = [[] for _ in range(num_vertices)]
    for a, b in edges:
        beside[a].append(b)
        beside[b].append(a)
    hub = num_vertices
    best = [min(range(num_vertices), key=lambda vertex: len(beside[vertex]))]
    while True:
        inside = set(best)
        leaving = sum((a in inside) != (b in inside) for a, b in edges)
        outside = num_vertices - len(best)
        capacity = [
            {**{other: outside * near.count(other) for other in near}, hub: leaving}
            for near in beside
        ]
        better = _cut_below(leaving * num_vertices, capacity, wide=outside)
        if not better:
            return best
        best = sorted(better)


def _cut_below(limit: int, capacity: Capacity, *, wide: int) -> Collection[int]:
    """A set, if any, with less than `limit` around it, in a graph with a hub after its vertices.

    A flow of `limit` from vertex 0 to the hub shows that no such set contains it. Then others join
    it, neighbour after neighbour, each once a flow to the hub and to those before shows the same.
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
    """The source's side of a cut of less than `limit` between it and the sinks, if any.

    The flow that looks for it takes links of capacity `wide` while it can, since they lead to sinks
    close by, and then whatever is left.
    """
    flow: dict[Edge, int] = {}
    least = wide

    def room(a: int, b: int) -> int:
        return capacity[a][b] - flow.get((a, b), 0)

    def onward(a: int) -> Iterator[int]:
        return (b for b in capacity[a] if room(a, b) >= least)

    while True:
        before = limit
        reached: Reached = {source: None}
        for steps in _ways(reached, onward, sinks.__contains__):
            amount = min(room(a, b) for a, b in steps)
            if not amount:
                break
            for a, b in steps:
                flow[a, b] = flow.get((a, b), 0) + amount
                flow[b, a] = flow.get((b, a), 0) - amount
            limit -= amount
            if limit <= 0:
                return ()
        if limit == before:
            if least == 1:
                return reached
            least = 1


def _ways(
    reached: Reached, onward: Callable[[int], Iterable[int]], is_goal: Callable[[int], object]
) -> Iterator[list[Edge]]:
    """Ways from what is `reached` to goals, the shortest first, each from its last step back.

    Everything on the way is added to `reached`, with where it was reached from. Goals are not, so
    there may be several ways to one; what has been used up since it was reached is not noticed.
    """
    queue = deque(reached)
    while queue:
        a = queue.popleft()
        for b in onward(a):
            if b in reached:
                continue
            if is_goal(b):
                steps = [(a, b)]
                while (start := reached[steps[-1][0]]) is not None:
                    steps.append((start, steps[-1][0]))
                yield steps
            else:
                reached[b] = a
                queue.append(b)
