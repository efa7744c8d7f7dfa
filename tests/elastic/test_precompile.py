"""Plans made ahead: the quick ones first, within bounds of time and memory."""

import time
from dataclasses import dataclass

import pytest

from ftmesh import PlanError, Topology
from ftmesh.elastic import precompile
from ftmesh.testing import cpu_grid


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"


@pytest.fixture(autouse=True)
def nothing_made(monkeypatch):
    monkeypatch.setattr(precompile, "_made", {})


def pod(shape, hosts):
    """A mesh with a host of so many devices for each."""
    every = [Device(number, host) for number, host in enumerate(hosts)]
    return Topology.from_devices(every, shape=shape)


ODD = pod("4x4", [0, 1, 2, 2, 3, 1, 2, 2, 3, 4, 0, 5, 4, 4, 5, 5])  # host 0 is on a diagonal
SPIN = 0.02  # seconds


def spin(seconds):
    """Keep the processor busy."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def done(topology, do=lambda left: None, **options):
    seen = []
    precompile.prepare(topology, lambda left: (seen.append(left), do(left)), **options).join()
    return seen


def test_what_is_quick_to_plan_goes_first():
    seen = done(ODD)
    assert len(seen) == 6
    quick = [precompile.planners.is_quick(left) for left in seen]
    assert quick == sorted(quick, reverse=True)
    assert quick.count(False) == 1


def test_time_is_bounded_by_what_the_longest_took():
    seen = done(ODD, lambda left: spin(SPIN), seconds=3.5 * SPIN)
    assert 1 <= len(seen) <= 3
    assert len(done(ODD, lambda left: spin(SPIN))) == 6


def test_what_cannot_be_planned_is_passed_over():
    def refuse(left):
        raise PlanError("no")

    assert len(done(ODD, refuse)) == 6


def test_plans_are_remembered_while_there_is_room(monkeypatch):
    lefts = list(precompile.without_each_host(ODD))[:4]
    one, other = (precompile.plan(left, "flood").schedule for left in lefts[:2])
    assert one.num_bytes == 7 * 4 * 2 * one.num_chunks * (lefts[0].num_live - 1)  # seven columns
    monkeypatch.setattr(precompile, "MOST_BYTES", one.num_bytes + other.num_bytes)
    plans = [precompile.planned(left, "flood") for left in lefts]
    assert len(precompile._made) == 2
    again = [precompile.planned(left, "flood") for left in lefts]
    assert [a is b for a, b in zip(plans, again, strict=True)] == [True, True, False, False]
    assert all(a.schedule == b.schedule for a, b in zip(plans, again, strict=True))


def test_a_newer_mesh_ends_what_was_under_way():
    seen = []

    def do(left):
        seen.append(left)
        if len(seen) == 2:
            precompile.prepare(ODD, lambda left: None).join()

    precompile.prepare(ODD, do).join()
    assert len(seen) == 2


def test_the_same_chips_as_other_devices():
    first = precompile.planned(cpu_grid("2x2"), "ring")
    others = Topology.grid("2x2")
    assert precompile.planned(others, "ring").topology.devices == ()
    assert precompile.planned(first.topology, "ring").topology.devices == first.topology.devices
