"""Losses that name mesh axes themselves: sharding constraints and logical axes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
from ftmesh.execute import _compat
from tests.support.compiled_text import collectives
from tests.support.slow import slow
from tests.support.whole_batch import (
    ARGS,
    assert_close,
    compiled,
    losses,
    on_ranks,
    on_tiles,
    plan_of_pairs,
    put,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")
two_axes = pytest.mark.skipif(not _compat.SUPPORTS_NESTED_SHARD_MAP, reason="takes JAX 0.10")


@pytest.fixture(scope="module")
def tiles():
    return plan_of_pairs()


# Constraints ------------------------------------------------------------------------------------


def held_loss(hold):
    """A loss that holds its activations, and the predictions made of them."""

    def loss(p, x, y):
        hidden = hold(jnp.tanh(x @ p["w"]), ("batch", "hidden"))
        return ((hold(hidden @ p["v"], ("batch",)) - y) ** 2).mean()

    return loss


def by_names(x, names):
    return lax.with_sharding_constraint(x, P("data", *[None] * (len(names) - 1)))


def scanned_loss(p, x, y):
    """Layers in a scan, computed again in the backward pass, each held in and out."""

    @jax.checkpoint
    def layer(x, w):
        x = lax.with_sharding_constraint(x, P("data"))
        x = x + jnp.tanh(x @ w @ p["w"].T)
        return lax.with_sharding_constraint(x, P("data")), None

    x, _ = lax.scan(layer, x, jnp.stack([p["w"], 2 * p["w"], -p["w"]]))
    return losses(p, x, y).mean()


@pytest.mark.parametrize(
    "loss",
    [
        held_loss(by_names),
        slow(held_loss(lambda x, _: lax.with_sharding_constraint(x, P(P.UNCONSTRAINED)))),
        held_loss(lambda x, _: lax.with_sharding_constraint(x, P())),
        scanned_loss,
    ],
    ids=["spec", "unconstrained", "replicated", "scan"],
)
def test_constraints_along_the_axis(even, loss):
    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


def test_a_sharding_with_its_mesh(even):
    by_rows = NamedSharding(even.jax_mesh("data"), P("data"))
    loss = held_loss(lambda x, _: lax.with_sharding_constraint(x, by_rows))
    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


def test_logical_axes(even):
    rules = (("batch", "data"), ("hidden", None))
    loss = held_loss(nn.with_logical_constraint)
    with nn.logical_axis_rules(rules):
        program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


def explicit(mesh):
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,) * mesh.devices.ndim)


def test_nnx_out_sharding(even):
    mesh = explicit(even.jax_mesh("data"))

    def loss(p, x, y):
        layer = nnx.Linear(6, 8, rngs=nnx.Rngs(0))
        layer.kernel.set_value(p["w"])
        hidden = jnp.tanh(layer(x, out_sharding=P("data")))
        return ((jnp.einsum("bh,h->b", hidden, p["v"], out_sharding=P("data")) - y) ** 2).mean()

    args = put(mesh, ARGS, (P(), P("data"), P("data")))
    with jax.set_mesh(mesh):
        program, result = compiled(even.value_and_grad(loss), *args)
        expected = jax.jit(jax.value_and_grad(loss))(*args)
    assert_close(jax.device_get(result), jax.device_get(expected))
    ftmesh.audit(program, "data").require_none()


@two_axes
@pytest.mark.parametrize("batch_axes", ["data", ("data",), ("data", "model")], ids=str)
def test_constraints_along_both_axes(tiles, batch_axes):
    """Along "model" constraints hold: hidden units stay where they are, or examples go there."""
    hidden_axis = None if "model" in batch_axes else "model"
    rules = (("batch", batch_axes), ("hidden", hidden_axis))
    with nn.logical_axis_rules(rules):
        program, result, expected = on_tiles(tiles, held_loss(nn.with_logical_constraint))
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()
    kinds = {each.kind for each in collectives(program) if "ftmesh" not in each.line}
    assert ("all-gather" in kinds or "all-to-all" in kinds) == (hidden_axis is None), kinds


@pytest.mark.parametrize("per_rank", [True, False], ids=["per_rank", "shard_map"])
def test_constraints_where_the_axis_is_bound_raise(even, per_rank):
    mesh, loss = even.jax_mesh("data"), held_loss(by_names)
    run = even.value_and_grad(loss, per_rank=per_rank)
    if not per_rank:
        run = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    here = rf"{__file__.split('/')[-1]}:{by_names.__code__.co_firstlineno + 1} names an axis"
    with jax.set_mesh(mesh), pytest.raises(ArgumentError, match=here):
        jax.jit(run)(*ARGS)


def test_other_errors_of_a_loss_are_its_own(even):
    with pytest.raises(TypeError, match="dot_general requires"):
        jax.jit(even.value_and_grad(lambda p, x, y: (x @ p["v"]).mean()))(*ARGS)
