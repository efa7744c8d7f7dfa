"""`Plan.value_and_grad` equals `jax.value_and_grad`, without collectives of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError
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

    def test_replicated_arguments(self, even):
        """A random key that every rank folds its index into, and a keyword argument."""

        def noisy(params, x, y, key, *, scale):
            own = jax.random.fold_in(key, lax.axis_index("data"))
            return loss(params, x, y) + scale * jax.random.normal(own)

        key = jax.random.key(0)
        run = even.value_and_grad(noisy, replicated=3)
        value, _ = jax.jit(lambda *args: run(*args, scale=2.0))(*ARGS, key)
        noise = [jax.random.normal(jax.random.fold_in(key, rank)) for rank in range(12)]
        assert float(value) == pytest.approx(float(loss(*ARGS)) + 2 * np.mean(noise), rel=1e-5)


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
    def test_scalar_loss_of_unequal_shares_raises(self, even, weighted):
        def one(params, x, y):
            total = losses(params, x, y).sum()
            return (total, len(x)) if weighted else total / len(x)

        with pytest.raises(ArgumentError, match="return one number for each example"):
            jax.eval_shape(
                even.value_and_grad(one, weighted=weighted), *as_float32(PARAMS, X[:29], Y[:29])
            )


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

    @pytest.mark.parametrize(
        ("aux", "size", "message"),
        [
            (lambda x: jnp.sum(x > 0), 36, r"aux\['it'\] has dtype int32, .* give reduce_aux="),
            (lambda x: x.T, 36, r"has shape \(6, 3\) for 3 examples and \(6, 36\) for 36"),
            (lambda x: x.mean(0), 29, "padding would count in it"),
        ],
    )
    def test_ambiguous_aux_raises(self, even, aux, size, message):
        def function(params, x, y):
            return losses(params, x, y), {"it": aux(x)}

        with pytest.raises(ArgumentError, match=message):
            jax.eval_shape(
                even.value_and_grad(function, has_aux=True), *as_float32(PARAMS, X[:size], Y[:size])
            )

    def test_reduce_aux(self, even):
        run = even.value_and_grad(
            lambda params, x, y: (loss(params, x, y), jnp.sum(x > 0)),
            has_aux=True,
            reduce_aux=lambda count: even.psum(count, "data"),
        )
        (_, count), _ = jax.jit(run)(*ARGS)
        assert count == (X > 0).sum()


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
            devices=list(even.topology.devices),
        )
        result = run(params, x.reshape(12, 3, -1), y.reshape(12, 3))
        expected = jax.value_and_grad(loss)(*ARGS)
        assert_close(jax.tree.map(lambda leaf: leaf[7], result), expected)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({"specs": P("data")}, "gather the weights"), ({"mesh": 1}, "leave out mesh")],
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
        (loss, (*ARGS[:2], np.float32(1)), {}, "replicated=2"),
        (loss, ARGS, {"argnums": 3}, r"given 3 arguments, and .* name \[3\]"),
        (loss, ARGS, {"replicated": 0}, r"\[0\] are both in argnums and in replicated"),
        (loss, ARGS, {"weighted": True}, r"returns \(sum, weight\), not an array of shape \(\)"),
        (lambda p, x, y: x @ p["w"], ARGS, {}, r"array of shape \(3, 8\) for 3 examples"),
        (lambda p, x, y: y[:2], ARGS, {}, r"array of shape \(2,\) for 3 examples"),
        (loss, as_float32(PARAMS, X[:7], Y[:7]), {}, "global batch of 7 is too small"),
    ],
)
def test_invalid_arguments(even, function, args, options, message):
    with pytest.raises(ArgumentError, match=message):
        jax.eval_shape(even.value_and_grad(function, **options), *args)


class TestBatchSizeDependence:
    @pytest.mark.parametrize(
        "aux",
        [lambda x: jnp.sum(jnp.ones_like(x)), lambda x: x.shape[0], lambda x: jnp.arange(len(x))],
        ids=["sum of ones", "a number", "numbers of rows"],
    )
    def test_aux_that_depends_on_it_raises(self, even, aux):
        run = even.value_and_grad(lambda p, x: (jnp.mean(p * x), {"n": aux(x)}), has_aux=True)
        with pytest.raises(ArgumentError, match=r"aux\['n'\] depends on the number of examples"):
            jax.eval_shape(run, jnp.float32(2), jnp.arange(24.0))

    def test_batch_passed_by_keyword_raises(self, even):
        """With an example per rank it would be broadcast."""
        run = even.value_and_grad(lambda p, x, mask: jnp.mean(mask * p * x))
        with pytest.raises(ArgumentError, match="argument 'mask' of the loss has an array with 12"):
            jax.eval_shape(lambda x: run(jnp.float32(2), x, mask=x), jnp.arange(12.0))
