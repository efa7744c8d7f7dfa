"""Schedules over tiles, as their chips run them: proofs of every position, and broken ones."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftmesh
from ftmesh import PlanError, ScheduleFileError, TiledTopology, Topology, VerificationError
from ftmesh.algorithms import registry
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import ADD
from ftmesh.topology.routing import around_failures, dimension_order


def tiled(shape, tile, failed="", **options):
    return TiledTopology.from_topology(Topology.grid(shape, failed=failed, **options), tile)


def on_two_cores(shape, tile, failed=""):
    return TiledTopology.from_topology(
        replace(Topology.grid(shape, failed=failed), devices_per_chip=2), tile
    )


def check_sums(schedule):
    """Replay the transfers of the chips with integers, and check the sum of each position."""
    tiles, chips = schedule.topology, schedule.on_chips
    initial = np.random.default_rng(0).integers(-9, 9, (tiles.chips.num_live, chips.num_chunks))
    held = initial.copy()
    for c in (c for phase in chips.phases for c in phase.rounds()):
        row, chunk = c.expanded()
        read = held[c.src[row], chunk]
        adds = c.op[row] == ADD
        held[c.dst[row][~adds], chunk[~adds]] = read[~adds]
        np.add.at(held, (c.dst[row][adds], chunk[adds]), read[adds])
    for ranks in tiles.chip_ranks:
        assert (held[ranks] == initial[ranks].sum(axis=0)).all()
    unused = np.setdiff1d(np.arange(len(initial)), tiles.chip_ranks)
    assert (held[unused] == initial[unused]).all(), "chips of failed tiles take no part"


@pytest.mark.parametrize(
    ("tiles", "algorithm"),
    [
        (tiled("4x4", "2x1", "2x2@0,0"), "row_pair"),
        (tiled("4x4", "2x2", "2x2@0,0"), "chain"),
        (tiled("8x8", "2x2", "1x1@2,3"), "row_pair"),
        (tiled("8x8", "2x1"), "two_dim"),
        (tiled("8x8", "2x2", wrap=True), "two_dim"),
        (tiled("12x12", "2x2", "4x4@4,4"), "ring"),
        (tiled("8x8", "1x2", failed_links="2,2-3,2"), "row_pair"),
        (tiled("8x4", "8x1"), "chain"),
        (tiled("4x4x4", "1x1x4", "2x2x1@0,0,0"), "ring"),
        (tiled("6x6x2", "1x1x2", "2x2x2@2,2,0"), "row_pair"),
        (on_two_cores("4x4", "1x1", "2x2@0,0"), "ring"),
        (on_two_cores("8x8", "2x2", "2x2@2,2"), "row_pair"),
        (tiled("16x32", "2x1", "4x2@6,14"), "row_pair"),
        (tiled("16x32", "2x2", "4x2@6,14"), "row_pair"),
    ],
    ids=str,
)
def test_every_position_is_proved_and_summed(tiles, algorithm):
    schedule = registry.build_schedule(tiles, algorithm)
    proof = ftmesh.verify(schedule)
    assert (proof.num_ranks, proof.num_positions) == (tiles.num_live, tiles.num_positions)
    assert f"{tiles.num_live} ranks, at each of {tiles.num_positions} positions, hold" in str(proof)
    check_sums(schedule)


def test_hops_are_between_chips():
    schedule = registry.build_schedule(tiled("8x8", "2x2"), "ring")
    assert not schedule.is_neighbour_only
    assert ftmesh.verify(schedule).longest_route == 2
    assert registry.build_schedule(tiled("8x8", "1x1"), "ring").is_neighbour_only


def test_routes_may_cross_live_chips_of_failed_tiles():
    tiles = tiled("12x12", "2x2", "1x1@4,4")
    schedule = registry.build_schedule(tiles, "row_pair")
    crossed = {chip for route in schedule.on_chips.routes.values() for chip in route}
    stranded = set(tiles.chips_of([(2, 2)])) - {(4, 4)}
    assert (4, 4) not in crossed
    assert crossed & stranded


@given(
    st.sampled_from([("4x4", "2x1"), ("4x4", "1x2"), ("6x6", "2x1"), ("8x4", "2x2")]),
    st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=3),
    st.integers(1, 2),
)
def test_any_damage_gives_a_correct_schedule_or_an_error(case, failed, cores):
    shape, tile = case
    chips = Topology.grid(shape)
    chips = Topology.grid(shape, failed=[c for c in failed if c in chips.coords])
    try:
        tiles = TiledTopology.from_topology(replace(chips, devices_per_chip=cores), tile)
        results = registry.try_algorithms(tiles)
    except (PlanError, ftmesh.TopologyError):
        return
    for schedule in results.values():
        if isinstance(schedule, Schedule):
            ftmesh.verify(schedule)
            check_sums(schedule)


class TestFaults:
    """The transfers of the chips are changed, those of the tiles are not."""

    TILES = tiled("8x8", "2x1", "1x1@2,2")

    @pytest.fixture
    def schedule(self):
        return registry.build_schedule(self.TILES, "row_pair")

    def with_chips(self, schedule, change):
        chips = schedule.on_chips
        first, *rest = chips.phases
        phases = (Phase(first.name, change(first.transfers)), *rest)
        schedule.__dict__["on_chips"] = replace(chips, phases=phases)
        return schedule

    def chip(self, coord):
        return self.TILES.chips.rank(coord)

    def test_a_transfer_of_one_position_is_missing(self, schedule):
        broken = self.with_chips(schedule, lambda c: c.take(np.arange(len(c)) != 5))
        with pytest.raises(VerificationError, match=r"missing, such as chip \(\d, \d\)'s"):
            ftmesh.verify(broken)

    def test_a_position_adds_twice(self, schedule):
        def again(c):
            chunk = c.chunk.copy()
            last = np.flatnonzero(c.round == c.round.max())[0]
            chunk[last] = (chunk[last] + 1) % schedule.num_chunks
            return c.replace(chunk=chunk)

        with pytest.raises(
            VerificationError, match=r"missing, such as chip|more than once, such as"
        ):
            ftmesh.verify(self.with_chips(schedule, again))

    def test_a_transfer_to_another_position(self, schedule):
        def misdirect(c):
            dst = c.dst.copy()
            row = np.flatnonzero(dst == self.chip((4, 0)))[0]
            dst[row] = self.chip((5, 0))
            other = (c.round == c.round[row]) & (c.lane == c.lane[row]) & (dst == dst[row])
            other[row] = False
            return c.replace(dst=dst).take(~other)

        with pytest.raises(
            VerificationError,
            match=r"sends to chip \(5, 0\); expected the same position of two live tiles, found "
            "position 0 and position 1",
        ):
            ftmesh.verify(self.with_chips(schedule, misdirect))

    def test_a_chip_of_a_failed_tile_takes_part(self, schedule):
        def add_transfer(c):
            extra = c.take(slice(0, 1)).replace(
                src=np.array([self.chip((3, 2))], np.int32),
                dst=np.array([self.chip((3, 3))], np.int32),
                lane=np.array([99], np.int32),
            )
            return type(c)(*(np.concatenate(pair) for pair in zip(c, extra, strict=True)))

        with pytest.raises(VerificationError, match="found a chip of no live tile and position 1"):
            ftmesh.verify(self.with_chips(schedule, add_transfer))

    def test_chunks_of_the_other_core(self):
        schedule = registry.build_schedule(on_two_cores("4x4", "1x1"), "row_pair")
        moved = self.with_chips(schedule, lambda c: c.replace(chunk=np.maximum(c.chunk - 1, 0)))
        with pytest.raises(VerificationError, match=r"missing|more than once"):
            ftmesh.verify(moved)

    def test_a_router_that_ignores_the_failures(self):
        schedule = registry.build_schedule(tiled("16x32", "2x2", "4x2@6,14"), "row_pair")
        with pytest.raises(VerificationError, match=r"from chip \(\d+, \d+\) to .* crosses failed"):
            ftmesh.verify(schedule, router=dimension_order)

    def test_routes_on_both_sides_of_the_failures_can_deadlock(self):
        schedule = registry.build_schedule(tiled("16x16", "2x2", "4x2@6,6"), "row_pair")
        assert ftmesh.verify(schedule)
        with pytest.raises(VerificationError, match="routes can deadlock"):
            ftmesh.verify(schedule, router=lambda *route: around_failures(*route))


class TestFiles:
    def test_tiles_round_trip(self, tmp_path):
        path = tmp_path / "tiles.npz"
        schedule = registry.build_schedule(tiled("8x8", "2x2", "1x1@2,2"), "row_pair")
        ftmesh.save(schedule, path)
        loaded = ftmesh.load(path)
        assert loaded == schedule
        assert str(loaded.topology) == "8x8 less 1x1@2,2 in 4x4 tiles of 2x2"
        assert np.load(path)["coords"].tolist() == [list(tile) for tile in schedule.topology.coords]

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"tile": [2, 1]}, "are not those of 8x8 less 1x1@2,2 in 4x8 tiles"),
            ({"tile": [3, 2]}, "cannot be cut into tiles of 3x2"),
            ({"chips": None}, "'meta' has no 'shape'"),
            ({"chips": {"shape": "8x8"}}, "which is not a list of sizes"),
            ({"failed": []}, "'shape' and the failures are not those of"),
        ],
        ids=str,
    )
    def test_tiles_that_do_not_match_the_mesh_raise(self, tmp_path, change, says):
        path = tmp_path / "tiles.npz"
        ftmesh.save(registry.build_schedule(tiled("8x8", "2x2", "1x1@2,2"), "row_pair"), path)
        arrays = dict(np.load(path))
        arrays["meta"] = np.array(json.dumps(json.loads(str(arrays["meta"])) | change))
        np.savez(path, **arrays)
        with pytest.raises((ScheduleFileError, ftmesh.TopologyError), match=says):
            ftmesh.load(path)
