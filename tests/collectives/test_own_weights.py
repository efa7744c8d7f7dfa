"""In shard_map, weights that vary along the axis keep their own gradient (FSDP)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, Topology
from ftmesh.execute import _compat
from tests.support.slow import slow
from tests.support.whole_batch import assert_close

pytestmark = pytest.mark.usefixtures("quick_compiler")

RNG = np.random.default_rng(0)
WEIGHTS = {"w": np.float32(RNG.normal(size=(24, 4))), "v": np.float32(RNG.normal(size=4))}
X, Y = np.float32(RNG.normal(size=(36, 24))), np.float32(RNG.normal(size=36))
MASK = np.float32(RNG.uniform(size=36))
SPECS = {"w": P("data"), "v": P()}


def losses(weights, x, y):
    return (jnp.tanh(x @ weights["w"]) @ weights["v"] - y) ** 2


def gathered(plan):
    def gather(weights):
        return {**weights, "w": plan.all_gather(weights["w"], "data", tiled=True)}

    return gather


@pytest.mark.parametrize(
    ("check_vma", "weighted"), [slow(True, False), (True, True), (False, False), slow(False, True)]
)
def test_gradients_of_shards(even, weighted, check_vma):
    """A shard for each rank, which the loss gathers, next to a weight that all ranks have."""
    gather = gathered(even)

    def loss(weights, x, y, mask):
        each = losses(gather(weights), x, y)
        return ((mask * each).sum(), mask.sum()) if weighted else each.mean()

    run = even.value_and_grad(loss, weighted=weighted, specs=None if check_vma else SPECS)
    mapped = jax.shard_map(
        run,
        mesh=even.jax_mesh("data"),
        in_specs=(SPECS, P("data"), P("data"), P("data")),
        out_specs=(P(), SPECS),
        check_vma=check_vma,
    )
    program = jax.jit(mapped).lower(WEIGHTS, X, Y, MASK).compile()

    def plain(weights):
        each = losses(weights, X, Y)
        return (MASK * each).sum() / MASK.sum() if weighted else each.mean()

    assert_close(program(WEIGHTS, X, Y, MASK), jax.value_and_grad(plain)(WEIGHTS))
    ftmesh.audit(program, "data").require_none()


def test_weights_of_ranks_alone(even):
    """Weights that no other rank uses: the mean loss has a twelfth of each rank's derivative."""
    own = np.float32(RNG.normal(size=12))
    mapped = jax.shard_map(
        even.value_and_grad(lambda w, x: jnp.mean(w * x**2)),
        mesh=even.jax_mesh("data"),
        in_specs=P("data"),
        out_specs=(P(), P("data")),
    )
    expected = jax.value_and_grad(lambda w: jnp.mean(w * Y.reshape(12, 3).T ** 2))(own)
    assert_close(jax.jit(mapped)(own, Y), expected)


@pytest.mark.skipif(not _compat.SUPPORTS_NESTED_SHARD_MAP, reason="takes JAX 0.10")
@pytest.mark.parametrize("is_manual", [True, False])
def test_with_a_second_axis(is_manual):
    """Weights sharded along both axes; the loss gathers one and sums over the other."""
    plan = ftmesh.plan(Topology.from_devices(jax.devices()[:12:2], shape="3x2"), "ring")
    column = plan.jax_mesh("data").devices
    columns = [column, [jax.devices()[device.id + 1] for device in column]]
    mesh = Mesh(np.array(columns).T, ("data", "model"))
    specs = {"w": P("data", "model"), "v": P("model")}
    gather = gathered(plan)

    def loss(weights, x, y):
        whole = gather(weights)
        outputs = jnp.tanh(x @ whole["w"]) @ whole["v"]
        outputs = lax.psum(outputs, "model") if is_manual else outputs
        return jnp.mean((outputs - y) ** 2)

    along = specs if is_manual else SPECS
    mapped = jax.shard_map(
        plan.value_and_grad(loss, specs=None if is_manual else specs),
        mesh=mesh,
        axis_names={"data", "model"} if is_manual else {"data"},
        in_specs=(along, P("data"), P("data")),
        out_specs=(P(), along),
    )
    expected = jax.value_and_grad(lambda w: losses(w, X, Y).mean())(WEIGHTS)
    assert_close(jax.jit(mapped)(WEIGHTS, X, Y), expected)


def test_specs_that_types_contradict_raise(even):
    mapped = jax.shard_map(
        even.value_and_grad(lambda w, x: jnp.mean(w["v"] * x), specs=SPECS),
        mesh=even.jax_mesh("data"),
        in_specs=(P(), P("data")),
        out_specs=P(),
    )
    with pytest.raises(ArgumentError, match="for a weight that is the same on all ranks"):
        jax.eval_shape(mapped, WEIGHTS, X[:, :4])
