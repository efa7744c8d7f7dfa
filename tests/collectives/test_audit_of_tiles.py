"""The audit on tiles: what runs inside them, between them, and over both."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import Network
from ftmesh.cost.executors import native_ring_seconds
from ftmesh.testing import cpu_grid
from ftmesh.topology.ring_order import ring_order


def audit_inside_tiles(tile, collective, **damage):
    """What an audit says of a collective inside each tile."""
    topology = cpu_grid("6x4", **damage)
    tiles = ftmesh.TiledTopology.from_topology(topology, tile)
    mesh = ftmesh.jax_mesh(tiles, ("data", "expert"))
    parts = mesh.shape["expert"]
    mapped = jax.shard_map(collective, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    program = jax.jit(mapped).lower(np.ones((parts, parts), np.float32))
    return ftmesh.audit(program, "expert", plan=tiles)


def exchange(x):
    return lax.all_to_all(x, "expert", 1, 1, tiled=True)


def gather(x):
    return lax.all_gather(x, "expert").mean(0)


def total(x):
    return x + lax.psum(x, "expert")


def to_the_last(x):
    return lax.ppermute(x, "expert", [(0, 1)])


INSIDE = (exchange, gather, total, to_the_last)


@pytest.mark.parametrize("collective", INSIDE)
@pytest.mark.parametrize(("tile", "wrap"), [("2x2", False), ("2x4", (False, True))])
def test_what_stays_inside_tiles_is_good(collective, tile, wrap):
    audit = audit_inside_tiles(tile, collective, failed="1x1@5,3", wrap=wrap)
    audit.require_none()
    (entry,) = audit.native
    assert entry.seconds is None
    assert f"1 collective stays inside chips or tiles: {entry.num_bytes} B" in str(audit)


@pytest.mark.parametrize("collective", INSIDE)
@pytest.mark.parametrize(
    ("tile", "failed"),
    [("2x2", "1x1@5,3"), ("3x4", "")],  # a link inside a live tile
)
def test_what_crosses_a_failed_link_inside_a_tile(collective, tile, failed):
    damage = {"failed": failed, "failed_links": "0,0-1,0"}
    (entry,) = audit_inside_tiles(tile, collective, **damage)
    assert entry.problem.startswith("its route from chip (")
    assert entry.problem.endswith("crosses failed chips or links")
    assert entry.advice.startswith("mark a chip at each failed link as failed")


@pytest.mark.parametrize("collective", INSIDE[:3])
def test_a_failed_link_between_tiles_is_none_inside_them(collective):
    audit_inside_tiles("3x4", collective, failed_links="2,0-3,0").require_none()


def audit_on_tiles(topology, tile, collective, plan=None):
    """What an audit says of a collective over tiles, "data", or over their chips too, "model"."""
    tiles = ftmesh.TiledTopology.from_topology(topology, tile)
    mesh, rows = ftmesh.jax_mesh(tiles, ("data", "model")), P("data", "model")
    mapped = jax.shard_map(collective, mesh=mesh, in_specs=rows, out_specs=rows)
    program = jax.jit(mapped).lower(np.ones((mesh.shape["data"] ** 2, mesh.size), np.float32))
    return ftmesh.audit(program, "data", plan=plan or tiles)


def over_both_axes(x):
    return x + lax.psum(x, ("data", "model"))


def test_a_failed_link_that_no_route_between_tiles_takes():
    """Tiles span the axis of the link; between them routes go along the other axis."""
    topology = cpu_grid("4x4", failed_links="0,0-1,0")
    plan = ftmesh.plan(ftmesh.TiledTopology.from_topology(topology, "4x1"))

    def swap(x):
        return plan.all_to_all(x, "data", 0, 0, tiled=True)

    audit_on_tiles(topology, "4x1", swap, plan).require_none()
    audit_on_tiles(topology, "4x1", lambda x: x + lax.psum(x, "data")).require_none()


def test_sums_of_all_chips_of_tiles_go_over_failed_links():
    """XLA sums over a whole slice along its axes, whatever the tiles."""
    topology = cpu_grid("6x4", failed_links="2,1-2,2")
    (entry,) = audit_on_tiles(topology, "2x2", over_both_axes)
    assert entry.problem == "it goes over all axes, also over failed links"
    audit_on_tiles(cpu_grid("6x4"), "2x2", over_both_axes).require_none()
    with_link = cpu_grid("4x4", failed_links="1,1-1,2")
    tiles = ftmesh.TiledTopology.from_topology(with_link, "4x4")
    mesh = ftmesh.jax_mesh(tiles, ("data", "model"))
    run = jax.shard_map(
        lambda x: x + lax.psum(x, "model"), mesh=mesh, in_specs=P("model"), out_specs=P("model")
    )
    (entry,) = ftmesh.audit(jax.jit(run).lower(np.ones(16, np.float32)), "model", plan=tiles)
    assert entry.problem == "it goes over all axes, also over failed links"


def test_routes_between_positions_of_tiles_that_cross_a_failed_chip():
    """Of three tiles around a wrapped axis, where the middle one has failed."""
    topology = cpu_grid("6x2", wrap=(True, False), failed="1x1@2,1")

    def across(x):  # from the last chip of a tile to the first of another
        return lax.ppermute(x, ("data", "model"), [(3, 6)])

    (entry,) = audit_on_tiles(topology, "2x2", across)
    assert entry.problem == ("its route from chip (1, 1) to (4, 1) crosses failed chips or links")
    assert entry.advice.startswith("call plan.ppermute")


def test_two_axes_and_tiles():
    """Each half of a tile sums over the tiles, whose order counts."""
    chips = cpu_grid("8x4", failed="2x2@2,2")
    tiles = ftmesh.TiledTopology.from_topology(chips, "2x1")
    coords = ring_order(tiles).coords
    cost = native_ring_seconds(ring_order(tiles), 4, Network(50e9, 0.5e-6))
    devices = np.array(tiles.devices).reshape(-1, 2)
    of_tile = dict(zip(tiles.coords, devices, strict=True))

    def program(order):
        mesh = Mesh(np.array([of_tile[coord] for coord in order]), ("data", "model"))
        run = jax.shard_map(
            lambda x: lax.psum(lax.psum(x, "data"), "model"),
            mesh=mesh, in_specs=P("data", "model"), out_specs=P("data", "model"), check_vma=False,
        )  # fmt: skip
        return jax.jit(run).lower(np.ones((len(order), 2), np.float32)).compile()

    audit = ftmesh.audit(program(coords), "data", plan=tiles)
    audit.require_none()
    (entry,) = audit.native
    assert entry.seconds == pytest.approx(2 * cost)
    wrong = list(coords)
    wrong[2], wrong[7] = wrong[7], wrong[2]
    assert ftmesh.audit(program(wrong), "data", plan=tiles)
