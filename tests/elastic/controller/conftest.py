"""Fixtures: a controller with connected workers, and short timeouts."""

import signal
import time

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
    """The times at which workers were asked for their stacks; this process stands in for all."""
    times = []
    old = signal.signal(signal.SIGUSR1, lambda *_: times.append(time.monotonic()))
    yield times
    signal.signal(signal.SIGUSR1, old)


@pytest.fixture
def make():
    harnesses = []

    def make_harness(*args, **options):
        harnesses.append(ControllerHarness(*args, **options))
        return harnesses[-1]

    yield make_harness
    for harness in harnesses:
        harness.close()


@pytest.fixture
def four(make):
    """A controller and four workers that are ready for the first step."""
    return make().connect().join()
