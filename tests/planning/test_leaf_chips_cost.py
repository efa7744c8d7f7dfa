"""Costs of chips with one link, and the advice that follows from them."""

import json

import pytest

from ftmesh import Topology
from ftmesh.cli.main import main
from ftmesh.cost.links import DEFAULT
from ftmesh.planning.advise import (
    FED,
    IDLE,
    IN_TREES,
    TrainingJob,
    compare_leaf_chips,
    leaf_chip_costs,
)

WITH_LEAF = Topology.grid("6x6", failed="1x1@1,0")
LINK = 100.0  # microseconds that a link takes for 5 MB


@pytest.fixture(scope="module")
def costs():
    return leaf_chip_costs(WITH_LEAF, 5_000_000, DEFAULT)


def test_cost_of_each_case(costs):
    """With the chip, no less than its link takes for all; fed, that twice; without, far less."""
    assert costs.leaf_chips == ((0, 0),)
    along, fed, idle = (1e6 * costs.seconds[name] for name in (IN_TREES, FED, IDLE))
    assert LINK < along < 1.5 * LINK
    assert fed == pytest.approx(2 * (LINK + 0.5) + idle, rel=0.02)
    assert idle < along - 0.3 * LINK
    assert str(costs).startswith("1x1@0,0 has one link; an all-reduce takes ")


def test_best_case_depends_on_compute_time(costs):
    gain = costs.seconds[IN_TREES] - costs.seconds[IDLE]
    assert costs.best(compute=33 * gain) == IDLE  # of 35 chips, one less computes 1/34 longer
    assert costs.best(compute=35 * gain) == IN_TREES
    steps = costs.step_seconds(compute=0.034)
    assert steps[IN_TREES] == pytest.approx(0.034 + costs.seconds[IN_TREES])
    assert steps[IDLE] == pytest.approx(0.035 + costs.seconds[IDLE])


@pytest.mark.parametrize(
    "topology",
    [
        Topology.grid("6x6", failed="2x2@2,2"),
        Topology.grid("1x6"),
        Topology.grid("5", failed="1@2"),
    ],
    ids=str,
)
def test_no_leaf_chips_or_nothing_else(topology):
    assert leaf_chip_costs(topology, 1_000_000, DEFAULT) is None


def test_a_site_with_such_a_chip():
    whole = Topology.grid("6x6", failed="")
    job = TrainingJob(
        whole, mtbf=1e9, repair_time=1e4, checkpoint_interval=1e3, step_time=0.003,
        payload_bytes=5_000_000,
    )  # fmt: skip
    costs, compute = compare_leaf_chips(job, WITH_LEAF)
    assert compute == pytest.approx((0.003 - job.full_all_reduce_seconds) * 36 / 35)
    assert costs.best(compute) == IN_TREES
    assert compare_leaf_chips(job, whole.with_failed([(2, 2)])) is None


def test_commands_print_it(capsys):
    mesh = ["6x6", "--failed", "1x1@1,0", "--payload", "5MB"]
    assert main(["simulate", *mesh, "--algorithm", "tree"]) == 0
    assert "1x1@0,0 has one link; an all-reduce takes" in capsys.readouterr().out
    advise = ["advise", *mesh, "--runs", "1", "--horizon", "1d"]
    assert main([*advise, "--step", "1ms"]) == 0
    assert "idle: plan with --failed '2x1@0,0'" in " ".join(capsys.readouterr().out.split())
    assert main([*advise, "--step", "20ms", "--json"]) == 0
    pendants = json.loads(capsys.readouterr().out)["pendants"]
    assert pendants["chips"] == [[0, 0]]
    assert pendants["best"] == IN_TREES
