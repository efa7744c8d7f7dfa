"""A single process with a controller: it commits steps, drops an unhealthy chip, and continues."""

from contextlib import contextmanager

import numpy as np
import pytest

from examples.common.arguments import start_attempts
from examples.common.loop import run, start_log
from examples.common.trainer import StepOptions
from ftmesh import elastic
from ftmesh.elastic import controller_client
from ftmesh.elastic.controller_client import RESTART_STATUS, ControllerClient
from ftmesh.elastic.elastic_group import ControllerKvClient, ElasticGroup
from ftmesh.elastic.rpc import ChannelClosed
from ftmesh.errors import ClusterError, PlanError
from ftmesh.testing import cpu_grid
from tests.support.controllers import TIMEOUT, ControllerHarness, wait_until
from tests.support.linear import arguments, descent, linear_job, linear_trainer
from tests.support.peer_stores import SECRET, running_stores

pytestmark = pytest.mark.usefixtures("quick_compiler")

STEPS = 6


@pytest.fixture
def peer_stores(monkeypatch):
    with running_stores(2) as stores:
        addresses = ",".join(f"{host}={store.address}" for host, store in stores.items())
        monkeypatch.setenv("FTMESH_KEEPERS", addresses)
        monkeypatch.setenv("FTMESH_SECRET", SECRET)
        monkeypatch.setenv("FTMESH_HOST", "0")
        yield stores


@contextmanager
def connected(**options):
    """A controller, and the group of a process that has connected to it."""
    harness = ControllerHarness(hosts=1, **options)

    def on_end(reason):
        client._has_left = True
        raise ChannelClosed(reason)

    client = ControllerClient.connect(
        harness.listener.address, SECRET, 0, harness.start, 1, timeout=TIMEOUT, on_end=on_end
    )
    try:
        yield (
            harness,
            ElasticGroup(kv=ControllerKvClient(client), controller=client, timeout=TIMEOUT),
        )
    finally:
        client._has_left = True
        client._channel.close()
        client._thread.join()
        harness.close()


def train(group, *argv, nan_at=None):
    """Train through all generations; return the last state."""
    args, states = arguments(*argv), []
    for attempt in start_attempts(group, args, lambda group: cpu_grid("2x2")):
        with attempt:
            options = StepOptions(keeps_state=not args.donate)
            trainer = linear_trainer(attempt.topology, options, group=attempt.group)
            job = linear_job(trainer, steps=STEPS, nan_at=nan_at)
            object.__setattr__(job, "finished", states.append)
            run(job, attempt, args, start_log(args, attempt.group))
    return states[-1]


def assert_descended(state):
    for name, expected in descent(STEPS)[0].items():
        np.testing.assert_allclose(state.params[name], expected, rtol=1e-5)


def generation_facts(harness):
    names = ("epoch", "live", "source", "from_step", "repeated")
    return [tuple(event[name] for name in names) for event in harness.events_named("epoch")]


@pytest.mark.slow
def test_a_chip_that_computes_wrong_is_quarantined(peer_stores, monkeypatch):
    """The step in which it differs is not committed, and is repeated by the others."""
    monkeypatch.setenv("FTMESH_FAULTS", "wrong@0:4")
    with connected() as (harness, group):
        assert_descended(train(group, "--check-every", "1"))
        assert generation_facts(harness) == [(1, 4, "start", 0, 0), (2, 3, "devices", 3, 0)]
        (quarantined,) = harness.events_named("masked")
        assert (quarantined["chips"], quarantined["epoch"]) == ("1x1@0,0", 1)
        assert harness.controller.committed == STEPS


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_healthy_chips_ends_the_run(monkeypatch):
    monkeypatch.setattr(controller_client, "DECISION_TIMEOUT", 0.05)  # it would be ended by now
    with connected() as (harness, group):
        with pytest.raises(ClusterError, match="no decision"):
            train(group, nan_at=4)
        wait_until(lambda: harness.controller.verdict)
        verdict = harness.controller.verdict
        assert verdict.action == "end"
        assert "the loss of step 4 is nan, and all chips are healthy" in verdict.reason
        assert harness.controller.committed == 3


@pytest.mark.slow
def test_a_pause_saves_the_state_for_the_next_start(peer_stores):
    with connected() as (harness, group):
        harness.controller.pause("a host comes back")
        with pytest.raises(SystemExit) as caught:
            train(group)
        assert caught.value.code == RESTART_STATUS
        assert harness.controller.committed == 1
    with connected(start=2, highest_step=1) as (harness, group):
        state = train(group)
        assert generation_facts(harness) == [(2, 4, "host memory", 1, 0)]
    assert_descended(state)


@pytest.mark.slow
def test_of_donated_states_only_copied_steps_are_committed(peer_stores, monkeypatch):
    committed = []
    with connected() as (_, group):
        commit = group.controller.commit
        monkeypatch.setattr(
            group.controller, "commit", lambda step: (committed.append(step), commit(step))[1]
        )
        assert_descended(train(group, "--donate", "--copy-every", "2"))
        assert committed == [2, 4, 6]
    names = peer_stores[0].names("state/1/")
    assert {name.split("/")[2] for name in names} >= {"4", "6"}


def run_attempts(group, train_generation):
    for attempt in elastic.attempts(group, topology=lambda group: cpu_grid("2x2")):
        with attempt:
            train_generation(attempt.group)


class TestNoPlan:
    def test_for_the_chips_left_restarts_all_processes(self, monkeypatch):
        def train_generation(group):
            if group.generation == 1:
                group.controller.report_joined(0)
                group.controller.quarantine("1x1@0,0", "it is unhealthy")
            # The process would be ended by now.
            monkeypatch.setattr(controller_client, "DECISION_TIMEOUT", 0.05)
            raise PlanError("there is none")

        with connected() as (harness, group):
            with pytest.raises(ClusterError, match="no decision from the controller"):
                run_attempts(group, train_generation)
            wait_until(lambda: harness.controller.verdict)
            verdict = harness.controller.verdict
            assert verdict.action == "restart"
            assert verdict.reason.endswith("no plan for the chips that are left: there is none")
            assert harness.events_named("failed") == []

    def test_for_the_first_generation_is_an_error(self):
        def train_generation(group):
            raise PlanError("there is none")

        with connected() as (harness, group), pytest.raises(PlanError):
            run_attempts(group, train_generation)
        assert harness.controller.verdict is None


def test_a_restarted_process_knows_the_quarantined_chips():
    with connected(start=3, quarantined="1x1@1,1") as (_, group):
        assert (group.generation, group.controller.first_generation) == (3, 3)
        assert sorted(group.live_topology(cpu_grid("2x2")).failed) == [(1, 1)]
