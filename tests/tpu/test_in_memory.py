"""The order of an array's axes in memory, as the TPU compiler has it."""

import json
import math
import random

import pytest

from ftmesh.layout.element_order import in_memory
from ftmesh.tpu import slices
from tests.support.reporting import in_a_process

LENGTHS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 24, 64, 100, 127, 128, 130, 250, 256, 257, 500, 1000)
LAYOUTS = """
import json, re, sys, jax
from jax.sharding import SingleDeviceSharding
from ftmesh.tpu.slices import tpu_devices
name, dtype, shapes = json.loads(sys.argv[1])
where = SingleDeviceSharding(tpu_devices(name)[0])
arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape in shapes]
same = jax.jit(lambda *x: x, donate_argnums=tuple(range(len(arrays))))
text = same.lower(*arrays).compile().as_text()
given = re.search(r"entry_computation_layout=\\{\\((.*?)\\)->", text)[1]
print(json.dumps(re.findall(r"\\{([\\d,]+):", given)))
"""


@pytest.mark.skipif(
    not slices.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
)
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5p:2x2x1", "v6e:2x2"])
def test_as_the_compiler_orders_axes(name, dtype, itemsize):
    rng = random.Random(1)
    shapes = [(40_000, 5, 128), (128, 40_000, 5), (250, 100_001), (50_257, 513), (7, 7, 3, 64)]
    chosen = [tuple(rng.choices(LENGTHS, k=rng.choice([2, 3, 4]))) for _ in range(200)]
    shapes += [shape for shape in chosen if math.prod(shape) < 10**7]
    found = in_a_process("-c", LAYOUTS, json.dumps([name, dtype, shapes]))
    for shape, inwards in zip(shapes, found, strict=True):
        order = tuple(map(int, inwards.split(",")))[::-1]
        assert in_memory(shape, itemsize) == order, shape
