"""What XLA's own sum along the ring costs, and where it is chosen."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

import ftmesh
from ftmesh import CollectiveError, PlanError, Topology
from ftmesh.algorithms import registry
from ftmesh.cost.executors import busiest_link, native_ring_seconds
from ftmesh.cost.links import NETWORKS
from ftmesh.cost.simulate import Simulator
from ftmesh.planning.selection import select_algorithm
from ftmesh.testing import cpu_grid
from ftmesh.topology.ring_order import RingOrder, ring_order
from ftmesh.topology.tiles import TiledTopology
from tests.support.more import more

HOLE = Topology.grid("4x4", failed="2x2@2,2")
V6E = Topology.grid("16x16", failed="2x2@2,2")
V3 = Topology.grid("16x32", failed="4x2@6,14")
PENDANT = Topology.grid("6x2", failed="1x1@4,1")  # beyond the hole, a chip on a single link


class TestCosts:
    @pytest.mark.parametrize(
        ("topology", "network", "along_ring", "in_grid_order"),
        [(V6E, "v6e", 1.92, 3.84), (V3, "v3", 2.27, 4.55)],
    )
    def test_one_hop_a_step_is_half_the_time(self, topology, network, along_ring, in_grid_order):
        orders = ring_order(topology), RingOrder(topology, topology.coords)
        assert [busiest_link(order) for order in orders] == [1, 2]
        assert orders[1].blocked
        milliseconds = [
            1e3 * native_ring_seconds(order, 100_000_000, NETWORKS[network]) for order in orders
        ]
        assert milliseconds == pytest.approx([along_ring, in_grid_order], abs=0.005)

    def test_on_tiles_it_reaches_the_same_share_of_the_links(self):
        tiles = TiledTopology.from_topology(Topology.grid("4x4"), "2x1")
        v6e, payload = NETWORKS["v6e"], 1_000_000_000
        full_rate = replace(v6e, all_reduce_efficiency=1.0, collective_launch=0.0)
        seconds, at_full_rate = (
            select_algorithm(tiles, payload, one, trees="never", with_native=True).candidates
            for one in (v6e, full_rate)
        )
        native, ideal = (
            next(one for one in candidates if one.executor == "xla").seconds
            for candidates in (seconds, at_full_rate)
        )
        assert native == pytest.approx(ideal / 0.69, rel=0.001)

    def test_operations_and_a_single_chip(self):
        order, network = ring_order(V6E), NETWORKS["v6e"]
        both, first, second = (
            native_ring_seconds(order, 10**8, network, operation)
            for operation in ("all_reduce", "reduce_scatter", "all_gather")
        )
        assert first == both  # as XLA compiles it
        hops, wires = 126 * network.latency, 10**8 / 2 / network.bandwidth
        share, launch = 251 / 252, network.collective_launch
        assert second == pytest.approx(launch + share * (hops + wires))
        assert both == pytest.approx(launch + 2 * share * (hops + wires / 0.69))
        assert native_ring_seconds(ring_order(Topology.grid("1x1")), 10**8, network) == 0


class TestSelection:
    @pytest.mark.parametrize(("topology", "link"), [(V6E, "v6e"), (V3, "v3")])
    def test_auto_leaves_sums_to_xla(self, topology, link):
        plan = ftmesh.plan(topology, link=link)
        assert (plan.executor, plan.chooses_executor) == ("xla", True)
        best, second, *_ = select_algorithm(
            topology, 100_000_000, NETWORKS[link], with_native=True
        ).candidates
        assert (best.name, second.executor) == ("ring, xla", "ppermute")
        assert best.seconds < 0.8 * second.seconds
        assert f"all {topology.num_live} steps of the ring are one hop" in str(plan)
        assert "the cheaper of ring, xla " in str(plan)

    def test_thousands_of_chips_pay_too_many_hops(self):
        """A ring waits for 4,000 of them, longer than row pairs take in all."""
        large = Topology.grid("64x64", failed="2x2@2,2")
        network = NETWORKS["v6e"]
        pairs = Simulator(registry.build_schedule(large, "row_pair")).seconds(10**6, network)
        native = native_ring_seconds(ring_order(large), 10**6, network)
        assert native == pytest.approx(4.11e-3, abs=1e-5)
        assert native > pairs

    @more
    @pytest.mark.slow
    def test_auto_takes_trees_on_thousands_of_chips(self):
        """A ring waits for 2,046 hops, a tree for 136 launches of 4.6 us and what each adds."""
        large = Topology.grid("64x64", failed="2x2@2,2")
        best, *others = select_algorithm(large, 10**6, NETWORKS["v6e"], with_native=True).candidates
        assert (best.algorithm, best.executor) == ("tree", "ppermute")
        (native,) = [one for one in others if one.executor == "xla"]
        assert 2 * best.seconds < native.seconds

    def test_auto_takes_permutations_where_the_ring_is_blocked(self):
        assert ring_order(PENDANT).blocked
        plan = ftmesh.plan(PENDANT, link="v6e")
        assert (plan.executor, plan.chooses_executor) == ("ppermute", True)
        (native,) = [one for one in plan.explain().candidates if one.executor == "xla"]
        assert native.rejection.endswith("1 has no route clear of failures")
        assert plan.with_reduce_scatter.executor == "ppermute"

    def test_xla_on_a_blocked_ring_raises(self):
        says = r"from chip \(\d, \d\) to \(\d, \d\) whose route goes over a failure: plan with "
        with pytest.raises(PlanError, match=says + "executor='ppermute'"):
            ftmesh.plan(PENDANT, executor="xla")

    def test_xla_on_two_parts_raises(self):
        with pytest.raises(PlanError, match="no link joins some of its chips to the others"):
            ftmesh.plan(Topology.from_drawing("..X..\n..X.."), executor="xla")

    @pytest.mark.parametrize("collective", ["psum", "pmean", "all_gather", "psum_scatter"])
    def test_a_mesh_in_another_order_raises(self, collective):
        topology = cpu_grid("4x4", failed="2x2@2,2")
        plan = ftmesh.plan(topology, executor="xla")
        options = {"tiled": True} if collective in ("all_gather", "psum_scatter") else {}
        run = partial(getattr(plan, collective), axis_name="data", **options)
        devices = plan.jax_mesh("data").devices
        in_grid_order = np.array(topology.devices)
        assert devices.tolist() != in_grid_order.tolist()

        def total(devices):
            spec = jax.P("data")
            mesh = jax.sharding.Mesh(devices, "data")
            body = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
            return jax.jit(body)(np.arange(144.0))

        assert total(devices).size
        says = r"rank 4 should be .* and is .*; make the mesh with plan.jax_mesh\('data'\)"
        with pytest.raises(CollectiveError, match=says):
            total(in_grid_order)

    def test_a_large_sharded_optimizer_stays_with_xla(self):
        """Floods move BERT's gradients sooner, but leave shares in an order that costs more."""
        torus = Topology.grid("16x16", failed="2x2@2,2", wrap=True)
        options = {"reduce_scatter": True, "with_native": True}
        selection = select_algorithm(torus, 1_345_000_000, NETWORKS["v6e"], **options)
        by_name = {one.name: one for one in selection.candidates}
        flood = by_name["flood"].schedule
        assert selection.best.name == "ring, xla"
        assert Simulator(flood).seconds(1_345_000_000, NETWORKS["v6e"]) < selection.best.seconds
        assert selection.best.seconds < by_name["flood"].seconds
