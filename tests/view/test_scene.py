"""Scenes contain what was planned and simulated."""

import base64
import json
import zlib
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
from ftmesh.view.page import MAX_CHIPS, build_scene, pack

ANY_MESH = {"flood", "tree"}  # what these serve
DAMAGED = Topology.grid("6x4", failed="2x2@2,0")


def unpack(text):
    """The inverse of `pack`, as `unpack.js` does it."""
    differences = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")
    return np.cumsum(differences, dtype=np.int32)


def entry(result, name):
    return next(a for a in result["algorithms"] if a["algorithm"] == name)


def rows(encoded):
    """Every transfer of a schedule in a scene: round, source, destination, chunk, count, op."""
    src, dst = unpack(encoded["src"]), unpack(encoded["dst"])
    found, first = [], 0
    for phase in encoded["phases"]:
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
def test_every_transfer_is_encoded(topology, names):
    result = json.loads(json.dumps(build_scene(topology, "all", payload_bytes=100_000)))
    assert {one["algorithm"] for one in result["algorithms"] if "schedule" in one} == names
    for name in names:
        encoded = entry(result, name)["schedule"]
        schedule = schedule_for(topology, name, 100_000, DEFAULT)
        c = schedule.transfers
        expected = np.stack([c.round, c.src, c.dst, c.chunk, c.count, c.op], axis=1)
        assert np.array_equal(rows(encoded), expected)
        assert encoded["num_chunks"] == schedule.num_chunks
        assert [phase["name"] for phase in encoded["phases"]] == [p.name for p in schedule.phases]
        assert encoded["proof"].startswith(f"verified: {topology.num_live} ranks")


@pytest.mark.parametrize("name", ["row_pair", "tree"])
def test_routes_and_the_busiest_link(name):
    encoded = entry(build_scene(DAMAGED, name, payload_bytes=100_000), name)["schedule"]
    schedule = schedule_for(DAMAGED, name, 100_000, DEFAULT)
    hops, route = unpack(encoded["hops"]), unpack(encoded["route"]).tolist()
    ends = [0, *np.cumsum(hops + 1).tolist()]
    pairs = zip(unpack(encoded["src"]).tolist(), unpack(encoded["dst"]).tolist(), strict=True)
    for pair, (start, stop) in zip(pairs, pairwise(ends), strict=True):
        assert route[start:stop] == [DAMAGED.grid_index(coord) for coord in schedule.routes[pair]]
    loads = [schedule.link_loads(phase) for phase in schedule.phases]
    busiest = max(sum(load.get(link, 0) for load in loads) for link in DAMAGED.links)
    assert encoded["busiest_share"] == busiest / schedule.num_chunks


@pytest.mark.parametrize("network", [DEFAULT, NETWORKS["v3"]], ids=["wires", "devices"])
def test_times_are_those_of_the_simulator_and_the_lower_bound(network):
    result = build_scene(DAMAGED, payload_bytes=3_000_000, network=network)
    assert 3_000_000 in result["payloads"]
    least = limits(DAMAGED)
    schedule = registry.build_schedule(DAMAGED, "row_pair")
    found = entry(result, "row_pair")
    for i in (0, 12, len(result["payloads"]) - 1):
        size = result["payloads"][i]
        simulation = simulate(schedule, payload_bytes=size, link=network)
        assert found["us"][i] == pytest.approx(1e6 * simulation.seconds, rel=1e-5)
        ends = [1e6 * phase.end for phase in simulation.phases]
        assert found["phase_us"][i] == pytest.approx(ends, rel=1e-5)
        limit = 1e6 * least.all_reduce_seconds(size, network)
        assert result["limit_us"][i] == pytest.approx(limit, rel=1e-5)
    assert result["limit_why"] == least.why_all_reduce


@pytest.mark.parametrize("failed", ["", "2x2@2,0", "1x1@1,1"])
@pytest.mark.parametrize("payload_bytes", [10_000, 100_000_000])
def test_auto_is_the_selected_algorithm(failed, payload_bytes):
    topology = Topology.grid("4x4", failed=failed)
    result = build_scene(topology, payload_bytes=payload_bytes)
    assert result["auto"] == result["shown"] == select_algorithm(topology, payload_bytes).algorithm
    assert "schedule" in entry(result, result["auto"])


def test_slow_algorithms_are_planned_on_request():
    assert entry(build_scene(DAMAGED), "flood") == {"algorithm": "flood"}
    requested = build_scene(DAMAGED, "tree", payload_bytes=4_000)
    assert requested["shown"] == "tree"
    assert entry(requested, "tree")["cut_by_size"]
    assert [a["algorithm"] for a in requested["algorithms"] if "schedule" in a] == ["tree"]


def test_errors_of_algorithms():
    says = entry(build_scene(DAMAGED), "two_dim")["refusal"]
    assert says == "it needs every row and column whole, and the mesh is damaged"
    with pytest.raises(PlanError, match=r"two_dim cannot run on 6x4 less .*; use row_pair"):
        build_scene(DAMAGED, "two_dim")
    with pytest.raises(PlanError, match="cut into 2 parts"):
        build_scene(Topology.grid("4x4", failed="1x4@1,0"))
    with pytest.raises(PlanError, match="there is no algorithm 'best'"):
        build_scene(DAMAGED, "best")


def test_large_meshes_are_rejected_first():
    with pytest.raises(ArgumentError, match=f"up to {MAX_CHIPS:,} chips, and 64x64 has 4,096"):
        build_scene(Topology.grid("64x64"))
