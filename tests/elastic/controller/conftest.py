"""Fixtures: a controller with connected workers, and short timeouts."""

import pytest

from ftmesh.elastic import controller as module
from ftmesh.elastic import heartbeats
from tests.support.controllers import ControllerHarness


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch):
    """Shorten what takes a second in a run."""
    monkeypatch.setattr(module, "CLOSED_SECONDS", 0.3)
    monkeypatch.setattr(heartbeats, "SLACK_SECONDS", 0.1)
    monkeypatch.setattr(heartbeats, "SLOWDOWN", 0)  # so that a pause of this machine does not count


@pytest.fixture(autouse=True)
def stacks():
    """The processes that were asked for their stacks."""
    return []


@pytest.fixture
def make(stacks):
    harnesses = []

    def make_harness(*args, **options):
        ask = lambda process, pid: stacks.append(process)  # noqa: E731
        harnesses.append(ControllerHarness(*args, write_stacks=ask, **options))
        return harnesses[-1]

    yield make_harness
    for harness in harnesses:
        harness.close()


@pytest.fixture
def four(make):
    """A controller and four workers that are ready for the first step."""
    return make().connect().join()
