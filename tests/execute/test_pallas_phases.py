"""Reduce-scatters and all-gathers by owners in the Pallas kernel: the bits of ppermute."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from ftmesh import Topology
from ftmesh.algorithms import registry
from ftmesh.execute import primitives
from ftmesh.execute.context import NO_CAST, WireDtypes
from ftmesh.execute.lowering import lower
from tests.support.more import more_case
from tests.support.on_devices import PER_RANK
from tests.support.pallas_programs import assert_same_bits
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler", "no_race")

IN_16_BITS = WireDtypes(jnp.bfloat16, jnp.bfloat16)
RESULTS_IN_16_BITS = WireDtypes(jnp.float32, jnp.float16)
TORUS = Topology.grid("3x3", wrap=True)
PROGRAMS = {
    "two chips": (Topology.grid("2x1"), "chain", {}),
    "ring": (Topology.grid("2x2"), "ring", {}),
    "two axes": (Topology.grid("2x2"), "two_dim", {}),
    "pairs of rows": (Topology.grid("4x4", failed="2x2@2,2"), "row_pair", {}),
    "three axes": (Topology.grid("2x2x2"), "two_dim", {}),
    "three axes with a hole": (Topology.grid("2x2x2", failed="1x1x2@0,0,0"), "flood", {}),
    "a wrapped row": (Topology.grid("5", wrap=True), "chain", {}),
    "a torus": (TORUS, "multi_ring", {}),
    "chips of any damage": (Topology.grid("2x3", failed="1x1@0,0"), "flood", {}),
    "two devices a chip": (Topology.grid("2x1"), "chain", {"devices_per_chip": 2}),
    "idle devices": (Topology.grid("2x2", failed="1x1@1,1"), "flood", {"with_idle": True}),
}
MORE = list(PROGRAMS)[1:]
SLOW = ("pairs of rows", "three axes with a hole", "two devices a chip", "idle devices")


def run_phases(program, held, wire):
    """What ranks have after the reduce-scatter, and after the all-gather of that."""
    mesh = Mesh(np.array(jax.devices()[: program.num_ranks]), "data")
    options = {"axis_name": "data", "program": program, "wire": wire}

    def body(x):
        own = primitives.reduce_scatter(x[0], **options)
        return own[None], primitives.all_gather(own, **options)[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=PER_RANK, out_specs=PER_RANK)
    return jax.device_get(jax.jit(mapped)(held))


@pytest.mark.parametrize(
    "wire", [more_case(NO_CAST), IN_16_BITS, more_case(RESULTS_IN_16_BITS)], ids=str
)
@pytest.mark.parametrize(
    "name", ["two chips", *((slow if name in SLOW else more_case)(name) for name in MORE)]
)
def test_phases_have_the_same_bits(name, wire):
    topology, algorithm, options = PROGRAMS[name]
    program = lower(registry.build_schedule(topology, algorithm), **options)
    shape = program.num_ranks, program.num_chunks, 16, 128
    held = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    ppermute, kernel = (
        run_phases(replace(program, executor=executor), held, wire)
        for executor in ("ppermute", "pallas")
    )
    owned = program.owner, np.arange(program.num_chunks)  # the rest is undefined
    assert_same_bits(ppermute[0][owned], kernel[0][owned])
    assert_same_bits(ppermute[1], kernel[1])
    total = held[program.live].sum(axis=0)
    rtol = 1e-6 if wire == NO_CAST else 2**-8
    np.testing.assert_allclose(kernel[1], np.broadcast_to(total, shape), rtol=rtol, atol=40 * rtol)
