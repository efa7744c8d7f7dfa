import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftmesh import Topology, TopologyError
from ftmesh.topology.notation import Block

HOLE = """
....
.XX.
.XX.
....
"""


def test_ranks_are_dense_over_live_chips_x_fastest():
    topo = Topology.from_drawing(HOLE)
    assert topo.coords[:6] == ((0, 0), (1, 0), (2, 0), (3, 0), (0, 1), (3, 1))
    assert [topo.rank(c) for c in topo.coords] == list(range(12))
    assert (topo.num_live, topo.num_chips) == (12, 16)
    with pytest.raises(TopologyError, match="chip \\(1, 1\\) has failed"):
        topo.rank((1, 1))
    with pytest.raises(TopologyError, match="is not on the mesh"):
        topo.rank((9, 9))


def test_a_drawing_reads_back():
    assert Topology.from_drawing(Topology.from_drawing(HOLE).drawing()).failed == {
        (1, 1), (2, 1), (1, 2), (2, 2),
    }  # fmt: skip


def test_topologies_are_values():
    a = Topology.grid("4x4", failed="2x2@1,1")
    b = Topology.from_drawing(HOLE)
    assert a == b
    assert hash(a) == hash(b)
    assert a != Topology.grid("4x4", failed="")
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.shape = (2, 2)


def test_the_paper_meshes_have_the_links_they_should():
    counts = {
        ("16x32", ""): (512, 976),
        ("16x32", "4x2@6,14"): (504, 954),
        ("16x32", "4x2@2,2"): (504, 954),
        ("32x32", "4x2@14,14"): (1016, 1962),
    }
    for (shape, failed), (live, cables) in counts.items():
        topo = Topology.grid(shape, failed=failed)
        assert (topo.num_live, len(topo.links)) == (live, 2 * cables)


def test_neighbours_stop_at_edges_damage_and_failed_links():
    topo = Topology.grid("4x4", failed="2x2@1,1", failed_links="0,0-1,0")
    assert topo.neighbours((0, 0)) == ((0, 1),)
    assert topo.neighbours((1, 0)) == ((2, 0),)
    assert topo.neighbours((3, 1)) == ((3, 2), (3, 0))
    assert not topo.is_link((0, 0), (1, 0))
    assert not topo.is_link((1, 0), (0, 0))


def test_failed_takes_blocks():
    block = Block((4, 2), (6, 6))
    wanted = Topology.grid("16x16", failed="4x2@6,6")
    assert Topology.grid("16x16", failed=block) == wanted
    assert Topology.grid("16x16", failed=[block]) == wanted


@pytest.mark.parametrize("failed", ["2x1@0,0", [[0, 0], [1, 0]], {(0, 0), (1, 0)}])
def test_with_failed_takes_what_grid_takes(failed):
    whole = Topology.grid("4x4", failed_links=None)
    assert whole.with_failed(failed) == Topology.grid("4x4", failed=failed)


def test_the_order_of_the_ends_of_a_failed_link_does_not_matter():
    topo = Topology((4, 4), (False, False), failed_links=frozenset({((1, 0), (0, 0))}))
    assert not topo.is_link((0, 0), (1, 0))
    assert topo == Topology.grid("4x4", failed_links="0,0-1,0")


def test_wrapped_axes_have_links_over_the_edge():
    topo = Topology.grid("4x3", wrap=[True, False])
    assert topo.neighbours((0, 0)) == ((1, 0), (3, 0), (0, 1))
    pair = Topology.grid("2x3", wrap=True)
    assert pair.neighbours((0, 0)) == ((1, 0), (0, 1), (0, 2))  # two chips share one cable


def test_three_axes():
    topo = Topology.grid("4x4x4", failed="2x2x1@0,0,0", wrap=True)
    assert topo.num_live == 60
    assert len(topo.neighbours((2, 2, 2))) == 6
    assert topo.largest_rectangle() == Block((4, 4, 3), (0, 0, 1))
    assert str(topo) == "4x4x4 (wrapping in xyz) less 2x2x1@0,0,0"


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Topology.grid("4x4", failed="4x4@0,0"), "all 16 chips of mesh 4x4 have failed"),
        (lambda: Topology.grid("4x4", failed="2x2@3,3"), "2x2@3,3 is not inside mesh 4x4"),
        (lambda: Topology.grid("4x4", failed_links="0,0-2,0"), "is not a neighbour of"),
        (lambda: Topology.grid("4x4", failed_links="4,0-4,1"), "is not a neighbour of"),
        (lambda: Topology.grid("4x4", failed_links="0-1"), "is not a neighbour of"),
        (lambda: Topology.grid("4x4", wrap=[True]), "one entry per axis"),
        (lambda: Topology.grid("4x4", wrap="no"), "wrap must be True, False, or"),
        (lambda: Topology.grid((4.5, 4)), "not a list of integers"),
        (lambda: Topology.grid("4x4", failed=[(1.5, 2)]), "not a list of integers"),
        (lambda: Topology.grid("4x4", failed=(2, 2)), "integers"),
        (lambda: Topology.grid("4x4", failed_links=[5]), r"pairs of coords, not \[5\]"),
        (lambda: Topology.grid("4x4", failed_links=[((0, 0, 0), (0, 0, 1))]), "not a neighbour"),
        (lambda: Topology.grid("4x4").with_failed([(4, 0)]), "is not on mesh 4x4"),
        (lambda: Topology.from_devices(3), r"such as jax.devices\(\), not 3"),
        (lambda: Topology.grid("2x2x2x2"), "one to three axes"),
        (lambda: Topology((4, 4), (False, False), frozenset({(4, 0)})), "is not on mesh 4x4"),
        (lambda: Topology.grid("4x4").groups(3), "cannot be cut into equal boxes of 3 chips"),
        (lambda: Topology.grid("4x4x4").drawing(), "need one or two axes, not 4x4x4"),
    ],
)
def test_bad_input_raises(build, says):
    with pytest.raises(TopologyError, match=says):
        build()


def test_components_of_a_disconnected_mesh():
    topo = Topology.from_drawing("""
        ..X.
        ..X.
        ..X.
    """)
    assert [len(part) for part in topo.components()] == [6, 3]
    assert topo.components()[1] == ((3, 0), (3, 1), (3, 2))


def brute_force_rectangle(topo):
    width, height = topo.shape
    best = 0
    for x in range(width):
        for y in range(height):
            for w in range(1, width - x + 1):
                for h in range(1, height - y + 1):
                    box = set(Block((w, h), (x, y)).coords())
                    broken = any(a in box and b in box for a, b in topo.failed_links)
                    if not box & topo.failed and not broken:
                        best = max(best, w * h)
    return best


@given(
    st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=8),
    st.sets(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=4),
)
def test_largest_rectangle_agrees_with_brute_force(failed, links):
    topo = Topology.grid(
        "5x4", failed=failed, failed_links=[((x, y), (x + 1, y)) for x, y in links]
    )
    block = topo.largest_rectangle()
    assert len(block.coords()) == brute_force_rectangle(topo)
    assert all(topo.is_live(c) for c in block.coords())


def test_a_hole_in_the_middle_leaves_half_the_mesh():
    assert str(Topology.grid("16x32", failed="4x2@6,14").largest_rectangle()) == "16x16@0,16"


def test_groups_are_squarish_tiles_without_failed_chips():
    topo = Topology.grid("4x4", failed="1x1@1,1")
    assert topo.groups(4)[0] == (topo.rank((0, 0)), topo.rank((1, 0)), topo.rank((0, 1)))
    assert [len(group) for group in topo.groups(4)] == [3, 4, 4, 4]
    assert sorted(rank for group in topo.groups(8) for rank in group) == list(range(15))
    assert len(Topology.grid("4x4", failed="2x2@0,0").groups(4)) == 3


@pytest.mark.parametrize(
    ("shape", "failed", "box", "groups"),
    [
        ("8", "1@3", "4@4", [(0, 1), (2,), (3, 4), (5, 6)]),
        ("1x8", "1x1@0,3", "1x4@0,4", [(0, 1), (2,), (3, 4), (5, 6)]),
        ("8x1", "1x1@3,0", "4x1@4,0", [(0, 1), (2,), (3, 4), (5, 6)]),
        ("8", "2@0", "6@2", [(0, 1), (2, 3), (4, 5)]),
    ],
)
def test_lines_have_sub_meshes_and_groups(shape, failed, box, groups):
    topo = Topology.grid(shape, failed=failed)
    assert str(topo.largest_rectangle()) == box
    assert list(topo.groups(2)) == groups


def test_a_failed_link_cuts_a_line():
    assert str(Topology.grid("8", failed_links="2-3").largest_rectangle()) == "5@3"
    assert str(Topology.grid("1x8", failed_links="0,2-0,3").largest_rectangle()) == "1x5@0,3"
    with pytest.raises(TopologyError, match="mesh 8 cannot be cut into equal boxes of 3 chips"):
        Topology.grid("8").groups(3)


def test_a_mesh_of_one_axis_is_drawn_as_a_row():
    assert Topology.grid("6", failed="2@1").drawing() == ".XX..."
