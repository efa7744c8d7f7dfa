"""One suite over every planner on full and damaged meshes, and what each promises beyond it."""

import math
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ftmesh import PlanError, Topology, planners, verify
from ftmesh.mesh.notation import Block, format_shape
from ftmesh.planners import PLANNERS, ring, row_pair, two_dim

SIDES = range(4, 13, 2)
GRIDS = list(product(SIDES, SIDES))
LINES = [(2,), (5,), (8,), (1, 2), (1, 8), (9, 1)]
ELSEWHERE = (*planners.CUT_BY_SIZE, *planners.FOR_TORI)  # see test_tree.py and test_colours.py
HALVED = [name for name in PLANNERS if name not in ELSEWHERE]
CASES = [
    (algorithm, shape)
    for algorithm in HALVED
    for shape in (LINES if algorithm == "line" else GRIDS)
]


def even_blocks(shape):
    """Every even block at even coordinates."""
    return [
        Block((w, h), (x, y))
        for w, h in product(*(range(2, n + 1, 2) for n in shape))
        for x, y in product(range(0, shape[0] - w + 1, 2), range(0, shape[1] - h + 1, 2))
    ]


def slim_blocks(shape, *, step=2):
    """Every block of 2k x 2 or 2 x 2k, at every coordinate or every second one."""
    sizes = {(2 * k, 2) for k in range(1, shape[0] // 2 + 1)}
    sizes |= {(2, 2 * k) for k in range(1, shape[1] // 2 + 1)}
    return [
        Block((w, h), (x, y))
        for w, h in sorted(sizes)
        for x in range(0, shape[0] - w + 1, step)
        for y in range(0, shape[1] - h + 1, step)
    ]


def every_block(shape):
    """Every block, at every coordinate."""
    return [
        Block(size, corner)
        for size in product(*(range(1, n + 1) for n in shape))
        for corner in product(*(range(n - s + 1) for n, s in zip(shape, size, strict=True)))
    ]


ADMISSIBLE = {
    "ring": even_blocks,
    "row_pair": slim_blocks,
    "two_dim": lambda shape: [],
    "line": every_block,
    "flood": lambda shape: every_block(shape)[::301],
}


def damaged(shape, *blocks):
    """The topology, or None where the blocks leave nothing to sum or cut the mesh in two."""
    failed = {coord for block in blocks for coord in block.coords()}
    if len(failed) >= math.prod(shape) - 1:
        return None
    topo = Topology.grid(shape, failed=failed)
    return topo if len(topo.components()) == 1 else None


def check(topo, algorithm):
    """Plan and prove; also what every algorithm of this package has in common."""
    schedule = planners.schedule(topo, algorithm)
    proof = verify(schedule)
    assert schedule.algorithm == algorithm
    assert 2 * schedule.rounds_in_reduce_scatter == schedule.num_rounds
    assert proof.num_additions == schedule.num_chunks * (topo.num_live - 1)
    assert proof.num_copies == schedule.num_chunks * (topo.num_live - 1)
    return schedule


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
    for shape in ("3", "1x7", "11x1", "2x2") if algorithm == "line" else grids:
        check(Topology.grid(shape), algorithm)


@pytest.mark.parametrize("algorithm", HALVED)
@pytest.mark.parametrize("wrap", [(True, False), (False, True), (True, True)])
def test_tori(algorithm, wrap):
    for shape in ("1x6", "8x1", "1x3") if algorithm == "line" else ("4x6", "8x4", "6x6"):
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
            row_pair.plan(topo)


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


class TestRing:
    def test_the_snake_of_figure_3(self):
        assert ring.circuit(Topology.grid("4x4")) == [
            (0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1),
            (1, 2), (2, 2), (3, 2), (3, 3), (2, 3), (1, 3), (0, 3), (0, 2), (0, 1),
        ]  # fmt: skip

    def test_both_directions_fill_every_link_of_the_circuit_in_every_round(self):
        schedule = ring.plan(Topology.grid("6x6", failed="2x2@2,2"))
        first = schedule.phases[0]
        assert set(schedule.link_loads(first).values()) == {31}
        assert len(schedule.link_loads(first)) == 2 * 32

    @pytest.mark.parametrize(
        ("topo", "says"),
        [
            (Topology.grid("5x5"), "odd number of chips"),
            (Topology.grid("6x5", failed="2x2@2,2"), "even sides"),
            (
                Topology.grid("8x8", failed="3x2@2,2"),
                r"square of chip \(4, 2\) is only partly failed",
            ),
            (Topology.grid("8x8", failed="2x2@1,2"), "even blocks at even coordinates"),
            (Topology.grid("8x8", failed="2x2@2,2;2x2@3,2"), "only partly failed"),
            (Topology.grid("8x8", failed_links="2,0-3,0"), "failed link between chips"),
            (Topology.grid("3x3x3"), "from the 14 whose coords have an even sum to the 13 others"),
            (Topology.grid("8"), "meshes of two axes"),
            (Topology.grid("1x8", wrap=True), "of 2 chips or more each"),
            (Topology.grid("4x4", failed="1x1@0,0", wrap=True), "from the 7 .* to the 8 others"),
            (Topology.grid("5x5", failed="1x1@2,2", wrap=True), "rings over the edge and strips"),
        ],
    )
    def test_what_it_cannot_do_it_refuses(self, topo, says):
        with pytest.raises(PlanError, match=says):
            ring.plan(topo)

    def test_a_failed_link_off_the_circuit_does_no_harm(self):
        check(Topology.grid("8x8", failed_links="2,1-2,2"), "ring")

    @pytest.mark.parametrize(
        ("shape", "wrap", "failed"),
        [
            ("5x5", (True, False), ""),  # an odd number of chips
            ("7x3", True, ""),
            ("5x7", True, "2x2@1,1"),  # an odd side, and damage
            ("8x8", True, "8x2@0,2;2x2@0,6"),  # parts that hang together over the edge
            ("6x6", True, "3x2@1,2"),
        ],
        ids=str,
    )
    def test_on_tori_it_goes_over_the_edge(self, shape, wrap, failed):
        topo = Topology.grid(shape, wrap=wrap, failed=failed)
        check(topo, "ring")
        walk = ring.circuit(topo)
        steps = [max(map(abs, np.subtract(a, b))) for a, b in pairwise([*walk, walk[0]])]
        assert max(steps) > 1

    @pytest.mark.parametrize(
        ("shape", "wrap", "failed", "links"),
        [
            ("2x2x2", False, "", ""),
            ("3x3x4", False, "", ""),
            ("3x3x3", (False, False, True), "", ""),
            ("4x3x5", True, "", "0,0,0-1,0,0"),
            ("4x4x4", False, "2x2x1@0,0,0", ""),
            ("4x4x4", False, "2x2x2@1,0,2", "3,1,0-3,1,1"),
            ("4x5x4", False, "2x1x2@1,2,0;4x1x2@0,0,2", ""),
        ],
        ids=str,
    )
    def test_on_three_axes(self, shape, wrap, failed, links):
        check(Topology.grid(shape, wrap=wrap, failed=failed, failed_links=links), "ring")


class TestTwoDim:
    def test_both_halves_move_pieces_of_one_size_on_the_paper_mesh(self):
        schedule = two_dim.plan(Topology.grid("16x32"))
        assert set(schedule.phases[0].columns.count.tolist()) == {16}
        assert schedule.num_rounds == 4 * 31
        assert schedule.is_neighbour_only

    @pytest.mark.parametrize("wrap", [False, True, (True, False, True)])
    @pytest.mark.parametrize("shape", ["2x2x2", "3x3x3", "4x4x4", "2x3x5", "4x2x6"])
    def test_three_axes(self, shape, wrap):
        schedule = check(Topology.grid(shape, wrap=wrap), "two_dim")
        assert schedule.is_neighbour_only
        assert len(set(schedule.owner.tolist())) == schedule.topology.num_live

    def test_on_three_axes_that_wrap_both_directions_of_every_link_work_all_the_time(self):
        schedule = two_dim.plan(Topology.grid("4x4x4", wrap=True))
        assert [phase.num_rounds for phase in schedule.scatter] == [3, 3, 3]
        for phase, chunks in zip(schedule.scatter, (16, 4, 1), strict=True):
            loads = schedule.link_loads(phase)
            assert set(loads) == set(schedule.topology.links)
            assert set(loads.values()) == {3 * chunks}
        assert [phase.name for phase in schedule.scatter] == [
            f"{turn}, reduce-scatter"
            for turn in ("x, y and z first", "y, z and x next", "z, x and y last")
        ]

    def test_pieces_are_of_one_size_where_a_side_is_twice_another(self):
        schedule = two_dim.plan(Topology.grid("4x4x8", wrap=True))
        assert [phase.counts for phase in schedule.scatter] == [[16], [4], [1]]
        assert schedule.num_rounds == 6 * 7

    def test_damage_is_refused(self):
        with pytest.raises(PlanError, match="every row and column whole"):
            two_dim.plan(Topology.grid("8x8", failed="2x2@2,2"))


def transfers_per_link_and_round(phase):
    keys = np.stack([phase.columns.round, phase.columns.src, phase.columns.dst])
    return np.unique(keys, axis=1, return_counts=True)[1].max()


def undamaged_rounds(shape):
    return row_pair.plan(Topology.grid(shape)).num_rounds


def has_pocket(topo):
    """Whether some chips hang on the rest by a single link, which every sum would have to cross."""
    return any(
        len(Topology.grid(topo.shape, failed=topo.failed, failed_links=[link]).components()) > 1
        for link in topo.links
        if link[0] < link[1]
    )


class TestRowPair:
    @pytest.mark.slow
    @pytest.mark.parametrize("size", [(2, 2), (4, 2), (2, 4), (8, 2), (2, 12)], ids=str)
    def test_one_even_block_costs_at_most_16_rounds_on_16x16(self, size):
        """And no link carries two pieces in a round of the first phase, wherever the block is."""
        full = undamaged_rounds("16x16")
        corners = list(product(range(0, 17 - size[0], 2), range(0, 17 - size[1], 2)))
        for x, y in {*corners[::3], corners[-1]}:
            topo = Topology.grid("16x16", failed=Block(size, (x, y)).coords())
            schedule = row_pair.plan(topo)
            assert schedule.num_rounds <= full + 16, topo
            assert transfers_per_link_and_round(schedule.phases[0]) == 1, topo
            assert transfers_per_link_and_round(schedule.phases[-1]) == 1, topo

    @pytest.mark.parametrize("shape", ["16x32", pytest.param("32x32", marks=pytest.mark.slow)])
    def test_one_even_block_costs_at_most_16_rounds_on_larger_meshes(self, shape):
        full = undamaged_rounds(shape)
        width, height = map(int, shape.split("x"))
        for (w, h), across, up in product([(4, 2), (2, 4)], (0, 0.4, 1), (0, 0.5, 1)):
            x, y = 2 * round(across * (width - w) / 2), 2 * round(up * (height - h) / 2)
            schedule = row_pair.plan(Topology.grid(shape, failed=f"{w}x{h}@{x},{y}"))
            assert schedule.num_rounds <= full + 16, schedule

    def test_one_odd_block_costs_at_most_16_rounds_away_from_the_corners(self):
        full = undamaged_rounds("16x16")
        for block in ("2x2@3,2", "4x2@5,6", "2x2@7,7", "2x4@3,9", "2x2@0,5", "4x2@3,1", "2x2@14,7"):
            assert check(Topology.grid("16x16", failed=block), "row_pair").num_rounds <= full + 16

    def test_the_paper_meshes_cost_no_round_more(self):
        for shape, block in (("16x32", "4x2@6,14"), ("32x32", "4x2@14,14")):
            damaged = row_pair.plan(Topology.grid(shape, failed=block))
            assert damaged.num_rounds == undamaged_rounds(shape)

    def test_it_turns_to_columns_where_that_fits_the_damage(self):
        wide = row_pair.plan(Topology.grid("16x16", failed="8x2@4,4"))
        tall = row_pair.plan(Topology.grid("16x16", failed="2x8@4,4"))
        assert wide.phases[0].name.startswith("row-pair")
        assert tall.phases[0].name.startswith("column-pair")
        assert wide.num_rounds == tall.num_rounds

    def test_only_chips_of_broken_pairs_own_nothing(self):
        topo = Topology.grid("8x8", failed="2x2@2,2")
        owners = {topo.coords[rank] for rank in row_pair.plan(topo).owner}
        assert owners == {coord for coord in topo.coords if coord[1] not in (2, 3)}

    def test_yellow_chips_work_in_2x2_blocks_beside_an_even_hole(self):
        topo = Topology.grid("8x8", failed="2x2@2,2")
        pairs = [(topo.coords[s], topo.coords[d]) for s, d in row_pair.plan(topo).phases[0].pairs]
        yellow = [(a, b) for a, b in pairs if a[1] in (2, 3) and b[1] in (2, 3)]
        assert {(a[0] // 2, b[0] // 2) for a, b in yellow} == {(0, 0), (2, 2), (3, 3)}

    def test_a_block_that_leaves_a_pocket_is_bound_by_the_pockets_one_link(self):
        """Every piece of the payload must leave by that link, one a round."""
        topo = Topology.grid("16x16", failed="2x2@0,1")
        assert has_pocket(topo)
        first = check(topo, "row_pair").phases[0]
        num_pieces = 2 * 32
        assert num_pieces <= first.num_rounds <= num_pieces + 8

    def test_refuses_where_no_pair_is_whole(self):
        with pytest.raises(PlanError, match="no pair of rows is whole and no pair of columns"):
            row_pair.plan(Topology.from_drawing("X...\n....\n..X.\n...."))
        with pytest.raises(PlanError, match="its 5 rows do not make pairs"):
            row_pair.plan(Topology.grid("5x5"))


class TestRegistry:
    def test_outcomes_are_schedules_or_reasons(self):
        found = planners.outcomes(Topology.grid("8x8", failed="2x2@2,2"))
        assert list(found) == ["two_dim", "row_pair", "ring", "line"]
        assert "it needs every row and column whole" in str(found["two_dim"])
        assert [found[name].algorithm for name in ("row_pair", "ring")] == ["row_pair", "ring"]

    def test_where_no_ring_fits_every_reason_is_given_and_flood_serves(self):
        found = planners.outcomes(Topology.from_drawing("X..\n...\n..."))
        reasons = {name: str(one) for name, one in found.items() if isinstance(one, PlanError)}
        assert list(reasons) == ["two_dim", "row_pair", "ring", "line"]
        assert "it needs every row and column whole" in reasons["two_dim"]
        assert "its 3 rows do not make pairs" in reasons["row_pair"]
        assert "a damaged mesh must have even sides" in reasons["ring"]
        assert "chip (1, 1) has 4" in reasons["line"]
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
            (Topology.grid("4x4x4"), "line", r"chip \(0, 0, 0\) has 3; use two_dim or ring$"),
            (
                Topology.grid("4x4x4", wrap=True),
                "line",
                r"chip \(0, 0, 0\) has 6; use two_dim or ring or colours$",
            ),
            (Topology.grid("4x4"), "colours", "none wraps; use two_dim or row_pair or ring$"),
            (Topology.grid("8x1"), "ring", "2 chips or more each, not on 8x1; use line$"),
            (Topology.grid("8"), "ring", "2 chips or more each, not on 8; use line$"),
            (
                Topology.grid("8x8"),
                "line",
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
            planners.schedule(topo, algorithm)
