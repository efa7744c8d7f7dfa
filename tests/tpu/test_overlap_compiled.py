"""What the TPU compiler runs while a sum is under way, as its schedule shows.

On a damaged slice it waits for each of XLA's own collectives, and for a kernel on the TensorCore. A
kernel on a SparseCore that sends to a neighbour is started, and awaited after the matrix products.
"""

import jax
import pytest

from ftmesh.tpu import compiler
from tests.support.more import more_case
from tests.support.reporting import run_json

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not compiler.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
    ),
]
SLICES = [("v6e:8x8", "2x2@2,2"), ("v5p:4x4x4", "2x2x1@0,0,0"), ("tpu7x:4x4x4", "2x2x1@0,0,0")]

STEP = """
import json, re, sys, jax, ftmesh
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu, tpu_sc as plsc
from jax.sharding import NamedSharding, PartitionSpec as P
from ftmesh.tpu.compiler import tpu_devices

name, failed, how = sys.argv[1:]
topology = ftmesh.Topology.from_devices(tpu_devices(name), failed=failed)
plan = ftmesh.plan(topology, "ring", executor="pallas" if how == "kernel" else "xla")
mesh = plan.jax_mesh("data")

def send(x):
    def kernel(x, out, sent, arrived):
        neighbour = {"data": lax.rem(lax.axis_index("data") + 1, mesh.size)}
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1, device_id=neighbour)
        pl.semaphore_wait(barrier, 1)
        pltpu.async_remote_copy(x, out, sent, arrived, device_id=neighbour).wait()

    call = pl.kernel(
        kernel,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        mesh=plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1),
        scratch_types=[pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA],
        compiler_params=pltpu.CompilerParams(collective_id=1, has_side_effects=True),
    )
    return call(x)

sums = {
    "sparse core": send,
    "kernel": lambda x: plan.psum(x, "data"),
    "all-reduce": lambda x: lax.psum(x, "data"),
    "all-gather": lambda x: lax.all_gather(x, "data", tiled=True)[: len(x)],
}

def step(x, a, w):
    total = sums[how](2 * x)
    for _ in range(6):
        a = jnp.tanh(a @ w)
    return total + 1, a

def sharded(shape, spec, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

step = jax.shard_map(
    step, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data"), check_vma=False
)
program = jax.jit(step).lower(
    sharded((mesh.size * mesh.size * 8, 1024), P("data"), "float32"),
    sharded((mesh.size * 4096, 4096), P("data"), "bfloat16"),
    sharded((4096, 4096), P(), "bfloat16"),
).compile(compiler_options=ftmesh.compiler_options(name, overlap=True))
try:
    entry = program.as_text().partition("ENTRY")[2]
except jax.errors.JaxRuntimeError as error:
    if "async-update instruction should have 1 operands" not in str(error):
        raise
    print(json.dumps("unread"))
    sys.exit()
print(json.dumps([
    "product" if "dot_general" in line else opcode.removeprefix("custom-")
    for line, opcode in re.findall(r"^(.*? = .*? ([a-z][a-z-]*)\\(.*)$", entry, re.M)
    if "dot_general" in line
    or opcode.removeprefix("custom-") in ("call-start", "call-done", "all-reduce", "all-gather")
    or (opcode == "custom-call" and "tpu_custom_call" in line)
]))
"""


def schedule(name, failed, how):
    """Matrix products and parts of the sum in the order in which the compiler runs them."""
    order = run_json("-c", STEP, name, failed, how)
    if order == "unread":
        pytest.skip(f"JAX {jax.__version__} cannot print asynchronous kernels of this libtpu")
    return order


@pytest.mark.parametrize(("name", "failed"), [*SLICES[1:], more_case(*SLICES[0])])
def test_a_kernel_on_a_sparse_core_runs_beside_matrix_products(name, failed):
    order = schedule(name, failed, "sparse core")
    assert order == ["call-start", *["product"] * 6, "call-done"]


@pytest.mark.parametrize(
    ("name", "failed", "how"),
    [
        more_case(*SLICES[0], "kernel"),  # the slowest to compile
        *((*slice_, "kernel") for slice_ in SLICES[1:]),
        *((*SLICES[1], how) for how in ("all-reduce", "all-gather")),
        *(more_case(*slice_, "all-reduce") for slice_ in SLICES[::2]),
        *(more_case(*slice_, "all-gather") for slice_ in SLICES[::2]),
    ],
)
def test_other_sums_run_by_themselves(name, failed, how):
    """If the compiler learns to overlap one of them, this fails."""
    order = schedule(name, failed, how)
    assert order.count("product") == 6
    assert len(order) == 7
    assert not any(part.endswith(("-start", "-done")) for part in order)
