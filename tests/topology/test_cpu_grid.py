"""Emulated devices as a mesh, and as a line of chips."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import ftmesh
from ftmesh import TopologyError
from ftmesh.testing import cpu_grid


@pytest.mark.parametrize("shape", ["8", "1x8", "8x1", "2x4"])
def test_devices_are_laid_out_in_the_shape_asked_for(shape):
    topo = cpu_grid(shape)
    assert topo.name == shape
    assert topo.devices == tuple(jax.devices()[:8])


def test_damage_and_wrap_are_those_of_the_grid():
    topo = cpu_grid("1x8", failed="1x1@0,7", failed_links="0,0-0,1", wrap=[False, True])
    assert topo.without_devices() == ftmesh.Topology.grid(
        "1x8", failed="1x1@0,7", failed_links="0,0-0,1", wrap=[False, True]
    )
    says = "needs 65 devices, and JAX has already created 64: call cpu_grid before"
    with pytest.raises(TopologyError, match=says):
        cpu_grid("65")


def test_under_a_launcher_devices_are_those_of_all_processes(monkeypatch):
    monkeypatch.setenv("FTMESH_NUM_PROCESSES", "2")
    with pytest.raises(TopologyError, match=r"take those of all, by Topology.from_devices"):
        cpu_grid("65")


@pytest.mark.parametrize(
    ("shape", "failed", "wrap"),
    [("1x8", "", False), ("8", "", False), ("8", "", True), ("8", "1@3", True), ("1x2", "", False)],
)
def test_lines_of_devices_sum(shape, failed, wrap):
    topo = cpu_grid(shape, failed=failed, wrap=wrap)
    plan = ftmesh.plan(topo)
    assert plan.algorithm == "chain"
    ranks = topo.num_live
    values = jnp.arange(ranks * 37).reshape(ranks, 37) ** 2

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=topo.jax_mesh("data"),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    def total(x):
        return plan.psum(x, "data")

    assert total(values).tolist() == [values.sum(0).tolist()] * ranks


def test_more_devices_than_are_emulated():
    with pytest.raises(TopologyError, match="has 10,000 chips, and at most 4,096 devices can be emulated"):
        cpu_grid("100x100")
