"""A steward, and processes that have come to it; what takes a second takes a moment here."""

import signal
import time

import pytest

from ftmesh.elastic import controller as module
from ftmesh.elastic import heartbeats
from tests.support.controllers import Stewarded


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """What takes a second or so in a run takes a moment here."""
    monkeypatch.setattr(module, "CLOSED", 0.3)
    monkeypatch.setattr(heartbeats, "SLACK", 0.1)
    monkeypatch.setattr(heartbeats, "TIMES", 0)  # so that a pause of this machine does not count


@pytest.fixture(autouse=True)
def stacks():
    """The times at which this process, which stands in for all, was asked where it is."""
    asked = []
    before = signal.signal(signal.SIGUSR1, lambda *_: asked.append(time.monotonic()))
    yield asked
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def make():
    made = []

    def stewarded(*args, **options):
        made.append(Stewarded(*args, **options))
        return made[-1]

    yield stewarded
    for each in made:
        each.close()


@pytest.fixture
def four(make):
    """Four processes that are ready for the first step."""
    return make().come().joined()
