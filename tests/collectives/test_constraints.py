"""Losses that name mesh axes themselves: sharding constraints, logical axes, nested shard_maps."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
from ftmesh.execute import _compat
from ftmesh.testing import cpu_grid
from tests.support.compiled_text import collectives
from tests.support.slow import slow
from tests.support.whole_batch import ARGS, assert_close, compiled, losses, put

pytestmark = pytest.mark.usefixtures("quick_compiler")
two_axes = pytest.mark.skipif(not _compat.SUPPORTS_NESTED_SHARD_MAP, reason="takes JAX 0.10")

BOTH = {"data", "model"}
WEIGHTS = {"w": P(None, "model"), "v": P("model")}


@pytest.fixture(scope="module")
def tiles():
    """Six pairs of chips around a hole: a rank is a pair."""
    topology = cpu_grid("4x4", failed="2x2@2,2")
    return ftmesh.plan(ftmesh.TiledTopology.from_topology(topology, "2x1"), executor="ppermute")


def on_tiles(tiles, loss, weights=WEIGHTS, args=ARGS, **options):
    """The compiled value and gradients on the plan, and those of JAX on the same mesh."""
    mesh = tiles.jax_mesh(("data", "model"))
    rows = P("data") if len(args[1]) % 6 == 0 else P()
    args = put(mesh, args, (weights, rows, rows))
    with jax.set_mesh(mesh):
        program, result = compiled(tiles.value_and_grad(loss, specs=weights, **options), *args)
        expected = jax.jit(jax.value_and_grad(loss))(*args)
    return program, result, expected


def on_ranks(even, loss, args=ARGS):
    """The same on a mesh of ranks alone."""
    mesh = even.jax_mesh("data")
    args = put(mesh, args, (P(), P("data"), P("data")))
    with jax.set_mesh(mesh):
        program, result = compiled(even.value_and_grad(loss), *args)
        expected = jax.jit(jax.value_and_grad(loss))(*args)
    return program, result, expected


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


# shard_map over other axes ----------------------------------------------------------------------


def mapped_loss(body, in_specs, out_spec, axes=("model",), **options):
    """A loss whose predictions are computed in a shard_map."""

    def loss(p, x, y):
        run = jax.shard_map(
            body, axis_names=set(axes), in_specs=in_specs, out_specs=out_spec, **options
        )
        return ((run(x, p["w"], p["v"]) - y) ** 2).mean()

    return loss


def whole_units(x, w, v):
    """A product that is summed over the model axis."""
    return lax.psum(jnp.tanh(x @ w) @ v, "model")


def gathered_units(x, w, v):
    hidden = lax.all_gather(jnp.tanh(x @ w), "model", axis=1, tiled=True)
    return hidden @ lax.all_gather(v, "model", tiled=True) / lax.axis_size("model")


def stacked_units(x, w, v):
    hidden = lax.all_gather(jnp.tanh(x @ w), "model", axis=0)
    return jnp.einsum("mbh,mh->b", hidden, lax.all_gather(v, "model", axis=0))


def scattered_units(x, w, v):
    partial_sums = lax.psum_scatter(jnp.tanh(x @ w), "model", scatter_dimension=1, tiled=True)
    return lax.psum(partial_sums.sum(1), "model") * lax.psum(v.sum(), "model")


def ring_of_units(x, w, v):
    """As in ring attention: weights go around."""
    total, size = 0, lax.axis_size("model")
    for _ in range(size):
        total += jnp.tanh(x @ w) @ v
        w, v = lax.ppermute((w, v), "model", [(i, (i + 1) % size) for i in range(size)])
    return lax.pmean(total, "model")


def exchanged_units(x, w, v):
    """As experts do: features go to other devices, and come back."""
    hidden = jnp.tanh(x @ w)[:, :, None] * jnp.ones(2)
    there = lax.all_to_all(hidden, "model", split_axis=2, concat_axis=1, tiled=True)
    back = lax.all_to_all(jnp.sin(there), "model", split_axis=1, concat_axis=2, tiled=True)
    return lax.psum(back.sum(2) @ v, "model")


def normed_units(x, w, v):
    """A statistic of all examples, which ranks sum, and the largest unit of each."""
    hidden = x @ w
    hidden = hidden - hidden.mean(0)
    largest = lax.pmax(lax.stop_gradient(hidden.max(1, keepdims=True)), "model")
    return lax.psum(jnp.exp(hidden - largest) @ v, "model")


SPLIT = (P(), P(None, "model"), P("model"))


@two_axes
@pytest.mark.parametrize(
    ("body", "check_vma"),
    [
        (whole_units, True),
        slow(whole_units, False),
        slow(gathered_units, False),
        (stacked_units, False),
        slow(scattered_units, True),
        slow(scattered_units, False),
        slow(ring_of_units, True),
        slow(ring_of_units, False),
        (exchanged_units, True),
        slow(exchanged_units, False),
        (normed_units, True),
        slow(normed_units, False),
    ],
)
def test_shard_map_over_another_axis(tiles, body, check_vma):
    loss = mapped_loss(body, SPLIT, P(), check_vma=check_vma)
    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


@two_axes
def test_a_batch_that_ranks_do_not_divide(tiles):
    params, x, y = ARGS
    loss = mapped_loss(normed_units, SPLIT, P())
    _, result, expected = on_tiles(tiles, loss, args=(params, x[:35], y[:35]))
    assert_close(result, expected)


@two_axes
def test_shard_map_in_a_scan(tiles):
    """Layers of tensor parallelism in a scan, computed again in the backward pass."""

    def loss(p, x, y):
        def body(x, w):
            return x + lax.psum(jnp.tanh(x @ w) @ w.T, "model")

        @jax.checkpoint
        def layer(x, w):
            run = jax.shard_map(
                body, axis_names={"model"}, in_specs=(P(), P(None, "model")), out_specs=P()
            )
            return run(x, w), None

        x, _ = lax.scan(layer, x, jnp.stack([p["w"], -p["w"] / 2]))
        return losses(p, x, y).mean()

    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


@two_axes
def test_examples_scattered_over_another_axis_raise(tiles):
    def body(x, w, v):
        hidden = lax.psum_scatter(x @ w, "model", scatter_dimension=0, tiled=True)
        return lax.all_gather(hidden, "model", tiled=True) @ v

    loss = mapped_loss(body, SPLIT, P(), check_vma=False)
    line = body.__code__.co_firstlineno + 1
    match = rf"test_constraints.py:{line} cuts examples along other axes of the mesh"
    with pytest.raises(ArgumentError, match=match):
        on_tiles(tiles, loss)
    cut = mapped_loss(lambda x, w, v: x @ w @ v, (P("model"), P(), P()), P("model"))
    with pytest.raises(ArgumentError, match="cuts examples along other axes of the mesh"):
        on_tiles(tiles, cut, weights=P())


# shard_map over the axis of the plan ------------------------------------------------------------

ROWS = (P("data"), P(None, "model"), P("model"))


@two_axes
@pytest.mark.parametrize(
    ("body", "check_vma"),
    [
        (whole_units, True),
        slow(whole_units, False),
        slow(ring_of_units, True),
        slow(exchanged_units, True),
        slow(exchanged_units, False),
    ],
)
def test_shard_map_over_both_axes(tiles, body, check_vma):
    loss = mapped_loss(body, ROWS, P("data"), BOTH, check_vma=check_vma)
    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


@two_axes
@pytest.mark.parametrize("check_vma", [True, slow(False)], ids=["vma", "no_vma"])
def test_examples_along_both_axes(tiles, check_vma):
    def body(x, w, v):
        return jnp.tanh(x @ w) @ v

    rows = P(("data", "model"))
    loss = mapped_loss(body, (rows, P(), P()), rows, BOTH, check_vma=check_vma)
    program, result, expected = on_tiles(tiles, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()
    other = P(("model", "data"))
    with pytest.raises(ArgumentError, match="gives ranks the examples of others"):
        on_tiles(tiles, mapped_loss(body, (other, P(), P()), other, BOTH))


def test_statistics_of_all_ranks(even):
    """Sums over the axis go by the plan; so do gradients, in one sum with the others."""

    def body(x, numbers, w, v):
        hidden = x @ w + numbers[:, None]
        hidden = hidden - lax.pmean(hidden.mean(0), "data")
        return jnp.tanh(hidden) @ v, lax.psum(hidden.sum(), "data")

    def loss(p, x, y):
        run = jax.shard_map(
            body, in_specs=(P("data"), P("data"), P(), P()), out_specs=(P("data"), P())
        )
        predicted, total = run(x, jnp.arange(len(x)) / len(x), p["w"], p["v"])
        return ((predicted - y) ** 2).mean() + total**2

    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


def test_gradients_are_summed_once(even):
    """Those of weights in a shard_map too: as many permutations as without one."""

    def loss(p, x, y):
        run = jax.shard_map(
            lambda x, w, v: jnp.tanh(x @ w) @ v,
            in_specs=(P("data"), P(), P()),
            out_specs=P("data"),
        )
        return ((run(x, p["w"], p["v"]) - y) ** 2).mean()

    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()
    plain, _, _ = on_ranks(even, lambda p, x, y: losses(p, x, y).mean())
    assert len(collectives(program)) == len(collectives(plain))


def test_other_shares_of_the_batch_raise(even):
    def loss(p, x, y):
        run = jax.shard_map(lambda x, w: x @ w, in_specs=(P(), P()), out_specs=P())
        return losses(p, run(x, p["w"] @ p["w"].T), y).mean()

    line = loss.__code__.co_firstlineno + 2
    match = f"'shard_map' at test_constraints.py:{line} gives ranks the examples of others, and a"
    with pytest.raises(ArgumentError, match=match):
        on_ranks(even, loss)


def test_a_weight_cut_along_the_axis(even):
    """Ranks compute with their parts of a weight that all of them have."""
    params = ARGS[0] | {"u": np.arange(24, dtype=np.float32)}

    def loss(p, x, y):
        run = jax.shard_map(
            lambda u: lax.psum((u**2).sum() * lax.axis_index("data"), "data"),
            in_specs=P("data"),
            out_specs=P(),
        )
        return losses(p, x, y).mean() + run(p["u"])

    program, result, expected = on_ranks(even, loss, (params, *ARGS[1:]))
    assert_close(result, expected)
    ftmesh.audit(program, "data").require_none()


def test_collectives_over_the_axis(even):
    """Sums over groups of ranks, and a sum that each rank keeps, go as they are written."""
    groups = [list(range(6)), list(range(6, 12))]

    def body(x, w, v):
        hidden = jnp.tanh(x @ w)
        of_group = lax.psum(hidden.sum(0), "data", axis_index_groups=groups)
        before = lax.ppermute(hidden, "data", [(i, (i + 1) % 12) for i in range(12)])
        return (hidden * of_group + before) @ v, lax.psum(hidden.sum(0, keepdims=True), "data")

    def loss(p, x, y):
        run = jax.shard_map(
            body, in_specs=(P("data"), P(), P()), out_specs=P("data"), check_vma=False
        )
        predicted, sums = run(x, p["w"], p["v"])
        return ((predicted - y) ** 2).mean() + (sums**2).mean()

    program, result, expected = on_ranks(even, loss)
    assert_close(result, expected)
    kinds = sorted({entry.kind for entry in ftmesh.audit(program, "data")})
    assert kinds == ["all-reduce", "collective-permute"], "those that the plan has no part in"
