"""What the TPU compiler makes of the Pallas executor's kernel."""

import pytest

from ftmesh.tpu import slices
from tests.support.reporting import in_a_process

pytestmark = pytest.mark.skipif(
    not slices.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)
HOLE = "2x2@2,2"


def compile_for(name, failed, algorithm, *options, payload=100_000_000, slab=None):
    """The report of a payload that fills all chunks, in a process of its own."""
    code = (
        "import json, sys, ftmesh\n"
        "from ftmesh.tpu.compile_report import compile_report\n"
        "from ftmesh.tpu.slices import tpu_devices\n"
        f"topology = ftmesh.Topology.from_devices(tpu_devices({name!r}), failed={failed!r})\n"
        f"plan = ftmesh.plan(topology, {algorithm!r}, executor='pallas', **{dict(options)!r})\n"
        "whole = plan.program.num_chunks * 4096\n"
        f"payload = -(-{payload} // whole) * whole\n"
        f"report = compile_report(plan, payload, slab_bytes={slab})\n"
        "print(json.dumps(report.as_dict()))"
    )
    return in_a_process("-c", code)


@pytest.mark.parametrize(
    ("name", "algorithm", "devices"),
    [
        ("v6e:8x8", "ring", 60),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("v6e:16x16", "ring", 252),
                ("v6e:16x16", "row_pair", 252),
                ("v5p:4x4x1", "row_pair", 12),
                ("v4:4x4x1", "ring", 24),
                ("tpu7x:4x4x1", "row_pair", 24),
            )
        ),
    ],
)
def test_one_kernel(name, algorithm, devices):
    """Its buffer is all that it takes: in VMEM on a v6e, and else beside the parameter's memory."""
    report = compile_for(name, HOLE, algorithm)
    assert report["accepted"], report["refusal"]
    assert report["num_devices"] == devices
    assert report["temporary_ratio"] <= (0.05 if name.startswith("v6e") else 1.05)
    assert report["loops"] == []  # of permutations
    unknown = [opcode for opcode, _ in report["packing"]["unknown"]]
    assert unknown.count("custom-call") == 1
    assert report["packing"]["exposed"] > 80_000  # the mean, which is made after the kernel


DTYPES = """
import json, sys, jax, ftmesh
from jax.sharding import NamedSharding, PartitionSpec as P
from ftmesh.tpu.slices import tpu_devices
jax.config.update("jax_enable_x64", sys.argv[1] == "64")
topology = ftmesh.Topology.from_devices(tpu_devices("v6e:4x4"), failed="2x2@0,0")
plan = ftmesh.plan(topology, "ring", executor="pallas")
ranks = NamedSharding(plan.jax_mesh("data"), P("data"))
total = jax.shard_map(
    lambda x: plan.psum(x, "data"), mesh=ranks.mesh, in_specs=P("data"), out_specs=P("data")
)
sizes = {}
for dtype in ("float32", "bfloat16", "float16", "int32", "bool"):
    held = jax.ShapeDtypeStruct((12_000,), dtype, sharding=ranks)
    program = jax.jit(total).lower(held).compile()
    sizes[dtype] = program.memory_analysis().generated_code_size_in_bytes
print(json.dumps(sizes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 64])
def test_numbers_of_every_kind(bits):
    """Also where JAX's numbers have 64 bits: a kernel's do not."""
    sizes = in_a_process("-c", DTYPES, str(bits))
    assert list(sizes) == ["float32", "bfloat16", "float16", "int32", "bool"]
    assert min(sizes.values()) > 0


BETWEEN = """
import json, re, sys, time, jax, ftmesh
from jax.sharding import NamedSharding, PartitionSpec as P
from ftmesh.tpu.slices import tpu_devices
name, failed, algorithm, payload = sys.argv[1:]
topology = ftmesh.Topology.from_devices(tpu_devices(name), failed=failed)
plan = ftmesh.plan(topology, algorithm, executor="pallas")
whole = plan.program.num_chunks * 1024
size = -(-int(payload) // 4 // whole) * whole

def step(x):
    return 1 + plan.psum(2 * x, "data")

ranks = NamedSharding(plan.jax_mesh("data"), P("data"))
held = jax.ShapeDtypeStruct((plan.program.num_ranks * size,), "float32", sharding=ranks)
step = jax.shard_map(
    step, mesh=ranks.mesh, in_specs=ranks.spec, out_specs=ranks.spec, check_vma=False
)
lowered = jax.jit(step, donate_argnums=0).lower(held)
start = time.perf_counter()
compiled = lowered.compile(compiler_options=ftmesh.compiler_options(name))
memory = compiled.memory_analysis()
(kernel,) = re.findall(r'"body":"([^"]*)"', compiled.as_text())
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "kernel": len(kernel),
    "temporary": memory.temp_size_in_bytes / 4 / size,
    "program": memory.generated_code_size_in_bytes,
    "rounds": plan.schedule.num_rounds,
}))
"""


def between(name, payload):
    return in_a_process("-c", BETWEEN, name, HOLE, "ring", str(payload))


@pytest.mark.slow
def test_between_other_work_a_kernel_takes_its_buffer_alone():
    """In VMEM, where there is room for it."""
    found = between("v6e:16x16", 100_000_000)
    assert found["temporary"] <= 0.05
    assert found["seconds"] < 30


@pytest.mark.slow
def test_a_kernel_does_not_grow_with_rounds():
    """200 MB along rings of 60 chips and of 252."""
    few, many = (between(name, 200_000_000) for name in ("v6e:8x8", "v6e:16x16"))
    assert (few["rounds"], many["rounds"]) == (118, 502)
    assert max(few["temporary"], many["temporary"]) <= 1.05  # of which 1 is the buffer
    assert many["kernel"] <= 1.05 * few["kernel"]
    assert many["program"] - few["program"] <= 1024 * (252 - 60)  # a row of a table for each chip
    assert many["seconds"] < 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "algorithm", "payload"),
    [
        ("v4:4x4x1", "ring", 100_000_000),
        ("v5p:4x4x1", "ring", 100_000_000),
        ("v5p:4x4x1", "row_pair", 100_000_000),
        ("tpu7x:4x4x1", "row_pair", 100_000_000),
        ("v6e:16x16", "row_pair", 200_000_000),  # more than fits in VMEM
    ],
)
def test_a_slab_at_a_time_there_is_nothing_beside_the_parameter(name, algorithm, payload):
    report = compile_for(name, HOLE, algorithm, payload=payload, slab=payload // 25)
    assert report["accepted"], report["refusal"]
    assert report["temporary_ratio"] <= 0.05


LAYERS = """
import json, sys, jax, ftmesh
from ftmesh.tpu.compile_report import compile_report
from ftmesh.tpu.slices import tpu_devices
topology = ftmesh.Topology.from_devices(tpu_devices("v5p:4x4x1"), failed="2x2@2,2")
dtype, executor = sys.argv[1:]
plan = ftmesh.plan(topology, "row_pair", executor=executor)
shapes = [(30522, 1024), (24, 1024, 4096), (24, 4096, 1024), (24, 1024, 16, 64), (24, 1024)]
shapes += [(1024, 1024), (1024,)] * 24
tree = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
print(json.dumps([compile_report(plan, tree, slab_bytes=s).as_dict() for s in (None, 20_000_000)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "executor"), [("float32", "pallas"), ("bfloat16", "pallas"), ("float32", "ppermute")]
)
def test_weights_of_a_model_a_slab_at_a_time(dtype, executor):
    """Some stacked, and one with a small last axis; 283 million in all."""
    whole, slabs = in_a_process("-c", LAYERS, dtype, executor)
    assert slabs["accepted"], slabs["refusal"]
    assert whole["temporary_ratio"] > 0.2
    assert slabs["temporary_bytes"] <= 2.5 * 20_000_000
    assert (slabs["slab_bytes"], slabs["loops"], slabs["packing"]) == (20_000_000, [], None)


SHAPES = """
import json, sys, jax, ftmesh
from ftmesh.tpu.compile_report import compile_report
from ftmesh.tpu.slices import tpu_devices
topology = ftmesh.Topology.from_devices(tpu_devices("v5p:4x4x1"), failed="2x2@2,2")
plan = ftmesh.plan(topology, "row_pair", executor=sys.argv[1])
found = []
shapes = [(40_000, 5, 128), (40_001, 5, 128), (40_000, 5, 130), (20_000, 24, 64)]
shapes += [(128, 40_000, 5), (99, 257, 1025), (40_001, 7, 11, 9), (250, 100_001), (50_257, 513)]
for shape in shapes:
    for dtype in ("float32", "bfloat16"):
        report = compile_report(plan, jax.ShapeDtypeStruct(shape, dtype), slab_bytes=2_000_000)
        found.append((shape, dtype, report.temporary_bytes))
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["pallas", "ppermute"])
def test_slabs_of_arrays_that_lie_in_memory_as_no_matrix_does(executor):
    """No axis fills tiles, or those that do are not the last, or the compiler moves them."""
    for shape, dtype, temporary in in_a_process("-c", SHAPES, executor):
        assert temporary <= 3 * 2_000_000, (shape, dtype)


MEETING = """
import json, sys, jax, numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from ftmesh.tpu.slices import tpu_devices
meets, writes = (word in sys.argv[1:] for word in ("meets", "writes"))
held = jax.ShapeDtypeStruct((400_000, 128), "float32")  # more than fits in VMEM

def kernel(x, out):
    if meets:
        barrier = pltpu.get_barrier_semaphore()
        pl.semaphore_signal(barrier, 1, device_id={"d": lax.rem(lax.axis_index("d") + 1, 16)})
        pl.semaphore_wait(barrier, 1)

anywhere = pl.BlockSpec(memory_space=pl.ANY)
call = pl.pallas_call(
    kernel,
    out_shape=held if writes else jax.ShapeDtypeStruct((8, 128), "float32"),
    in_specs=[anywhere],
    out_specs=anywhere,
    input_output_aliases={0: 0} if writes else {},
    compiler_params=pltpu.CompilerParams(
        collective_id=0 if meets else None, has_side_effects=True
    ),
)

def one(x):
    return call(x) if writes else lax.dynamic_update_slice(x, call(x), (0, 0))

ranks = NamedSharding(Mesh(np.array(tpu_devices("v6e:4x4")).reshape(-1), "d"), P("d"))
step = jax.shard_map(one, mesh=ranks.mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
every = jax.ShapeDtypeStruct((16 * 400_000, 128), "float32", sharding=ranks)
memory = jax.jit(step, donate_argnums=0).lower(every).compile().memory_analysis()
print(json.dumps(memory.temp_size_in_bytes / (400_000 * 512)))
"""


@pytest.mark.slow
def test_a_kernel_that_communicates_is_given_no_result_to_write_to():
    """What the compiler does for any of them: it is no matter of what this one does.

    It may read a parameter. Should it be given what goes out one day, this will tell.
    """
    assert in_a_process("-c", MEETING, "writes") == 0
    assert in_a_process("-c", MEETING, "meets") == 0
    assert in_a_process("-c", MEETING, "meets", "writes") == 1


@pytest.mark.slow
def test_what_fits_into_a_slab_is_no_slab():
    report = compile_for("v6e:4x4", HOLE, "ring", payload=1_000_000, slab=2_000_000)
    assert report["accepted"], report["refusal"]
    assert report["slab_bytes"] is None
    assert report["packing"] is not None


@pytest.mark.slow
def test_whole_slices_with_idle_chips():
    report = compile_for("v5e:16x16", HOLE, "ring", ("with_idle", True))
    assert report["accepted"], report["refusal"]
