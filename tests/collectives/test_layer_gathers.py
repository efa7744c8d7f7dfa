"""Weights that are sharded along the axis of a plan are gathered layer by layer, also in jit."""

import re
from collections import Counter
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.testing import cpu_grid
from tests.support.slow import slow

WIDTH, ROWS = 384, 24
SMALL = "2x2", ""  # mesh and failed chips
CUT = P(None, "data")  # of layers, stacked


@lru_cache
def plan_for(algorithm, executor="ppermute", mesh="4x4", failed="2x2@2,2"):
    topology = cpu_grid(mesh, failed=failed)
    return ftmesh.plan(topology, algorithm, executor=executor, payload_bytes=4 * WIDTH**2)


def loss_of(gather=lambda weight: weight, dtype=jnp.float32):
    """A loss of layers in a scan, each computed again in the backward pass."""

    @jax.checkpoint
    def layer(x, weights):
        up, down = (gather(weights[name].astype(dtype)) for name in ("up", "down"))
        return x + jnp.tanh(x @ up) @ down * weights["scale"].astype(dtype), None

    def loss(params, x, y):
        x, _ = lax.scan(layer, x.astype(dtype), params["layers"])
        return ((x @ params["head"].astype(dtype).T - y).astype(jnp.float32) ** 2).mean()

    return loss


def arguments(layers, width=WIDTH):
    keys = jax.random.split(jax.random.key(0), 5)
    up, down = (jax.random.normal(key, (layers, width, width)) / width for key in keys[:2])
    params = {
        "layers": {"up": up, "down": down, "scale": jnp.linspace(0.5, 2, layers)},
        "head": jax.random.normal(keys[2], (width, width)) / width,
    }
    return params, *(jax.random.normal(key, (ROWS, width)) for key in keys[3:])


SPECS = {"layers": {"up": CUT, "down": P(None, None, "data"), "scale": P()}, "head": P("data")}


def types(plan, layers):
    mesh, args = plan.jax_mesh("data"), jax.eval_shape(lambda: arguments(layers))
    specs = SPECS, P("data"), P("data")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    shardings = jax.tree.broadcast(shardings, args)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        args,
        shardings,
    )


def in_shard_map(plan, gather, *, by_plan):
    """The step where the axis is bound; `gather` is called with a weight and its dimension."""

    def layer_weight(weight):
        return gather(weight, int(weight.shape[0] == WIDTH))

    def loss(params, x, y):
        params = params | {"head": gather(params["head"], 0)}
        return loss_of(layer_weight)(params, x, y)

    def by_lax(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        grads["layers"]["scale"] = lax.pmean(grads["layers"]["scale"], "data")
        return lax.pmean(value, "data"), grads

    specs = {"in_specs": (SPECS, P("data"), P("data")), "out_specs": (P(), SPECS)}
    step = plan.value_and_grad(loss) if by_plan else by_lax
    return jax.jit(jax.shard_map(step, mesh=plan.jax_mesh("data"), check_vma=by_plan, **specs))


def temporaries(step, plan, layers):
    """Compiled temporary memory of a device, in layers."""
    compiled = step.lower(*types(plan, layers)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / (2 * WIDTH**2 * 4)


DEPTHS = pytest.mark.parametrize(
    "depths", [(8,), pytest.param((4, 32), marks=pytest.mark.slow)], ids=str
)


@DEPTHS
def test_temporaries_in_jit(depths):
    plan = plan_for("row_pair")
    native = jax.jit(jax.value_and_grad(loss_of()))
    step = jax.jit(plan.value_and_grad(loss_of(), specs=SPECS))
    for depth in depths:
        assert temporaries(step, plan, depth) <= 1.3 * temporaries(native, plan, depth)
    fault = jax.jit(plan.value_and_grad(with_all_weights_first, specs=SPECS))
    assert temporaries(fault, plan, 8) > 16


def with_all_weights_first(params, x, y):
    """A planted fault: all weights are gathered before the loop over layers."""
    return loss_of()(jax.tree.map(lambda weight: weight * 1.5, params), x, y)


@DEPTHS
def test_temporaries_in_shard_map(depths):
    """Permutations need one more buffer of the weight that is gathered; none grows with depth."""
    plan, options = plan_for("row_pair"), {"axis_name": "data", "tiled": True}
    lax_step, step = (
        in_shard_map(
            plan, lambda weight, axis, by=by: by(weight, axis=axis, **options), by_plan=by_plan
        )
        for by, by_plan in ((lax.all_gather, False), (plan.all_gather, True))
    )
    for depth in depths:
        shards = depth / 24  # of the gradients of one weight, stacked
        assert temporaries(step, plan, depth) <= temporaries(lax_step, plan, depth) + 1 + shards


def assert_equal_to_jax(plan, loss, args, specs, **options):
    mean = loss if options else lambda *args: loss(*args).mean()
    wanted = jax.jit(jax.value_and_grad(mean, **options))(*args)
    have = jax.jit(plan.value_and_grad(loss, specs=specs, **options))(*args)
    for want, got in zip(*map(jax.tree.leaves, (wanted, have)), strict=True):
        np.testing.assert_allclose(want, got, rtol=1e-5, atol=1e-6 * np.abs(want).max())
    return have


@pytest.mark.parametrize(
    ("executor", "rows"), [("ppermute", 25), slow("ppermute", 24), slow("xla", 25), slow("xla", 24)]
)
def test_gradients_are_those_of_jax(executor, rows):
    plan = plan_for("ring", executor, *SMALL)
    params, *batch = arguments(3, width=24)
    batch = [jnp.concatenate([x, x])[:rows] for x in batch]

    def loss(params, x, y):
        return jnp.broadcast_to(loss_of()(params, x, y), len(x)) + (x**2).sum(1)

    _, grads = assert_equal_to_jax(plan, loss, (params, *batch), SPECS)
    assert grads["layers"]["up"].sharding.spec == CUT
    assert grads["layers"]["down"].sharding.spec == P(None, None, "data")


def scanned(body):
    """A loss that scans over weights ``[layer, 24, 24]``."""

    def loss(w, x, y):
        x, ys = lax.scan(body, x, w)
        return ((x - y) ** 2).mean() + ys.sum() * 1e-3

    return loss


LOSSES = {
    "without computing again": scanned(lambda x, w: (jnp.tanh(x @ w), w.sum())),
    "transposed": scanned(lambda x, w: (jnp.tanh(x @ w.T), jnp.float32(0))),
    "twice": scanned(lambda x, w: (jnp.tanh(x @ w) @ w, (w**2).sum())),
    "cast before": lambda w, x, y: scanned(lambda x, w: (x @ w, jnp.float32(0)))(
        w.astype(jnp.float16).astype(jnp.float32), x, y
    ),
    "held": scanned(lambda x, w: (x @ lax.with_sharding_constraint(w, P()), jnp.float32(0))),
    "in a branch": scanned(
        lambda x, w: (lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: x + 1.0), jnp.float32(0))
    ),
    "one by one": lambda w, x, y: ((x @ w[0] @ w[1] @ w[2] - y) ** 2).mean(),
    "as a constant": lambda w, x, y: (
        (lax.scan(lambda x, _: (x @ w[1], None), x, None, length=3)[0] - y) ** 2
    ).mean(),
    "carried": lambda w, x, y: (
        (lax.scan(lambda c, _: ((c[0] @ c[1], c[1]), None), (x, w[0]), None, length=2)[0][0] - y)
        ** 2
    ).mean(),
    "computed again": jax.checkpoint(scanned(lambda x, w: (jnp.tanh(x @ w), jnp.float32(0)))),
}


QUICK = ("without computing again", "cast before", "held", "computed again")


OTHER_CUT = P(None, None, "data")


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        *((name, CUT) if name in QUICK else slow(name, CUT) for name in LOSSES),
        *(slow(name, OTHER_CUT) for name in ("transposed", "twice", "one by one")),
    ],
    ids=str,
)
def test_weights_however_they_are_used(name, spec):
    w = jax.random.normal(jax.random.key(0), (3, 24, 24)) / 5
    x, y = jax.random.normal(jax.random.key(1), (2, 24, 24))
    plan = plan_for("ring", "ppermute", *SMALL)
    with jax.set_mesh(plan.jax_mesh("data")):
        _, grad = assert_equal_to_jax(plan, LOSSES[name], (w, x, y), spec)
    assert grad.sharding.spec == spec


@pytest.mark.slow
def test_weights_sharded_along_layers():
    w = jax.random.normal(jax.random.key(0), (12, 24, 24)) / 5
    x, y = jax.random.normal(jax.random.key(1), (2, 24, 24))
    plan = plan_for("ring", "ppermute", *SMALL)
    assert_equal_to_jax(plan, LOSSES["twice"], (w, x, y), P("data"))


def test_weights_as_aux():
    def loss(params, x, y):
        return loss_of()(params, x, y), params["head"] * 2

    args = arguments(2, width=24)
    plan = plan_for("ring", "ppermute", *SMALL)
    (_, aux), _ = assert_equal_to_jax(plan, loss, args, SPECS, has_aux=True)
    np.testing.assert_array_equal(aux, args[0]["head"] * 2)


def collectives(plan, loss):
    """The shapes and dtypes that a traced step sends, with how often its text has them."""
    step = jax.jit(plan.value_and_grad(loss, specs=SPECS))
    text = step.lower(*types(plan, 4)).as_text()
    return Counter(re.findall(r'"stablehlo.collective_permute".*-> tensor<([0-9x]*x\w+)>', text))


def test_weights_travel_in_the_dtype_of_the_computation():
    plan = plan_for("row_pair")
    sent = collectives(plan, loss_of(dtype=jnp.bfloat16))
    assert sent["1x48x128xbf16"] >= 2  # gathers, in both directions around the ring
    assert sent["1x48x128xf32"] >= 2  # gradients of float32 masters
    assert not collectives(plan, loss_of())["1x48x128xbf16"]


def test_weights_that_cannot_be_cut():
    plan = plan_for("ring", "ppermute", *SMALL)
    params = {"w": np.ones((8, 6), np.float32)}
    grad_of = plan.value_and_grad(lambda p, x: ((x @ p["w"]) ** 2).mean(), specs=P(None, "data"))
    with pytest.raises(
        ftmesh.ArgumentError, match=r"\['w'\] of shape \(8, 6\).* zeros to 8, as Cuts"
    ):
        grad_of(params, np.ones((4, 8), np.float32))
