"""Random losses over a batch, and their value and gradients with all ranks on one device."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from ftmesh.collectives.local_loss import ArgumentRoles, Loss, OverRanks
from ftmesh.collectives.whole_batch import PartitionedLoss, TracedLoss
from ftmesh.testing import shard_map_on_one_device

ELEMENTWISE = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "square": jnp.square,
    "halve": lambda x: x / 2,
    "less one": lambda x: x - 1,
    "where": lambda x: jnp.where(x > 0.1, x, 0.5),
    "sixteenths": lambda x: jnp.round(16 * jax.lax.stop_gradient(x)) / 16 * x,
}
REDUCTIONS = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "var": jnp.var}
OPERATIONS = (
    "element", "element", "pair", "pair", "reduce", "dot", "reshape", "transpose", "gather",
    "own row", "concatenate", "slice", "sort", "cumsum", "broadcast", "keep",
)  # fmt: skip
PAIRS = {"add": jnp.add, "multiply": jnp.multiply, "maximum": jnp.maximum, "subtract": jnp.subtract}


@st.composite
def programs(draw, max_steps=7):
    """Steps of a program: the name of an operation, which arrays, and numbers that it may use."""
    step = st.tuples(st.sampled_from(OPERATIONS), *[st.integers(0, 10**6)] * 4)
    return draw(st.lists(step, min_size=2, max_size=max_steps))


def loss_of(steps):
    """A loss that runs steps on the weights and the batch. It takes whatever shapes come."""

    def loss(p, b):
        size = len(b["x"])
        arrays = [b["x"], b["y"], p["w"], p["v"], b["n"] * 1.0]
        for name, i, j, m, n in steps:
            # The newest arrays are the likeliest operands.
            x, y = arrays[-1 - i % min(3, len(arrays))], arrays[j % len(arrays)]
            result = apply(name, x, y, m, n, b["n"], size)
            if result is not None and result.size <= 20_000:
                arrays.append(result)
        return sum(jnp.mean(jnp.sin(x)) for x in arrays[-3:]) + jnp.mean(arrays[-1]) ** 2

    return loss


def apply(name, x, y, m, n, index, size):
    """The result of one step; None if shapes do not fit."""
    axis = m % x.ndim if x.ndim else None
    if name == "element":
        return list(ELEMENTWISE.values())[m % len(ELEMENTWISE)](x)
    if name == "pair":
        try:
            shape = np.broadcast_shapes(x.shape, y.shape)
        except ValueError:
            return None
        return list(PAIRS.values())[m % len(PAIRS)](x, y) if len(shape) < 5 else None
    if name == "reduce":
        reduction = list(REDUCTIONS.values())[n % len(REDUCTIONS)]
        return reduction(x, axis=axis, keepdims=bool(m // 8 % 2))
    if name == "keep":
        return x + jnp.mean(y)
    if x.ndim == 0:
        return None
    if name == "dot":
        for a in range(x.ndim):
            for b in range(y.ndim):
                if x.shape[a] == y.shape[b] and x.ndim + y.ndim - 2 < 5:
                    return jnp.tensordot(x, y, axes=(a, b)) / 3
        return None
    if name == "reshape":
        shape = list(x.shape)
        if n % 3 == 0:
            return x.reshape(-1)
        if n % 3 == 1 and x.ndim > 1:
            at = m % (x.ndim - 1)
            return x.reshape(*shape[:at], -1, *shape[at + 2 :])
        divisor = next((d for d in (2, 3) if shape[axis] % d == 0), 1)
        split = (divisor, shape[axis] // divisor)
        return x.reshape(*shape[:axis], *split[:: 1 if m % 2 else -1], *shape[axis + 1 :])
    if name == "transpose":
        return jnp.moveaxis(x, axis, n % x.ndim)
    if name == "gather":
        return jnp.take(x, index % x.shape[axis], axis=axis) if x.ndim < 3 else None
    if name == "own row":
        is_matrix = x.ndim == 2 and x.shape[0] == size
        return x[jnp.arange(size), index % x.shape[1]] if is_matrix else None
    if name == "concatenate":
        other = jnp.flip(x, axis) if n % 4 == 0 else 2 * x
        return jnp.concatenate([x, other], axis=m // 3 % x.ndim)
    if name == "slice":
        half = x.shape[axis] // 2
        if not half:
            return None
        return jax.lax.slice_in_dim(x, 0 if n % 2 else half, half if n % 2 else None, axis=axis)
    if name == "sort":
        return jnp.sort(x, axis=axis)
    if name == "cumsum":
        return jnp.cumsum(x, axis=axis)
    if name == "broadcast":
        return jnp.broadcast_to(x, (2 + n % 2, *x.shape)) if x.ndim < 4 else None
    raise AssertionError(name)


def make_args(size):
    rng = np.random.default_rng(size)
    weights = {"w": rng.normal(size=(4, 3)), "v": rng.normal(size=size // 2)}
    return weights, {
        "x": rng.normal(size=(size, 4)),
        "y": rng.normal(size=size),
        "n": rng.integers(0, 50, size),
    }


def on_one_device(plan, loss, args, *, has_aux=False):
    """The value, the gradients and aux of the whole batch, as the plan's function returns them.

    Raises ArgumentError where that would.
    """
    ranks = OverRanks(plan, "data", 2**20, None, None)
    known = Loss(loss, {}, (0,), has_aux=has_aux, weighted=False)
    batch = tuple(range(1, len(args)))
    traced = TracedLoss.trace(known, ArgumentRoles((0,), (), batch), args, "data")
    replicated = [jax.sharding.PartitionSpec()] * len(traced.weight_inputs)
    partitioned = PartitionedLoss.find(traced, ranks, [None] * len(replicated))
    program = partitioned.rank_program(ranks, replicated)
    run = shard_map_on_one_device(
        lambda *arrays: tuple(program.run(*arrays)),
        num_ranks=plan.program.num_ranks,
        axis_name="data",
        in_specs=program.in_specs,
        out_specs=tuple(program.out_specs),
    )
    value, (grads,), aux = traced.out_tree.unflatten(jax.jit(run)(*traced.inputs, *traced.consts))
    return value, grads, aux
