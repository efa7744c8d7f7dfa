"""Plans for the loss of a host: the fast ones first, with limits on time and memory."""

import time
from dataclasses import dataclass

import pytest

from ftmesh import PlanError, Topology
from ftmesh.elastic import ElasticGroup, precompile
from ftmesh.testing import cpu_grid


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch):
    monkeypatch.setattr(precompile, "_plans", {})


def pod(shape, hosts):
    """A mesh; `hosts` has the host of each device."""
    devices = [Device(number, host) for number, host in enumerate(hosts)]
    return Topology.from_devices(devices, shape=shape)


ODD = pod("4x4", [0, 1, 2, 2, 3, 1, 2, 2, 3, 4, 0, 5, 4, 4, 5, 5])  # host 0 is on a diagonal
SPIN = 0.02  # seconds


def spin(seconds):
    """Keep the processor busy."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def prepare(topology, rebuild, **options):
    """Call `rebuild` with what is left of a topology, in a thread that is returned."""

    def rebuild_step(left, group):
        return rebuild(left), ()

    return precompile.rebuild_for_host_loss(
        topology, ElasticGroup(), rebuild_step, ahead=False, **options
    )


def prepare_all(topology, do=lambda left: None, **options):
    seen = []
    prepare(topology, lambda left: (seen.append(left), do(left)), **options).join()
    return seen


def test_fast_meshes_come_first():
    seen = prepare_all(ODD)
    assert len(seen) == 6
    quick = [precompile.registry.has_fast_algorithm(left) for left in seen]
    assert quick == sorted(quick, reverse=True)
    assert quick.count(False) == 1


def test_a_fast_mesh_is_prepared_before_any_later_one_is_classified(monkeypatch):
    """To classify a large mesh takes seconds, which must not use up the limit before any plan."""
    classified = []
    fast = precompile.registry.has_fast_algorithm

    def classify(left):
        classified.append(left)
        return fast(left)

    monkeypatch.setattr(precompile.registry, "has_fast_algorithm", classify)
    counts = []
    prepare_all(ODD, lambda left: counts.append(len(classified)))
    assert counts == [2, 3, 4, 5, 6, 6]  # the first is slow to plan, and comes last


def test_the_processor_time_is_limited():
    seen = prepare_all(ODD, lambda left: spin(SPIN), cpu_seconds=3.5 * SPIN)
    assert 1 <= len(seen) <= 3
    assert len(prepare_all(ODD, lambda left: spin(SPIN))) == 6


def test_meshes_without_a_plan_are_skipped():
    def fail(left):
        raise PlanError("no")

    assert len(prepare_all(ODD, fail)) == 6


def test_plans_are_cached_up_to_a_limit(monkeypatch):
    lefts = list(precompile.topologies_without_a_host(ODD))[:4]
    one, other = (precompile.plan(left, "flood").schedule for left in lefts[:2])
    assert one.num_bytes == 7 * 4 * 2 * one.num_chunks * (lefts[0].num_live - 1)  # seven columns
    monkeypatch.setattr(precompile, "MAX_CACHED_BYTES", one.num_bytes + other.num_bytes)
    plans = [precompile.cached_plan(left, "flood") for left in lefts]
    assert len(precompile._plans) == 2
    again = [precompile.cached_plan(left, "flood") for left in lefts]
    assert [a is b for a, b in zip(plans, again, strict=True)] == [True, True, False, False]
    assert all(a.schedule == b.schedule for a, b in zip(plans, again, strict=True))


def test_a_newer_mesh_stops_the_thread():
    seen = []

    def do(left):
        seen.append(left)
        if len(seen) == 2:
            prepare(ODD, lambda left: None).join()

    prepare(ODD, do).join()
    assert len(seen) == 2


def test_the_same_chips_with_other_devices():
    first = precompile.cached_plan(cpu_grid("2x2"), "ring")
    others = Topology.grid("2x2")
    assert precompile.cached_plan(others, "ring").topology.devices == ()
    assert precompile.cached_plan(first.topology, "ring").topology.devices == first.topology.devices
