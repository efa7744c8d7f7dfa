"""Collectives along "data" where ranks are tiles of chips, against lax."""

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology, TopologyError, jax_mesh
from ftmesh.testing import cpu_grid

pytestmark = pytest.mark.usefixtures("quick_compiler")

CASES = [
    ("4x4", "2x2@0,0", "2x1"),
    ("4x4", "2x2@0,0", "2x2"),
    ("8x8", "2x2@2,2", "2x1"),
    ("8x8", "2x2@2,2", "2x2"),
]
AXES = ("data", "model")


def tiled(shape, failed, tile, **options):
    return ftmesh.plan(
        ftmesh.TiledTopology.from_topology(cpu_grid(shape, failed=failed), tile), **options
    )


@pytest.fixture
def small():
    """Six tiles of two chips each."""
    return tiled("4x4", "2x2@0,0", "2x1")


def on_mesh(mesh, run, x):
    """`run` on every device; arguments and results have leading dimensions of rank, position."""
    spec = P("data", tuple(name for name in mesh.axis_names if name != "data"))
    mapped = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None, None], run(x[0, 0])),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
    return jax.device_get(jax.jit(mapped)(x))


def numbers(plan, *shape):
    lead = (plan.topology.num_live, plan.topology.num_positions)
    return np.random.default_rng(0).integers(-99, 99, (*lead, *shape), np.int32)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case[0] == "8x8")) for case in CASES],
    ids=" ".join,
)
def test_collectives_match_lax(case):
    plan = tiled(*case)
    ranks = plan.topology.num_live
    x = numbers(plan, 2 * ranks, 3)

    def run(sums, x):
        return {
            "sum": sums.psum(x, "data"),
            "mean": sums.pmean(x.astype(np.float32), "data"),
            "scattered": sums.psum_scatter(x, "data", tiled=True),
            "gathered": sums.all_gather(x[:2], "data", tiled=True),
            "over both axes": lax.psum(sums.psum(x[0], "data"), "model"),
        }

    ours, laxs = (
        on_mesh(plan.jax_mesh(AXES), lambda x, sums=sums: run(sums, x), x) for sums in (plan, lax)
    )
    assert all((ours["sum"][rank] == x.sum(axis=0)).all() for rank in range(ranks))
    for name in ("sum", "scattered", "gathered", "over both axes"):
        np.testing.assert_array_equal(ours[name], laxs[name], err_msg=name)
    np.testing.assert_allclose(ours["mean"], laxs["mean"], rtol=1e-5, atol=1e-5)


class TestMeshes:
    def ids(self, mesh):
        return np.vectorize(lambda device: device.id)(mesh.devices).tolist()

    def test_mesh_order_is_tiles_along_the_ring_then_positions_x_first(self, small):
        mesh = small.jax_mesh(AXES)
        assert mesh.axis_names == AXES
        assert self.ids(mesh) == [[2, 3], [6, 7], [10, 11], [8, 9], [12, 13], [14, 15]]
        square = tiled("4x4", "2x2@0,0", "2x2")
        assert self.ids(square.jax_mesh(AXES)) == [
            [2, 3, 6, 7],
            [10, 11, 14, 15],
            [8, 9, 12, 13],
        ]

    def test_axis_order_and_one_axis_per_side(self, small):
        turned = small.jax_mesh(("model", "data"), along="data")
        assert self.ids(turned) == [[2, 6, 10, 8, 12, 14], [3, 7, 11, 9, 13, 15]]
        sides = tiled("4x4", "2x2@0,0", "2x2").jax_mesh(("data", "x", "y"))
        assert dict(sides.shape) == {"data": 3, "x": 2, "y": 2}
        assert self.ids(sides)[0] == [[2, 6], [3, 7]]
        x = numbers(small, 5)
        np.testing.assert_array_equal(
            on_mesh(turned, lambda x: small.psum(x, "data"), x)[0], x.sum(axis=0)
        )

    def test_invalid_axis_names(self, small):
        for names in ("data", ("data",), ("data", "a", "b", "c")):
            with pytest.raises(ArgumentError, match="give two names, as"):
                small.jax_mesh(names)
        with pytest.raises(ArgumentError, match=r"along must be one of the axes .* not 'batch'"):
            small.jax_mesh(AXES, along="batch")
        with pytest.raises(ArgumentError, match="'2x1'\\) for a model axis"):
            jax_mesh(cpu_grid("4x4"), AXES)
        with pytest.raises(TopologyError, match="4x4 was not built from devices"):
            ftmesh.plan(ftmesh.TiledTopology.from_topology(Topology.grid("4x4"), "2x2")).jax_mesh(
                AXES
            )

    @pytest.mark.parametrize(
        ("places", "complaint"),
        [
            ([[2, 3], [6, 7], [11, 10], [8, 9], [12, 13], [14, 15]], "rank 2 should be cpu:10 and"),
            ([[6, 7], [2, 3], [10, 11], [8, 9], [12, 13], [14, 15]], "rank 0 should be cpu:2 and"),
            ([[2, 3], [6, 7], [10, 11], [8, 9], [12, 13], [14, 0]], "rank 5 should be cpu:15 and"),
        ],
        ids=["positions of one tile swapped", "two tiles swapped", "a device that has failed"],
    )
    def test_wrong_mesh_raises(self, small, places, complaint):
        wrong = Mesh(np.array(jax.devices())[np.array(places)], AXES)
        with pytest.raises(CollectiveError, match=complaint) as error:
            on_mesh(wrong, lambda x: small.psum(x, "data"), numbers(small, 5))
        assert "make the mesh with plan.jax_mesh(('data', 'model'), along='data')" in str(error)

    @pytest.mark.slow
    def test_positions_may_be_permuted(self, small):
        mesh = Mesh(small.jax_mesh(AXES).devices[:, ::-1], AXES)
        x = numbers(small, 5)
        result = on_mesh(mesh, lambda x: small.psum(x, "data"), x)
        np.testing.assert_array_equal(result[0], x.sum(axis=0))

    def test_mesh_of_wrong_size(self, small):
        flat = jax_mesh(cpu_grid("4x4", failed="2x2@0,0"), "data")
        complaint = r"has 12 devices, but the plan for .* has 6: .*jax_mesh\(\('data', 'model'\)\)"
        with pytest.raises(CollectiveError, match=complaint):
            jax.shard_map(
                lambda x: small.psum(x, "data"), mesh=flat, in_specs=P("data"), out_specs=P()
            )(np.arange(12.0))


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["2x1", "2x2"])
def test_paper_mesh_on_one_device(tile):
    plan = ftmesh.plan(
        ftmesh.TiledTopology.from_topology(Topology.grid("16x32", failed="4x2@6,14"), tile)
    )
    x = numbers(plan, 301)
    every_rank = jax.vmap(lambda x: plan.psum(x, "data"), axis_name="data")
    result = jax.jit(jax.vmap(every_rank, axis_name="model", in_axes=1, out_axes=1))(x)
    assert (np.asarray(result) == x.sum(axis=0)).all()


def test_idle_tiles_contribute_nothing_and_get_results():
    plan = tiled("4x4", "1x1@0,0", "2x1", with_idle=True)
    mesh = plan.jax_mesh(AXES)
    assert mesh.devices.shape == (8, 2)
    x = np.random.default_rng(0).integers(-99, 99, (8, 2, 5), np.int32)
    result = on_mesh(mesh, lambda x: plan.psum(x, "data"), x)
    assert all((row == x[:7].sum(axis=0)).all() for row in result)


def test_plans_for_other_payloads_are_on_the_same_tiles():
    plan = tiled("8x8", "", "2x2", payload_bytes=100_000_000)
    small = plan.for_payload(8)
    assert small.topology == plan.topology
    assert small.proof.num_positions == 4


def test_value_and_grad_on_tiles_needs_a_mesh():
    plan = ftmesh.plan(ftmesh.TiledTopology.from_topology(cpu_grid("4x4", failed="2x2@0,0"), "2x2"))
    with pytest.raises(
        ftmesh.ArgumentError, match=r"give mesh=plan.jax_mesh\(\('data', 'model'\)\)"
    ):
        jax.eval_shape(plan.value_and_grad(lambda p, x: (p * x).mean()), 2.0, np.ones(12))


@pytest.mark.parametrize("traces_init", [False, True], ids=["init", "jit(init)"])
def test_shard_finds_the_mesh_of_the_parameters(traces_init):
    """Without mesh= or jax.set_mesh: they are cut along "model"."""
    plan = tiled("4x4", "2x2@2,2", "2x1")
    mesh, specs = plan.jax_mesh(AXES), {"w": P(None, "model"), "b": P()}
    host = {"w": np.arange(128, dtype=np.float32).reshape(8, 16), "b": np.ones(5, np.float32)}
    params = {
        name: jax.device_put(host[name], NamedSharding(mesh, spec)) for name, spec in specs.items()
    }
    grads = jax.tree.map(lambda x: x / 100 + 1, params)
    optimizer, alone = plan.shard(optax.adam(0.1), specs=specs), optax.adam(0.1)
    state = (jax.jit(optimizer.init) if traces_init else optimizer.init)(params)
    updates, state = optimizer.update(grads, state, params)
    expected, full = alone.update(grads, alone.init(host), host)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), updates, expected)
    gathered = optimizer.gather_state(state, params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), gathered, full)
    restored = optimizer.shard_state(gathered, params)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    with pytest.raises(ArgumentError, match="give mesh="):
        optimizer.init(host)
