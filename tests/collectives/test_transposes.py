"""Derivatives of collectives: with lax's values, and with no collective but the plan's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.collectives.all_reduce import ChipGroups
from ftmesh.collectives.reduce_scatter import gather_rows, scatter_rows
from ftmesh.testing import cpu_grid

slow = pytest.mark.slow
pytestmark = pytest.mark.usefixtures("quick_compiler")

MESHES = {
    "row_pair": ("4x4", "2x2@0,0"),  # some own nothing
    "ring": ("4x4", "2x2@0,0"),
    "two_dim": ("2x2", None),
    "chain": ("1x4", None),
}


def collectives_of(who, square_of_sum, *, with_idle=False):
    """Functions of one rank's numbers, by name, with the collectives of a plan or of lax."""
    result = {
        "psum": lambda x: who.psum(x, "data"),
        "pmean": lambda x: who.pmean(x, "data"),
    }
    if with_idle:
        return result
    return result | {
        "rows": square_of_sum,
        "psum_scatter": lambda x: who.psum_scatter(x, "data", tiled=True),
        "all_gather": lambda x: who.all_gather(x, "data"),
        "all_gather of the same": lambda x: who.all_gather(who.pmean(x, "data"), "data"),
    }


def rows_square(plan):
    def run(x):
        return gather_rows(scatter_rows(x, "data", plan=plan) ** 2, "data", plan=plan)

    return run


def derivative(of, order):
    first = jax.grad(lambda x: jnp.sin(of(x * x)).sum())
    return first if order == 1 else jax.grad(lambda x: (first(x) ** 2).sum())


def derivatives(functions, mesh, order, check_vma):
    """The derivatives of all of them at each rank, as one program, compiled."""
    every = jax.shard_map(
        lambda x: {name: derivative(of, order)(x[0])[None] for name, of in functions.items()},
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    x = np.random.default_rng(0).uniform(0.1, 0.5, (mesh.size, mesh.size, 3)).astype(np.float32)
    program = jax.jit(every).lower(x).compile()
    return program, jax.device_get(program(x))


@pytest.mark.parametrize(
    ("algorithm", "order", "check_vma"),
    [
        ("chain", 1, True),
        pytest.param("row_pair", 1, True, marks=slow),
        pytest.param("row_pair", 1, False, marks=slow),
        pytest.param("ring", 2, True, marks=slow),
        pytest.param("ring", 1, False, marks=slow),
        pytest.param("two_dim", 1, False, marks=slow),
        pytest.param("chain", 2, True, marks=slow),
    ],
)
def test_derivatives_match_lax_and_follow_the_plan(algorithm, order, check_vma):
    shape, failed = MESHES[algorithm]
    plan = ftmesh.plan(cpu_grid(shape, failed=failed), algorithm)
    mesh = plan.jax_mesh("data")
    groups = {"groups": lambda x: ChipGroups.of_size(plan, 4).sum(x, "data")}
    program, ours = derivatives(
        collectives_of(plan, rows_square(plan)) | groups, mesh, order, check_vma
    )
    ftmesh.audit(program, "data").require_none()
    squares = lambda x: lax.psum(x, "data") ** 2  # noqa: E731
    program, laxs = derivatives(collectives_of(lax, squares), mesh, order, check_vma)
    assert ftmesh.audit(program, "data")
    for name, values in laxs.items():
        # In float32, added up in different orders, twice or four times.
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-4, err_msg=name)


@slow
@pytest.mark.parametrize(("order", "check_vma"), [(1, False), (2, True)])
def test_with_idle_devices(order, check_vma):
    plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "row_pair", with_idle=True)
    program, _ = derivatives(
        collectives_of(plan, None, with_idle=True),
        plan.jax_mesh("data"),
        order,
        check_vma,
    )
    ftmesh.audit(program, "data").require_none()
