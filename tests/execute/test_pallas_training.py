"""Gradients and sharded optimizers in the Pallas kernel: the bits of ppermute."""

import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.collectives import with_mean_gradients
from ftmesh.testing import cpu_grid
from tests.support.more import more_case
from tests.support.pallas_programs import assert_same_bits, in_kernel

optax = pytest.importorskip("optax")  # which is not there with other versions of JAX
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_compiler", "no_race")]

RNG = np.random.default_rng(0)
PARAMS = {
    "w": RNG.normal(size=(12, 8)).astype(np.float32),
    "v": RNG.normal(size=8).astype(jnp.bfloat16),
    "scale": np.float32(1.5),
}
X, Y = RNG.normal(size=(8, 12)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
SHARDED = {"w": P("data"), "v": P(), "scale": P()}
# What XLA's older code generator rounds depends on what it fuses (tests/conftest.py).
OLDER = jaxlib.version.__version_info__ < (0, 11)
SAME_ROUNDING = {"xla_cpu_use_fusion_emitters": True} if OLDER else {}


def losses(params, x, y):
    hidden = jnp.tanh(x @ params["w"])
    return (params["scale"] * (hidden @ params["v"].astype(np.float32)) - y) ** 2


@pytest.fixture(scope="module")
def plan():
    return ftmesh.plan(cpu_grid("2x1"), "chain")


def run_by_both(plan, make_step, *args):
    """Compile and run the step that is made for a plan, with each executor."""

    def run(plan):
        step = jax.jit(make_step(plan), compiler_options=SAME_ROUNDING)
        return jax.device_get(step(*args))

    return [run(plan), run(in_kernel(plan))]


@pytest.mark.parametrize(
    "options", [more_case({}), {"wire_dtype": "bfloat16", "bucket_bytes": 100}]
)
def test_value_and_grad_in_jit(plan, options):
    ppermute, kernel = run_by_both(
        plan, lambda plan: plan.value_and_grad(losses, **options), PARAMS, X, Y
    )
    assert_same_bits(ppermute, kernel)
    np.testing.assert_allclose(kernel[0], losses(PARAMS, X, Y).mean(), rtol=1e-5)


def test_value_and_grad_of_sharded_weights(plan):
    """The plan gathers them, and scatters the sums of their gradients."""
    steps = run_by_both(plan, lambda plan: plan.value_and_grad(losses, specs=SHARDED), PARAMS, X, Y)
    assert_same_bits(*steps)


def test_sums_in_the_backward_pass(plan):
    def make_step(plan):
        def step(params, x, y):
            def loss(params):
                averaged = with_mean_gradients(params, "data", plan=plan, bucket_bytes=100)
                return losses(averaged, x, y).mean()

            return jax.grad(loss)(params)

        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
        return jax.shard_map(step, mesh=plan.jax_mesh("data"), **specs)

    assert_same_bits(*run_by_both(plan, make_step, PARAMS, X, Y))


@pytest.mark.parametrize(
    "options",
    [
        more_case({}),
        {"wire_dtype": "bfloat16"},
        more_case({"overlap": True, "bucket_bytes": 100}),
        more_case({"specs": SHARDED}),
    ],
    ids=str,
)
def test_sharded_optimizers(plan, options):
    """Each rank updates its part, or with `specs` its own weights (FSDP)."""
    transformation = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.02))
    specs = options.get("specs", P())

    def make_step(plan):
        assert plan.with_reduce_scatter is plan
        optimizer = plan.shard(transformation, **options)
        state_specs = optimizer.specs(PARAMS)

        def loss(params, x, y):
            if "specs" in options:
                params = {**params, "w": plan.all_gather(params["w"], "data", tiled=True)}
            return losses(params, x, y).mean()

        def step(params, state, x, y):
            value, grads = optimizer.value_and_grad(loss)(params, x, y)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value[None]

        mapped = jax.shard_map(
            step,
            mesh=plan.jax_mesh("data"),
            in_specs=(specs, state_specs, P("data"), P("data")),
            out_specs=(specs, state_specs, P("data")),
            check_vma=False,
        )
        return lambda params, x, y: mapped(params, optimizer.init(params), x, y)

    ppermute, kernel = run_by_both(plan, make_step, PARAMS, X, Y)
    assert_same_bits(ppermute, kernel)
    assert (kernel[0]["w"] != PARAMS["w"]).all()
