"""`two_dim`: halves of the payload on two axes, thirds on three."""

import pytest

from ftmesh import PlanError, Topology
from ftmesh.algorithms import rings
from tests.support.proving import check


class TestTwoDim:
    def test_both_halves_move_pieces_of_one_size_on_the_mesh_of_the_paper(self):
        schedule = rings.build_two_dim(Topology.grid("16x32"))
        assert set(schedule.phases[0].transfers.count.tolist()) == {16}
        assert schedule.num_rounds == 4 * 31
        assert schedule.is_neighbour_only

    @pytest.mark.parametrize("wrap", [False, True, (True, False, True)])
    @pytest.mark.parametrize("shape", ["2x2x2", "3x3x3", "4x4x4", "2x3x5", "4x2x6"])
    def test_three_axes(self, shape, wrap):
        schedule = check(Topology.grid(shape, wrap=wrap), "two_dim")
        assert schedule.is_neighbour_only
        assert len(set(schedule.owner.tolist())) == schedule.topology.num_live

    def test_every_link_is_used_both_ways_in_every_round_on_a_3d_torus(self):
        schedule = rings.build_two_dim(Topology.grid("4x4x4", wrap=True))
        assert [phase.num_rounds for phase in schedule.reduce_scatter] == [3, 3, 3]
        for phase, chunks in zip(schedule.reduce_scatter, (16, 4, 1), strict=True):
            loads = schedule.link_loads(phase)
            assert set(loads) == set(schedule.topology.links)
            assert set(loads.values()) == {3 * chunks}
        assert [phase.name for phase in schedule.reduce_scatter] == [
            f"{name}, reduce-scatter"
            for name in ("x, y and z first", "y, z and x next", "z, x and y last")
        ]

    def test_pieces_have_one_size_if_a_side_is_twice_another(self):
        schedule = rings.build_two_dim(Topology.grid("4x4x8", wrap=True))
        assert [phase.counts for phase in schedule.reduce_scatter] == [[16], [4], [1]]
        assert schedule.num_rounds == 6 * 7

    def test_damage_raises(self):
        with pytest.raises(PlanError, match="every row and column whole"):
            rings.build_two_dim(Topology.grid("8x8", failed="2x2@2,2"))
