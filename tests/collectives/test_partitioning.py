"""Collectives along "data" while "model" is left to the compiler: devices sum their shards."""

from dataclasses import replace
from math import ceil

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError, Topology
from ftmesh.collectives import all_reduce
from ftmesh.execute import _compat
from tests.support.compiled_text import collectives, moved

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.skipif(not _compat.SUPPORTS_NESTED_SHARD_MAP, reason="takes JAX 0.10"),
]

SHAPE = {"data": 6, "model": 2}
X = np.random.default_rng(0).normal(size=(6, 12, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def plan():
    """For the first column of a mesh of 6x2; the other columns lie as that does."""
    return ftmesh.plan(Topology.from_devices(jax.devices()[:12:2], shape="3x2"), "ring")


def mesh_of(kind):
    devices = np.array(jax.devices()[:12]).reshape(6, 2)[[0, 1, 2, 5, 4, 3]]  # around 3x2
    return Mesh(devices, tuple(SHAPE), axis_types=(AxisType.Auto, kind))


def compiled(run, mesh, x, out, check_vma=True):
    """`run` of a rank's array, cut along "model" in its last dimension."""
    mapped = jax.shard_map(
        lambda x: run(x[0]),
        mesh=mesh,
        axis_names={"data"},
        in_specs=P("data"),
        out_specs=out,
        check_vma=check_vma,
    )
    x = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
    return jax.jit(mapped).lower(x).compile(), x


@pytest.mark.parametrize(
    ("kind", "check_vma"),
    [(AxisType.Auto, True), (AxisType.Explicit, True), (AxisType.Explicit, False)],
)
def test_each_device_sums_its_shard(plan, kind, check_vma):
    specs = P(None, "model") if kind == AxisType.Auto else None
    program, x = compiled(
        lambda x: plan.psum({"x": x, "ones": 1}, "data", specs=specs and {"x": specs, "ones": P()}),
        mesh_of(kind),
        X,
        P(),
        check_vma,
    )
    result = program(x)
    np.testing.assert_allclose(result["x"], X.sum(axis=0), rtol=1e-5, atol=1e-6)
    assert result["ones"] == 6
    ftmesh.audit(program, "data").require_none()
    # Half of the array, in as many chunks as the ring has, and each permutation takes one of them.
    chunk = 12 * 8 // 2 // plan.program.num_chunks
    assert set(moved(program, "data", SHAPE)) == {chunk}


def test_auto_arrays_without_specs_are_gathered(plan):
    program, x = compiled(lambda x: plan.pmean(x, "data"), mesh_of(AxisType.Auto), X, P())
    np.testing.assert_allclose(program(x), X.mean(axis=0), rtol=1e-5, atol=1e-6)
    assert set(moved(program, "data", SHAPE)) == {12 * 8 // plan.program.num_chunks}
    assert [each for each in collectives(program) if each.is_along("model", SHAPE)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_derivative_of_pmean_on_shards(plan, kind, monkeypatch):
    """Also those that are computed with on the way in, as for a kernel."""
    monkeypatch.setattr(all_reduce, "PALLAS", plan.executor)
    specs = P(None, "model") if kind == AxisType.Auto else None

    def slope(x):
        return jax.grad(lambda x: 3 * plan.pmean(x, "data", specs=specs).sum())(x)[None]

    program, x = compiled(slope, mesh_of(kind), X, P("data"))
    np.testing.assert_array_equal(program(x), np.full_like(X, 3 / 6))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_interpreted_kernel_raises(plan, kind):
    kernel = replace(plan, executor="pallas")
    with pytest.raises(CollectiveError, match="axes are left to the compiler, here 'model'"):
        compiled(lambda x: kernel.psum(x, "data"), mesh_of(kind), X, P())


@pytest.mark.parametrize(
    ("kind", "dimension", "tiled"),
    [
        pytest.param(AxisType.Auto, 0, True, marks=pytest.mark.slow),
        (AxisType.Auto, 1, False),
        (AxisType.Explicit, 0, False),
        pytest.param(AxisType.Explicit, 1, True, marks=pytest.mark.slow),
    ],
)
def test_psum_scatter_and_all_gather_match_lax(plan, kind, dimension, tiled):
    """Including the dimension sharded along "model", over which arrays are gathered first."""
    length = 12 if tiled else 6
    x = np.random.default_rng(0).normal(size=(6, length, length)).astype(np.float32)
    options = {"scatter_dimension": dimension, "tiled": tiled}
    there, back = {}, {}
    if kind == AxisType.Auto:
        there = {"specs": P(None, "model")}
        back = {"specs": P("model") if dimension == 0 and not tiled else P(None, "model")}
        back = back if dimension == 0 else {"specs": P()}

    def ours(x):
        mine = plan.psum_scatter(x, "data", **options, **there)
        return mine[None], plan.all_gather(mine, "data", axis=dimension, tiled=tiled, **back)

    def theirs(x):
        mine = lax.psum_scatter(x, "data", **options)
        return mine[None], lax.all_gather(mine, "data", axis=dimension, tiled=tiled)

    program, placed = compiled(ours, mesh_of(kind), x, (P("data"), P()), check_vma=False)
    ftmesh.audit(program, "data").require_none()
    # A ring of six whose chunks are twelfths; half of each where pieces travel.
    assert max(moved(program, "data", SHAPE)) == ceil(length**2 / 12 / (2 if dimension == 0 else 1))
    mesh = mesh_of(AxisType.Auto)
    reference, same = compiled(theirs, mesh, x, (P("data"), P()), check_vma=False)
    for result, wanted in zip(program(placed), reference(same), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-6)


def test_invalid_spec(plan):
    with pytest.raises(ArgumentError, match="one of them is 'model'"):
        compiled(lambda x: plan.psum(x, "data", specs="model"), mesh_of(AxisType.Auto), X, P())
