"""Replicas are compared bit for bit, on their devices."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import Topology, jax_mesh
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.health.replica_check import check_replicas, digest, digest_words
from ftmesh.testing import cpu_grid
from ftmesh.testing.emulation import UnhealthySpec
from ftmesh.topology.ranks import Ranks


@pytest.fixture(scope="module")
def mesh():
    return cpu_grid("4x2", failed="1x1@1,0")


def copies(topology, value_of):
    """Build a replicated array whose copy on chip r, in grid order, is ``value_of(r)``."""
    parts = [jax.device_put(value_of(chip), d) for chip, d in enumerate(topology.devices)]
    sharding = NamedSharding(jax_mesh(topology, "data"), P())
    return jax.make_array_from_single_device_arrays(parts[0].shape, sharding, parts)


def tree(topology, wrong=lambda chip, host: host):
    return {
        "kernel": copies(topology, lambda chip: np.ones((13, 7), np.float32)),
        "half": copies(topology, lambda chip: np.full(9, 0.5, ml_dtypes.bfloat16)),
        "count": copies(topology, lambda chip: wrong(chip, np.arange(5, dtype=np.int32))),
    }


def test_equal_replicas(mesh):
    assert check_replicas(tree(mesh), mesh) == ()
    assert check_replicas({}, mesh) == ()


def test_one_bit_of_one_copy(mesh):
    def wrong(chip, host):
        return host ^ (1 << 30) * (chip == 3) * (host == 4)

    assert mesh.coords[3] == (0, 1)
    assert check_replicas(tree(mesh, wrong), mesh) == ((0, 1),)


def test_a_topology_of_other_devices_raises(mesh):
    whole = cpu_grid("4x2")
    with pytest.raises(ArgumentError, match="not on 1 of the 8 live devices of 4x2"):
        check_replicas(tree(mesh), whole)


def test_elements_of_few_bits(mesh):
    def tree(wrong):
        return copies(mesh, lambda chip: np.full(6, 3 - (chip == wrong), ml_dtypes.int4))

    assert check_replicas(tree(None), mesh) == ()
    assert check_replicas(tree(2), mesh) == (mesh.coords[2],)


def test_several_and_a_tie(mesh):
    assert check_replicas(tree(mesh, lambda chip, x: x + (chip in (1, 6))), mesh) == (
        (2, 0),
        (3, 1),
    )
    pair = cpu_grid("2x1")
    assert check_replicas(tree(pair, lambda chip, x: x + chip), pair) == ((0, 0), (1, 0))


@pytest.mark.parametrize(("text", "chips"), [("wrong@2,1", ((2, 1),)), ("", ())])
def test_wrong_chip_in_a_training_step(mesh, text, chips):
    unhealthy = UnhealthySpec.parse(text, mesh)

    def step(params):
        index = jnp.asarray([*map(mesh.grid_index, Ranks(mesh).coords)])[jax.lax.axis_index("data")]
        return {"w": params["w"] * 2, "b": unhealthy.corrupt(params["b"], index)}

    mapped = jax.shard_map(
        step, mesh=jax_mesh(mesh, "data"), in_specs=P(), out_specs=P(), check_vma=False
    )
    ones = copies(mesh, lambda chip: np.ones(100, np.float32))
    params = jax.jit(mapped)({"w": ones, "b": ones})
    assert check_replicas(params, mesh) == chips
    assert check_replicas(params["w"], mesh) == ()


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "int8", "bool", "complex64", "float8_e4m3fn", "uint16"]
)
def test_every_bit_of_every_dtype_counts(dtype):
    host = np.zeros(3, dtype)
    base = int(digest(jnp.asarray(host)))
    bits = host.view(np.uint8)
    for byte in range(bits.size):
        for bit in range(1 if dtype == "bool" else 8):
            bits[byte] ^= 1 << bit
            assert int(digest(jnp.asarray(host))) != base
            bits[byte] ^= 1 << bit


def test_nans_and_signs_change_the_digest():
    numbers = [0.0, -0.0, np.nan, -np.nan, np.inf]
    assert len({int(digest(jnp.full(2, x, jnp.float32))) for x in numbers}) == 5


def test_numpy_agrees_and_keys_have_digests():
    words = np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32)
    assert int(digest(jnp.asarray(words))) == int(digest_words(words))
    assert int(digest(jax.random.key(0))) != int(digest(jax.random.key(1)))


def test_arrays_that_are_not_replicated_are_rejected(mesh):
    split = NamedSharding(jax_mesh(mesh, "data"), P("data"))
    with pytest.raises(ArgumentError, match=r"shape \(14,\) has the sharding .*only arrays"):
        check_replicas(jax.device_put(np.zeros(14), split), mesh)
    with pytest.raises(ArgumentError, match="has the sharding None"):
        check_replicas(np.zeros(3), mesh)
    with pytest.raises(TopologyError, match="has no devices"):
        check_replicas(tree(mesh), Topology.grid("4x2"))
    other = copies(cpu_grid("2x1"), lambda chip: np.zeros(3))
    with pytest.raises(ArgumentError, match="different meshes"):
        check_replicas([other, *tree(mesh).values()], mesh)
