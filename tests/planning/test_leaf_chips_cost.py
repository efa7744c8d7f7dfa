"""Ways with chips that hang on one link, and the advice that follows from their prices."""

import json

import pytest

from ftmesh import Topology
from ftmesh.cli.main import main
from ftmesh.cost.links import DEFAULT
from ftmesh.planning.advise import Site, with_pendants
from ftmesh.planning.leaf_chips import ALONG, FED, IDLE, ways

HUNG = Topology.grid("6x6", failed="1x1@1,0")
LINK = 100.0  # microseconds that a link takes for 5 MB


@pytest.fixture(scope="module")
def found():
    return ways(HUNG, 5_000_000, DEFAULT)


def test_what_each_takes(found):
    """With the chip, no less than its link takes for all; fed, that twice; without, far less."""
    assert found.pendants == ((0, 0),)
    along, fed, idle = (1e6 * found.seconds[name] for name in (ALONG, FED, IDLE))
    assert LINK < along < 1.5 * LINK
    assert fed == pytest.approx(2 * (LINK + 0.5) + idle, rel=0.02)
    assert idle < along - 0.3 * LINK
    assert str(found).startswith("1x1@0,0 hangs on one link; a sum takes ")


def test_which_is_best_depends_on_what_is_computed(found):
    gain = found.seconds[ALONG] - found.seconds[IDLE]
    assert found.best(compute=33 * gain) == IDLE  # of 35 chips, one less computes 1/34 longer
    assert found.best(compute=35 * gain) == ALONG
    steps = found.steps(compute=0.034)
    assert steps[ALONG] == pytest.approx(0.034 + found.seconds[ALONG])
    assert steps[IDLE] == pytest.approx(0.035 + found.seconds[IDLE])


@pytest.mark.parametrize(
    "topology",
    [
        Topology.grid("6x6", failed="2x2@2,2"),
        Topology.grid("1x6"),
        Topology.grid("5", failed="1@2"),
    ],
    ids=str,
)
def test_nothing_hangs_or_everything_does(topology):
    assert ways(topology, 1_000_000, DEFAULT) is None


def test_a_site_with_such_a_chip():
    whole = Topology.grid("6x6", failed="")
    site = Site(whole, mtbf=1e9, repair=1e4, checkpoint=1e3, step=0.003, payload_bytes=5_000_000)
    found, compute = with_pendants(site, HUNG)
    assert compute == pytest.approx((0.003 - site.full_sum) * 36 / 35)
    assert found.best(compute) == ALONG
    assert with_pendants(site, whole.less([(2, 2)])) is None


def test_commands_say_it(capsys):
    mesh = ["6x6", "--failed", "1x1@1,0", "--payload", "5MB"]
    assert main(["simulate", *mesh, "--algorithm", "tree"]) == 0
    assert "1x1@0,0 hangs on one link; a sum takes" in capsys.readouterr().out
    advise = ["advise", *mesh, "--runs", "1", "--horizon", "1d"]
    assert main([*advise, "--step", "1ms"]) == 0
    assert "idle: plan with --failed '2x1@0,0'" in " ".join(capsys.readouterr().out.split())
    assert main([*advise, "--step", "20ms", "--json"]) == 0
    pendants = json.loads(capsys.readouterr().out)["pendants"]
    assert pendants["chips"] == [[0, 0]]
    assert pendants["best"] == ALONG
