"""The table of docs/optimizers.md: each of optax's transformations, sharded and as optax has it."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optax import contrib

import ftmesh
from ftmesh import ArgumentError
from ftmesh.optim import NotShardableError
from ftmesh.optim.communication import Communication
from ftmesh.optim.evaluate import ShardEvaluator
from ftmesh.testing import cpu_grid
from tests.support.slow import slow
from tests.support.updates import LR_SCHEDULE

pytestmark = pytest.mark.usefixtures("quick_compiler")
PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
RNG = np.random.default_rng(0)
PARAMS = {
    "kernel": RNG.normal(size=(6, 5)).astype(np.float32),
    "stack": RNG.normal(size=(2, 3, 4)).astype(np.float32),
    "bias": RNG.normal(size=7).astype(np.float32),
    "gain": np.float32(1.5),
}
MASK = {"kernel": True, "stack": False, "bias": True, "gain": False}
LABELS = {name: str(on) for name, on in MASK.items()}
WITHOUT_SCALARS = {"sm3", "scale_by_distance_over_gradients"}  # optax itself fails on them
STEPS = 3

WITH_A_RATE = """
    adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam
    nadamw novograd optimistic_adam_v2 optimistic_gradient_descent radam rmsprop
    rprop sgd sign_sgd signum sm3 yogi
    acprop ademamix adopt dadapt_adamw dog dowg madgrad momo momo_adam muon prodigy
    schedule_free_adamw schedule_free_sgd simplified_ademamix
"""
WITHOUT_ARGUMENTS = """
    centralize identity keep_params_nonnegative normalize_by_update_norm scale_by_lbfgs
    scale_by_param_block_norm scale_by_param_block_rms scale_by_rss scale_by_stddev
    scale_by_distance_over_gradients scale_by_trust_ratio set_to_zero
    cocob normalize
"""
AS_OTHERS = """
    belief chain factored_rms inject_stateful_hyperparams learning_rate multi_transform
    optimistic_adam optimistic_gradient polyak rms scale sign stateless stateless_with_tree_map
    with_extra_args_support
"""  # what the cases are made of, or what has another name now
ADAM = optax.adam(0.1)
KEY = jax.random.key(0)


def sum_of_all(tree):
    return sum(x.sum() for x in jax.tree.leaves(tree))


CASES = {
    **{name: lambda make: make(0.1) for name in WITH_A_RATE.split()},
    **{name: lambda make: make() for name in WITHOUT_ARGUMENTS.split()},
    "adafactor": lambda make: make(0.1, min_dim_size_to_factor=2),
    "adaptive_grad_clip": lambda make: make(0.1),
    "add_decayed_weights": lambda make: make(0.1),
    "add_noise": lambda make: make(0.1, 0.5, key=0),
    "apply_every": lambda make: make(2),
    "apply_if_finite": lambda make: make(ADAM, 3),
    "clip": lambda make: make(0.1),
    "clip_by_block_rms": lambda make: make(0.1),
    "clip_by_global_norm": lambda make: make(0.1),
    "conditionally_mask": lambda make: make(ADAM, lambda step: step % 2 == 0),
    "conditionally_transform": lambda make: make(ADAM, lambda step: step % 2 == 0),
    "ema": lambda make: make(0.9),
    "flatten": lambda make: make(ADAM),
    "freeze": lambda make: make(MASK),
    "galore": lambda make: make(0.1, rank=2),
    "inject_hyperparams": lambda make: make(optax.adam)(learning_rate=LR_SCHEDULE),
    "masked": lambda make: make(optax.sgd(0.1, 0.9), MASK),
    "mechanize": lambda make: make(ADAM),
    "MultiSteps": lambda make: make(
        ADAM, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "named_chain": lambda make: make(("clip", optax.clip(0.1)), ("adam", ADAM)),
    "noisy_sgd": lambda make: make(0.1, key=0),
    "partition": lambda make: make({"True": ADAM, "False": optax.sgd(0.1)}, LABELS),
    "polyak_sgd": lambda make: make(1.0),
    "reduce_on_plateau": lambda make: optax.chain(ADAM, make(patience=1)),
    "sam": lambda make: make(optax.sgd(0.1), optax.sgd(0.05), sync_period=2),
    "scale_by_schedule": lambda make: make(LR_SCHEDULE),
    "schedule_free": lambda make: make(optax.sgd(0.1), 0.1),
    "selective_transform": lambda make: make(ADAM, freeze_mask=MASK),
    "snapshot": lambda make: make("norm", sum_of_all),
    "split_real_and_imaginary": lambda make: make(ADAM),
    "trace": lambda make: make(0.9),
    "zero_nans": lambda make: optax.chain(make(), ADAM),
}
QUICK = {"adafactor", "adaptive_grad_clip", "apply_if_finite", "centralize", "muon", "zero_nans"}
WITH_VALUE = {"momo", "momo_adam", "polyak_sgd", "reduce_on_plateau"}
WITH_NAN = {"apply_if_finite", "zero_nans", "MultiSteps"}


def constructor(name):
    """Return optax's function of a name; skip where this version has none."""
    make = getattr(contrib, name, None) or getattr(optax, name, None)
    if make is None:
        pytest.skip(f"this optax has no {name}")
    return make


def transformation_of(name):
    return CASES[name](constructor(name))


def rows_of_table():
    """Return the kind of each transformation in the table."""
    text = PAGE.read_text().split("## Every transformation of optax")[1].split("\n## ")[0]
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    assert rows
    return {
        name: kind.strip().split(":")[0]
        for names, kind in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def gradients_at(step, params, name):
    rng = np.random.default_rng(step + 1)
    grads = jax.tree.map(lambda x: np.asarray(rng.normal(size=np.shape(x)), np.float32), params)
    if name in WITH_NAN and step == 1:
        grads["stack"][1, 2, 3] = np.nan
    return grads


@pytest.fixture(scope="module")
def damaged():
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"))


def train(transformation, name, plan=None):
    """Return the parameters after some steps, on the mesh of a plan in jit."""
    params = {
        k: jnp.asarray(v) for k, v in PARAMS.items() if np.ndim(v) or name not in WITHOUT_SCALARS
    }
    if plan is not None:
        params = jax.device_put(params, NamedSharding(plan.jax_mesh("data"), P()))
    state = transformation.init(params)

    def step(params, state, grads, value):
        extra = {"value": value} if name in WITH_VALUE else {}
        updates, state = transformation.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    run = step if plan is None else jax.jit(step)
    for i in range(STEPS):
        grads = gradients_at(i, params, name)
        params, state = run(params, state, grads, jnp.float32(STEPS - i))
    return params


def assert_as_optax(transformation, plan, name):
    want = train(transformation, name)
    got = train(plan.shard(transformation), name, plan)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in CASES]
)
def test_updates_are_those_of_optax(damaged, name, monkeypatch):
    """And full tensors are needed if the table says so."""
    needed = []
    layout_of = ShardEvaluator._layout_of

    def recorded(self, leaf):
        needed.append(leaf)
        return layout_of(self, leaf)

    monkeypatch.setattr(ShardEvaluator, "_layout_of", recorded)
    assert_as_optax(transformation_of(name), damaged, name)
    kind = rows_of_table()[name]
    assert kind == ("full tensors" if needed else "sharded")


def test_the_table_has_every_transformation_of_optax():
    def is_transformation(make):
        if not inspect.isfunction(make):
            return make is optax.MultiSteps
        return "GradientTransformation" in str(inspect.signature(make).return_annotation)

    names = {
        name
        for module in (optax, contrib)
        for name in dir(module)
        if not name.startswith("_") and is_transformation(getattr(module, name))
    }
    rows = rows_of_table()
    assert names - set(rows) == set()
    works = {name for name, kind in rows.items() if kind in ("sharded", "full tensors")}
    untested = {name.removeprefix("scale_by_") for name in works - set(CASES)}
    assert untested <= {*CASES, *AS_OTHERS.split()}
    assert len(works & set(CASES)) >= 42


@pytest.mark.parametrize(
    ("method", "fault", "name"),
    [
        ("sum_vectors", lambda self, axes, vectors: vectors, "clip_by_global_norm"),
        (
            "gather_tensors",
            lambda self, size, own, leaves: [
                jnp.zeros(leaf.type.shape).at[0].set(x[0])
                for x, leaf in zip(own, leaves, strict=True)
            ],
            "muon",
        ),
    ],
    ids=["norms of shards", "tensors of shards"],
)
def test_a_planted_fault_is_caught(damaged, monkeypatch, method, fault, name):
    monkeypatch.setattr(Communication, method, fault)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_as_optax(transformation_of(name), damaged, name)


@pytest.mark.parametrize("name", ["muon", slow("MultiSteps"), slow("adafactor")])
def test_gradients_of_ranks_in_shard_map(damaged, name):
    """A rank's own gradients are averaged before, and tensors are gathered from the parts.

    Branches of `MultiSteps` return zeros, the same at all ranks, or moments that vary.
    """
    transformation = transformation_of(name)
    optimizer = damaged.shard(transformation)
    mesh, state_specs = damaged.jax_mesh("data"), optimizer.specs(PARAMS)

    def step(params, state, grads):
        own = jax.tree.map(lambda g: g * (1 + jax.lax.axis_index("data") - 5.5), grads)
        updates, state = optimizer.update(own, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), state_specs, P()), out_specs=(P(), state_specs)
        )
    )
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    state = optimizer.init(params)
    for i in range(STEPS):
        params, state = step(params, state, gradients_at(i, PARAMS, name))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        params,
        train(transformation, name),
    )


def loss_of(params):
    return sum(jnp.sum((x - 0.3) ** 4 + x**2) for x in jax.tree.leaves(params))


def test_a_line_search_outside(damaged):
    """The direction is sharded. Inside, a rejection names this."""
    search = optax.scale_by_backtracking_linesearch(5)

    def two_steps(transformation):
        params = jax.device_put(PARAMS, NamedSharding(damaged.jax_mesh("data"), P()))
        state = transformation.init(params)

        @jax.jit
        def step(params, state):
            value, grad = jax.value_and_grad(loss_of)(params)
            extra = {"value": value, "grad": grad, "value_fn": loss_of}
            updates, state = transformation.update(grad, state, params, **extra)
            return optax.apply_updates(params, updates), state

        for _ in range(2):
            params, state = step(params, state)
        return params

    want = two_steps(optax.chain(optax.sgd(0.5), search))
    got = two_steps(optax.chain(damaged.shard(optax.sgd(0.5)), search))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), got, want)
    with pytest.raises(NotShardableError, match=r"optax.chain\(plan.shard\("):
        two_steps(damaged.shard(optax.chain(optax.sgd(0.5), search)))


def test_gradients_of_examples_are_rejected(damaged):
    make = constructor("differentially_private_aggregate")
    optimizer = damaged.shard(make(1.0, 0.1, key=KEY))
    per_example = jax.tree.map(lambda x: np.ones((4, *np.shape(x)), np.float32), PARAMS)
    with pytest.raises(ArgumentError, match="or what aggregates, around"):
        optimizer.update(per_example, optimizer.init(PARAMS), PARAMS)


def test_a_state_that_grows_is_rejected(damaged):
    optimizer = damaged.shard(constructor("monitor")({"sum": sum_of_all}))
    with pytest.raises(NotShardableError, match=r"optax.chain\(plan.shard\(...\), optax.monitor"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def test_full_tensors_of_sharded_weights_are_rejected():
    plan = ftmesh.plan(cpu_grid("3x1"))
    optimizer = plan.shard(transformation_of("muon"), specs=P("data"))
    params = {"w": np.ones((6, 5), np.float32)}
    with pytest.raises(NotShardableError, match=r"sharded itself \(specs=\)"):
        jax.eval_shape(lambda p: optimizer.update(p, optimizer.init(p), p), params)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_state_is_gathered_and_sharded_again(damaged, name):
    optimizer = damaged.shard(transformation_of(name))
    params = jax.device_put(PARAMS, NamedSharding(damaged.jax_mesh("data"), P()))
    state = optimizer.init(params)
    plain = transformation_of(name).init(params)
    gathered = optimizer.gather_state(state, params)
    jax.tree.map(np.testing.assert_array_equal, gathered, plain)
    jax.tree.map(np.testing.assert_array_equal, optimizer.shard_state(gathered, params), state)
