"""Simulated costs: closed forms, bounds, and small cases worked out by hand."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from ftmesh import ArgumentError, Phase, Schedule, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.links import DEFAULT, NETWORKS, Network, parse_network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import MODES, Simulator, simulate
from ftmesh.schedule.proofs import replay
from ftmesh.schedule.schedule import RankSchedule
from ftmesh.schedule.transfers import ADD, COPY, make_transfers

NETWORKS_TRIED = [
    DEFAULT,
    NETWORKS["v3"].wires_only,
    Network(10e9, 3e-6, overhead=2e-6),
    Network(1e9, 0.0),
]
PAYLOADS = [4_000, 1_000_000, 100_000_000, 1_000_003]


def costs(topology, algorithm, mode="synchronous"):
    simulator = Simulator(registry.build_schedule(topology, algorithm))
    for payload, network in itertools.product(PAYLOADS, NETWORKS_TRIED):
        yield payload, network, simulator.seconds(payload, network, mode)


# Closed forms -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "failed"), [("4x4", ""), ("8x8", "2x2@2,2"), ("6x10", "2x4@2,4"), ("5x4", "")]
)
def test_ring_formula(shape, failed, mode):
    topology = Topology.grid(shape, failed=failed)
    n = topology.num_live
    for payload, network, seconds in costs(topology, "ring", mode):
        step = network.overhead + network.latency + payload / (2 * n * network.bandwidth)
        assert seconds == pytest.approx(2 * (n - 1) * step, rel=1e-12)


@pytest.mark.parametrize("shape", ["4x4", "8x8", "4x8", "6x3", "2x8"])
def test_two_dim_formula(shape):
    topology = Topology.grid(shape)
    n, long = topology.num_live, max(topology.shape)
    for payload, network, seconds in costs(topology, "two_dim"):
        a = network.overhead + network.latency
        first = a + payload / (2 * long * network.bandwidth)
        second = a + payload / (2 * n * network.bandwidth)
        assert seconds == pytest.approx(2 * (long - 1) * (first + second), rel=1e-12)


@pytest.mark.parametrize("shape", ["4x4", "8x8", "6x8", "4x12", "5x6"])
def test_row_pair_formula(shape):
    topology = Topology.grid(shape)
    width, height = topology.shape
    n = topology.num_live
    for payload, network, seconds in costs(topology, "row_pair"):
        a = network.overhead + network.latency
        whole = payload / (n * network.bandwidth)
        first = a + payload / (4 * width * network.bandwidth)
        second = a + whole + max(network.latency, whole)
        expected = 2 * (2 * width - 1) * first + 2 * (height // 2 - 1) * second
        assert seconds == pytest.approx(expected, rel=1e-12)


def test_the_published_figures_of_a_bidirectional_ring():
    for shape, failed, expected in [
        ("8x8", "", 2032), ("8x8", "2x2@2,2", 2026), ("16x16", "4x2@4,4", 2239),
    ]:  # fmt: skip
        schedule = registry.build_schedule(Topology.grid(shape, failed=failed), "ring")
        simulation = simulate(schedule, link="50GB/s", latency="0.5us")
        assert round(1e6 * simulation.seconds) == expected


# Bounds -----------------------------------------------------------------------------------------


def random_topology(rng):
    """A small connected mesh with random damage."""
    while True:
        shape = (rng.randint(2, 5), rng.randint(2, 4))
        places = list(itertools.product(*map(range, shape)))
        failed = rng.sample(places, rng.randint(0, len(places) // 4))
        topology = Topology(shape, (rng.random() < 0.2,) * 2, frozenset(failed))
        if topology.num_live > 1 and len(topology.components()) == 1:
            return topology


def random_schedule(rng):
    """Each chunk up and down a random tree, some edges over several hops, with random delays."""
    topology = random_topology(rng)
    live, num_chunks = topology.num_live, rng.randint(1, 6)
    longer = rng.choice([0.0, 0.3])
    rows = []
    for chunk in range(num_chunks):
        order = [rng.randrange(live)]
        parent = {}
        while len(order) < live:
            child = rng.choice([rank for rank in range(live) if rank not in order])
            near = {topology.rank(c) for c in topology.neighbours(topology.coords[child])}
            joined = [rank for rank in order if rank in near or rng.random() < longer]
            if joined:
                parent[child] = rng.choice(joined)
                order.append(child)
        ready = dict.fromkeys(order, 0)
        for child in reversed(order[1:]):
            when = ready[child] + rng.randint(0, 2)
            rows.append((when, child, parent[child], chunk, ADD))
            ready[parent[child]] = max(ready[parent[child]], when + 1)
        ready = dict.fromkeys(order, ready[order[0]])
        for child in order[1:]:
            when = ready[parent[child]] + rng.randint(0, 2)
            rows.append((when, parent[child], child, chunk, COPY))
            ready[child] = when + 1
    when, src, dst, chunk, op = np.array(rows, np.int32).T
    transfers = make_transfers(
        round=when, lane=np.arange(len(rows)), src=src, dst=dst, chunk=chunk, op=op
    )
    return Schedule(topology, "random", num_chunks, (Phase("all", transfers),))


@pytest.mark.parametrize("seed", range(300))
def test_dataflow_is_between_the_lower_bound_and_synchronous(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    for chunk in range(schedule.num_chunks):
        replayed = replay(RankSchedule.from_schedule(schedule), chunk, schedule.num_rounds)
        assert (replayed.counts == 1).all()
    payload = rng.choice(PAYLOADS)
    network = rng.choice(NETWORKS_TRIED)
    simulator = Simulator(schedule)
    synchronous, dataflow = (simulator.seconds(payload, network, mode) for mode in MODES)
    least = limits(schedule.topology).all_reduce_seconds(payload, network)
    assert least * (1 - 1e-12) <= dataflow <= synchronous * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(100))
def test_device_time_keeps_the_order_of_the_clocks(seed):
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    payload = rng.choice(PAYLOADS)
    device_model = DeviceModel(
        rng.choice([0, 3000]), 2000, rng.choice([0, 0.01]), packing=0, clock=1e9,
    )  # fmt: skip
    network = replace(rng.choice(NETWORKS_TRIED), device_model=device_model)
    simulator = Simulator(schedule)
    synchronous, dataflow = (simulator.seconds(payload, network, mode) for mode in MODES)
    (round_seconds,), _ = device_model.schedule_seconds(schedule, payload)
    devices = round_seconds * schedule.num_rounds
    wires = simulator.seconds(payload, network.wires_only, "dataflow")
    in_rounds = simulator.seconds(payload, network.wires_only)
    assert synchronous == pytest.approx(in_rounds + devices, rel=1e-9)
    assert max(wires, devices) * (1 - 1e-12) <= dataflow <= synchronous * (1 + 1e-12)


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
@pytest.mark.parametrize("payload", [10_000, 100_000_000])
def test_bounds_of_planned_schedules(algorithm, payload):
    topology = Topology.grid("8x8", failed="4x2@2,2")
    simulator = Simulator(registry.build_schedule(topology, algorithm))
    synchronous, dataflow = (simulator.seconds(payload, mode=mode) for mode in MODES)
    least = limits(topology).all_reduce_seconds(payload, DEFAULT)
    assert least < dataflow <= synchronous * (1 + 1e-12)


# By hand: links of one byte a second, so that a chunk of one byte takes a second ----------------

SLOW = Network(1.0, 0.25, overhead=0.5)


def by_hand(rows, *, shape="4x1", num_chunks=1):
    """A schedule of (round, src, dst, chunk, op), not a whole all-reduce."""
    when, src, dst, chunk, op = np.array(rows, np.int32).T
    transfers = make_transfers(
        round=when, lane=np.arange(len(rows)), src=src, dst=dst, chunk=chunk, op=op
    )
    phase = Phase("by hand", transfers)
    return Schedule(Topology.grid(shape), "by hand", num_chunks, (phase,))


@pytest.mark.parametrize("mode", MODES)
def test_cut_through_over_several_hops(mode):
    simulation = simulate(by_hand([(0, 0, 3, 0, ADD)]), payload_bytes=1, link=SLOW, mode=mode)
    assert simulation.seconds == 0.5 + 3 * 0.25 + 1.0
    assert simulation.lost_to_latency == 0.5 + 3 * 0.25
    assert simulation.lost_to_contention == 0.0
    assert simulation.link_bytes == {((x, 0), (x + 1, 0)): 1.0 for x in range(3)}
    assert simulation.utilisation == pytest.approx(3 / (6 * 2.25))


@pytest.mark.parametrize("mode", MODES)
def test_a_shared_link_serves_nearer_transfers_first(mode):
    schedule = by_hand([(0, 0, 2, 0, ADD), (0, 1, 3, 0, ADD)])
    simulation = simulate(schedule, payload_bytes=1, link=SLOW, mode=mode)
    # 1 to 2 is taken by 1's own until 0.5 + 1; then what came from 0 crosses it.
    assert simulation.seconds == 1.5 + 0.25 + 1.0
    assert simulation.lost_to_contention == pytest.approx(0.75)
    assert simulation.busiest_links(1) == [(((1, 0), (2, 0)), 2.0)]


def test_dataflow_waits_only_for_its_data():
    rows = [(0, 0, 1, 0, ADD), (0, 3, 2, 0, ADD), (0, 3, 2, 1, ADD), (1, 1, 0, 0, COPY)]
    schedule = by_hand(rows, num_chunks=2)
    synchronous, dataflow = (
        simulate(schedule, payload_bytes=2, link=SLOW, mode=mode).seconds for mode in MODES
    )
    assert synchronous == (0.5 + 2 + 0.25) + 1.75  # the queue on 3 to 2, then the last one
    assert dataflow == 2 * 1.75


def test_a_write_waits_for_earlier_reads():
    # Rank 1's old value of chunk 2 leaves last; the new one, there early, is only then written.
    queue = [(0, 1, 2, chunk, ADD) for chunk in range(3)]
    schedule = by_hand([*queue, (1, 0, 1, 2, COPY), (2, 1, 0, 2, COPY)], num_chunks=3)
    simulation = simulate(schedule, payload_bytes=3, link=SLOW, mode="dataflow")
    assert simulation.seconds == (0.5 + 3) + (0.5 + 0.25 + 1)


def test_spans_and_utilisation_of_phases():
    topology = Topology.grid("8x8", failed="2x2@2,2")
    simulation = simulate(registry.build_schedule(topology, "row_pair"))
    assert [phase.start for phase in simulation.phases][1:] == [p.end for p in simulation.phases][
        :-1
    ]
    assert simulation.phases[-1].end == simulation.seconds
    sent = sum(
        phase.utilisation * phase.seconds * len(topology.links) * DEFAULT.bandwidth
        for phase in simulation.phases
    )
    assert sent == pytest.approx(sum(simulation.link_bytes.values()))
    first = simulation.phases[0]
    assert first.busiest_link_bytes / DEFAULT.bandwidth < first.seconds
    assert "row-pair rings, all-gather" in str(simulation)
    assert "links of 50 GB/s each way, 0.5 us a hop" in str(simulation)


# User input ------------------------------------------------------------------------------------


def test_parse_network():
    assert parse_network("v3") is NETWORKS["v3"]
    assert parse_network("v3", "2us").latency == 2e-6
    assert parse_network(10e9) == Network(10e9, DEFAULT.latency)
    assert parse_network("10GB/s", 1e-6, "3us") == Network(10e9, 1e-6, 3e-6)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "eager"}, "mode must be one of synchronous, dataflow, not 'eager'"),
        ({"payload_bytes": 0}, "payload_bytes must be a positive whole number, not 0"),
        ({"payload_bytes": 1.5}, "payload_bytes must be a positive whole number, not 1.5"),
        ({"payload_bytes": True}, "payload_bytes must be a positive whole number, not True"),
        ({"payload_bytes": 10**400}, "payload_bytes must be a positive whole number up to 9"),
        ({"link": "quick"}, "'quick' is not a rate"),
        ({"link": 0.0}, "bandwidth must be above 0 bytes/s"),
        ({"latency": -1.0}, "latency must be 0 seconds or more"),
        ({"latency": "soon"}, "'soon' is not a time"),
    ],
)
def test_bad_input_is_rejected(options, says):
    schedule = by_hand([(0, 0, 1, 0, ADD)])
    with pytest.raises(ArgumentError, match=says):
        simulate(schedule, **options)
