"""Gradients averaged after the backward pass and inside it, against those of all examples."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
from ftmesh.collectives import backward_order, with_mean_gradients
from ftmesh.optim.sharded import ShardedOptimizer
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")

RNG = np.random.default_rng(0)
PARAMS = {
    "first": RNG.normal(size=(5, 7)).astype(np.float32),
    "bias": RNG.normal(size=7).astype(np.float32),
    "last": RNG.normal(size=(7, 3)).astype(np.float32),
    "gain": np.float32(2),
    "unused": np.ones(4, np.float32),
    "empty": np.zeros((0, 3), np.float32),
}


def loss(params, x):
    hidden = jnp.tanh(x @ params["first"] + params["bias"])
    return jnp.mean((hidden @ params["last"]) ** 2) * jnp.sum(params["gain"])


def examples(num_ranks):
    return np.random.default_rng(1).normal(size=(num_ranks, 4, 5)).astype(np.float32)


def expected(x):
    return jax.grad(lambda p: jnp.mean(jax.vmap(lambda x: loss(p, x))(x)))(PARAMS)


def assert_gradient(grads, x):
    for name, want in expected(x).items():
        np.testing.assert_allclose(grads[name], want, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def plan():
    return ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring")


def grad_in_backward(plan, **options):
    """A function that returns the gradient of a rank, averaged in the backward pass."""

    def marked(params, x):
        return loss(with_mean_gradients(params, "data", plan=plan, **options), x)

    return jax.grad(marked)


def shards_in_backward(plan, **options):
    """The same for the shards that an optimizer's `value_and_grad` returns."""
    optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data", overlap=True, **options)
    return lambda params, x: optimizer.value_and_grad(loss)(params, x)[1].tree


def on_devices(plan, run, x, *, check_vma):
    body = jax.shard_map(
        lambda params, x: run(params, x[0]),
        mesh=plan.jax_mesh("data"),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.device_get(jax.jit(body)(PARAMS, x))


def on_logical_ranks(run, x):
    grads = jax.device_get(on_one_device(lambda x: run(PARAMS, x))(x))
    assert all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(grads))
    return jax.tree.map(lambda leaf: leaf[0], grads)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradient_of_all_examples_on_a_damaged_mesh(check_vma):
    plan = ftmesh.plan(cpu_grid("8x8", failed="2x2@2,2"), "row_pair")
    x = examples(60)
    assert_gradient(on_devices(plan, grad_in_backward(plan), x, check_vma=check_vma), x)


def test_after_the_backward_pass(plan):
    x = examples(12)

    def explicit(params, x):
        return plan.pmean(jax.grad(loss)(params, x), "data", bucket_bytes=200)

    assert_gradient(on_logical_ranks(explicit, x), x)


def test_bucket_order_does_not_change_results(plan):
    x = examples(12)
    run = grad_in_backward(plan, bucket_bytes=200, order=(5, 0, 3, 2, 1, 4))
    assert_gradient(on_logical_ranks(run, x), x)


def test_one_all_reduce_per_bucket(plan):
    def sums(**options):
        run = jax.vmap(grad_in_backward(plan, **options), in_axes=(None, 0), axis_name="data")
        text = str(jax.make_jaxpr(lambda x: run(PARAMS, x))(examples(12)))
        return text.count("while[") + text.count("scan[")

    single = sums(bucket_bytes=2**20)
    assert single > 0
    assert sums(bucket_bytes=1) == 4 * single  # four leaves have gradients


def ancestors(text):
    """For each permutation in a lowered program, how many others it waits for."""
    waits: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not (assignment := re.match(r"\s*(%\w+)(?::\d+)? = (.*)", line)):
            continue
        name, what = assignment.groups()
        operands = [operand for operand in re.findall(r"%\w+", what) if operand in waits]
        waits[name] = set().union(*(waits[operand] for operand in operands))
        waits[name] |= {name} if "collective_permute" in what else set()
    return sorted(len(known) - 1 for name, known in waits.items() if name in known)


@pytest.mark.parametrize("check_vma", [True, slow(False)])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize(
    ("reduced", "out"), [(grad_in_backward, P()), (shards_in_backward, P("data"))]
)
def test_buckets_are_reduced_in_order(reduced, out, bucket_bytes, check_vma):
    """Checked in the lowered program."""
    topology = cpu_grid("2x2")
    plan = ftmesh.plan(topology, "ring", executor="ppermute_unrolled")
    run = reduced(plan, bucket_bytes=bucket_bytes)
    body = jax.shard_map(
        lambda params, x: jax.tree.map(jnp.atleast_1d, run(params, x)),
        mesh=plan.jax_mesh("data"),
        in_specs=(P(), P("data")),
        out_specs=out,
        check_vma=check_vma,
    )
    params = PARAMS if out == P() else PARAMS | {"gain": np.full(1, 2, np.float32)}
    counts = ancestors(jax.jit(body).lower(params, examples(4)[0]).as_text())
    buckets = 4 if bucket_bytes == 1 else 1
    per_bucket = len(counts) // buckets
    schedule = plan.schedule
    rounds = schedule.num_rounds if out == P() else schedule.rounds_in_reduce_scatter
    assert per_bucket == 2 * rounds  # both directions
    assert [n // per_bucket for n in counts] == [i // per_bucket for i in range(len(counts))]


def test_varying_parameters(plan):
    x = examples(12)

    def run(params, x):
        varying = lax.pcast(params, "data", to="varying")
        return jax.tree.map(lambda leaf: leaf[None], grad_in_backward(plan)(varying, x[0]))

    body = jax.shard_map(
        run, mesh=plan.jax_mesh("data"), in_specs=(P(), P("data")), out_specs=P("data")
    )
    grads = jax.device_get(jax.jit(body)(PARAMS, x))
    assert_gradient(jax.tree.map(lambda leaf: leaf[7], grads), x)


def test_remat_and_scan(plan):
    """Two passes over the same examples, rematerialized in the backward pass."""
    x = examples(12)

    def run(params, x):
        def total(params):
            params = with_mean_gradients(params, "data", plan=plan)
            remat_loss = jax.checkpoint(lambda x: loss(params, x))
            return lax.scan(lambda sum, _: (sum + remat_loss(x) / 2, None), 0.0, None, length=2)[0]

        return jax.grad(total)(params)

    assert_gradient(on_logical_ranks(run, x), x)


def test_parts_of_the_mean(plan):
    x = examples(12)
    optimizer = ShardedOptimizer(optax.sgd(0.1), plan, "data", overlap=True, bucket_bytes=200)
    own = partial(optimizer.comm.take_own, layout=optimizer.layout(PARAMS))
    run = shards_in_backward(plan, bucket_bytes=200)
    whole = expected(x)
    got, want = on_one_device(lambda x: (run(PARAMS, x), own(whole)))(x)
    for shard, expected_shard in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(shard, expected_shard, rtol=1e-5, atol=1e-6)


def test_bfloat16_wire_dtype(plan):
    x = examples(12)
    grads = on_logical_ranks(grad_in_backward(plan, wire_dtype=jnp.bfloat16), x)
    for name, want in expected(x).items():
        assert grads[name].dtype == np.float32
        # 8 bits of mantissa, rounded at each of at most 11 hops and once for the gather.
        np.testing.assert_allclose(grads[name], want, atol=12 * 2**-9 * 2, rtol=12 * 2**-9)


def test_averaging_twice_raises(plan):
    """Under check_vma, what comes out is replicated, and a second sum is an error."""
    twice = lambda p, x: plan.pmean(grad_in_backward(plan)(p, x), "data")  # noqa: E731
    with pytest.raises(ftmesh.CollectiveError, match="is the same on every device already"):
        on_devices(plan, twice, examples(12), check_vma=True)


class TestOrder:
    def test_last_layer_is_first(self):
        names = sorted(PARAMS)
        order = backward_order(loss, PARAMS, examples(1)[0])
        known = [names[i] for i in order if names[i] in ("first", "last", "gain")]
        assert known == ["gain", "last", "first"]

    def test_gradients_of_one_operation_are_ordered_from_the_end(self):
        order = backward_order(jax.jit(loss), PARAMS, examples(1)[0])
        assert [i for i in order if i in (0, 2, 3, 4)] == [4, 3, 2, 0]

    def test_order_must_be_a_permutation(self, plan):
        with pytest.raises(ArgumentError, match="each position from 0 to 5 once"):
            on_logical_ranks(grad_in_backward(plan, order=(0, 1, 2)), examples(12))

    def test_first_complete_bucket_is_reduced_first(self, plan, monkeypatch):
        """Leaves alternate between two dtypes, and so do the buckets that become complete."""
        params = [jnp.ones(1 + i, jnp.float32 if i % 2 else jnp.bfloat16) for i in range(6)]

        def total(params, x):
            marked = with_mean_gradients(params, "data", plan=plan, bucket_bytes=1)
            return sum(leaf.sum().astype(jnp.float32) for leaf in marked) * x.sum()

        sizes = record_payloads(monkeypatch)
        on_one_device(lambda x: jax.grad(total)(params, x))(examples(12))
        assert sizes == [24, 10, 16, 6, 8, 2]


def test_each_bucket_uses_the_plan_for_its_size(plan, monkeypatch):
    sizes = record_payloads(monkeypatch)
    x = examples(12)
    assert_gradient(on_logical_ranks(grad_in_backward(plan, bucket_bytes=200), x), x)
    assert sorted(sizes) == [88, 168]  # leaves on which the loss does not depend are not summed


def record_payloads(monkeypatch):
    """The bytes of the payloads for which plans are asked from now on."""
    sizes = []
    for_payload = ftmesh.Plan.for_payload

    def record(self, num_bytes, *, wire_dtype=None):
        sizes.append(num_bytes)
        return for_payload(self, num_bytes, wire_dtype=wire_dtype)

    monkeypatch.setattr(ftmesh.Plan, "for_payload", record)
    return sizes
