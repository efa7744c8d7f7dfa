"""`row_pair`: rounds that a failed block costs, owners, and column pairs."""

from itertools import product

import numpy as np
import pytest

from ftmesh import PlanError, Topology
from ftmesh.algorithms import row_pair
from ftmesh.topology.notation import Block
from tests.support.proving import check


def transfers_per_link_and_round(phase):
    keys = np.stack([phase.transfers.round, phase.transfers.src, phase.transfers.dst])
    return np.unique(keys, axis=1, return_counts=True)[1].max()


def undamaged_rounds(shape):
    return row_pair.build_schedule(Topology.grid(shape)).num_rounds


def has_bridge(topo):
    """Whether removing a single link disconnects the mesh."""
    return any(
        len(Topology.grid(topo.shape, failed=topo.failed, failed_links=[link]).components()) > 1
        for link in topo.links
        if link[0] < link[1]
    )


class TestRowPair:
    @pytest.mark.slow
    @pytest.mark.parametrize("size", [(2, 2), (4, 2), (2, 4), (8, 2), (2, 12)], ids=str)
    def test_one_even_block_costs_at_most_16_rounds_on_16x16(self, size):
        """And no link carries two pieces in a round of the first phase."""
        full = undamaged_rounds("16x16")
        corners = list(product(range(0, 17 - size[0], 2), range(0, 17 - size[1], 2)))
        for x, y in {*corners[::3], corners[-1]}:
            topo = Topology.grid("16x16", failed=Block(size, (x, y)).coords())
            schedule = row_pair.build_schedule(topo)
            assert schedule.num_rounds <= full + 16, topo
            assert transfers_per_link_and_round(schedule.phases[0]) == 1, topo
            assert transfers_per_link_and_round(schedule.phases[-1]) == 1, topo

    @pytest.mark.parametrize("shape", ["16x32", pytest.param("32x32", marks=pytest.mark.slow)])
    def test_one_even_block_costs_at_most_16_rounds_on_larger_meshes(self, shape):
        full = undamaged_rounds(shape)
        width, height = map(int, shape.split("x"))
        for (w, h), across, up in product([(4, 2), (2, 4)], (0, 0.4, 1), (0, 0.5, 1)):
            x, y = 2 * round(across * (width - w) / 2), 2 * round(up * (height - h) / 2)
            schedule = row_pair.build_schedule(Topology.grid(shape, failed=f"{w}x{h}@{x},{y}"))
            assert schedule.num_rounds <= full + 16, schedule

    def test_one_odd_block_costs_at_most_16_rounds_away_from_the_corners(self):
        full = undamaged_rounds("16x16")
        for block in ("2x2@3,2", "4x2@5,6", "2x2@7,7", "2x4@3,9", "2x2@0,5", "4x2@3,1", "2x2@14,7"):
            assert check(Topology.grid("16x16", failed=block), "row_pair").num_rounds <= full + 16

    def test_the_meshes_of_the_paper_take_no_extra_round(self):
        for shape, block in (("16x32", "4x2@6,14"), ("32x32", "4x2@14,14")):
            damaged = row_pair.build_schedule(Topology.grid(shape, failed=block))
            assert damaged.num_rounds == undamaged_rounds(shape)

    def test_it_uses_column_pairs_if_these_fit_the_damage(self):
        wide = row_pair.build_schedule(Topology.grid("16x16", failed="8x2@4,4"))
        tall = row_pair.build_schedule(Topology.grid("16x16", failed="2x8@4,4"))
        assert wide.phases[0].name.startswith("row-pair")
        assert tall.phases[0].name.startswith("column-pair")
        assert wide.num_rounds == tall.num_rounds

    def test_only_chips_of_broken_pairs_own_nothing(self):
        topo = Topology.grid("8x8", failed="2x2@2,2")
        owners = {topo.coords[rank] for rank in row_pair.build_schedule(topo).owner}
        assert owners == {coord for coord in topo.coords if coord[1] not in (2, 3)}

    def test_off_ring_chips_form_2x2_blocks_next_to_an_even_hole(self):
        topo = Topology.grid("8x8", failed="2x2@2,2")
        phase = row_pair.build_schedule(topo).phases[0]
        pairs = [(topo.coords[s], topo.coords[d]) for s, d in phase.pairs]
        off_ring = [(a, b) for a, b in pairs if a[1] in (2, 3) and b[1] in (2, 3)]
        assert {(a[0] // 2, b[0] // 2) for a, b in off_ring} == {(0, 0), (2, 2), (3, 3)}

    def test_a_pocket_is_bound_by_its_one_link(self):
        """Every piece of the payload must leave over that link, one per round."""
        topo = Topology.grid("16x16", failed="2x2@0,1")
        assert has_bridge(topo)
        first = check(topo, "row_pair").phases[0]
        num_pieces = 2 * 32
        assert num_pieces <= first.num_rounds <= num_pieces + 8

    def test_raises_if_no_pair_is_whole(self):
        with pytest.raises(PlanError, match="no pair of rows is whole and no pair of columns"):
            row_pair.build_schedule(Topology.from_drawing("X...\n....\n..X.\n...."))
        with pytest.raises(PlanError, match="its 5 rows do not form pairs"):
            row_pair.build_schedule(Topology.grid("5x5"))
