"""`Plan.value_and_grad` on a mesh with a second axis: devices sum their own shards."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.execute import _compat
from tests.support.compiled_text import collectives, moved
from tests.support.whole_batch import ARGS, assert_close, compiled, loss, put

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.skipif(not _compat.SUPPORTS_NESTED_SHARD_MAP, reason="takes JAX 0.10"),
]

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SHAPE = {"data": 6, "model": 2}
WEIGHTS = {"w": P(None, "model"), "v": P("model")}


@pytest.fixture(scope="module")
def plan():
    """For the first column of a mesh of 6x2; the other lies as that does."""
    return ftmesh.plan(Topology.from_devices(jax.devices()[:12:2], shape="3x2"), "ring")


def placed(kinds, weights, devices=None):
    """Arguments on a mesh whose first column is the ring of the plan."""
    ring = (0, 2, 4, 10, 8, 6)
    devices = [jax.devices()[i + j] for i in ring for j in (0, 1)] if devices is None else devices
    mesh = Mesh(np.array(devices).reshape(6, 2), tuple(SHAPE), axis_types=kinds)
    return mesh, put(mesh, ARGS, (weights, P("data"), P("data")))


def along_model(program):
    return sorted(each.kind for each in collectives(program) if each.is_along("model", SHAPE))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)
def test_each_device_sums_its_shard(plan, kind):
    _, args = placed((kind, kind), WEIGHTS)
    specs = WEIGHTS if kind == AUTO else None
    program, result = compiled(plan.value_and_grad(loss, specs=specs), *args)
    assert_close(result, jax.value_and_grad(loss)(*ARGS))
    ftmesh.audit(program, "data").require_none()
    # Half of both weights, and the value, in as many chunks as the ring has.
    size = (6 * 8 + 8) // 2 + 1
    assert set(moved(program, "data", SHAPE)) == {-(-size // plan.program.num_chunks)}
    assert {name: grad.sharding.spec for name, grad in result[1].items()} == WEIGHTS
    # What the loss itself exchanges along "model", its sum over hidden units, and no more.
    theirs, _ = compiled(jax.value_and_grad(loss), *args)
    assert along_model(program) == along_model(theirs) == ["all-reduce"]


@pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)], ids=str)
def test_weights_sharded_along_data_too(plan, kind):
    weights = {"w": P("data", "model"), "v": P("model")}
    _, args = placed((kind, kind), weights)
    specs = weights if kind == AUTO else None
    program, result = compiled(plan.value_and_grad(loss, specs=specs), *args)
    assert_close(result, jax.value_and_grad(loss)(*ARGS))
    ftmesh.audit(program, "data").require_none()
    assert result[1]["w"].sharding.spec == P("data", "model")
    assert along_model(program) == ["all-reduce"]


def test_weights_sharded_along_the_only_axis(even):
    rng = np.random.default_rng(0)
    w, x, y = (np.float32(rng.normal(size=shape)) for shape in (12, (24, 12), 24))

    def loss_of(w, x, y):
        return ((x @ w - y) ** 2).mean()

    args = put(even.jax_mesh("data"), (w, x, y), (P("data"),) * 3)
    program, result = compiled(even.value_and_grad(loss_of, specs=P("data")), *args)
    assert_close(result, jax.value_and_grad(loss_of)(w, x, y))
    ftmesh.audit(program, "data").require_none()
    assert result[1].sharding.spec == P("data")


@pytest.mark.parametrize("kind", [AUTO, pytest.param(EXPLICIT, marks=pytest.mark.slow)], ids=str)
def test_axes_of_one_device_beside_the_plan(even, kind):
    """As configurations of many axes have them, of which most are of size 1."""
    rng = np.random.default_rng(0)
    w, x, y = (np.float32(rng.normal(size=shape)) for shape in (12, (24, 12), 24))

    def loss_of(w, x, y):
        return ((x @ w - y) ** 2).mean()

    names, specs = ("data", "expert"), P(("data", "expert"))
    mesh = Mesh(even.jax_mesh("data").devices.reshape(12, 1), names, axis_types=(kind, kind))
    args = put(mesh, (w, x, y), (specs,) * 3)
    given = specs if kind == AUTO else None
    program, result = compiled(even.value_and_grad(loss_of, specs=given), *args)
    assert_close(result, jax.value_and_grad(loss_of)(w, x, y))
    ftmesh.audit(program, "data").require_none()
    assert result[1].sharding.is_equivalent_to(args[0].sharding, 1)


def test_shardings_as_specs(plan):
    mesh, args = placed((AUTO, AUTO), WEIGHTS)
    specs = jax.tree.map(lambda weight: weight.sharding, args[0])
    with jax.set_mesh(mesh):
        program, result = compiled(plan.value_and_grad(loss, specs=specs), *args)
    assert_close(result, jax.value_and_grad(loss)(*ARGS))
    assert along_model(program) == ["all-reduce"]


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_inside_a_shard_map_over_data(plan, check_vma):
    mesh, args = placed((AUTO, AUTO), WEIGHTS)
    mapped = jax.shard_map(
        plan.value_and_grad(loss, specs=WEIGHTS),
        mesh=mesh,
        axis_names={"data"},
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    program, result = compiled(mapped, *args)
    assert_close(result, jax.value_and_grad(loss)(*ARGS))
    ftmesh.audit(program, "data").require_none()
    assert along_model(program) == ["all-reduce"]


@pytest.mark.parametrize("kinds", [(AUTO, EXPLICIT), (EXPLICIT, AUTO)], ids=str)
def test_mixed_axis_types_raise(plan, kinds):
    _, args = placed(kinds, P())
    with pytest.raises(CollectiveError, match="JAX then sums gradients by itself"):
        jax.jit(plan.value_and_grad(loss))(*args)


def test_other_devices_raise(plan, even):
    mesh, args = placed((AUTO, AUTO), WEIGHTS, devices=jax.devices()[11::-1])
    with jax.set_mesh(mesh), pytest.raises(CollectiveError, match="or another order"):
        jax.jit(plan.value_and_grad(loss, specs=WEIGHTS))(*args)
    backwards = Mesh(even.jax_mesh("data").devices[::-1], ("data",))
    args = put(backwards, ARGS, (P(), P("data"), P("data")))
    with pytest.raises(ValueError, match="incompatible devices"):  # JAX sees that
        jax.jit(even.value_and_grad(loss))(*args)
    for kind in (AUTO, EXPLICIT):
        line = Mesh(backwards.devices, "data", axis_types=(kind,))
        args = put(line, ARGS, (P(), P("data"), P("data")))
        with pytest.raises(CollectiveError, match="rank 0 should be"):
            even.value_and_grad(loss)(*args)


def test_conflicting_meshes_raise(plan):
    mesh, args = placed((AUTO, AUTO), WEIGHTS)
    other = Mesh(mesh.devices.T, ("model", "data"))
    with jax.set_mesh(mesh), pytest.raises(ArgumentError, match="leave out one of them"):
        jax.eval_shape(plan.value_and_grad(loss, specs=WEIGHTS, mesh=other), *args)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, ArgumentError, r"specs=jax.tree.map\(lambda w: w.sharding, params\)"),
        ({"specs": "model"}, ArgumentError, "one of them is 'model'"),
        (
            {"specs": {"w": P(("data", "model")), "v": P()}},
            ArgumentError,
            "one dimension of a weight",
        ),
        ({"axis_name": "model"}, CollectiveError, "has 2 devices, but the plan for 3x2 has 6"),
        ({"axis_name": "batch", "mesh": ...}, ArgumentError, "has axes .* and not 'batch'"),
    ],
)
def test_invalid_arguments(plan, options, error, message):
    mesh, args = placed((AUTO, AUTO), WEIGHTS)
    if "mesh" in options:
        options = {**options, "mesh": mesh}
    with pytest.raises(error, match=message):
        jax.jit(plan.value_and_grad(loss, **options))(*args)
