"""cpu_grid: emulated CPU devices as a mesh or a line."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import ftmesh
from ftmesh import TopologyError, jax_mesh
from ftmesh.testing import cpu_grid
from tests.support.slow import slow


@pytest.mark.parametrize("shape", ["8", "1x8", "8x1", "2x4"])
def test_devices_fill_the_given_shape(shape):
    topo = cpu_grid(shape)
    assert topo.name == shape
    assert topo.devices == tuple(jax.devices()[:8])


def test_failures_and_wrap_are_passed_on():
    topo = cpu_grid("1x8", failed="1x1@0,7", failed_links="0,0-0,1", wrap=[False, True])
    assert topo.without_devices() == ftmesh.Topology.grid(
        "1x8", failed="1x1@0,7", failed_links="0,0-0,1", wrap=[False, True]
    )
    says = "needs 65 devices, and JAX has already created 64: call cpu_grid before"
    with pytest.raises(TopologyError, match=says):
        cpu_grid("65")


def test_too_few_devices_under_a_launcher(monkeypatch):
    monkeypatch.setenv("FTMESH_NUM_PROCESSES", "2")
    with pytest.raises(TopologyError, match=r"use those of all, by Topology.from_devices"):
        cpu_grid("65")


@pytest.mark.parametrize(
    ("shape", "failed", "wrap"),
    [
        ("1x8", "", False),
        slow("8", "", False),
        slow("8", "", True),
        ("8", "1@3", True),
        ("1x2", "", False),
    ],
)
def test_psum_on_a_line_of_devices(shape, failed, wrap):
    topo = cpu_grid(shape, failed=failed, wrap=wrap)
    plan = ftmesh.plan(topo, "chain")
    ranks = topo.num_live
    values = jnp.arange(ranks * 37).reshape(ranks, 37) ** 2

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=jax_mesh(topo, "data"),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    def total(x):
        return plan.psum(x, "data")

    assert total(values).tolist() == [values.sum(0).tolist()] * ranks


def test_too_many_devices_raise():
    with pytest.raises(
        TopologyError, match="has 10,000 chips, and at most 4,096 devices can be emulated"
    ):
        cpu_grid("100x100")
