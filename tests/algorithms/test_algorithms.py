"""Every algorithm on full and damaged meshes, and the errors of those that do not work."""

import math
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import ftmesh
from ftmesh import PlanError, Topology
from ftmesh.algorithms import registry, row_pair
from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.topology.notation import format_shape
from tests.support.more import more
from tests.support.proving import SIDES, all_blocks, check, damaged, even_blocks, slim_blocks

GRIDS = list(product(SIDES, SIDES))
LINES = [(2,), (5,), (8,), (1, 2), (1, 8), (9, 1)]
TESTED_ELSEWHERE = (
    *registry.CHUNKED_BY_PAYLOAD,
    *registry.TORUS_ONLY,
)  # see test_tree.py and test_multi_ring.py
SPLIT = [name for name in ALGORITHMS if name not in TESTED_ELSEWHERE]
CASES = [
    (algorithm, shape)
    for algorithm in SPLIT
    for shape in (LINES if algorithm == "chain" else GRIDS)
]

MARKS = [], [pytest.mark.slow], [pytest.mark.slow, more]  # by size
SUPPORTED_BLOCKS = {
    "ring": even_blocks,
    "row_pair": slim_blocks,
    "two_dim": lambda shape: [],
    "chain": all_blocks,
    "flood": lambda shape: all_blocks(shape)[::301],
}


@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [
        pytest.param(name, shape, marks=MARKS[(math.prod(shape) >= 60) + (math.prod(shape) >= 90)])
        for name, shape in CASES
    ],
    ids=[f"{name}-{format_shape(shape)}" for name, shape in CASES],
)
def test_full_mesh_and_every_supported_block(algorithm, shape):
    check(Topology.grid(shape), algorithm)
    blocks = SUPPORTED_BLOCKS[algorithm](shape)
    for block in blocks[:: 3 if math.prod(shape) >= 80 else 1]:  # there are hundreds
        topo = damaged(shape, block)
        if topo is not None:
            check(topo, algorithm)


@pytest.mark.parametrize("algorithm", SPLIT)
def test_meshes_with_odd_sides(algorithm):
    grids = ("5x4", "4x7", "2x2", "2x9", "6x3")
    for shape in ("3", "1x7", "11x1", "2x2") if algorithm == "chain" else grids:
        check(Topology.grid(shape), algorithm)


@pytest.mark.parametrize("algorithm", SPLIT)
@pytest.mark.parametrize("wrap", [(True, False), (False, True), (True, True)])
def test_tori(algorithm, wrap):
    for shape in ("1x6", "8x1", "1x3") if algorithm == "chain" else ("4x6", "8x4", "6x6"):
        check(Topology.grid(shape, wrap=wrap), algorithm)
        if algorithm in ("ring", "row_pair"):
            check(Topology.grid(shape, failed="2x2@2,2", wrap=wrap), algorithm)


def plan_error(topo, algorithm):
    """The error of the algorithm; None if its schedule is correct."""
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
def test_ring_works_around_any_number_of_even_blocks(topo):
    check(topo, "ring")


@settings(max_examples=80)
@given(several_blocks(even=True))
def test_row_pair_works_around_several_blocks_while_a_pair_is_whole(topo):
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
def test_blocks_anywhere_give_a_correct_schedule_or_an_error(topo, wraps):
    topo = Topology.grid(topo.shape, failed=topo.failed, wrap=wraps)
    for algorithm in SPLIT:
        error = plan_error(topo, algorithm)
        assert error is None or f"{algorithm} cannot run on {topo}: " in error


@settings(max_examples=60)
@given(
    st.sets(st.tuples(st.integers(0, 7), st.integers(0, 5)), max_size=5),
    st.sets(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=3),
)
def test_single_chips_and_links_give_a_correct_schedule_or_an_error(failed, links):
    topo = Topology.grid(
        "8x6", failed=failed, failed_links=[((x, y), (x + 1, y)) for x, y in links]
    )
    assume(len(topo.components()) == 1)
    error = plan_error(topo, "row_pair")
    assert error is None or "no pair of rows is whole and no pair of columns" in error


class TestRegistry:
    @pytest.mark.parametrize(
        ("old", "topo", "new"),
        [("colours", Topology.grid("3x3", wrap=True), "multi_ring"), ("line", "4", "chain")],
        ids=["colours", "line"],
    )
    def test_old_names_are_accepted(self, old, topo, new):
        topo = Topology.grid(topo) if isinstance(topo, str) else topo
        assert registry.build_schedule(topo, old).algorithm == new
        assert ftmesh.plan(topo, old).algorithm == new

    def test_try_algorithms_gives_schedules_or_errors(self):
        outcomes = registry.try_algorithms(Topology.grid("8x8", failed="2x2@2,2"))
        assert list(outcomes) == ["two_dim", "row_pair", "ring", "chain"]
        assert "it needs every row and column whole" in str(outcomes["two_dim"])
        assert [outcomes[name].algorithm for name in ("row_pair", "ring")] == ["row_pair", "ring"]

    def test_flood_is_tried_if_no_other_algorithm_works(self):
        outcomes = registry.try_algorithms(Topology.from_drawing("X..\n...\n..."))
        reasons = {name: str(e) for name, e in outcomes.items() if isinstance(e, PlanError)}
        assert list(reasons) == ["two_dim", "row_pair", "ring", "chain"]
        assert "it needs every row and column whole" in reasons["two_dim"]
        assert "its 3 rows do not form pairs" in reasons["row_pair"]
        assert "a damaged mesh must have even sides" in reasons["ring"]
        assert "chip (1, 1) has 4" in reasons["chain"]
        assert outcomes["flood"].algorithm == "flood"

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
            (Topology.grid("1x8"), "two_dim", "2 chips or more each, not 1x8; use chain$"),
            (Topology.grid("1x8"), "row_pair", "2 chips or more each, not 1x8; use chain$"),
            (
                Topology.grid("4x4x4", failed="1x1x1@0,0,0"),
                "two_dim",
                "every row and column whole, and the mesh is damaged; use flood or tree$",
            ),
            (Topology.grid("4x4x4"), "row_pair", "it needs two axes, .*; use two_dim or ring$"),
            (Topology.grid("3x3x3"), "ring", "14 .* even sum to the 13 others .*; use two_dim$"),
            (Topology.grid("4x4x4"), "chain", r"chip \(0, 0, 0\) has 3; use two_dim or ring$"),
            (
                Topology.grid("4x4x4", wrap=True),
                "chain",
                r"chip \(0, 0, 0\) has 6; use two_dim or ring or multi_ring$",
            ),
            (Topology.grid("4x4"), "multi_ring", "none wraps; use two_dim or row_pair or ring$"),
            (Topology.grid("8x1"), "ring", "2 chips or more each, not 8x1; use chain$"),
            (Topology.grid("8"), "ring", "2 chips or more each, not 8; use chain$"),
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
    def test_errors_name_algorithms_that_work(self, topo, algorithm, says):
        with pytest.raises(PlanError, match=says):
            registry.build_schedule(topo, algorithm)
