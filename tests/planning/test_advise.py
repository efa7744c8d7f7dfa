"""Strategies for failed boards: the strategies, the accounting, and cases with a known result."""

import pytest

from ftmesh import ArgumentError, PlanError, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.executors import native_ring_seconds
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.simulate import Simulator
from ftmesh.planning import advise
from ftmesh.planning.advise import (
    HotSpares,
    LargestSubMesh,
    Outcome,
    RouteAround,
    RunMode,
    TrainingJob,
    WaitForRepair,
)
from ftmesh.planning.job_model import best_replicas, replica_options
from ftmesh.topology.ring_order import ring_order

HOUR, DAY = 3600.0, 86400.0


def make_job(shape="8x8", **changes):
    settings = {
        "mtbf": 100 * DAY, "repair_time": 8 * HOUR, "checkpoint_interval": HOUR, "step_time": 0.02,
        "restart_time": 600.0,
    }  # fmt: skip
    return TrainingJob(Topology.grid(shape, failed=""), **{**settings, **changes})


def test_boards_are_2x2_at_even_coordinates():
    assert [str(board) for board in make_job("4x4").boards] == [
        "2x2@0,0", "2x2@2,0", "2x2@0,2", "2x2@2,2",
    ]  # fmt: skip
    assert [str(board) for board in make_job("5x4").boards][2] == "1x2@4,0"
    assert [str(board) for board in make_job("4x2x2").boards] == [
        "2x2x1@0,0,0", "2x2x1@2,0,0", "2x2x1@0,0,1", "2x2x1@2,0,1",
    ]  # fmt: skip


def test_every_moment_is_accounted_for():
    for strategy in advise.STRATEGIES:
        outcome = advise.simulate_strategy(strategy(make_job(num_spares=2)), 400 * DAY, seed=3)
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
def test_flood_where_no_ring_fits(shape, topology):
    want = Simulator(registry.build_schedule(topology, "flood")).seconds(100_000_000, DEFAULT)
    assert make_job(shape).all_reduce_seconds(topology) == want


@pytest.mark.parametrize(
    ("algorithm", "topology"),
    [
        ("multi_ring", Topology.grid("3x16", failed="", wrap=True)),
        ("flood", Topology.grid("4x4x4", failed="2x2x1@0,0,0", wrap=True)),
        ("flood", Topology.grid("6x6", failed="2x2@2,2", wrap=True)),
    ],
    ids=str,
)
def test_the_fastest_algorithm_counts(algorithm, topology):
    want = Simulator(registry.build_schedule(topology, algorithm)).seconds(10**9, DEFAULT)
    whole = Topology.grid(topology.shape, failed="", wrap=topology.wrap)
    job = TrainingJob(whole, 100 * DAY, 8 * HOUR, HOUR, step_time=0.2, payload_bytes=10**9)
    assert job.all_reduce_seconds(topology) == want


def test_xla_sums_where_that_is_faster():
    for topology in (
        Topology.grid("4x4x4", failed="", wrap=True),
        Topology.grid("6x6", failed="2x2@2,2"),
    ):
        whole = Topology.grid(topology.shape, failed="", wrap=topology.wrap)
        job = TrainingJob(whole, 100 * DAY, 8 * HOUR, HOUR, step_time=0.2, payload_bytes=10**9)
        native = native_ring_seconds(ring_order(topology), 10**9, DEFAULT)
        assert job.all_reduce_seconds(topology) == native


def test_a_disconnected_mesh_has_no_all_reduce():
    with pytest.raises(PlanError, match="cut into 2 parts"):
        make_job("4x4").all_reduce_seconds(
            Topology.grid("4x4", failed="4x2@0,2").with_failed([(1, 0), (1, 1)])
        )


def history(monkeypatch, *events):
    monkeypatch.setattr(
        advise, "failure_events", lambda *_: [(t * HOUR, b, f) for t, b, f in events]
    )


def test_waiting_by_hand(monkeypatch):
    # Fails 2.5 h in, half an hour after a checkpoint; whole again at 10.5 h, back after 10 min.
    history(monkeypatch, (2.5, 5, True), (10.5, 5, False))
    outcome = advise.simulate_strategy(WaitForRepair(make_job()), 20 * HOUR, seed=0)
    assert outcome.trained == pytest.approx((2 + 9.5 - 1 / 6) / 20)
    assert outcome.thrown_away == pytest.approx(0.5 / 20)
    assert outcome.waiting == pytest.approx(8 / 20)
    assert outcome.restarting == pytest.approx(1 / 6 / 20)


def test_routing_around_by_hand(monkeypatch):
    history(monkeypatch, (2.5, 5, True), (10.5, 5, False))
    strategy = RouteAround(make_job())
    speed = make_job().relative_speed(Topology.grid("8x8", failed="2x2@2,2"))
    assert strategy.run_mode(frozenset([5])) == RunMode(speed, frozenset(range(16)) - {5})
    outcome = advise.simulate_strategy(strategy, 20 * HOUR, seed=0)
    around = 8 - 1 / 6
    assert outcome.trained == pytest.approx((2 + around * speed + 9.5 - 1 / 6) / 20)
    assert outcome.slower == pytest.approx(around * (1 - speed) / 20)
    assert outcome.waiting == 0


def test_failures_outside_a_sub_mesh_do_not_matter(monkeypatch):
    history(monkeypatch, (1, 0, True), (2, 4, True), (9, 0, False), (10, 4, False))
    strategy = LargestSubMesh(make_job())
    first, both = (strategy.run_mode(frozenset(failed)) for failed in ([0], [0, 4]))
    assert first == both
    assert first.boards == frozenset(range(16)) - {0, 4, 8, 12}
    outcome = advise.simulate_strategy(strategy, 20 * HOUR, seed=0)
    assert outcome.thrown_away == 0  # both fell on full hours, the second on an unused board
    assert outcome.restarting == pytest.approx(2 / 6 / 20)
    assert outcome.slower == pytest.approx((9 - 1 / 6) * (1 - first.speed) / 20)


def test_spares_replace_failed_boards_until_there_are_too_few():
    strategy = HotSpares(make_job(num_spares=1))
    assert strategy.num_boards == 17
    assert strategy.run_mode(frozenset([3])) == RunMode(1.0, frozenset(range(17)) - {3})
    assert strategy.run_mode(frozenset([16])).speed == 1.0
    assert strategy.run_mode(frozenset([3, 4])).speed == 0.0
    assert Outcome(trained=0.9, paid=1.25).per_chip == pytest.approx(0.72)


def test_speed_of_a_sub_mesh():
    job = make_job()
    half = Topology.grid("8x4", failed="")
    compute = job.step_time - job.full_all_reduce_seconds
    assert job.relative_speed(half) == pytest.approx(
        job.step_time / (2 * compute + job.all_reduce_seconds(half))
    )
    assert 0.5 < job.relative_speed(half) < 0.56


def test_damage_without_an_algorithm_falls_back_to_a_sub_mesh():
    job = make_job("4x4")
    strategy = RouteAround(job)
    failed = frozenset([0, 3])  # opposite corners: what is left hangs together by nothing
    assert strategy.run_mode(failed) == LargestSubMesh(job).run_mode(failed)
    assert strategy.run_mode(frozenset(range(4))).speed == 0.0


def test_rate_of_failures():
    events = advise.failure_events(64, make_job(), 5000 * DAY, seed=1)
    assert events == sorted(events)
    failures = sum(fails for _, _, fails in events)
    expected = 64 * 5000 / (100 + 1 / 3)
    assert failures == pytest.approx(expected, abs=3 * expected**0.5)
    fewer = advise.failure_events(16, make_job(), 5000 * DAY, seed=1)
    assert fewer == [event for event in events if event[1] < 16]


def test_comparison_for_one_damage():
    job = make_job()
    damaged = Topology.grid("8x8", failed="2x2@2,2")
    comparison = advise.compare_for_damage(job, damaged)
    assert comparison.best == "fault-tolerant"
    assert comparison.done["fault-tolerant"] == pytest.approx(
        job.relative_speed(damaged) * (8 * HOUR - 600)
    )
    assert comparison.done["wait for repair"] == 0
    cut = advise.compare_for_damage(job, Topology.grid("8x8", failed="8x2@0,2"))
    assert (cut.best, cut.speeds["fault-tolerant"]) == ("largest sub-mesh", 0.0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mtbf": 0.0}, "mtbf must be above 0"),
        ({"num_spares": -1}, "cannot be below 0"),
        ({"step_time": 1e-4}, "shorter than its all-reduce"),
    ],
)
def test_impossible_jobs_are_rejected(changes, says):
    with pytest.raises(ArgumentError, match=says):
        make_job(**changes)


def test_a_job_needs_the_undamaged_mesh():
    with pytest.raises(ArgumentError, match="needs the undamaged topology"):
        TrainingJob(Topology.grid("8x8", failed="2x2@2,2"), DAY, HOUR, HOUR, 0.02)
    with pytest.raises(ArgumentError, match="runs must be 1 or more"):
        advise.simulate_strategies(make_job(), horizon=DAY, runs=0)


DAMAGED = Topology.grid("8x8", failed="2x2@2,2")
FAST = Network(bandwidth=100e9, latency=0.0)


@pytest.mark.slow
def test_replicas_of_each_size():
    """Tiles are cut as square as can be, and lose live chips only where they are cut by damage."""
    options = replica_options(DAMAGED, 4 * 10**9, FAST)
    assert [(one.tile, one.replicas, one.wasted) for one in options] == [
        ("1x1", 60, 0),
        ("2x1", 30, 0),
        ("2x2", 15, 0),
        ("4x2", 7, 4),
        ("4x4", 3, 12),
        ("8x4", 1, 28),
        ("all", 1, 0),
    ]
    assert [one.state_bytes for one in options[:3]] == [16 * 10**9, 8 * 10**9, 4 * 10**9]
    assert options[-1].state_bytes == 16 * -(-(10**9) // 60)


def test_times_of_replicas():
    """On links of 100 GB/s: a gather moves 3/4 of 2 GB in a tile of 2x2, both ways around."""
    alone, pairs, square, *_, whole = replica_options(DAMAGED, 4 * 10**9, FAST)
    assert alone.gather_seconds == whole.sum_seconds == 0
    half = 1 / 200e9  # seconds per byte, in two directions
    gathers = 2 * 0.75 * 2e9 * half
    scatter = 2 * 0.75 * 4e9 * half / FAST.all_reduce_efficiency  # compiled as an all-reduce
    launches = 3 * FAST.collective_launch
    assert square.gather_seconds == pytest.approx(gathers + scatter + launches, rel=1e-6)
    assert pairs.gather_seconds > square.gather_seconds  # both ways over one link
    order = ring_order(DAMAGED)
    assert alone.sum_seconds == native_ring_seconds(order, 4 * 10**9, FAST)
    assert square.seconds == square.gather_seconds + square.sum_seconds


@pytest.mark.parametrize(
    ("memory", "tile"),
    [
        (16 * 10**9, "1x1"),
        (16 * 10**9 - 1, "2x2"),  # as few are wasted as of 2x1, and links are used both ways
        (4 * 10**9 - 1, "4x2"),
        (2 * 10**9 - 1, "all"),  # 4x4 would waste 12 of 60
    ],
)
def test_best_replicas(memory, tile):
    options = replica_options(DAMAGED, 4 * 10**9, FAST)
    assert best_replicas(options, memory).tile == tile


def test_no_replica_over_chips_that_no_ring_joins():
    for shape, failed in (("4x4", "1x4@1,0"), ("2x2", "1x1@1,1")):
        options = replica_options(Topology.grid(shape, failed=failed), 10**9)
        assert "all" not in {one.tile for one in options}
    assert best_replicas(options, 10**10).tile == "1x1"
    with pytest.raises(PlanError, match="nothing fits: over 2 live chips the state takes 2 GB"):
        best_replicas(options, 10**9)


def test_replicas_where_nothing_fits():
    options = replica_options(DAMAGED, 4 * 10**9, FAST)
    with pytest.raises(PlanError, match="over all 60 live chips the state takes 267 MB of each"):
        best_replicas(options, 266 * 10**6)


def test_replicas_on_three_axes_and_in_parts():
    options = replica_options(Topology.grid("4x4x4", failed="2x2x1@0,0,0"), 10**9)
    assert [one.tile for one in options] == [
        "1x1x1", "2x1x1", "2x2x1", "2x2x2", "4x2x2", "4x4x2", "all",
    ]  # fmt: skip
    assert [one.wasted for one in options] == [0, 0, 0, 4, 12, 28, 0]
    # Columns of 2x8 are not connected, and are left out: 4x4 has as many chips.
    assert all(one.tile != "2x8" for one in replica_options(DAMAGED, 10**9))
