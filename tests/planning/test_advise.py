"""What to do about failed boards: the answers, the accounting, and cases with a known result."""

import pytest

from ftmesh import ArgumentError, PlanError, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT
from ftmesh.cost.simulate import Simulator
from ftmesh.planning import advise
from ftmesh.planning.advise import Outcome, RouteAround, Setting, Site, Spares, SubMesh, Wait

HOUR, DAY = 3600.0, 86400.0


def site(shape="8x8", **changes):
    settings = {
        "mtbf": 100 * DAY, "repair": 8 * HOUR, "checkpoint": HOUR, "step": 0.02, "restart": 600.0,
    }  # fmt: skip
    return Site(Topology.grid(shape, failed=""), **{**settings, **changes})


def test_boards_are_2x2_at_even_coordinates():
    assert [str(board) for board in site("4x4").boards] == [
        "2x2@0,0", "2x2@2,0", "2x2@0,2", "2x2@2,2",
    ]  # fmt: skip
    assert [str(board) for board in site("5x4").boards][2] == "1x2@4,0"
    assert [str(board) for board in site("4x2x2").boards] == [
        "2x2x1@0,0,0", "2x2x1@2,0,0", "2x2x1@0,0,1", "2x2x1@2,0,1",
    ]  # fmt: skip


def test_every_moment_is_accounted_for():
    for answer in advise.ANSWERS:
        outcome = advise.play(answer(site(spares=2)), 400 * DAY, seed=3)
        shares = (
            outcome.trained + outcome.slower + outcome.thrown_away + outcome.restarting
            + outcome.waiting
        )  # fmt: skip
        assert shares == pytest.approx(1.0, abs=1e-12)
        assert 0 < outcome.trained < 1


@pytest.mark.parametrize(
    ("shape", "topology"),
    [
        ("5x5", Topology.grid("5x5", failed="2x2@2,2")),
        ("3x3x2", Topology.grid("3x3x2", failed="")),
    ],
)
def test_where_no_ring_fits_sums_are_priced_with_flood(shape, topology):
    want = Simulator(registry.schedule(topology, "flood")).seconds(100_000_000, DEFAULT)
    assert site(shape).sum_on(topology) == want


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [
        ("two_dim", Topology.grid("4x4x4", failed="", wrap=True)),
        ("colours", Topology.grid("3x16", failed="", wrap=True)),
        ("flood", Topology.grid("4x4x4", failed="2x2x1@0,0,0", wrap=True)),
        ("flood", Topology.grid("6x6", failed="2x2@2,2", wrap=True)),
        ("ring", Topology.grid("6x6", failed="2x2@2,2")),
    ],
    ids=str,
)
def test_sums_are_priced_with_what_is_fastest(algorithm, topology):
    want = Simulator(registry.schedule(topology, algorithm)).seconds(10**9, DEFAULT)
    whole = Topology.grid(topology.shape, failed="", wrap=topology.wrap)
    mine = Site(whole, 100 * DAY, 8 * HOUR, HOUR, step=0.2, payload_bytes=10**9)
    assert mine.sum_on(topology) == want


def test_a_cut_mesh_has_no_sum():
    with pytest.raises(PlanError, match="cut into 2 parts"):
        site("4x4").sum_on(Topology.grid("4x4", failed="4x2@0,2").less([(1, 0), (1, 1)]))


def history(monkeypatch, *events):
    monkeypatch.setattr(advise, "failures", lambda *_: [(t * HOUR, b, f) for t, b, f in events])


def test_waiting_by_hand(monkeypatch):
    # Fails 2.5 h in, half an hour after a checkpoint; whole again at 10.5 h, back after 10 min.
    history(monkeypatch, (2.5, 5, True), (10.5, 5, False))
    outcome = advise.play(Wait(site()), 20 * HOUR, seed=0)
    assert outcome.trained == pytest.approx((2 + 9.5 - 1 / 6) / 20)
    assert outcome.thrown_away == pytest.approx(0.5 / 20)
    assert outcome.waiting == pytest.approx(8 / 20)
    assert outcome.restarting == pytest.approx(1 / 6 / 20)


def test_routing_around_by_hand(monkeypatch):
    history(monkeypatch, (2.5, 5, True), (10.5, 5, False))
    answer = RouteAround(site())
    speed = site().speed_on(Topology.grid("8x8", failed="2x2@2,2"))
    assert answer.setting(frozenset([5])) == Setting(speed, frozenset(range(16)) - {5})
    outcome = advise.play(answer, 20 * HOUR, seed=0)
    around = 8 - 1 / 6
    assert outcome.trained == pytest.approx((2 + around * speed + 9.5 - 1 / 6) / 20)
    assert outcome.slower == pytest.approx(around * (1 - speed) / 20)
    assert outcome.waiting == 0


def test_a_sub_mesh_does_not_mind_what_fails_outside_it(monkeypatch):
    history(monkeypatch, (1, 0, True), (2, 4, True), (9, 0, False), (10, 4, False))
    answer = SubMesh(site())
    first, both = (answer.setting(frozenset(failed)) for failed in ([0], [0, 4]))
    assert first == both
    assert first.boards == frozenset(range(16)) - {0, 4, 8, 12}
    outcome = advise.play(answer, 20 * HOUR, seed=0)
    assert outcome.thrown_away == 0  # both fell on full hours, the second on an unused board
    assert outcome.restarting == pytest.approx(2 / 6 / 20)
    assert outcome.slower == pytest.approx((9 - 1 / 6) * (1 - first.speed) / 20)


def test_spares_stand_in_until_there_are_too_few():
    answer = Spares(site(spares=1))
    assert answer.num_boards == 17
    assert answer.setting(frozenset([3])) == Setting(1.0, frozenset(range(17)) - {3})
    assert answer.setting(frozenset([16])).speed == 1.0
    assert answer.setting(frozenset([3, 4])).speed == 0.0
    assert Outcome(trained=0.9, paid=1.25).per_chip == pytest.approx(0.72)


def test_the_speed_of_a_sub_mesh_is_its_share_of_chips_less_a_shorter_sum():
    here = site()
    half = Topology.grid("8x4", failed="")
    compute = here.step - here.full_sum
    assert here.speed_on(half) == pytest.approx(here.step / (2 * compute + here.sum_on(half)))
    assert 0.5 < here.speed_on(half) < 0.56


def test_damage_that_no_algorithm_can_serve_falls_back_to_a_sub_mesh():
    here = site("4x4")
    answer = RouteAround(here)
    failed = frozenset([0, 3])  # opposite corners: what is left hangs together by nothing
    assert answer.setting(failed) == SubMesh(here).setting(failed)
    assert answer.setting(frozenset(range(4))).speed == 0.0


def test_failures_come_as_often_as_they_should():
    events = advise.failures(64, site(), 5000 * DAY, seed=1)
    assert events == sorted(events)
    failures = sum(fails for _, _, fails in events)
    expected = 64 * 5000 / (100 + 1 / 3)
    assert failures == pytest.approx(expected, abs=3 * expected**0.5)
    fewer = advise.failures(16, site(), 5000 * DAY, seed=1)
    assert fewer == [event for event in events if event[1] < 16]


def test_the_damage_at_hand():
    here = site()
    damaged = Topology.grid("8x8", failed="2x2@2,2")
    found = advise.at_hand(here, damaged)
    assert found.best == "fault-tolerant"
    assert found.done["fault-tolerant"] == pytest.approx(here.speed_on(damaged) * (8 * HOUR - 600))
    assert found.done["wait for repair"] == 0
    cut = advise.at_hand(here, Topology.grid("8x8", failed="8x2@0,2"))
    assert (cut.best, cut.speeds["fault-tolerant"]) == ("largest sub-mesh", 0.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mtbf": 0.0}, "mtbf must be above 0"),
        ({"spares": -1}, "cannot be below 0"),
        ({"step": 1e-4}, "shorter than its all-reduce"),
    ],
)
def test_impossible_sites_are_refused(changes, says):
    with pytest.raises(ArgumentError, match=says):
        site(**changes)


def test_a_site_is_described_undamaged():
    with pytest.raises(ArgumentError, match="described undamaged"):
        Site(Topology.grid("8x8", failed="2x2@2,2"), DAY, HOUR, HOUR, 0.02)
    with pytest.raises(ArgumentError, match="one run or more"):
        advise.play_all(site(), horizon=DAY, runs=0)
