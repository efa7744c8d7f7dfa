"""Run a collective on every emulated device of a plan, on data of awkward sizes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.testing import cpu_grid

PER_RANK = P("data")


def plan_on_cpu(algorithm, shape, failed):
    """A plan with an algorithm in permutations, or with the executor "xla"."""
    topology = cpu_grid(shape, failed=failed)
    if algorithm == "xla":
        return ftmesh.plan(topology, executor="xla")
    return ftmesh.plan(topology, algorithm)


def without_reduce_scatter(schedule):
    """The same rounds as an all-reduce without a reduce-scatter phase."""
    return ftmesh.Schedule(
        schedule.topology, schedule.algorithm, schedule.num_chunks, schedule.phases
    )


def per_rank(plan, run, *args, out=PER_RANK, check_vma=True):
    """Run a function on every device; arguments and results have a leading dimension of ranks."""

    def body(*args):
        result = run(*(jax.tree.map(lambda x: x[0], arg) for arg in args))
        return jax.tree.map(lambda x: x[None], result) if out == PER_RANK else result

    mapped = jax.shard_map(
        body, mesh=plan.jax_mesh("data"), in_specs=P("data"), out_specs=out, check_vma=check_vma
    )
    return jax.device_get(jax.jit(mapped)(*args))


def odd_tree(num_ranks, *, every_dtype=True):
    """Arrays of many dtypes, with a leading dimension of ranks and sizes that nothing divides."""
    rng = np.random.default_rng(0)
    tree = {
        "kernel": rng.normal(size=(num_ranks, 13, 7)).astype(np.float32),
        "bias": rng.normal(size=(num_ranks, 5)).astype(np.float32),
        "scalar": rng.normal(size=num_ranks).astype(np.float32),
        "empty": np.zeros((num_ranks, 0, 3), np.float32),
        "count": rng.integers(-100, 100, (num_ranks, 3), np.int32),
        "flags": rng.random((num_ranks, 11)) > 0.5,
        "wave": (rng.normal(size=(num_ranks, 4)) + 1j).astype(np.complex64),
        "half": rng.integers(-8, 8, (num_ranks, 9)).astype(jnp.bfloat16),
    }
    return tree if every_dtype else {name: tree[name] for name in ("kernel", "bias", "count")}
