"""XLA's own sums along the ring, compiled for damaged TPU slices: their order is the circuit's."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import Topology
from ftmesh.tpu import compiler
from tests.support.reporting import run_json

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not compiler.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
    ),
]


@pytest.mark.parametrize(
    ("name", "failed", "devices"),
    [
        ("v3:16x32", "4x2@6,14", 1008),
        ("v6e:16x16", "2x2@2,2", 252),
        ("v5p:4x4x8", "2x2x1@0,0,0", 124),
        ("tpu7x:4x4x4", "2x2x1@0,0,0", 120),
    ],
)
def test_sums_go_around_the_circuit(name, failed, devices):
    report = run_json(
        "-m", "ftmesh", "compile", name, "--failed", failed, "--executor", "xla", "--json"
    )
    assert report["accepted"], report["refusal"]
    assert report["num_devices"] == devices
    assert report["temporary_ratio"] == 0
    assert (len(report["native"]), report["astray"]) == (1, [])


@pytest.mark.parametrize(("swap", "listed"), [(False, 0), (True, 1)])
def test_an_order_with_one_swap_is_noticed(swap, listed):
    topology = Topology.from_devices(compiler.tpu_devices("v6e:8x8"), failed="2x2@2,2")
    plan = ftmesh.plan(topology, executor="xla")
    devices = plan.jax_mesh("data").devices.copy()
    if swap:
        devices[[10, 11]] = devices[[11, 10]]
    mesh = Mesh(devices, "data")
    step = jax.shard_map(
        lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    types = jax.ShapeDtypeStruct((60, 1000), np.float32, sharding=NamedSharding(mesh, P("data")))
    audited = ftmesh.audit(jax.jit(step).lower(types).compile(), "data", plan=plan)
    assert len(audited) == listed
    assert len(audited.native) == 1 - listed
