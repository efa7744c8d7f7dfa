"""`Plan.value_and_grad` equals `jax.value_and_grad`, without collectives of JAX."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError
from ftmesh.collectives import compiled_cache
from ftmesh.testing import cpu_grid
from tests.support.whole_batch import (
    ARGS,
    PARAMS,
    WEIGHTS,
    X,
    Y,
    as_float32,
    assert_close,
    compiled,
    loss,
    losses,
    put,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

SHAPE = {"data": 12}
SPECS = P(), P("data"), P("data")


def weighted_losses(params, x, y, weights):
    return weights * losses(params, x, y), weights


class TestInJit:
    @pytest.mark.parametrize(
        "how",
        [
            "no mesh",
            "set",
            "explicit",
            pytest.param("of the arguments", marks=pytest.mark.slow),
            pytest.param("given", marks=pytest.mark.slow),
        ],
    )
    def test_mesh_of_any_source(self, even, how):
        mesh = even.jax_mesh("data")
        args, given = ARGS, mesh if how == "given" else None
        if how == "explicit":
            mesh = Mesh(mesh.devices, ("data",), axis_types=(AxisType.Explicit,))
        if how not in ("no mesh", "given"):
            args = put(mesh, ARGS, SPECS)
        run = even.value_and_grad(loss, mesh=given)
        if how == "set":
            with jax.set_mesh(mesh):
                program, result = compiled(run, *args)
        else:
            program, result = compiled(run, *args)
        assert_close(result, jax.value_and_grad(loss)(*ARGS))
        ftmesh.audit(program, "data").require_none()
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(result))

    @pytest.mark.parametrize("executor", ["xla", "ppermute"])
    def test_a_mesh_in_another_order(self, executor):
        plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), executor=executor)
        devices = plan.jax_mesh("data").devices.copy()
        devices[[1, 2]] = devices[[2, 1]]
        run = plan.value_and_grad(loss, mesh=Mesh(devices, "data"))
        with pytest.raises(CollectiveError, match="rank 1 should be"):
            jax.jit(run)(*ARGS)

    def test_an_argument_named_twice(self, even):
        with pytest.raises(ArgumentError, match=r"argnums \(0, 0\) name an argument more"):
            even.value_and_grad(loss, argnums=(0, 0))(*ARGS)

    def test_plain_jax_inserts_an_all_reduce(self, even):
        """The audit of the other tests would find it."""
        args = put(even.jax_mesh("data"), ARGS, SPECS)
        program, _ = compiled(jax.value_and_grad(loss), *args)
        assert ftmesh.audit(program, "data")

    def test_several_argnums(self, even):
        params, x, y = ARGS
        split = lambda v, x, y, w: loss({"w": w, "v": v}, x, y)  # noqa: E731
        args = params["v"], x, y, params["w"]
        result = jax.jit(even.value_and_grad(split, argnums=(-1, 0)))(*args)
        assert_close(result, jax.value_and_grad(split, argnums=(3, 0))(*args))

    def test_replicated_and_static_arguments(self, even):
        """A random key, a number, a flag of Python and a keyword argument."""

        def noisy(params, x, y, key, size, is_noisy, *, scale):
            noise = scale * jax.random.normal(key, y.shape) if is_noisy else 0
            return jnp.mean(losses(params, x, y + size * noise))

        args = *ARGS, jax.random.key(0), np.float32(0.5)
        run = even.value_and_grad(noisy)
        result = jax.jit(lambda *args: run(*args, True, scale=2.0))(*args)
        assert_close(result, jax.value_and_grad(noisy)(*args, True, scale=2.0))

    def test_rank_in_the_loss_raises(self, even):
        run = even.value_and_grad(lambda p, x: jnp.mean(p * x) * lax.axis_index("data"))
        with pytest.raises(ArgumentError, match=r"uses a mesh axis .*'data' is bound"):
            jax.eval_shape(run, jnp.float32(2), jnp.arange(24.0))


class TestBatchesOfAnySize:
    @pytest.mark.parametrize(
        "size", [13, *(pytest.param(n, marks=pytest.mark.slow) for n in (12, 35))]
    )
    def test_mean_over_examples(self, even, size):
        with jax.enable_x64(True):
            args = PARAMS, X[:size], Y[:size]
            program, result = compiled(even.value_and_grad(losses), *args)
            assert_close(result, jax.value_and_grad(loss)(*args), rtol=1e-12)
            ftmesh.audit(program, "data").require_none()

    def test_weighted(self, even):
        def mean(params, x, y, weights):
            return jnp.sum(weights * losses(params, x, y)) / weights.sum()

        with jax.enable_x64(True):
            args = PARAMS, X[:29], Y[:29], WEIGHTS[:29]
            result = jax.jit(even.value_and_grad(weighted_losses, weighted=True))(*args)
            assert_close(result, jax.value_and_grad(mean)(*args), rtol=1e-12)

    def test_weighted_sums_of_ranks(self, even):
        """As a loss over words gives them, of which ranks have different numbers."""

        def sums(*args):
            return jax.tree.map(jnp.sum, weighted_losses(*args))

        args = (*ARGS, *as_float32(WEIGHTS))
        result = jax.jit(even.value_and_grad(sums, weighted=True))(*args)
        assert_close(
            result, jax.value_and_grad(lambda *args: sums(*args)[0] / args[3].sum())(*args)
        )

    @pytest.mark.parametrize("size", [29, pytest.param(36, marks=pytest.mark.slow)])
    def test_with_idle_devices(self, size):
        plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "ring", with_idle=True)
        args = as_float32(PARAMS, X[:size], Y[:size])
        program, result = compiled(plan.value_and_grad(losses), *args)
        assert_close(result, jax.value_and_grad(loss)(*args))
        ftmesh.audit(program, "data").require_none()

    @pytest.mark.parametrize("weighted", [False, True])
    def test_one_number(self, even, weighted):
        def one(params, x, y):
            total = losses(params, x, y).sum()
            return (total, len(x)) if weighted else total / len(x)

        args = as_float32(PARAMS, X[:29], Y[:29])
        result = jax.jit(even.value_and_grad(one, weighted=weighted))(*args)
        assert_close(result, jax.value_and_grad(loss)(*args))


class TestAux:
    def test_rows_are_gathered_and_statistics_averaged(self, even):
        """Also statistics as long as a rank has examples; what is no matter of the batch stays."""

        def function(params, x, y):
            each = losses(params, x, y)
            aux = {"rows": x, "is_large": each > 1, "stats": (x.mean(0)[:3], None)}
            return each.mean(), {**aux, "same": (params["v"] > 0, 7)}

        program, result = compiled(even.value_and_grad(function, has_aux=True), *ARGS)
        assert_close(result, jax.value_and_grad(function, has_aux=True)(*ARGS))
        ftmesh.audit(program, "data").require_none()

    def test_rows_of_unequal_shares(self, even):
        def function(params, x, y):
            each = losses(params, x, y)
            return each, {"rows": x, "is_large": each > 1}

        args = as_float32(PARAMS, X[:29], Y[:29])
        program, ((_, aux), _) = compiled(even.value_and_grad(function, has_aux=True), *args)
        assert_close(aux, function(*args)[1])
        ftmesh.audit(program, "data").require_none()

    def test_sums_are_not_rounded_to_the_wire_dtype(self, even):
        def function(params, x, y):
            return losses(params, x, y), (jnp.sum(y), x.sum(0))

        run = even.value_and_grad(function, has_aux=True, wire_dtype="bfloat16")
        (value, aux), grads = jax.jit(run)(*ARGS)
        assert_close((value, aux), (loss(*ARGS), (Y.sum(), X.sum(0))))
        assert_close(grads, jax.grad(loss)(*ARGS), rtol=1e-2)

    def test_reduce_aux_raises(self, even):
        run = even.value_and_grad(loss, reduce_aux=lambda aux: aux)
        with pytest.raises(ArgumentError, match="aux is that of the whole batch: leave it out"):
            jax.eval_shape(run, *ARGS)


class TestBoundAxis:
    @pytest.mark.parametrize(
        ("form", "check_vma"),
        [("mean", True), ("weighted", True), pytest.param("each", False, marks=pytest.mark.slow)],
    )
    def test_in_shard_map(self, even, form, check_vma):
        """Typed as replicated: out_specs say so, and are checked."""
        function = {
            "mean": loss,
            "each": losses,
            "weighted": lambda params, x, y: (losses(params, x, y).sum(), len(x)),
        }[form]
        mapped = jax.shard_map(
            even.value_and_grad(function, weighted=form == "weighted"),
            mesh=even.jax_mesh("data"),
            in_specs=SPECS,
            out_specs=P(),
            check_vma=check_vma,
        )
        program, result = compiled(mapped, *ARGS)
        assert_close(result, jax.value_and_grad(loss)(*ARGS))
        ftmesh.audit(program, "data").require_none()

    @pytest.mark.parametrize("weighted", [False, True])
    @pytest.mark.parametrize("check_vma", [True, False])
    def test_a_loss_that_is_summed_over_ranks_already(self, even, weighted, check_vma):
        """As for one that was written for `jax.grad`, with a `pmean` in it."""

        def averaged(*args):
            if not weighted:
                return lax.pmean(loss(*args), "data")
            return lax.psum(losses(*args).sum(), "data"), lax.psum(len(args[1]), "data")

        mapped = jax.shard_map(
            even.value_and_grad(averaged, weighted=weighted),
            mesh=even.jax_mesh("data"),
            in_specs=SPECS,
            out_specs=P(),
            check_vma=check_vma,
        )
        assert_close(jax.jit(mapped)(*ARGS), jax.value_and_grad(loss)(*ARGS))

    def test_aux_is_local(self, even):
        mapped = jax.shard_map(
            lambda *args: even.value_and_grad(lambda *args: (loss(*args), args[1]), has_aux=True)(
                *args
            )[0][1],
            mesh=even.jax_mesh("data"),
            in_specs=SPECS,
            out_specs=P("data"),
        )
        assert_close(jax.jit(mapped)(*ARGS), ARGS[1])

    def test_in_pmap(self, even):
        params, x, y = ARGS
        run = jax.pmap(
            even.value_and_grad(loss, axis_name="batch"),
            axis_name="batch",
            in_axes=(None, 0, 0),
            devices=list(even.jax_mesh("batch").devices),
        )
        result = run(params, x.reshape(12, 3, -1), y.reshape(12, 3))
        expected = jax.value_and_grad(loss)(*ARGS)
        assert_close(jax.tree.map(lambda leaf: leaf[7], result), expected)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"specs": P("data")}, "gather the weight in the loss"), ({"mesh": 1}, "leave out mesh")],
    )
    def test_arguments_for_jit_raise(self, even, options, message):
        mapped = jax.shard_map(
            even.value_and_grad(loss, **options),
            mesh=even.jax_mesh("data"),
            in_specs=SPECS,
            out_specs=P(),
        )
        with pytest.raises(ArgumentError, match=message):
            jax.eval_shape(mapped, *ARGS)


@pytest.mark.parametrize(
    ("function", "args", "options", "message"),
    [
        (lambda params: 0.0, ARGS[:1], {}, "no arguments that could be the batch"),
        (loss, (*ARGS[:2], ARGS[2][:7]), {}, r"first dimensions of \[7, 36\]"),
        (loss, (*ARGS[:2], np.float32(1)), {"per_rank": True}, "replicated=2"),
        (loss, ARGS, {"argnums": 3}, r"given 3 arguments, and .* name \[3\]"),
        (loss, ARGS, {"replicated": 0}, r"\[0\] are both in argnums and in replicated"),
        (loss, ARGS, {"weighted": True}, r"returns \(sum, weight\), not an array of shape \(\)"),
        (lambda p, x, y: x @ p["w"], ARGS, {}, r"array of shape \(36, 8\) for 36 examples"),
        (lambda p, x, y: y[:2], ARGS, {}, r"array of shape \(2,\) for 36 examples"),
        (loss, as_float32(PARAMS, X[:7], Y[:7]), {}, "global batch of 7 is too small"),
    ],
)
def test_invalid_arguments(even, function, args, options, message):
    with pytest.raises(ArgumentError, match=message):
        jax.eval_shape(even.value_and_grad(function, **options), *args)


@pytest.mark.parametrize("per_rank", [False, True])
def test_batch_passed_by_keyword_raises(even, per_rank):
    """On a rank with one example it would be broadcast."""
    run = even.value_and_grad(lambda p, x, mask: jnp.mean(mask * p * x), per_rank=per_rank)
    with pytest.raises(ArgumentError, match="argument 'mask' of the loss has an array with 12"):
        jax.eval_shape(lambda x: run(jnp.float32(2), x, mask=x), jnp.arange(12.0))


class TestOutsideJit:
    def test_compiled_once(self, even):
        """The Python code of the loss runs at every call, as without a plan."""
        calls = []

        def function(params, x, y):
            calls.append(1)
            return scale * loss(params, x, y)

        scale = 1.0
        for scale in (1.0, jnp.float32(3), jnp.float32(4)):
            assert_close(even.value_and_grad(function)(*ARGS)[0], scale * loss(*ARGS))
        num_programs = len(compiled_cache._programs)
        assert_close(even.value_and_grad(function)(*ARGS)[1]["v"], 4 * jax.grad(loss)(*ARGS)["v"])
        assert len(calls) == 4
        assert len(compiled_cache._programs) == num_programs

    def test_second_call_is_fast(self, even):
        """In time of this thread: other tests may run at once."""
        run = even.value_and_grad(loss)
        jax.block_until_ready(run(*ARGS))
        times = []
        for _ in range(5):
            start = time.thread_time()
            jax.block_until_ready(run(*ARGS))
            times.append(time.thread_time() - start)
        assert min(times) < 0.05

    def test_few_programs_are_kept(self, even, monkeypatch):
        monkeypatch.setattr(compiled_cache, "MAX_PROGRAMS", 1)
        for scale in (5.0, 6.0):
            run = even.value_and_grad(lambda p, x, s=scale: s * jnp.mean(p * x))
            assert_close(run(1.0, np.ones(12, np.float32)), (scale, scale))
        assert len(compiled_cache._programs) == 1


class TestXlaExecutor:
    def test_every_loss_is_computed(self):
        """With a batch that ranks share equally, XLA exchanges examples."""

        def function(params, x, y):
            each = losses(params, x, y)
            return jnp.median(each), (jnp.sort(each), each @ each)

        plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), executor="xla")
        program, result = compiled(plan.value_and_grad(function, has_aux=True), *ARGS)
        assert_close(result, jax.value_and_grad(function, has_aux=True)(*ARGS))
        audit = ftmesh.audit(program, "data", plan=plan, mesh=plan.jax_mesh("data"))
        audit.require_none()
        assert audit.native

    def test_weights_sharded_along_the_axis(self):
        plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), executor="xla")
        w = np.float32(X[:24, :1])

        def function(w, x, y):
            return jnp.mean((y - w[:, 0].sum()) ** 2)

        run = plan.value_and_grad(function, specs=P("data"))
        result = jax.jit(run)(w, *ARGS[1:])
        assert_close(result, jax.value_and_grad(function)(w, *ARGS[1:]))
        assert result[1].sharding.spec == P("data")

    def test_batch_of_any_size(self):
        plan = ftmesh.plan(cpu_grid("4x4", failed="2x2@2,2"), executor="xla")
        args = as_float32(PARAMS, X[:29], Y[:29])
        assert_close(jax.jit(plan.value_and_grad(loss))(*args), jax.value_and_grad(loss)(*args))
