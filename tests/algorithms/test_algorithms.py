"""One suite over every planner on full and damaged meshes, and what those say that cannot."""

import math
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ftmesh import PlanError, Topology
from ftmesh.algorithms import registry, row_pair
from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.topology.notation import format_shape
from tests.support.proving import SIDES, check, damaged, even_blocks, every_block, slim_blocks

GRIDS = list(product(SIDES, SIDES))
LINES = [(2,), (5,), (8,), (1, 2), (1, 8), (9, 1)]
ELSEWHERE = (*registry.CHUNKED_BY_PAYLOAD, *registry.TORUS_ONLY)  # see test_tree.py and test_colours.py
HALVED = [name for name in ALGORITHMS if name not in ELSEWHERE]
CASES = [
    (algorithm, shape)
    for algorithm in HALVED
    for shape in (LINES if algorithm == "chain" else GRIDS)
]

ADMISSIBLE = {
    "ring": even_blocks,
    "row_pair": slim_blocks,
    "two_dim": lambda shape: [],
    "chain": every_block,
    "flood": lambda shape: every_block(shape)[::301],
}


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        pytest.param(name, shape, marks=[pytest.mark.slow] * (math.prod(shape) >= 72))
        for name, shape in CASES
    ],
    ids=[f"{name}-{format_shape(shape)}" for name, shape in CASES],
)
def test_full_mesh_and_every_admissible_block(algorithm, shape):
    check(Topology.grid(shape), algorithm)
    blocks = ADMISSIBLE[algorithm](shape)
    for block in blocks[:: 3 if math.prod(shape) >= 80 else 1]:  # there are hundreds
        topo = damaged(shape, block)
        if topo is not None:
            check(topo, algorithm)


@pytest.mark.parametrize("algorithm", HALVED)
def test_meshes_with_odd_sides(algorithm):
    grids = ("5x4", "4x7", "2x2", "2x9", "6x3")
    for shape in ("3", "1x7", "11x1", "2x2") if algorithm == "chain" else grids:
        check(Topology.grid(shape), algorithm)


@pytest.mark.parametrize("algorithm", HALVED)
@pytest.mark.parametrize("wrap", [(True, False), (False, True), (True, True)])
def test_tori(algorithm, wrap):
    for shape in ("1x6", "8x1", "1x3") if algorithm == "chain" else ("4x6", "8x4", "6x6"):
        check(Topology.grid(shape, wrap=wrap), algorithm)
        if algorithm in ("ring", "row_pair"):
            check(Topology.grid(shape, failed="2x2@2,2", wrap=wrap), algorithm)


def served_or_refused(topo, algorithm):
    """None where the schedule was proved right, else what the planner said."""
    try:
        check(topo, algorithm)
    except PlanError as error:
        return str(error)
    return None


@st.composite
def several_blocks(draw, *, even):
    shape = draw(st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES)))
    pick = st.sampled_from(slim_blocks(shape, step=2 if even else 1))
    topo = damaged(shape, *draw(st.lists(pick, min_size=2, max_size=3)))
    assume(topo is not None)
    return topo


@settings(max_examples=80)
@given(several_blocks(even=True))
def test_ring_takes_any_number_of_even_blocks(topo):
    check(topo, "ring")


@settings(max_examples=80)
@given(several_blocks(even=True))
def test_row_pair_takes_several_blocks_while_a_pair_is_whole(topo):
    broken_rows = {y // 2 for _, y in topo.failed}
    broken_columns = {x // 2 for x, _ in topo.failed}
    width, height = topo.shape
    if len(broken_rows) < height // 2 or len(broken_columns) < width // 2:
        check(topo, "row_pair")
    else:
        with pytest.raises(PlanError, match="no pair of rows is whole"):
            row_pair.build_schedule(topo)


@pytest.mark.slow
@settings(max_examples=40)
@given(several_blocks(even=False), st.booleans())
def test_blocks_anywhere_are_served_or_refused_in_words(topo, wraps):
    topo = Topology.grid(topo.shape, failed=topo.failed, wrap=wraps)
    for algorithm in HALVED:
        refused = served_or_refused(topo, algorithm)
        assert refused is None or f"{algorithm} cannot run on {topo}: " in refused


@settings(max_examples=60)
@given(
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=5),
    st.sets(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=3),
)
def test_single_chips_and_links_are_served_or_refused_in_words(failed, links):
    topo = Topology.grid(
        "8x6", failed=failed, failed_links=[((x, y), (x + 1, y)) for x, y in links]
    )
    assume(len(topo.components()) == 1)
    refused = served_or_refused(topo, "row_pair")
    assert refused is None or "no pair of rows is whole and no pair of columns" in refused


class TestRegistry:
    def test_outcomes_are_schedules_or_reasons(self):
        found = registry.try_algorithms(Topology.grid("8x8", failed="2x2@2,2"))
        assert list(found) == ["two_dim", "row_pair", "ring", "chain"]
        assert "it needs every row and column whole" in str(found["two_dim"])
        assert [found[name].algorithm for name in ("row_pair", "ring")] == ["row_pair", "ring"]

    def test_where_no_ring_fits_every_reason_is_given_and_flood_serves(self):
        found = registry.try_algorithms(Topology.from_drawing("X..\n...\n..."))
        reasons = {name: str(one) for name, one in found.items() if isinstance(one, PlanError)}
        assert list(reasons) == ["two_dim", "row_pair", "ring", "chain"]
        assert "it needs every row and column whole" in reasons["two_dim"]
        assert "its 3 rows do not make pairs" in reasons["row_pair"]
        assert "a damaged mesh must have even sides" in reasons["ring"]
        assert "chip (1, 1) has 4" in reasons["chain"]
        assert found["flood"].algorithm == "flood"

    @pytest.mark.parametrize(
        ("topo", "algorithm", "says"),
        [
            (Topology.grid("8x8", failed="2x2@2,2"), "two_dim", "; use row_pair or ring$"),
            (Topology.grid("8x8", failed="2x2@1,1"), "ring", "; use row_pair$"),
            (
                Topology.grid("8x8"),
                "psum",
                "no algorithm 'psum': choose from two_dim",
            ),
            (Topology.grid("1x8"), "two_dim", "2 chips or more each, not on 1x8; use line$"),
            (Topology.grid("1x8"), "row_pair", "2 chips or more each, not on 1x8; use line$"),
            (
                Topology.grid("4x4x4", failed="1x1x1@0,0,0"),
                "two_dim",
                "every row and column whole, and the mesh is damaged; use flood or tree$",
            ),
            (Topology.grid("4x4x4"), "row_pair", "meshes of two axes, .*; use two_dim or ring$"),
            (Topology.grid("3x3x3"), "ring", "14 .* even sum to the 13 others .*; use two_dim$"),
            (Topology.grid("4x4x4"), "chain", r"chip \(0, 0, 0\) has 3; use two_dim or ring$"),
            (
                Topology.grid("4x4x4", wrap=True),
                "chain",
                r"chip \(0, 0, 0\) has 6; use two_dim or ring or multi_ring$",
            ),
            (Topology.grid("4x4"), "multi_ring", "none wraps; use two_dim or row_pair or ring$"),
            (Topology.grid("8x1"), "ring", "2 chips or more each, not on 8x1; use line$"),
            (Topology.grid("8"), "ring", "2 chips or more each, not on 8; use line$"),
            (
                Topology.grid("8x8"),
                "chain",
                r"chip \(1, 0\) has 3; use two_dim or row_pair or ring$",
            ),
            (Topology.grid("2x2", failed="2x1@0,0;1x1@0,1"), "ring", "single live chip"),
            (
                Topology.grid("8x8", failed="8x2@0,2"),
                "row_pair",
                r"cut into 2 parts that no link joins: 32 chips around \(0, 4\), 16 chips around "
                r"\(0, 0\); the largest whole sub-mesh is 8x4@0,4",
            ),
            (
                Topology.from_drawing("X..\n...\n..."),
                "ring",
                "ring cannot run on 3x3 less 1x1@0,0: a damaged .*; use flood or tree$",
            ),
        ],
    )
    def test_refusals_name_the_way_out(self, topo, algorithm, says):
        with pytest.raises(PlanError, match=says):
            registry.build_schedule(topo, algorithm)
