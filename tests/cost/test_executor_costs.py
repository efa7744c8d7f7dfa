"""The modelled time of a kernel for all rounds, and when a plan uses it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import ftmesh
from ftmesh import ArgumentError, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.executors import LANE_BUNDLES, STEP_BUNDLES, kernel_seconds
from ftmesh.cost.links import DEFAULT, NETWORKS
from ftmesh.cost.simulate import DATAFLOW, Simulator
from ftmesh.testing import cpu_grid

HOLE = Topology.grid("16x16", failed="2x2@2,2")  # 252 live chips
GRID = Topology.grid("4x4")
PAYLOAD = 100_000_000


def tpus(kind, shape=(4, 4)):
    """Devices as JAX lists them, one to a chip."""
    width, height = shape
    return Topology.from_devices(
        [
            SimpleNamespace(
                id=x + width * y, coords=(x, y, 0), core_on_chip=0, device_kind=kind,
                platform="tpu", process_index=0,
            )
            for y in range(height)
            for x in range(width)
        ]
    )  # fmt: skip


def test_the_slower_of_wires_and_memory_plus_packing():
    """On a ring every chip sends both halves once, adds one and copies the other."""
    ring, network = registry.build_schedule(HOLE, "ring"), NETWORKS["v6e"]
    step = (STEP_BUNDLES + 2 * LANE_BUNDLES["added"]) / network.device_model.clock
    moving = replace(network.wires_only, overhead=step)  # a piece goes on after its step
    wires = Simulator(ring).seconds(PAYLOAD, moving, DATAFLOW)
    packing = network.device_model.packing * PAYLOAD / network.device_model.clock
    packing += network.collective_launch
    assert kernel_seconds(ring, PAYLOAD, network) == pytest.approx(wires + packing)
    moved = (2 + 2 + 1) * 251 / 252 * PAYLOAD
    slow = replace(network, memory_bandwidth=1e10)
    assert kernel_seconds(ring, PAYLOAD, slow) == pytest.approx(moved / 1e10 + packing)
    cores = replace(slow, device_model=replace(slow.device_model, devices=2))
    halves = 2.5 * PAYLOAD / 1e10
    assert kernel_seconds(ring, PAYLOAD, cores) == pytest.approx(moved / 1e10 + halves + packing)
    sleepy = replace(network, device_model=replace(network.device_model, clock=1e7, packing=0))
    added, copied = (STEP_BUNDLES + 2 * LANE_BUNDLES[op] for op in ("added", "copied"))
    bundles = 3 * 251 * (added + copied)  # three pieces of each chunk
    assert kernel_seconds(ring, PAYLOAD, sleepy) >= bundles / 1e7


def test_partial_sums_in_a_wider_dtype():
    """Half of the rounds of a ring carry them, and all along trees; packing goes by results."""
    network = replace(
        NETWORKS["v6e"], device_model=replace(NETWORKS["v6e"].device_model, packing=0)
    )
    for algorithm, times in (("ring", 1.5), ("tree", 2)):
        schedule = registry.build_schedule(HOLE, algorithm)
        narrow = kernel_seconds(schedule, PAYLOAD, network, "bfloat16")
        one, two = (kernel_seconds(schedule, size, network) for size in (PAYLOAD, 2 * PAYLOAD))
        assert narrow == pytest.approx((2 - times) * one + (times - 1) * two)


def test_single_devices_on_chips_exchange_nothing():
    slow = replace(NETWORKS["v4"], memory_bandwidth=1e10)
    alone, unknown = (registry.build_schedule(each, "ring") for each in (tpus("TPU v4"), GRID))
    halves = 2.5 * PAYLOAD / 1e10
    found = kernel_seconds(alone, PAYLOAD, slow)
    assert kernel_seconds(unknown, PAYLOAD, slow) == pytest.approx(found + halves)


@pytest.mark.parametrize(
    "network", [DEFAULT, NETWORKS["v3"], NETWORKS["v5e"], NETWORKS["v6e"].wires_only]
)
def test_networks_without_a_kernel(network):
    with pytest.raises(ArgumentError, match="known only for TPU v4, v5p, v6e and 7x"):
        kernel_seconds(registry.build_schedule(HOLE, "ring"), PAYLOAD, network)


class TestAuto:
    @pytest.mark.parametrize(
        ("kind", "executor"),
        [("TPU v6 lite", "xla"), ("TPU v5", "xla"), ("TPU v3", "xla"), ("TPU v5 lite", "xla"),
         ("TPU7x", "ppermute"), ("TPU v9", "ppermute")],
    )  # fmt: skip
    def test_the_faster_executor(self, kind, executor):
        topology = tpus(kind)
        plan = ftmesh.plan(topology, executor="auto")
        assert plan.executor == executor
        alike = ftmesh.plan(topology, executor=executor)
        assert (plan.algorithm, plan.schedule.num_rounds) == (
            alike.algorithm, alike.schedule.num_rounds,
        )  # fmt: skip
        assert plan.network == alike.network

    def test_a_kernel_only_where_it_is_asked_for(self):
        """Not where its model is the fastest either, until a device has shown that it is right."""
        topology, ring = tpus("TPU v6 lite"), registry.build_schedule(HOLE, "ring")
        kernel = kernel_seconds(ring, PAYLOAD, NETWORKS["v6e"])
        assert kernel < Simulator(ring).seconds(PAYLOAD, NETWORKS["v6e"])
        assert ftmesh.plan(topology, "ring").executor == "ppermute"
        assert ftmesh.plan(topology, with_idle=True).executor == "ppermute"
        assert ftmesh.plan(topology, executor="pallas").executor == "pallas"
        assert ftmesh.plan(topology, executor="ppermute_unrolled").executor == "ppermute_unrolled"
        for other in (cpu_grid("2x2"), Topology.grid("4x4"), tpus("TPU v3")):
            assert ftmesh.plan(other, link="v6e", executor="auto").executor == "xla"

    def test_tiles_and_given_schedules(self):
        tpu = tpus("TPU v6 lite")
        tiles = ftmesh.TiledTopology.from_topology(tpu, "2x1")
        assert ftmesh.plan(tiles, executor="auto").topology.num_live == 8
        given = registry.build_schedule(tpu, "ring")
        plan = ftmesh.Plan.from_schedule(given)
        assert (plan.algorithm, plan.is_given) == ("ring", True)

    def test_unknown_executors_are_rejected(self):
        with pytest.raises(
            ArgumentError,
            match="one of auto, xla, ppermute, ppermute_unrolled, pallas, not 'mosaic'",
        ):
            ftmesh.plan(HOLE, executor="mosaic")
