"""What the page is given is what was planned and priced."""

import json
from itertools import pairwise

import numpy as np
import pytest

from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT, NETWORKS
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import simulate
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.planning.chunking import schedule_for
from ftmesh.planning.selection import select_algorithm
from ftmesh.topology.topology import Topology
from ftmesh.view.encoding import pack, unpack
from ftmesh.view.scene import MAX_CHIPS, build_scene

ANY_MESH = {"flood", "tree"}  # what these serve
DAMAGED = Topology.grid("6x4", failed="2x2@2,0")


def entry(made, name):
    return next(each for each in made["algorithms"] if each["algorithm"] == name)


def rows(written):
    """Every transfer of a schedule in a scene: round, source, destination, chunk, count, op."""
    src, dst = unpack(written["src"]), unpack(written["dst"])
    found, first = [], 0
    for phase in written["phases"]:
        starts = unpack(phase["starts"])
        pair, chunk, count, op = (unpack(phase[k]) for k in ("pair", "chunk", "count", "op"))
        now = np.repeat(np.arange(phase["rounds"]) + first, np.diff(starts))
        found.append(np.stack([now, src[pair], dst[pair], chunk, count, op], axis=1))
        first += phase["rounds"]
    return np.concatenate(found)


@pytest.mark.parametrize("values", [[], [5], [0, -3, 2**31 - 1, -(2**31)], list(range(1000))])
def test_packing_loses_nothing(values):
    assert unpack(pack(values)).tolist() == values


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (DAMAGED, {"row_pair", "ring", *ANY_MESH}),
        (Topology.grid("4x4", wrap=True), {"two_dim", "row_pair", "ring", "multi_ring", *ANY_MESH}),
        (
            Topology.grid("3x3x2", failed="1x1x1@1,1,1", wrap=[True, False, False]),
            ANY_MESH,
        ),
        (Topology.grid("5"), {"chain", *ANY_MESH}),
    ],
)
def test_every_schedule_is_there_to_the_last_transfer(topology, names):
    made = json.loads(json.dumps(build_scene(topology, "all", payload_bytes=100_000)))
    assert {one["algorithm"] for one in made["algorithms"] if "schedule" in one} == names
    for name in names:
        written = entry(made, name)["schedule"]
        schedule = schedule_for(topology, name, 100_000, DEFAULT)
        c = schedule.transfers
        expected = np.stack([c.round, c.src, c.dst, c.chunk, c.count, c.op], axis=1)
        assert np.array_equal(rows(written), expected)
        assert written["num_chunks"] == schedule.num_chunks
        assert [phase["name"] for phase in written["phases"]] == [p.name for p in schedule.phases]
        assert written["proof"].startswith(f"verified: {topology.num_live} ranks")


@pytest.mark.parametrize("name", ["row_pair", "tree"])
def test_routes_and_the_busiest_link(name):
    written = entry(build_scene(DAMAGED, name, payload_bytes=100_000), name)["schedule"]
    schedule = schedule_for(DAMAGED, name, 100_000, DEFAULT)
    hops, route = unpack(written["hops"]), unpack(written["route"]).tolist()
    ends = [0, *np.cumsum(hops + 1).tolist()]
    pairs = zip(unpack(written["src"]).tolist(), unpack(written["dst"]).tolist(), strict=True)
    for pair, (start, stop) in zip(pairs, pairwise(ends), strict=True):
        assert route[start:stop] == [DAMAGED.grid_index(coord) for coord in schedule.routes[pair]]
    loads = [schedule.link_loads(phase) for phase in schedule.phases]
    busiest = max(sum(load.get(link, 0) for load in loads) for link in DAMAGED.links)
    assert written["busiest_share"] == busiest / schedule.num_chunks


@pytest.mark.parametrize("network", [DEFAULT, NETWORKS["v3"]], ids=["wires", "devices"])
def test_times_are_those_of_the_simulator_and_the_lower_bound(network):
    made = build_scene(DAMAGED, payload_bytes=3_000_000, network=network)
    assert 3_000_000 in made["payloads"]
    least = limits(DAMAGED)
    schedule = registry.build_schedule(DAMAGED, "row_pair")
    found = entry(made, "row_pair")
    for i in (0, 12, len(made["payloads"]) - 1):
        size = made["payloads"][i]
        priced = simulate(schedule, payload_bytes=size, link=network)
        assert found["us"][i] == pytest.approx(1e6 * priced.seconds, rel=1e-5)
        ends = [1e6 * phase.end for phase in priced.phases]
        assert found["phase_us"][i] == pytest.approx(ends, rel=1e-5)
        limit = 1e6 * least.all_reduce_seconds(size, network)
        assert made["limit_us"][i] == pytest.approx(limit, rel=1e-5)
    assert made["limit_why"] == least.why_all_reduce


@pytest.mark.parametrize("failed", ["", "2x2@2,0", "1x1@1,1"])
@pytest.mark.parametrize("payload_bytes", [10_000, 100_000_000])
def test_auto_is_what_plans_take(failed, payload_bytes):
    topology = Topology.grid("4x4", failed=failed)
    made = build_scene(topology, payload_bytes=payload_bytes)
    assert made["auto"] == made["shown"] == select_algorithm(topology, payload_bytes).algorithm
    assert "schedule" in entry(made, made["auto"])


def test_what_takes_long_waits_until_it_is_asked_for():
    assert entry(build_scene(DAMAGED), "tree") == {"algorithm": "tree"}
    asked = build_scene(DAMAGED, "tree", payload_bytes=4_000)
    assert asked["shown"] == "tree"
    assert entry(asked, "tree")["cut_by_size"]
    assert [one["algorithm"] for one in asked["algorithms"] if "schedule" in one] == ["tree"]


def test_refusals_are_the_planners_sentences():
    says = entry(build_scene(DAMAGED), "two_dim")["refusal"]
    assert says == "it needs every row and column whole, and the mesh is damaged"
    with pytest.raises(PlanError, match=r"two_dim cannot run on 6x4 less .*; use row_pair"):
        build_scene(DAMAGED, "two_dim")
    with pytest.raises(PlanError, match="cut into 2 parts"):
        build_scene(Topology.grid("4x4", failed="1x4@1,0"))
    with pytest.raises(PlanError, match="there is no algorithm 'best'"):
        build_scene(DAMAGED, "best")


def test_large_meshes_are_refused_before_any_work():
    with pytest.raises(ArgumentError, match=f"up to {MAX_CHIPS:,} chips, and 64x64 has 4,096"):
        build_scene(Topology.grid("64x64"))
