"""A year of a large machine on paper: shares add up, and simple cases can be checked by hand."""

import json
from dataclasses import astuple, fields, replace

import pytest

from examples.fleet import simulation
from examples.fleet.__main__ import main
from examples.fleet.simulation import (
    DAY,
    Event,
    Fleet,
    LeaveOutHosts,
    Outcome,
    Replicas,
    compare,
    simulate,
)
from ftmesh.errors import ArgumentError
from tests.support.more import more_case
from tests.support.pages import ROOT, read_blocks

SMALL = Fleet(cubes=8, spares=1, replica=2, restart=0.0, lost=0.0, quorum=0.0, batch=0.0, network=1)
FEW = replace(Fleet(), cubes=32)
ONE_HOST = [
    Event(1 * DAY, 3, simulation.HOST, False, 1),
    Event(5 * DAY, 3, simulation.HOST, False, -1),
]


def outcomes(model, events, days=10):
    return {kind(model).name: simulate(kind(model), events, days) for kind in simulation.STRATEGIES}


def total(outcome):
    return sum(getattr(outcome, f.name) for f in fields(Outcome) if f.name != "paid")


def test_without_failures_everything_trains():
    perfect = replace(SMALL, host_failures=0, cable_failures=0)
    for name, outcome in compare(perfect, days=30, runs=1).items():
        assert outcome.trained == 1, name
        assert outcome.per_chip == (8 / 9 if name == "spare cubes" else 1)


def test_one_host_for_four_of_ten_days():
    results = outcomes(replace(SMALL, sums=0.0), ONE_HOST)
    assert results["drop the cube"].idle == pytest.approx(0.4 / 8)
    assert results["spare cubes"].trained == pytest.approx(1)
    assert results["replicas"].idle == pytest.approx(0.4 * 2 / 8)
    assert results["ftmesh"].idle == pytest.approx(0.4 / 8 / 16)


def test_sums_around_a_hole():
    """Computing takes 128/127 of 0.9 of a step there, and sums three times 0.1."""
    model = replace(SMALL, sums=0.1, slowdown=3.0)
    outcome = outcomes(model, ONE_HOST)["ftmesh"]
    assert outcome.trained == pytest.approx(0.6 + 0.4 / (0.9 * 128 / 127 + 0.3))
    assert outcomes(model, ONE_HOST)["drop the cube"].slower == 0


def test_restarts_and_lost_steps():
    model = replace(SMALL, sums=0.0, restart=0.02 * DAY, lost=0.01 * DAY)
    results = outcomes(model, ONE_HOST)
    dropped = results["drop the cube"]
    assert dropped.restarting == pytest.approx(0.002 * (7 / 8 + 1))  # the failure, and the return
    assert dropped.thrown_away == pytest.approx(0.001)
    assert results["replicas"].thrown_away == 0


def test_a_cable_idles_a_cube_and_no_chip_of_ftmesh():
    events = [event._replace(kind=simulation.CABLE) for event in ONE_HOST]
    results = outcomes(replace(SMALL, sums=0.0), events)
    assert results["drop the cube"].idle == pytest.approx(0.05)
    assert results["ftmesh"].idle == 0
    optical = outcomes(SMALL, [event._replace(is_optical=True) for event in events])
    assert all(outcome.trained == pytest.approx(1) for outcome in optical.values())


def test_repairs_that_wait_come_back_with_the_next_failure():
    later = [Event(7 * DAY, 5, simulation.HOST, False, 1)]
    model = replace(SMALL, sums=0.0, batch=30 * DAY)
    outcome = simulate(LeaveOutHosts(model), ONE_HOST + later, 10)
    assert outcome.idle == pytest.approx((0.6 + 0.3) / 128)
    assert simulate(LeaveOutHosts(model), ONE_HOST, 10).idle == pytest.approx(0.9 / 128)


def test_shares_add_up():
    model = replace(FEW, host_failures=0.01)
    for name, outcome in compare(model, days=60, runs=2).items():
        assert total(outcome) == pytest.approx(1, abs=2e-3), name
        assert min(astuple(outcome)) >= 0


def test_ftmesh_can_lose():
    quick = replace(FEW, repair=(0.01, 0.02), sums=0.3, slowdown=3.0, batch=30 * DAY)
    results = compare(quick, days=60, runs=1)
    assert results["ftmesh"].per_chip < results["drop the cube"].per_chip
    slow = replace(FEW, repair=(0.1, 0.2), restart=3600.0, host_failures=0.01, replica=1)
    results = compare(slow, days=60, runs=1)
    assert results["ftmesh"].trained < results["replicas"].trained


def test_histories_are_those_of_the_seed():
    one, same, other = (compare(Fleet(), days=30, runs=1, seed=s) for s in (1, 1, 2))
    assert one == same != other


def test_every_assumption_matters():
    base = {name: o.per_chip for name, o in compare(FEW, days=60, runs=1).items()}
    for name in simulation.VARIED:
        changed = compare(simulation.vary(FEW, name, 2.0), days=60, runs=1)
        assert any(changed[key].per_chip != base[key] for key in base), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repair": (5.0, 3.0)}, "takes from A to B days"),
        ({"replica": 200}, "does not fit 144"),
        ({"sums": 2.0}, "a share from 0 to 1, not 2.0"),
    ],
)
def test_wrong_assumptions(change, message):
    with pytest.raises(ArgumentError, match=message):
        replace(Fleet(), **change)
    with pytest.raises(ArgumentError, match="use fewer runs"):
        compare(replace(Fleet(), host_failures=1.0), days=10_000, runs=1000)


def test_the_command(capsys):
    assert main(["--cubes", "16", "--days", "30", "--runs", "1", "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["as assumed"]
    assert set(shares) == {"drop the cube", "spare cubes", "replicas", "ftmesh"}
    assert main(["--cubes", "16", "--days", "9", "--runs", "1", "--sensitivity"]) == 0
    assert "repair x 0.5" in capsys.readouterr().out


def test_replicas_stop_alone():
    model = replace(SMALL, restart=0.02 * DAY, lost=0.01 * DAY)
    outcome = simulate(Replicas(model), ONE_HOST, 10)
    assert outcome.restarting == pytest.approx(2 * 0.002 * 2 / 8)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], more_case(["--sensitivity"])], ids=" ".join)
def test_the_page_shows_what_the_command_prints(capsys, arguments):
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / "fleet.md").read_text()
    tables = [block.text for block in read_blocks(page) if block.language == "text"]
    shown = "\n".join(tables)
    assert shown == printed if arguments else shown.startswith(printed)
