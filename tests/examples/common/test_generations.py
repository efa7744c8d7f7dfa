"""One process on a line to a steward: its steps count, a sick chip is left out, and it goes on."""

from contextlib import contextmanager

import numpy as np
import pytest
from ftmesh.elastic.controller_kv import ControllerKvClient

from examples.common.loop import run, start_log
from examples.common.step_commit import StepCommit
from examples.common.trainer import StepOptions
from ftmesh.elastic import controller_client as line_module
from ftmesh.elastic.controller_client import ControllerClient, Paused
from ftmesh.elastic.elastic_group import ElasticGroup, run_generations
from ftmesh.elastic.rpc import ChannelClosed
from ftmesh.errors import ArgumentError, ClusterError, PlanError
from ftmesh.testing import cpu_grid
from tests.support.controllers import SOON, ControllerHarness, wait_until
from tests.support.linear import arguments, descent, linear_job, linear_trainer
from tests.support.peer_stores import SECRET, running

pytestmark = pytest.mark.usefixtures("quick_compiler")

STEPS = 6


@pytest.fixture
def keepers(monkeypatch):
    with running(2) as started:
        told = ",".join(f"{host}={keeper.address}" for host, keeper in started.items())
        monkeypatch.setenv("FTMESH_KEEPERS", told)
        monkeypatch.setenv("FTMESH_SECRET", SECRET)
        monkeypatch.setenv("FTMESH_HOST", "0")
        yield started


@contextmanager
def on_line(**options):
    """A steward, and a process that has come to it."""
    stewarded = ControllerHarness(hosts=1, **options)
    address, start = stewarded.listener.address, stewarded.start

    def over(why):
        line._has_left = True
        raise ChannelClosed(why)

    line = ControllerClient.to(address, SECRET, 0, start, 1, limit=SOON, end=over)
    try:
        yield stewarded, ElasticGroup(board=ControllerKvClient(line), line=line, limit=SOON)
    finally:
        line._has_left = True  # what ends now is the test
        line._channel.close()
        line._thread.join()
        stewarded.close()


def train(group, *argv):
    """The last state, through epochs."""
    args, last = arguments(*argv), []

    def body(group):
        topology = group.live_topology(cpu_grid("2x2"))
        options = StepOptions(keeps_state=not args.donate)
        trainer = linear_trainer(topology, options, group=group.for_topology(topology))
        job = linear_job(trainer, steps=STEPS)
        object.__setattr__(job, "finished", last.append)
        run(job, args, start_log(args, group))

    run_generations(group, body)
    return last[-1]


def assert_descended(state):
    for name, wanted in descent(STEPS)[0].items():
        np.testing.assert_allclose(state.params[name], wanted, rtol=1e-5)


def facts(stewarded):
    names = ("epoch", "live", "source", "from_step", "repeated")
    return [tuple(event[name] for name in names) for event in stewarded.of("epoch")]


@pytest.mark.slow
def test_a_chip_that_computes_wrong_is_left_out(keepers, monkeypatch):
    """The step in which it differs does not count, and is done again by the others."""
    monkeypatch.setenv("FTMESH_FAULTS", "wrong@0:4")
    with on_line() as (stewarded, group):
        assert_descended(train(group, "--check-every", "1"))
        assert facts(stewarded) == [(1, 4, "start", 0, 0), (2, 3, "devices", 3, 0)]
        (masked,) = stewarded.of("masked")
        assert (masked["chips"], masked["epoch"]) == ("1x1@0,0", 1)
        assert stewarded.steward.committed == group.controller.held_state.step == STEPS


@pytest.mark.slow
def test_a_pause_puts_the_state_down_for_those_who_come_next(keepers):
    with on_line() as (stewarded, group):
        stewarded.steward.pause("a host comes back")
        with pytest.raises(Paused):
            train(group)
        assert stewarded.steward.committed == 1
    with on_line(start=2, highest=1) as (stewarded, group):
        state = train(group)
        assert facts(stewarded) == [(2, 4, "host memory", 1, 0)]
    assert_descended(state)


class TestWhereAStepTakesOverTheStateBeforeIt:
    def test_it_needs_copies(self):
        with on_line() as (_, group):
            trainer = linear_trainer(cpu_grid("2x1"), StepOptions(keeps_state=False), group=group)
            with pytest.raises(ArgumentError, match="give --copy-every"):
                StepCommit(trainer, None, None, is_saved=lambda step: False)

    @pytest.mark.slow
    def test_only_steps_that_are_copied_count(self, keepers, monkeypatch):
        counted = []
        with on_line() as (_, group):
            commit = group.controller.commit
            monkeypatch.setattr(
                group.controller, "commit", lambda s: (counted.append(s), commit(s))[1]
            )
            assert_descended(train(group, "--donate", "--copy-every", "2"))
            assert counted == [2, 4, 6]
            assert group.controller.held_state is None
        names = keepers[0].names("state/1/")
        assert {name.split("/")[2] for name in names} >= {"4", "6"}


class TestNoPlan:
    def test_for_what_is_left_all_are_started_anew(self, monkeypatch):
        def body(group):
            if group.generation == 1:
                group.controller.report_joined(0)
                group.controller.quarantine("1x1@0,0", "it is sick")
            monkeypatch.setattr(line_module, "LAST_WORD", 0.05)  # the process would be ended
            raise PlanError("there is none")

        with on_line() as (stewarded, group):
            with pytest.raises(ClusterError, match="no word from the steward"):
                run_generations(group, body)
            wait_until(lambda: stewarded.steward.verdict)
            verdict = stewarded.steward.verdict
            assert verdict.what == "restart"
            assert verdict.why.endswith("no plan for what is left: there is none")
            assert stewarded.of("failed") == []

    def test_for_what_a_run_begins_with_is_an_error(self):
        def body(group):
            raise PlanError("there is none")

        with on_line() as (stewarded, group), pytest.raises(PlanError):
            run_generations(group, body)
        assert stewarded.steward.verdict is None


def test_those_who_are_started_anew_hear_of_masks():
    with on_line(start=3, masked="1x1@1,1") as (_, group):
        assert (group.generation, group.controller.start) == (3, 3)
        assert sorted(group.live_topology(cpu_grid("2x2")).failed) == [(1, 1)]
