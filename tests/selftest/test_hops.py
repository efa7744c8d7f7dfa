"""What is timed of a mesh's links, and what is concluded about its wrap links."""

import pytest

from ftmesh import Topology
from ftmesh.selftest.speed import TimedHop, find_hops, hop_latency, judge_wrap, time_hops
from ftmesh.testing import cpu_grid


def timed(topology, wraps, latency=1e-6, launch=4e-6):
    """Times as on a mesh of which axes wrap as `wraps` says, whatever the topology says."""
    times = []
    for hop in find_hops(topology):
        hops = hop.hops or 1
        if hop.hops is None and hop.axis != "ring":
            axis = "xyz".index(hop.axis)
            hops = 1 if wraps[axis] else topology.shape[axis] - 1
        times.append(TimedHop(hop, launch + latency * hops, 1e-3))
    return times


def test_messages_of_a_damaged_mesh():
    hops = {hop.name: hop.pairs for hop in find_hops(Topology.grid("4x4", failed="1x1@1,0"))}
    assert list(hops) == [
        "x, 1 hop", "x, 2 hops", "x, from the last chip to the first",
        "y, 1 hop", "y, 2 hops", "y, from the last chip to the first",
        "along the ring of the plan",
    ]  # fmt: skip
    assert len(hops["x, 1 hop"]) == 3 * 3 + 1
    assert len(hops["x, 2 hops"]) == 3 * 2
    assert len(hops["x, from the last chip to the first"]) == 3
    assert len(hops["along the ring of the plan"]) == 15


@pytest.mark.parametrize("wraps", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("said", [(False, False), (True, False), (True, True)])
def test_axes_that_wrap_otherwise_than_is_said(wraps, said):
    topology = Topology.grid("4x8", wrap=said)
    times = timed(topology, wraps)
    assert hop_latency(times) == pytest.approx(1e-6)
    for axis in (0, 1):
        problem, note = judge_wrap(times, topology, axis)
        if wraps[axis] == said[axis]:
            assert problem is None
            assert note.startswith("xy"[axis])
        elif wraps[axis]:
            assert f"axis {'xy'[axis]} wraps, and is not said to" in problem.text
        else:
            assert f"axis {'xy'[axis]} is said to wrap, and does not" in problem.text


def test_what_to_type():
    topology = Topology.grid("8x8", wrap=(True, False))
    problem, _ = judge_wrap(timed(topology, (True, True)), topology, 1)
    assert "--wrap xy " in problem.advice
    problem, _ = judge_wrap(timed(topology, (False, False)), topology, 0)
    assert "--wrap none " in problem.advice
    assert "14 us" not in problem.text
    assert "takes 11 us, one over a hop 5 us" in problem.text


def test_nothing_is_concluded_from_equal_times():
    topology = Topology.grid("4x4", wrap=True)
    times = timed(topology, (True, True), latency=0.0)
    assert hop_latency(times) is None
    assert judge_wrap(times, topology, 0) == (
        None, "whether x wraps cannot be told: further hops take no longer",
    )  # fmt: skip


def test_times_on_devices():
    topology = cpu_grid("3x2")
    hops = find_hops(topology)
    times = time_hops(topology, hops, large_bytes=4096, num_sends=2, repeats=1)
    assert [one.hop for one in times] == hops
    assert all(one.small_s > 0 and one.large_s > 0 for one in times)
