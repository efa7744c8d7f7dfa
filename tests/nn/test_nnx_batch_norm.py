"""The NNX batch norm equals that of Flax without groups, and the Linen one with them."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
from ftmesh.nn import ChipGroups, GroupBatchNorm, NnxGroupBatchNorm
from ftmesh.testing import cpu_grid

X = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32) * 2 + 1


@pytest.fixture(scope="module")
def plan():
    return ftmesh.plan(cpu_grid("4x4", failed="1x1@2,1"), "row_pair")


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_matches_flax_without_groups(dtype):
    x = X if dtype is None else X.astype(dtype)
    results = []
    for kind in (NnxGroupBatchNorm, nnx.BatchNorm):
        norm = kind(3, momentum=0.9, dtype=dtype, rngs=nnx.Rngs(0))
        y = norm(x)
        state = nnx.state(norm)
        norm.eval()
        results.append((y, norm(x), nnx.to_pure_dict(state)))
    assert jax.tree.structure(results[0]) == jax.tree.structure(results[1])
    tolerance = 1e-5 if dtype is None else 2**-6
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_allclose(
            ours.astype(np.float32), theirs.astype(np.float32), rtol=tolerance, atol=tolerance
        )


def test_without_scale_and_bias():
    norm = NnxGroupBatchNorm(3, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(norm, nnx.Param))
    y = norm(X)
    assert abs(y.mean()) < 1e-6
    assert abs(y.var() - 1) < 1e-3


def test_nnx_view():
    norm = NnxGroupBatchNorm(3, rngs=nnx.Rngs(0))
    y = nnx.view(norm, use_running_average=True)(X)
    np.testing.assert_allclose(y, X / np.sqrt(1 + 1e-5), rtol=1e-6)  # nothing was taken in yet


def test_wrong_number_of_features():
    with pytest.raises(
        ArgumentError, match=r"with 3 features, and this batch norm has num_features=4"
    ):
        NnxGroupBatchNorm(4, rngs=nnx.Rngs(0))(X)


def step_of(plan, run, check_vma=True):
    """Loss and gradients of a rank by a scale and a bias, and running statistics, at every rank."""

    def body(scale, bias, x, weights):
        scale, bias = (jax.lax.pcast(each, "data", to="varying") for each in (scale, bias))

        def loss(scale, bias):
            y, stats = run(scale, bias, x[0], weights[0])
            return jnp.sum(weights[0][:, None, None] * y**3), stats

        (value, stats), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(scale, bias)
        return jax.tree.map(lambda leaf: leaf[None], (value, stats, grads))

    return jax.jit(
        jax.shard_map(
            body,
            mesh=plan.jax_mesh("data"),
            in_specs=(P(), P(), P("data"), P("data")),
            out_specs=P("data"),
            check_vma=check_vma,
        )
    )


def arguments(num_ranks):
    rng = np.random.default_rng(1)
    x = 3 + rng.normal(size=(num_ranks, 4, 2, 3)).astype(np.float32)
    weights = np.ones((num_ranks, 4), np.float32)
    weights[::2, -1] = 0
    x[weights == 0] = 1e3  # what padding holds must not matter
    return rng.normal(size=3).astype(np.float32), rng.normal(size=3).astype(np.float32), x, weights


@pytest.mark.parametrize("check_vma", [True, False])
def test_matches_linen_in_groups(plan, check_vma):
    groups = ChipGroups.of_size(plan, 4)
    assert sorted(map(len, groups.ranks)) == [3, 4, 4, 4]
    given = arguments(plan.program.num_ranks)
    graph, _, first = nnx.split(
        NnxGroupBatchNorm(3, groups=groups, axis_name="data", rngs=nnx.Rngs(0)),
        nnx.Param,
        nnx.BatchStat,
    )
    linen = GroupBatchNorm(False, groups=groups, axis_name="data")

    def in_nnx(scale, bias, x, weights):
        params = nnx.State({"scale": nnx.Param(scale), "bias": nnx.Param(bias)})
        model = nnx.merge(graph, params, first, copy=True)
        y = model(x, weights=weights)
        return y, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def in_linen(scale, bias, x, weights):
        stats = nnx.to_pure_dict(first)
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
        y, new = linen.apply(variables, x, weights=weights, mutable="batch_stats")
        return y, new["batch_stats"]

    ours, theirs = (
        jax.device_get(step_of(plan, run, check_vma)(*given)) for run in (in_nnx, in_linen)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    _, stats, _ = ours
    x, weights = given[2:]
    for group in groups.ranks:
        rows = x[list(group)][weights[list(group)] > 0]
        want = 0.1 * rows.mean(axis=(0, 1))
        np.testing.assert_allclose(stats["mean"][list(group)], [want] * len(group), rtol=1e-5)


def test_audit_names_flax_batch_norm(plan):
    graph, state = nnx.split(nnx.BatchNorm(3, axis_name="data", rngs=nnx.Rngs(0)))

    def body(x):
        model = nnx.merge(graph, state, copy=True)
        return model(x)

    run = jax.shard_map(
        body, mesh=plan.jax_mesh("data"), in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    x = np.ones((15, 4, 3), np.float32)
    audit = ftmesh.audit(jax.jit(run).lower(x), "data")
    assert len(audit) > 0
    line = inspect.getsourcelines(body)[1] + 2
    for entry in audit:
        assert entry.sources == (f"{__file__}:{line}",)
        assert "a Flax batch norm averages its statistics along 'data'" in entry.advice
