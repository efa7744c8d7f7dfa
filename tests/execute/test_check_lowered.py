"""Lowered programs read back and proved, and faults planted in their tables."""

from dataclasses import replace

import numpy as np
import pytest

import ftmesh
from ftmesh import ScheduleError, Topology, VerificationError
from ftmesh.algorithms import registry
from ftmesh.execute.check_lowered import check_program
from ftmesh.execute.lowering import IDLE, Rule, Table, lower
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import RankSchedule
from ftmesh.schedule.transfers import COPY, make_transfers
from ftmesh.schedule.verify import prove
from tests.support.numpy_executor import run

HOLE = Topology.grid("6x6", failed="2x2@2,2")
MESHES = [("6x6", "2x2@2,2"), ("4x4", "2x2@0,0"), ("8x8", "2x2@0,0;2x2@4,4"), ("4x4", "")]


def with_lane(program, part, loop, lane, **changes):
    """The program with one lane of one loop changed."""
    loops = list(getattr(program, part))
    lanes = list(loops[loop].lanes)
    lanes[lane] = replace(lanes[lane], **changes)
    loops[loop] = replace(loops[loop], lanes=tuple(lanes))
    return replace(program, **{part: tuple(loops)})


@pytest.mark.parametrize(("shape", "failed"), MESHES)
@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
@pytest.mark.parametrize("devices_per_chip", [1, 2])
@pytest.mark.parametrize("with_idle", [False, True])
def test_every_device_ends_with_the_sum_of_the_live_ones(
    shape, failed, algorithm, devices_per_chip, with_idle
):
    schedule = registry.build_schedule(Topology.grid(shape, failed=failed), algorithm)
    program = lower(schedule, devices_per_chip=devices_per_chip, with_idle=with_idle)
    check_program(program)
    held = np.random.default_rng(0).integers(0, 100, (program.num_ranks, program.num_chunks))
    expected = held[program.live].sum(axis=0)
    assert (run(program, held.copy()) == expected).all()
    assert program.depth == schedule.depth + devices_per_chip - 1


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_idle_devices_cost_few_rounds(algorithm):
    """They receive their pieces during the last phase, and the rest in a few more rounds."""
    schedule = registry.build_schedule(Topology.grid("16x16", failed="2x2@2,2"), algorithm)
    plain, idle = (lower(schedule, with_idle=with_idle) for with_idle in (False, True))
    rounds = [sum(loop.num_rounds for loop in program.loops) for program in (plain, idle)]
    assert rounds[0] == schedule.num_rounds
    assert rounds[1] - rounds[0] <= 0.1 * schedule.num_rounds
    if algorithm == "ring":  # rings stay rules with idle ranks on the axis
        assert all(isinstance(lane.send, Rule) for lane in idle.reduce_scatter[0].lanes)


RINGS = {"reduce_scatter": 0, "all_gather": 1}  # the loops of `row_pair` that have tables


class TestFaults:
    """A program with one entry changed is rejected."""

    @pytest.mark.parametrize("part", ["reduce_scatter", "all_gather"])
    @pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
    def test_an_entry_of_a_table(self, part, where):
        program = lower(registry.build_schedule(HOLE, "row_pair"))
        lane = getattr(program, part)[RINGS[part]].lanes[0]
        assert isinstance(lane.send, Table)
        rows = lane.send.rows.copy()
        used = np.argwhere(rows != IDLE)
        at = tuple(used[int(where * len(used))])
        rows[at] = rows[at] + lane.count if rows[at] == 0 else rows[at] - lane.count
        faulty = with_lane(program, part, RINGS[part], 0, send=replace(lane.send, rows=rows))
        with pytest.raises(VerificationError, match=r"lowered program, read back: .*chunk \d+ "):
            check_program(faulty)

    @pytest.mark.parametrize("part", ["reduce_scatter", "all_gather"])
    def test_an_idle_entry(self, part):
        program = lower(registry.build_schedule(HOLE, "row_pair"))
        lane = getattr(program, part)[RINGS[part]].lanes[0]
        rows = lane.send.rows.copy()
        rows[tuple(np.argwhere(rows != IDLE)[0])] = IDLE
        faulty = with_lane(program, part, RINGS[part], 0, send=replace(lane.send, rows=rows))
        with pytest.raises(VerificationError, match=r"lowered program, read back: .*chunk \d+ "):
            check_program(faulty)

    @pytest.mark.parametrize("part", ["reduce_scatter", "all_gather"])
    def test_a_position_of_a_rule(self, part):
        program = lower(registry.build_schedule(HOLE, "ring"))
        lane = getattr(program, part)[0].lanes[0]
        position = lane.send.position.copy()
        position[3] += 1
        faulty = with_lane(program, part, 0, 0, send=replace(lane.send, position=position))
        with pytest.raises(VerificationError, match=r"read back: .*chunk \d+ "):
            check_program(faulty)

    @pytest.mark.parametrize("end", ["begin", "end"])
    @pytest.mark.parametrize("part", ["reduce_scatter", "all_gather"])
    def test_a_missing_round_of_a_rule(self, part, end):
        program = lower(registry.build_schedule(Topology.grid("8x8", failed="2x2@2,2"), "row_pair"))
        across = 1 - RINGS[part]
        lane = getattr(program, part)[across].lanes[0]
        rounds = getattr(lane.send, end).copy()
        sender = lane.permutation[0][0]
        rounds[sender] += 1 if end == "begin" else -1
        faulty = with_lane(program, part, across, 0, send=replace(lane.send, **{end: rounds}))
        with pytest.raises(VerificationError, match=r"read back: .*chunk \d+ "):
            check_program(faulty)

    def test_an_addition_instead_of_a_copy_and_a_wrong_owner(self):
        program = lower(registry.build_schedule(HOLE, "ring"))
        with pytest.raises(VerificationError, match="times"):
            check_program(with_lane(program, "all_gather", 0, 0, op=0))
        with pytest.raises(VerificationError, match="missing"):
            check_program(replace(program, owner=np.roll(program.owner, 1)))

    def test_an_idle_device_left_out(self):
        program = lower(registry.build_schedule(HOLE, "ring"), with_idle=True)
        *loops, last = program.all_gather
        fewer = replace(last, lanes=last.lanes[:-1])
        with pytest.raises(VerificationError, match=r"read back: .*chunk"):
            check_program(replace(program, all_gather=(*loops, fewer)))

    @pytest.mark.parametrize("part", ["reduce_scatter", "all_gather"])
    def test_a_wrong_source(self, part):
        program = lower(registry.build_schedule(HOLE, "row_pair"))
        source = getattr(program, part)[0].lanes[1].source
        for faulty in (np.full_like(source, -1), np.roll(source, 1)):
            with pytest.raises(VerificationError, match=r"lane 1: expected chip .* to receive"):
                check_program(with_lane(program, part, 0, 1, source=faulty))

    @pytest.mark.parametrize("num_scatter", [0, 1])
    def test_an_idle_device_that_contributes(self, num_scatter):
        """It is declared idle, but its value is added."""
        add = make_transfers(round=0, lane=[0, 1], src=[1, 2], dst=[0, 0], chunk=0)
        copy = make_transfers(round=0, lane=[0, 1], src=[0, 0], dst=[1, 2], chunk=0, op=COPY)
        script = RankSchedule(
            1, (Phase("rs", add), Phase("ag", copy)), ("a", "b", "chip c"),
            np.array([0, 1], np.int32), num_scatter,
            np.array([0], np.int32) if num_scatter else None,
        )  # fmt: skip
        with pytest.raises(VerificationError, match="the initial value of the idle chip c"):
            prove(script)

    def test_an_idle_device_that_adds_its_own(self):
        program = lower(registry.build_schedule(HOLE, "ring"), with_idle=True)
        everyone = np.arange(program.num_ranks, dtype=np.int32)
        with pytest.raises(VerificationError, match="missing"):
            check_program(replace(program, live=everyone))


def test_plans_check_their_program(monkeypatch):
    checked = []
    monkeypatch.setattr("ftmesh.planning.plan.check_program", checked.append)
    plan = ftmesh.plan(HOLE, "ring")
    assert checked == []
    assert plan.program is checked[0]


def test_without_a_reduce_scatter_no_rank_owns_a_chunk():
    whole = ftmesh.Schedule(HOLE, "ring", 64, registry.build_schedule(HOLE, "ring").phases)
    program = lower(whole)
    check_program(program)
    assert program.owner is None
    assert not program.owns_evenly
    with pytest.raises(ScheduleError, match="so no rank owns a chunk: plan with"):
        _ = program.owned_chunks


def test_unreachable_idle_chips_are_rejected_when_planning():
    cut = Topology.grid("4x4", failed="1x1@0,0", failed_links="0,0-1,0;0,0-0,1")
    with pytest.raises(ftmesh.PlanError, match=r"no live link leads to the idle chip \(0, 0\)"):
        ftmesh.plan(cut, with_idle=True)
