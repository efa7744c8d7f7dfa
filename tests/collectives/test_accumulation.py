"""Accumulated gradients equal those of the whole batch, and are reduced once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError
from ftmesh.collectives import BatchShares, accumulate_gradients, weighted_sum
from ftmesh.execute.hlo_text import parse_computations

pytestmark = pytest.mark.usefixtures("quick_compiler")

ROWS = 12  # of a rank


def params_and_batch(num_ranks, dtype=np.float64):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(5, 3)), "b": rng.normal(size=3)}
    x, y = rng.normal(size=(num_ranks * ROWS, 5)), rng.normal(size=(num_ranks * ROWS, 3))
    return jax.tree.map(lambda leaf: leaf.astype(dtype), (params, (x, y)))


def losses(params, batch):
    x, y = batch
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2, axis=1)


def loss(params, batch):
    values = losses(params, batch)
    return values.mean(), {"largest": values.max(), "rows": jnp.asarray(len(values))}


def on_ranks(plan, step, check_vma):
    """`step` of parameters that all ranks have and of a rank's rows, with one result for all."""
    return jax.jit(
        jax.shard_map(
            step,
            mesh=plan.jax_mesh("data"),
            in_specs=(P(), P("data")),
            out_specs=P(),
            check_vma=check_vma,
        )
    )


@pytest.mark.parametrize(
    ("num_parts", "check_vma", "remat"), [(4, True, True), (4, False, False), (1, True, False)]
)
def test_gradient_equals_that_of_the_whole_batch(even, num_parts, check_vma, remat):
    with jax.enable_x64(True):
        params, batch = params_and_batch(12)
        value_and_grad = jax.value_and_grad(jax.checkpoint(loss) if remat else loss, has_aux=True)

        def step(params, batch):
            (value, aux), grads = accumulate_gradients(value_and_grad, num_parts)(params, batch)
            return even.pmean((value, grads), "data"), aux["rows"]

        (value, grads), rows = on_ranks(even, step, check_vma)(params, batch)
        (want_value, _), want = jax.value_and_grad(loss, has_aux=True)(params, batch)
        close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        close(value, want_value)
        jax.tree.map(close, grads, want)
        assert rows == ROWS  # whole numbers are counted


def permutations(program):
    """The names of the permutations in a program, with JAX's scopes."""
    bodies, _ = parse_computations(program.as_text())
    return [op.op_name for body in bodies.values() for op in body if "permute" in op.opcode]


def is_in_the_scan(source):
    """The loops of a plan are in its own scope; a loop around that is the scan over parts."""
    return "while" in source.partition("ftmesh.")[0]


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_are_reduced_once_after_the_scan(even, check_vma):
    params, batch = params_and_batch(12, np.float32)

    def step(params, batch, num_parts):
        run = jax.value_and_grad(lambda *args: loss(*args)[0])
        _, grads = accumulate_gradients(run, num_parts)(params, batch)
        return even.pmean(grads, "data")

    programs = [
        on_ranks(even, partial(step, num_parts=num_parts), check_vma).lower(params, batch).compile()
        for num_parts in (1, 6)
    ]
    for program in programs:
        ftmesh.audit(program, "data").require_none()
    alone = jax.shard_map(
        lambda x: even.pmean(x, "data"),
        mesh=even.jax_mesh("data"),
        in_specs=P("data"),
        out_specs=P(),
    )
    alone = jax.jit(alone).lower(np.ones((12, 18), np.float32)).compile()
    in_parts = permutations(programs[1])
    assert len(in_parts) == len(permutations(programs[0])) == len(permutations(alone)) > 0
    assert not any(map(is_in_the_scan, in_parts))

    def planted(params, batch):
        def each_part(params, batch):
            value, grads = jax.value_and_grad(lambda p: loss(p, batch)[0])(params)
            return value, even.pmean(grads, "data")

        return accumulate_gradients(each_part, 6)(params, batch)[1]

    in_scan = permutations(on_ranks(even, planted, check_vma).lower(params, batch).compile())
    assert in_scan
    assert all(map(is_in_the_scan, in_scan))


def test_weighted_sums_and_shares(even):
    """Shares of a batch that ranks do not divide, in parts, where some rows are padding."""
    with jax.enable_x64(True):
        params, (x, y) = params_and_batch(12)
        x, y = x[:43], y[:43]
        shares = BatchShares.for_ranks(even, 43)
        assert shares.per_rank == 4
        laid, weights = shares.pad_batch((x, y))

        def in_means(params, batch):
            return shares.mean_contribution(losses(params, batch[:2]), batch[2])

        def in_sums(params, batch):
            return weighted_sum(losses(params, batch[:2]), batch[2]), batch[2].sum()

        def step(params, batch):
            of_mean = accumulate_gradients(jax.value_and_grad(in_means), 2, mean=False)(
                params, batch
            )
            run = accumulate_gradients(jax.value_and_grad(in_sums, has_aux=True), 2, mean=False)
            (total, number), grads = even.psum(run(params, batch), "data")
            of_sums = jax.tree.map(lambda leaf: leaf / number, (total, grads))
            return even.pmean(of_mean, "data"), of_sums

        result = on_ranks(even, step, True)(params, (*laid, weights.astype(np.float64)))
        want = jax.value_and_grad(lambda p: losses(p, (x, y)).mean())(params)
        close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        for one in result:
            jax.tree.map(close, one, want)


@pytest.mark.parametrize(("dtype", "worth"), [(None, 256 + 63), (jnp.bfloat16, 256)])
def test_gradients_are_added_in_accumulate_dtype(dtype, worth):
    """In bfloat16 a sum stops growing at 256; in float32 it does not, and is rounded once."""

    def run(w, x):
        return jnp.float32(0), (w * x.sum()).astype(jnp.bfloat16)

    x = np.ones(320, np.float32)
    x[0] = 0  # 319 ones
    value, total = accumulate_gradients(run, 320, mean=False, accumulate_dtype=dtype)(
        jnp.ones(()), x
    )
    assert total.dtype == jnp.bfloat16
    assert float(total) == float(jnp.bfloat16(worth))
    assert value.dtype == np.float32


def test_values_are_added_in_float32():
    run = accumulate_gradients(
        lambda w, x: (x.sum(), w), 320, mean=False, accumulate_dtype=jnp.bfloat16
    )
    assert float(run(jnp.ones(()), np.ones(320, np.float32))[0]) == 320


def test_invalid_arguments():
    run = jax.value_and_grad(lambda w, x: jnp.sum(w * x))
    with pytest.raises(
        ArgumentError, match=r"\(9,\) cannot be split into 4 equal parts.* \[1, 3, 9\].* 12 rows"
    ):
        accumulate_gradients(run, 4)(1.0, np.ones(9))
    with pytest.raises(ArgumentError, match=r"shape \(\) cannot be split into 4 equal"):
        accumulate_gradients(run, 4)(1.0, 2.0)
    with pytest.raises(ArgumentError, match="num_parts must be a positive whole number, not 0"):
        accumulate_gradients(run, 0)
    with pytest.raises(ArgumentError, match=r"give it jax.value_and_grad\(loss\), not the loss"):
        accumulate_gradients(lambda w, x: jnp.sum(w * x), 3)(1.0, np.ones(9))
    with pytest.raises(CollectiveError, match="accumulate_dtype must be a floating dtype"):
        accumulate_gradients(run, 3, accumulate_dtype=np.int32)(1.0, np.ones(9))


def test_optax_multi_steps(even):
    """Every third step moves the parameters, by the mean of three batches' gradients."""
    params, (x, y) = params_and_batch(12, np.float32)
    optimizer = optax.MultiSteps(optax.sgd(0.5), every_k_schedule=3)

    def step(params, state, batch):
        own = jax.tree.map(lambda leaf: lax.pcast(leaf, "data", to="varying"), params)
        grads = jax.grad(lambda p: loss(p, batch)[0])(own)
        updates, state = optimizer.update(even.pmean(grads, "data"), state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=even.jax_mesh("data"),
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
        )
    )
    state, now = optimizer.init(params), params
    for third in range(3):
        if third:
            jax.tree.map(np.testing.assert_array_equal, now, params)
        rows = np.arange(12 * ROWS).reshape(12, 3, -1)[:, third].reshape(-1)
        now, state = run(now, state, (x[rows], y[rows]))
    want = jax.grad(lambda p: loss(p, (x, y))[0])(params)
    jax.tree.map(
        lambda new, old, grad: np.testing.assert_allclose(
            new, old - 0.5 * grad, rtol=1e-5, atol=1e-6
        ),
        now,
        params,
        want,
    )
