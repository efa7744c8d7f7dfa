"""Checks what training is made of next to plain JAX, and runs the trainers of ``examples``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh.command_line import Parser
from ftmesh.errors import ArgumentError, PlanError, RoutingError
from ftmesh.execute.lowering import PPERMUTE
from ftmesh.optional_deps import require
from ftmesh.planning.make_plan import RING, plan
from ftmesh.planning.plan import Plan
from ftmesh.selftest.context import ONE_DEVICE, CheckContext, left_out, result_from
from ftmesh.selftest.journal import CheckResult, Problem
from ftmesh.selftest.timing import AXIS

TOLERANCE = 1e-5  # in units of the largest number of an array
EXAMPLES_PER_RANK, FEATURES, HIDDEN = 4, 16, 24
ADAM_STEPS, TRAINER_STEPS = 3, 3
_ADVICE = (
    "the collectives below it may be right (see the checks 'right'): report it with journal.jsonl, "
    "and compare your own loss by plan.check(loss, params, batch)"
)


def check_gradients(context: CheckContext) -> CheckResult:
    """Compare `Plan.value_and_grad` of a small network with `jax.value_and_grad`."""
    if len(context.topology.devices) == 1:
        return left_out(ONE_DEVICE)
    params, x, y = _data(len(context.topology.devices))
    problems, notes = [], []
    for made in _plans(context):
        compared = made.check(_loss, params, x, y, tolerance=TOLERANCE, axis_name=AXIS)
        name = f"{made.executor} {made.algorithm}"
        if compared:
            notes.append(f"{name}: {compared}")
        problems += [Problem(f"{name}: {entry}", _ADVICE) for entry in compared.differing]
    return result_from(problems, notes)


def check_optimizer(context: CheckContext) -> CheckResult:
    """Compare a few steps of a sharded Adam with those of optax on one device."""
    require("the check of sharded optimizers", "optim", "optax")
    if len(context.topology.devices) == 1:
        return left_out(ONE_DEVICE)
    expected = _train_alone(len(context.topology.devices))
    problems, notes = [], []
    for made in _plans(context):
        name = f"{made.executor} {made.algorithm}"
        differences = _differences(_train_sharded(made), expected)
        largest = max(differences.values())
        if largest <= TOLERANCE:
            notes.append(f"{name}: weights after {ADAM_STEPS} steps of Adam, up to {largest:.1g}")
        problems += [
            Problem(
                f"{name}: weight {leaf!r} after {ADAM_STEPS} steps of Adam differs by "
                f"{difference:.2g} of its largest number",
                _ADVICE,
            )
            for leaf, difference in differences.items()
            if not difference <= TOLERANCE
        ]
    return result_from(problems, notes)


def _plans(context: CheckContext) -> Iterator[Plan]:
    """Yield the plan that ftmesh chooses, and a ring in permutations, unless known to be wrong."""
    chosen = plan(context.topology)
    yield chosen
    ring = context.results.get(f"right: {PPERMUTE} {RING}")
    if (chosen.executor, chosen.algorithm) == (PPERMUTE, RING) or (ring and ring.is_bad):
        return
    try:
        ring_plan = plan(context.topology, RING, executor=PPERMUTE)
    except (PlanError, RoutingError):
        return
    yield ring_plan


def _data(num_ranks: int) -> tuple[dict[str, Any], Any, Any]:
    """The weights of a small network and a batch; the same in every process."""
    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(FEATURES, HIDDEN)) / math.sqrt(FEATURES),
        "bias": rng.normal(size=HIDDEN) / 10,
        "out": rng.normal(size=(HIDDEN, 1)) / math.sqrt(HIDDEN),
    }
    x = rng.normal(size=(EXAMPLES_PER_RANK * num_ranks, FEATURES)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
    return {name: leaf.astype(np.float32) for name, leaf in params.items()}, x, y


def _loss(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return ((hidden @ params["out"] - y) ** 2).mean()


def _adam() -> Any:
    import optax

    return optax.adam(1e-2, eps=1e-3)  # a larger eps, since a sign near zero would be noise


def _train_alone(num_ranks: int) -> dict[str, Any]:
    import optax

    params, x, y = _data(num_ranks)
    transformation = _adam()
    state = transformation.init(params)

    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(_loss)(params, x, y)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(step)
    for _ in range(ADAM_STEPS):
        params, state = run(params, state)
    return {name: np.asarray(leaf) for name, leaf in params.items()}


def _train_sharded(made: Plan) -> dict[str, Any]:
    """Train by the sharded optimizer of a plan; return the weights of this process's first chip."""
    import optax

    mesh = made.jax_mesh(AXIS)
    params, x, y = _data(mesh.size)
    optimizer = made.shard(_adam(), AXIS)
    gradient = made.value_and_grad(_loss, axis_name=AXIS)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        _, grads = gradient(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def put(array: Any, *axes: str) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    weights: Any = {name: put(leaf) for name, leaf in params.items()}
    batch = put(x, AXIS), put(y, AXIS)
    state, run = optimizer.init(weights), jax.jit(step)
    for _ in range(ADAM_STEPS):
        weights, state = run(weights, state, *batch)
    return {name: np.asarray(leaf.addressable_shards[0].data) for name, leaf in weights.items()}


def _differences(have: dict[str, Any], want: dict[str, Any]) -> dict[str, float]:
    """The largest difference of each array, in units of its largest number."""
    return {
        name: float(np.max(np.abs(have[name] - leaf)) / np.max(np.abs(leaf)))
        for name, leaf in want.items()
    }


# The trainers of examples/ ----------------------------------------------------------------------


def check_trainer(context: CheckContext, *, name: str) -> CheckResult:
    """Train a tiny model of ``examples`` for a few steps on synthetic data."""
    try:
        module = import_module(f"examples.{name}.train")
        arguments = import_module("examples.common.arguments")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "examples":
            raise
        return left_out("the trainers are in a clone of the repository: run the test from there")
    parser = Parser(prog=name)
    if hasattr(module, "add_bert"):
        module.add_bert(parser)
    arguments.add_run(parser, module.PRESETS)
    args = parser.parse_args(["--steps", str(TRAINER_STEPS)])
    config = module.PRESETS["tiny"]
    batch = max(config.batch, 2 * len(context.topology.devices))
    sizes = {key: batch for key in vars(config) if key in ("eval_images", "eval_sequences")}
    config = replace(config, batch=batch, **sizes)
    try:
        with context.quick_compiler():
            report = module.train(config, context.topology, args, context.group)
    except ArgumentError as error:
        return left_out(str(error))
    losses = [report.losses[step] for step in sorted(report.losses)]
    problems = []
    if len(losses) < TRAINER_STEPS or not all(map(math.isfinite, losses)):
        text = f"the losses of {TRAINER_STEPS} steps are {losses}"
        problems.append(
            Problem(text, f"run python -m examples.{name}.train --steps 20, and report it")
        )
    shown = ", ".join(f"{loss:.4f}" for loss in losses)
    return result_from(problems, [f"losses {shown}"], {"losses": losses})
