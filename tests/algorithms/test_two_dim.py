"""Rows and columns at once: both halves of the payload, and thirds on three axes."""

import pytest

from ftmesh import PlanError, Topology
from ftmesh.algorithms import two_dim
from tests.support.proving import check


class TestTwoDim:
    def test_both_halves_move_pieces_of_one_size_on_the_paper_mesh(self):
        schedule = two_dim.build_schedule(Topology.grid("16x32"))
        assert set(schedule.phases[0].transfers.count.tolist()) == {16}
        assert schedule.num_rounds == 4 * 31
        assert schedule.is_neighbour_only

    @pytest.mark.parametrize("wrap", [False, True, (True, False, True)])
    @pytest.mark.parametrize("shape", ["2x2x2", "3x3x3", "4x4x4", "2x3x5", "4x2x6"])
    def test_three_axes(self, shape, wrap):
        schedule = check(Topology.grid(shape, wrap=wrap), "two_dim")
        assert schedule.is_neighbour_only
        assert len(set(schedule.owner.tolist())) == schedule.topology.num_live

    def test_on_three_axes_that_wrap_both_directions_of_every_link_work_all_the_time(self):
        schedule = two_dim.build_schedule(Topology.grid("4x4x4", wrap=True))
        assert [phase.num_rounds for phase in schedule.reduce_scatter] == [3, 3, 3]
        for phase, chunks in zip(schedule.reduce_scatter, (16, 4, 1), strict=True):
            loads = schedule.link_loads(phase)
            assert set(loads) == set(schedule.topology.links)
            assert set(loads.values()) == {3 * chunks}
        assert [phase.name for phase in schedule.reduce_scatter] == [
            f"{turn}, reduce-scatter"
            for turn in ("x, y and z first", "y, z and x next", "z, x and y last")
        ]

    def test_pieces_are_of_one_size_where_a_side_is_twice_another(self):
        schedule = two_dim.build_schedule(Topology.grid("4x4x8", wrap=True))
        assert [phase.counts for phase in schedule.reduce_scatter] == [[16], [4], [1]]
        assert schedule.num_rounds == 6 * 7

    def test_damage_is_refused(self):
        with pytest.raises(PlanError, match="every row and column whole"):
            two_dim.build_schedule(Topology.grid("8x8", failed="2x2@2,2"))
