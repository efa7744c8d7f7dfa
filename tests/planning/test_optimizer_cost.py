"""Costs of sharded and replicated optimizer state."""

from dataclasses import replace

import pytest

from ftmesh.algorithms import registry
from ftmesh.cli.main import main
from ftmesh.cost.links import DEFAULT, NETWORKS
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError
from ftmesh.planning.job_model import MEMORY_TRAFFIC, optimizer_costs
from ftmesh.topology.topology import Topology

HOLE = Topology.grid("4x8", failed="2x2@2,2")
FAST = replace(DEFAULT, memory_bandwidth=1e12)


def test_both_costs_are_communication_and_an_update():
    costs = optimizer_costs(HOLE, 100_000_000, FAST)
    ring = Simulator(registry.build_schedule(HOLE, "ring"))
    assert costs.sharded.algorithm == "ring"
    assert costs.sharded.communication == pytest.approx(ring.seconds(100_000_000, FAST))
    assert costs.sharded.update == pytest.approx(7e8 / 1e12 / 28)
    assert costs.replicated.algorithm == "tree"
    assert costs.replicated.communication < 1550e-6
    assert costs.replicated.update == pytest.approx(7e8 / 1e12)
    assert str(costs).splitlines()[1].startswith("  replicated state: 2.21 ms by tree")


@pytest.mark.parametrize(
    ("memory", "is_sharded"), [(0.9e12, True), (1e12, True), (2e12, False), (7e12, False)]
)
def test_fast_memory_favours_replicated_state(memory, is_sharded):
    assert (
        optimizer_costs(HOLE, 100_000_000, replace(FAST, memory_bandwidth=memory)).is_sharded_faster
        is is_sharded
    )


def test_less_state_means_less_memory_traffic():
    updates = [
        optimizer_costs(HOLE, 10_000_000, FAST, name).replicated.update
        for name in ("sgd", "lars", "lamb")
    ]
    assert updates == pytest.approx([3e-5, 5e-5, 7e-5])


def test_every_generation_has_a_memory_bandwidth():
    assert all(
        n.memory_bandwidth and n.memory_bandwidth > 5 * n.bandwidth for n in NETWORKS.values()
    )


@pytest.mark.parametrize(
    ("network", "optimizer", "says"),
    [
        (DEFAULT, "adam", "bandwidth is unknown: name a TPU generation"),
        (FAST, "adagrad", f"one of {', '.join(MEMORY_TRAFFIC)}, not 'adagrad'"),
    ],
)
def test_unknown_memory_or_optimizer(network, optimizer, says):
    with pytest.raises(ArgumentError, match=says):
        optimizer_costs(HOLE, 1_000_000, network, optimizer)


def test_memory_bandwidth_must_be_positive():
    with pytest.raises(ArgumentError, match="memory_bandwidth must be above 0 bytes/s, not 0"):
        replace(DEFAULT, memory_bandwidth=0)


def test_the_command_prints_both(capsys):
    argv = ["simulate", "4x4", "--failed", "2x2@0,0", "--algorithm", "ring", "--tpu", "v5e"]
    assert main([*argv, "--optimizer", "lamb"]) == 0
    out = capsys.readouterr().out
    assert "  sharded state:    " in out
    assert "1/12 of it on each chip\n  replicated state: " in out
    assert main([*argv[:6], "--optimizer", "lamb"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "bandwidth is unknown: name a TPU generation" in error
