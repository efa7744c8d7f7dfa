from dataclasses import replace

import pytest

from ftmesh.algorithms import registry
from ftmesh.cli.main import main
from ftmesh.cost.links import DEFAULT, NETWORKS
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError
from ftmesh.planning.optimizer_cost import TOUCHED, weigh
from ftmesh.topology.topology import Topology

HOLE = Topology.grid("8x8", failed="2x2@2,2")
FAST = replace(DEFAULT, memory=1e12)


def test_both_ways_are_sums_and_an_update():
    weighed = weigh(HOLE, 100_000_000, FAST)
    ring = Simulator(registry.schedule(HOLE, "ring"))
    assert weighed.shared_out.algorithm == "ring"
    assert weighed.shared_out.wires == pytest.approx(ring.seconds(100_000_000, FAST))
    assert weighed.shared_out.update == pytest.approx(7e8 / 1e12 / 60)
    assert weighed.whole.algorithm == "tree"
    assert weighed.whole.wires < 1385e-6
    assert weighed.whole.update == pytest.approx(7e8 / 1e12)
    assert str(weighed).splitlines()[1].startswith("  whole at each chip: 2.05 ms by tree")


@pytest.mark.parametrize(
    ("memory", "is_sharded"), [(0.9e12, True), (1e12, True), (2e12, False), (7e12, False)]
)
def test_a_quick_memory_speaks_for_the_whole_state(memory, is_sharded):
    assert weigh(HOLE, 100_000_000, replace(FAST, memory=memory)).is_sharded is is_sharded


def test_what_keeps_less_touches_less():
    updates = [weigh(HOLE, 10_000_000, FAST, name).whole.update for name in ("sgd", "lars", "lamb")]
    assert updates == pytest.approx([3e-5, 5e-5, 7e-5])


def test_every_generation_says_what_its_memory_moves():
    assert all(on.memory and on.memory > 5 * on.bandwidth for on in NETWORKS.values())


@pytest.mark.parametrize(
    ("on", "optimizer", "says"),
    [
        (DEFAULT, "adam", "nothing is known here: name a TPU generation"),
        (FAST, "adagrad", f"'adagrad' to price: choose from {', '.join(TOUCHED)}"),
    ],
)
def test_what_cannot_be_priced(on, optimizer, says):
    with pytest.raises(ArgumentError, match=says):
        weigh(HOLE, 1_000_000, on, optimizer)


def test_a_memory_that_moves_nothing():
    with pytest.raises(ArgumentError, match="memory must move above 0 bytes/s, not 0"):
        replace(DEFAULT, memory=0)


def test_the_command_prices_both_ways(capsys):
    argv = ["simulate", "4x4", "--failed", "2x2@0,0", "--algorithm", "ring", "--tpu", "v5e"]
    assert main([*argv, "--optimizer", "lamb"]) == 0
    out = capsys.readouterr().out
    assert "  state shared out:   " in out
    assert "1/12 of it at each chip\n  whole at each chip: " in out
    assert main([*argv[:6], "--optimizer", "lamb"]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "nothing is known here: name a TPU generation" in error
