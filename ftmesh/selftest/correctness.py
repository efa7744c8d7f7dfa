"""Checks that what is computed is right: collectives, gradients, an optimizer, and the trainers.

Every executor and algorithm, every rank and every element of a collective is checked. Sums of
int32, and of whole numbers in float32, are compared bit by bit; those of random numbers within what
rounding allows. Gradients and optimizers are compared with plain JAX and optax, and the trainers of
``examples`` are run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.command_line import Parser
from ftmesh.cost.wire_precision import FLOAT_FORMATS, worst_error
from ftmesh.errors import ArgumentError, CollectiveError, PlanError, RoutingError
from ftmesh.execute.lowering import PALLAS, PPERMUTE, PPERMUTE_UNROLLED, XLA
from ftmesh.optional_deps import require
from ftmesh.planning.make_plan import RING, plan
from ftmesh.planning.plan import Plan
from ftmesh.selftest.context import ONE_DEVICE, CheckContext, left_out, result_from
from ftmesh.selftest.journal import HUNG, CheckResult, Problem
from ftmesh.selftest.timing import AXIS, rank_values
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import format_coord
from ftmesh.topology.topology import Topology

ROWS_PER_RANK, ROWS_INTERPRETED = 37, 1  # elements of each dtype, in multiples of the ranks
MAX_UNROLLED = 64  # ranks
MAX_INTERPRETED = 4  # ranks of a Pallas kernel on CPU devices
WHOLE, RANDOM, INTEGERS, SHORT = "whole float32", "random float32", "int32", "bfloat16"
_DTYPES = {WHOLE: "float32", RANDOM: "float32", INTEGERS: "int32", SHORT: "bfloat16"}
_EXACT = (WHOLE, INTEGERS)
OPERATIONS = {
    "psum": (WHOLE, RANDOM, INTEGERS, SHORT),
    "pmean": (RANDOM,),
    "psum_scatter": (WHOLE, SHORT),
    "all_gather": (RANDOM, INTEGERS),
}
UNROLLED = {"psum": (WHOLE,), "psum_scatter": (WHOLE,)}  # their programs are long


def executors_and_algorithms(topology: Topology) -> list[tuple[str, str]]:
    """Return what may run on a mesh; what cannot be planned there says so when it is checked."""
    pairs = [(XLA, RING)]
    pairs += [(PPERMUTE, name) for name in ALGORITHMS]
    if topology.num_live <= MAX_UNROLLED:
        pairs.append((PPERMUTE_UNROLLED, RING))
    return pairs + [(PALLAS, name) for name in ALGORITHMS]


def check_collectives(context: CheckContext, *, executor: str, algorithm: str) -> CheckResult:
    """Check the collectives of one plan, in one program."""
    topology = context.topology
    if len(topology.devices) == 1:
        return left_out(ONE_DEVICE)
    is_interpreted = executor == PALLAS and context.platform != "tpu"
    hung = [one.name for one in context.results.values() if one.status == HUNG]
    if executor == PALLAS and any(name.startswith(f"right: {PALLAS} ") for name in hung):
        return left_out("another kernel hung, and may have left chips that do not answer")
    # Interpreted, two kernels of a program would wait for each other.
    operations = UNROLLED if executor == PPERMUTE_UNROLLED else OPERATIONS
    operations = {"psum": (INTEGERS,)} if is_interpreted else operations
    rows = ROWS_INTERPRETED if is_interpreted else ROWS_PER_RANK
    try:
        made = plan(topology, RING if executor == XLA else algorithm, executor=executor)
    except (PlanError, RoutingError) as error:
        return left_out(str(error))
    if is_interpreted and (reason := _why_not_interpreted(context)):
        return left_out(reason)
    try:
        with context.quick_compiler():
            wrong = list(wrong_results(made, operations, rows))
    except CollectiveError as error:
        if executor != PALLAS:
            raise
        return left_out(str(error))
    advice = (
        f"do not plan with executor={executor!r} and algorithm {algorithm!r} on this mesh, and "
        "report it with journal.jsonl: the schedule was proved, so its executor, JAX or a chip is "
        "wrong"
    )
    notes = ["interpreted: psum of a few int32 alone"] if is_interpreted else []
    data = {"executor": executor, "algorithm": algorithm, "is_interpreted": is_interpreted}
    return result_from([Problem(text, advice) for text in wrong], notes, data)


def _why_not_interpreted(context: CheckContext) -> str:
    if context.group.num_processes > 1:
        return "without TPUs the kernel is interpreted, which needs all devices in one process"
    if len(context.topology.devices) > MAX_INTERPRETED:
        return (
            "without TPUs the kernel is interpreted, which takes minutes on more than "
            f"{MAX_INTERPRETED} devices: `ftmesh selftest 2x2` checks it"
        )
    return ""


def wrong_results(
    made: Plan, operations: Mapping[str, tuple[str, ...]], rows: int
) -> Iterator[str]:
    """Run collectives and yield what is wrong: operation, dtype, rank, device and element."""
    mesh, topology = made.jax_mesh(AXIS), made.topology
    num_ranks = mesh.size
    size = rows * num_ranks
    names = dict.fromkeys(name for kinds in operations.values() for name in kinds)
    inputs = {name: _rank_inputs(name, num_ranks, size) for name in names}
    spec = jax.sharding.PartitionSpec(AXIS)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    arrays = {
        name: jax.make_array_from_callback(values.shape, sharding, values.__getitem__)
        for name, values in inputs.items()
    }

    def one_rank(arrays: Any) -> Any:
        own = {name: x[0] for name, x in arrays.items()}
        results = {
            operation: _call(made, operation)({name: own[name] for name in kinds})
            for operation, kinds in operations.items()
        }
        return jax.tree.map(lambda x: x[None], results)

    run = jax.jit(
        jax.shard_map(one_rank, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    results = run(arrays)
    for operation, kinds in operations.items():
        for name in kinds:
            expected, bound = _expected(made, operation, name, inputs[name])
            for shard in results[operation][name].addressable_shards:
                rank = shard.index[0].start or 0
                values = np.asarray(shard.data)[0].astype(np.float64)
                want = expected[rank] if operation == "psum_scatter" else expected
                allowed = bound[rank] if operation == "psum_scatter" else bound
                wrong = np.flatnonzero(~(np.abs(values - want) <= allowed))
                if wrong.size:
                    first = int(wrong[0])
                    chip = format_coord(topology.coord_of(shard.device))
                    yield (
                        f"{operation} of {name} is wrong: rank {rank} (chip {chip}, {shard.device} "
                        f"of process {process_of(shard.device)}) has {values[first]:.9g} where "
                        f"{want[first]:.9g} is right at element {first}, and {wrong.size:,} of "
                        f"{want.size:,} elements are wrong"
                    )


def _call(made: Plan, operation: str) -> Callable[[Any], Any]:
    if operation == "psum_scatter":
        return lambda x: made.psum_scatter(x, AXIS, tiled=True)
    if operation == "all_gather":
        return lambda x: made.all_gather(x, AXIS, tiled=True)
    function = made.psum if operation == "psum" else made.pmean
    return lambda x: function(x, AXIS)


def _rank_inputs(name: str, num_ranks: int, size: int) -> NDArray[Any]:
    """What every rank contributes; the same in every process."""
    if name == WHOLE:
        return np.stack([rank_values(rank, num_ranks, size) for rank in range(num_ranks)])
    rng = np.random.default_rng(len(name))
    if name == INTEGERS:
        return rng.integers(-(2**31), 2**31, (num_ranks, size), np.int32)  # sums wrap around
    values = rng.normal(size=(num_ranks, size)).astype(np.float32)
    return values.astype(jnp.bfloat16) if name == SHORT else values


def _expected(
    made: Plan, operation: str, name: str, inputs: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """The right result, by NumPy, and how far rounding may take a result from it."""
    num_ranks = len(inputs)
    if operation == "all_gather":
        gathered = inputs.astype(np.float64).reshape(-1)
        return gathered, np.zeros_like(gathered)
    if name == INTEGERS:
        total = inputs.sum(axis=0, dtype=np.int32).astype(np.float64)
        bound = np.zeros_like(total)
    else:
        exact = inputs.astype(np.float64)
        total, bound = exact.sum(axis=0), np.zeros(exact.shape[1])
        if name not in _EXACT:
            dtype = _DTYPES[name]
            partials = made.partial_sum_dtype(dtype)
            error = worst_error(partials, num_ranks) + 2 * FLOAT_FORMATS[dtype].roundoff
            bound = error * np.abs(exact).sum(axis=0)
    if operation == "pmean":
        return total / num_ranks, bound / num_ranks
    if operation == "psum_scatter":
        return total.reshape(num_ranks, -1), bound.reshape(num_ranks, -1)
    return total, bound


# Gradients and optimizers -----------------------------------------------------------------------

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
            group = replace(context.group, shutdown=None)  # further checks need its processes
            for attempt in arguments.start_attempts(group, args, lambda group: context.topology):
                with attempt:
                    report = module.train(config, attempt, args)
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
