"""What runs is what was proved: lowered tables, read back, and faults planted in them."""

from dataclasses import replace

import numpy as np
import pytest

import ftmesh
from ftmesh import ScheduleError, Topology, VerificationError
from ftmesh.algorithms import registry
from ftmesh.execute.check_lowered import check_program
from ftmesh.execute.lowering import IDLE, Rule, Table, lower
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.rank_schedule import Script
from ftmesh.schedule.transfers import COPY, transfers
from ftmesh.schedule.verify import prove
from tests.support.numpy_executor import run

HOLE = Topology.grid("6x6", failed="2x2@2,2")
MESHES = [("6x6", "2x2@2,2"), ("4x4", "2x2@0,0"), ("8x8", "2x2@0,0;2x2@4,4"), ("4x4", "")]


def with_lane(program, half, loop, lane, **changes):
    """The program with one lane of one loop changed."""
    loops = list(getattr(program, half))
    lanes = list(loops[loop].lanes)
    lanes[lane] = replace(lanes[lane], **changes)
    loops[loop] = replace(loops[loop], lanes=tuple(lanes))
    return replace(program, **{half: tuple(loops)})


@pytest.mark.parametrize(("shape", "failed"), MESHES)
@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
@pytest.mark.parametrize("devices_per_chip", [1, 2])
@pytest.mark.parametrize("with_idle", [False, True])
def test_every_device_ends_with_the_sum_of_the_live_ones(
    shape, failed, algorithm, devices_per_chip, with_idle
):
    schedule = registry.schedule(Topology.grid(shape, failed=failed), algorithm)
    program = lower(schedule, devices_per_chip=devices_per_chip, with_idle=with_idle)
    check_program(program)
    mine = np.random.default_rng(0).integers(0, 100, (program.num_ranks, program.num_chunks))
    expected = mine[program.live].sum(axis=0)
    assert (run(program, mine.copy()) == expected).all()
    assert program.depth == schedule.depth + devices_per_chip - 1


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_idle_devices_cost_few_rounds(algorithm):
    """They get their pieces while the last phase runs, and what is left in a few rounds more."""
    schedule = registry.schedule(Topology.grid("16x16", failed="2x2@2,2"), algorithm)
    plain, idle = (lower(schedule, with_idle=with_idle) for with_idle in (False, True))
    rounds = [sum(loop.num_rounds for loop in program.loops) for program in (plain, idle)]
    assert rounds[0] == schedule.num_rounds
    assert rounds[1] - rounds[0] <= 0.1 * schedule.num_rounds
    if algorithm == "ring":  # rings stay rules where idle ranks are on the axis, too
        assert all(isinstance(lane.send, Rule) for lane in idle.scatter[0].lanes)


RINGS = {"scatter": 0, "gather": 1}  # loops of `row_pair` that are read from a table


class TestFaults:
    """One entry changed, and the program is refused by name."""

    @pytest.mark.parametrize("half", ["scatter", "gather"])
    @pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
    def test_an_entry_of_a_table(self, half, where):
        program = lower(registry.schedule(HOLE, "row_pair"))
        lane = getattr(program, half)[RINGS[half]].lanes[0]
        assert isinstance(lane.send, Table)
        rows = lane.send.rows.copy()
        used = np.argwhere(rows != IDLE)
        at = tuple(used[int(where * len(used))])
        rows[at] = rows[at] + lane.count if rows[at] == 0 else rows[at] - lane.count
        bent = with_lane(program, half, RINGS[half], 0, send=replace(lane.send, rows=rows))
        with pytest.raises(VerificationError, match=r"lowered program, read back: .*chunk \d+ "):
            check_program(bent)

    @pytest.mark.parametrize("half", ["scatter", "gather"])
    def test_an_entry_that_says_nothing(self, half):
        program = lower(registry.schedule(HOLE, "row_pair"))
        lane = getattr(program, half)[RINGS[half]].lanes[0]
        rows = lane.send.rows.copy()
        rows[tuple(np.argwhere(rows != IDLE)[0])] = IDLE
        bent = with_lane(program, half, RINGS[half], 0, send=replace(lane.send, rows=rows))
        with pytest.raises(VerificationError, match=r"lowered program, read back: .*chunk \d+ "):
            check_program(bent)

    @pytest.mark.parametrize("half", ["scatter", "gather"])
    def test_a_place_of_a_rule(self, half):
        program = lower(registry.schedule(HOLE, "ring"))
        lane = getattr(program, half)[0].lanes[0]
        place = lane.send.place.copy()
        place[3] += 1
        bent = with_lane(program, half, 0, 0, send=replace(lane.send, place=place))
        with pytest.raises(VerificationError, match=r"read back: .*chunk \d+ "):
            check_program(bent)

    @pytest.mark.parametrize("end", ["begin", "end"])
    @pytest.mark.parametrize("half", ["scatter", "gather"])
    def test_a_round_too_few_of_a_rule(self, half, end):
        program = lower(registry.schedule(Topology.grid("8x8", failed="2x2@2,2"), "row_pair"))
        across = 1 - RINGS[half]
        lane = getattr(program, half)[across].lanes[0]
        rounds = getattr(lane.send, end).copy()
        sender = lane.permutation[0][0]
        rounds[sender] += 1 if end == "begin" else -1
        bent = with_lane(program, half, across, 0, send=replace(lane.send, **{end: rounds}))
        with pytest.raises(VerificationError, match=r"read back: .*chunk \d+ "):
            check_program(bent)

    def test_an_addition_for_a_copy_and_a_changed_owner(self):
        program = lower(registry.schedule(HOLE, "ring"))
        with pytest.raises(VerificationError, match="times"):
            check_program(with_lane(program, "gather", 0, 0, op=0))
        with pytest.raises(VerificationError, match="missing"):
            check_program(replace(program, owner=np.roll(program.owner, 1)))

    def test_an_idle_device_left_out(self):
        program = lower(registry.schedule(HOLE, "ring"), with_idle=True)
        *loops, last = program.gather
        fewer = replace(last, lanes=last.lanes[:-1])
        with pytest.raises(VerificationError, match=r"read back: .*chunk"):
            check_program(replace(program, gather=(*loops, fewer)))

    @pytest.mark.parametrize("half", ["scatter", "gather"])
    def test_a_source_that_is_not_the_one_that_sends(self, half):
        program = lower(registry.schedule(HOLE, "row_pair"))
        source = getattr(program, half)[0].lanes[1].source
        for bent in (np.full_like(source, -1), np.roll(source, 1)):
            with pytest.raises(VerificationError, match=r"lane 1: expected chip .* to receive"):
                check_program(with_lane(program, half, 0, 1, source=bent))

    @pytest.mark.parametrize("num_scatter", [0, 1])
    def test_what_an_idle_device_holds_in_a_sum(self, num_scatter):
        """It brings nothing by the book, and something in fact."""
        add = transfers(round=0, lane=[0, 1], src=[1, 2], dst=[0, 0], chunk=0)
        copy = transfers(round=0, lane=[0, 1], src=[0, 0], dst=[1, 2], chunk=0, op=COPY)
        script = Script(
            1, (Phase("rs", add), Phase("ag", copy)), ("a", "b", "chip c"),
            np.array([0, 1], np.int32), num_scatter,
            np.array([0], np.int32) if num_scatter else None,
        )  # fmt: skip
        with pytest.raises(VerificationError, match="what the idle chip c began with"):
            prove(script)

    def test_an_idle_device_that_adds_its_own(self):
        program = lower(registry.schedule(HOLE, "ring"), with_idle=True)
        everyone = np.arange(program.num_ranks, dtype=np.int32)
        with pytest.raises(VerificationError, match="missing"):
            check_program(replace(program, live=everyone))


def test_plans_check_what_they_run(monkeypatch):
    checked = []
    monkeypatch.setattr("ftmesh.planning.plan.check_program", checked.append)
    plan = ftmesh.plan(HOLE, "ring")
    assert checked == []
    assert plan.program is checked[0]


def test_without_halves_nobody_owns_anything():
    whole = ftmesh.Schedule(HOLE, "ring", 64, registry.schedule(HOLE, "ring").phases)
    program = lower(whole)
    check_program(program)
    assert program.owner is None
    assert not program.owns_evenly
    with pytest.raises(ScheduleError, match="without halves, so nobody owns a chunk: plan with"):
        _ = program.owned


def test_idle_chips_that_no_link_leads_to_are_refused_when_planning():
    cut = Topology.grid("4x4", failed="1x1@0,0", failed_links="0,0-1,0;0,0-0,1")
    with pytest.raises(ftmesh.PlanError, match=r"no live link leads to the idle chip \(0, 0\)"):
        ftmesh.plan(cut, with_idle=True)
