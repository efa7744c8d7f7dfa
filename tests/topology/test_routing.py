from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Topology, TopologyError
from ftmesh.errors import RoutingError
from ftmesh.topology.routing import (
    around_failures,
    deadlock_free_routes,
    dimension_order,
    find_cycle,
)

HOLE = Topology.from_drawing("""
    ......
    ......
    ..XX..
    ..XX..
    ......
    ......
""")


def test_dimension_order_goes_along_x_then_along_y():
    assert dimension_order(HOLE, (0, 4), (3, 5)) == ((0, 4), (1, 4), (2, 4), (3, 4), (3, 5))
    assert dimension_order(HOLE, (3, 1), (3, 1)) == ((3, 1),)


def test_dimension_order_takes_the_shorter_way_round_a_ring():
    ring = Topology.grid("6x6", wrap=True)
    assert dimension_order(ring, (1, 0), (5, 0)) == ((1, 0), (0, 0), (5, 0))
    assert dimension_order(ring, (5, 0), (1, 0)) == ((5, 0), (0, 0), (1, 0))
    assert len(dimension_order(ring, (0, 0), (3, 0))) == 4


def test_dimension_order_ignores_failures():
    assert (2, 2) in dimension_order(HOLE, (2, 1), (2, 4))


def test_routes_pass_failed_chips_on_the_nearer_side():
    assert around_failures(HOLE, (2, 1), (2, 4)) == ((2, 1), (1, 1), (1, 2), (1, 3), (1, 4), (2, 4))
    assert around_failures(HOLE, (3, 1), (3, 4)) == ((3, 1), (4, 1), (4, 2), (4, 3), (4, 4), (3, 4))
    assert around_failures(HOLE, (0, 0), (5, 5)) == dimension_order(HOLE, (0, 0), (5, 5))


def test_routes_go_around_failed_links():
    topo = Topology.grid("3x2", failed_links="0,0-1,0")
    assert around_failures(topo, (0, 0), (1, 0)) == ((0, 0), (0, 1), (1, 1), (1, 0))


def test_routes_that_do_not_exist_raise():
    with pytest.raises(TopologyError, match="chip \\(2, 2\\) has failed"):
        around_failures(HOLE, (2, 2), (0, 0))
    cut = Topology.from_drawing(".X.\n.X.")
    with pytest.raises(RoutingError, match="no live route leads from chip \\(0, 0\\) to"):
        around_failures(cut, (0, 0), (2, 0))


def distances(topo, src):
    hops = {src: 0}
    for a in (queue := [src]):
        for b in topo.neighbours(a):
            if b not in hops:
                hops[b] = hops[a] + 1
                queue.append(b)
    return hops


@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=6))
def test_routes_are_live_and_shortest(failed):
    topo = Topology.grid("5x5", failed=failed)
    src = topo.components()[0][0]
    for dst, hops in distances(topo, src).items():
        route = around_failures(topo, src, dst)
        assert (route[0], route[-1], len(route) - 1) == (src, dst, hops)
        assert all(topo.is_link(a, b) for a, b in pairwise(route))


def test_four_turns_form_a_cycle():
    square = [(0, 0), (1, 0), (1, 1), (0, 1)]
    corners = [(square[i], square[(i + 1) % 4], square[(i + 2) % 4]) for i in range(4)]
    cycle = find_cycle(corners)
    assert set(cycle) == {(square[i], square[(i + 1) % 4]) for i in range(4)}
    assert find_cycle(corners[:3]) == ()


def test_dimension_order_never_deadlocks_and_free_routing_can():
    full = Topology.grid("4x4")
    every = list(product(full.coords, repeat=2))
    assert find_cycle(dimension_order(full, a, b) for a, b in every) == ()
    y_then_x = [dimension_order(full, b, a)[::-1] for a, b in every]
    assert find_cycle(y_then_x) == ()
    assert find_cycle([*y_then_x, *(dimension_order(full, a, b) for a, b in every)])


def test_a_torus_has_a_second_channel_beyond_the_edge():
    torus = Topology.grid("5x5", wrap=True)
    every = product(torus.coords, repeat=2)
    assert find_cycle(dimension_order(torus, a, b) for a, b in every) == ()
    walk = tuple((x % 5, 0) for x in range(7))
    assert find_cycle([walk[i : i + 3] for i in range(5)]) == ()


class TestDeadlockFreeRoutes:
    """Detours on both sides of a hole; hops along the rows they use close a cycle."""

    HOLE = Topology.grid("8x8", failed="2x2@3,3")
    ACROSS = (((3, 2), (3, 5)), ((4, 2), (4, 5)), ((3, 5), (3, 2)), ((4, 5), (4, 2)))
    ALONG = (((2, 2), (4, 2)), ((3, 2), (5, 2)), ((5, 5), (3, 5)), ((4, 5), (2, 5)))

    def test_the_nearer_side_if_that_cannot_deadlock(self):
        routes = deadlock_free_routes(self.HOLE, self.ACROSS)
        assert routes == [around_failures(self.HOLE, *pair) for pair in self.ACROSS]
        assert {route[1] for route in routes} == {(2, 2), (5, 2), (2, 5), (5, 5)}

    def test_one_side_for_all_if_both_can_deadlock(self):
        pairs = [*self.ACROSS, *self.ALONG]
        assert find_cycle(around_failures(self.HOLE, *pair) for pair in pairs)
        routes = deadlock_free_routes(self.HOLE, pairs)
        assert find_cycle(routes) == ()
        assert [(route[0], route[-1]) for route in routes] == pairs
        assert all((2, 3) in route or (2, 4) in route for route in routes[:4])

    def test_a_side_without_a_route_raises(self):
        hole = Topology.grid("6x8", failed="4x2@0,3")
        pairs = [((0, 2), (0, 5)), ((0, 5), (0, 2))]
        assert around_failures(hole, *pairs[0], first=(0, 1)) == around_failures(hole, *pairs[0])
        with pytest.raises(RoutingError, match="no live route"):
            around_failures(hole, *pairs[0], first=(0, -1))

    def test_the_nearest_routes_if_no_side_works(self):
        over_rows = [((2, 3), (5, 3)), ((5, 3), (2, 3))]
        pairs = [*self.ACROSS, *self.ALONG, *over_rows]
        nearest = [around_failures(self.HOLE, *pair) for pair in pairs]
        assert find_cycle(nearest)
        assert deadlock_free_routes(self.HOLE, pairs) == nearest
