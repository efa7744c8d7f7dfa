"""The dtypes in which sums are made and sent, and 16-bit sums on hundreds of ranks."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import ArgumentError, CollectiveError
from ftmesh.collectives import with_mean_gradients
from ftmesh.collectives.operands import Precision, choose_precision
from ftmesh.collectives.reduce_scatter import gather_rows, scatter_rows
from ftmesh.execute.context import WireDtypes
from ftmesh.testing import on_one_device
from tests.support.on_devices import per_rank, plan_on_cpu, without_reduce_scatter
from tests.support.roundings import (
    HALF_PRECISION,
    LARGE,
    assert_accurate,
    exact_means,
    large_plan,
    lax_means,
    sample_inputs,
)
from tests.support.slow import slow

F32, BF16, F16 = map(jnp.dtype, (np.float32, jnp.bfloat16, np.float16))


def dtypes_sent(plan, run, dtype):
    """The dtypes that a function sends, in the lowered program."""
    mapped = jax.shard_map(
        lambda x: run(x[0]), mesh=plan.jax_mesh("data"), in_specs=P("data"), out_specs=P()
    )
    x = jax.ShapeDtypeStruct((plan.program.num_ranks, 9), dtype)
    text = jax.jit(mapped).lower(x).as_text()
    return set(re.findall(r"collective_permute.*-> tensor<[0-9x]*x(\w+)>", text))


@pytest.mark.parametrize(("shape", "failed", "algorithm"), LARGE)
def test_bfloat16_means_of_hundreds_of_ranks(shape, failed, algorithm):
    plan = large_plan(shape, failed, algorithm)
    ranks = plan.program.num_ranks
    narrow = {name: sample_inputs(ranks, dtype) for name, dtype in HALF_PRECISION.items()}
    wide = sample_inputs(ranks, np.float32)

    @on_one_device
    def means(narrow, wide):
        return plan.pmean(narrow, "data"), {
            name: plan.pmean(wide, "data", wire_dtype=dtype)
            for name, dtype in HALF_PRECISION.items()
        }

    result = jax.device_get(means(narrow, wide))
    assert all((leaf == leaf[:1]).all() for leaf in jax.tree.leaves(result)), "ranks differ"
    of_halves, on_the_wire = jax.tree.map(lambda leaf: leaf[0], result)
    for name, dtype in HALF_PRECISION.items():
        assert of_halves[name]["ones"].dtype == dtype
        assert on_the_wire[name]["ones"].dtype == np.float32
        assert (of_halves[name]["ones"] == 1).all()
        assert (on_the_wire[name]["ones"] == 1).all()
        given = narrow[name]
        assert_accurate(of_halves[name], exact_means(given), lax_means(given, dtype))
        assert_accurate(on_the_wire[name], exact_means(wide), lax_means(wide, dtype))


@pytest.mark.slow
def test_accumulate_in_bfloat16_if_asked():
    """The fault that all this is there to prevent."""
    plan = large_plan("16x32", "4x2@6,14", "ring")
    mean = on_one_device(lambda x: plan.pmean(x, "data", accumulate_dtype=jnp.bfloat16))
    assert float(mean(np.ones((504, 1), BF16))[0, 0]) == pytest.approx(256 / 504, rel=0.01)


class TestChoosePrecision:
    def test_small_floats_are_added_in_float32(self):
        assert choose_precision(BF16) == Precision(F32, BF16)
        assert choose_precision(F16) == Precision(F32, F16)
        assert choose_precision(jnp.float8_e4m3fn) == Precision(F32, jnp.dtype(jnp.float8_e4m3fn))
        for dtype in (np.float32, np.int8, np.int32, np.uint8, np.complex64):
            assert choose_precision(dtype) == Precision(np.dtype(dtype), np.dtype(dtype))

    def test_options(self):
        assert choose_precision(F32, BF16) == Precision(F32, BF16)
        assert choose_precision(BF16, None, BF16) == Precision(BF16, BF16)
        assert choose_precision(BF16, F32) == Precision(F32, F32)
        assert choose_precision(np.int32, BF16, F32) == Precision(
            np.dtype(np.int32), np.dtype(np.int32)
        )

    @pytest.mark.parametrize(("depth", "partials"), [(2, BF16), (3, F32), (503, F32)])
    def test_partial_sums_are_narrow_on_shallow_plans(self, depth, partials):
        assert choose_precision(BF16).wire(depth) == WireDtypes(partials, BF16)

    def test_float16_partial_sums_are_float32(self):
        assert choose_precision(F16).wire(1) == WireDtypes(F32, F16)

    def test_wide_leaves_are_sent_as_they_are(self):
        assert choose_precision(F32).wire(1000) == WireDtypes()
        assert choose_precision(BF16, None, BF16).wire(1000) == WireDtypes()

    @pytest.mark.parametrize("option", ["wire_dtype", "accumulate_dtype"])
    @pytest.mark.parametrize("dtype", [np.int8, "int32", bool, np.complex64, "nonsense", 3])
    def test_invalid_dtypes(self, twelve, option, dtype):
        for collective in (twelve.psum, twelve.pmean, twelve.psum_scatter):
            with pytest.raises(CollectiveError, match=f"{option} must be a floating dtype, one of"):
                on_one_device(lambda x, f=collective: f(x, "data", **{option: dtype}))(
                    np.ones((12, 12), np.float32)
                )

    def test_float64_needs_x64(self, twelve):
        def total(x):
            return twelve.psum(x, "data", accumulate_dtype=np.float64)

        with pytest.raises(CollectiveError, match="float64, which JAX supports only with jax_ena"):
            on_one_device(total)(np.ones((12, 3), np.float32))
        with jax.enable_x64(True):
            x = np.full((12, 3), 0.1, np.float32)
            got = on_one_device(total)(x)
        assert got.dtype == np.float32
        assert (got == np.float32(x[:, 0].astype(np.float64).sum())).all()

    @pytest.mark.parametrize("bucket_bytes", [0, -1, 1.5, None, True])
    def test_invalid_bucket_bytes(self, twelve, bucket_bytes):
        run = on_one_device(lambda x: twelve.psum(x, "data", bucket_bytes=bucket_bytes))
        with pytest.raises(ArgumentError, match="bucket_bytes must be a positive whole number"):
            run(np.ones((12, 3)))


class TestDtypesOnTheWire:
    def sent(self, plan, dtype, **options):
        return dtypes_sent(plan, lambda x: plan.psum(x, "data", **options), dtype)

    def test_deep_plan(self, even):
        assert self.sent(even, BF16) == {"f32", "bf16"}
        assert self.sent(even, F32) == {"f32"}
        assert self.sent(even, F32, wire_dtype=F16) == {"f32", "f16"}
        assert self.sent(even, BF16, accumulate_dtype=BF16) == {"bf16"}
        assert self.sent(even, np.int8) == {"i8"}

    def test_shallow_plan(self):
        plan = plan_on_cpu("two_dim", "2x2", "")
        assert plan.program.depth == 2
        assert self.sent(plan, BF16) == {"bf16"}
        assert self.sent(plan, F32, wire_dtype=BF16) == {"bf16"}


class TestMeans:
    def test_divided_before_rounding(self, twelve):
        """Where a sum would not fit, nor its partial sums; and rounded once, not twice."""
        large = np.full((12, 3), 60000, F16)
        odd = np.random.default_rng(0).uniform(1, 2, (12, 300)).astype(BF16)
        got = per_rank(twelve, lambda t: twelve.pmean(t, "data"), (large, odd))
        assert (got[0] == 60000).all()
        once = (odd.astype(np.float32).sum(axis=0) / np.float32(12)).astype(BF16)
        assert (got[1][0] != once).mean() < 0.01  # ties, by another order of additions

    def test_float32_means_are_divided_sums(self, twelve):
        x = np.random.default_rng(0).normal(size=(12, 300)).astype(np.float32)
        total, mean = per_rank(
            twelve, lambda x: (twelve.psum(x, "data"), twelve.pmean(x, "data")), x
        )
        np.testing.assert_array_equal(mean, jax.jit(lambda total: total / 12)(total))

    @pytest.mark.parametrize(
        ("check_vma", "wire_dtype", "rtol"),
        [slow(True, None, 1e-5), (False, None, 1e-5), (True, BF16, 0.02)],
    )
    def test_derivatives_are_divided_too(self, twelve, check_vma, wire_dtype, rtol):
        """Those that are rounded to the wire dtype are divided before."""
        x = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)

        def gradient(pmean):
            return jax.grad(lambda x: (pmean(x**2, "data") ** 2).sum())

        pmean = partial(twelve.pmean, wire_dtype=wire_dtype)
        ours = per_rank(twelve, gradient(pmean), x, check_vma=check_vma)
        laxs = per_rank(twelve, gradient(jax.lax.pmean), x, check_vma=check_vma)
        np.testing.assert_allclose(ours, laxs, rtol=rtol)

    @pytest.mark.slow
    def test_gradients_after_and_during_the_backward_pass(self):
        plan = large_plan("16x32", "4x2@6,14", "row_pair")
        ones = np.ones((504, 3), BF16)
        weights = jnp.ones(3, BF16)

        def during(x):
            return jax.grad(
                lambda w: (with_mean_gradients(w, "data", plan=plan) * x).astype(F32).sum()
            )(weights)

        def after(x):
            return plan.pmean(x, "data")

        for run in (during, after):
            assert (on_one_device(run)(ones) == 1).all()


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_bfloat16_psum_scatter(algorithm):
    plan = plan_on_cpu(algorithm, "4x4", "2x2@0,0")
    x = np.full((12, 12, 7), 1 + 3 * 2**-7, BF16)
    mine = per_rank(plan, lambda x: plan.psum_scatter(x, "data"), x)
    assert (mine == np.asarray(12 * (1 + 3 * 2**-7), BF16)).all()

    def derivative(x):
        """Of a gather, which adds up what comes back."""
        return jax.grad(lambda x: plan.all_gather(x, "data").astype(F32).sum() * (1 + 3 / 128))(x)

    back = per_rank(plan, derivative, x[:, 0])
    assert (back == np.asarray(12 * (1 + 3 * 2**-7), BF16)).all()


@pytest.mark.slow  # test_sharded_precision.py has a step of that size
def test_bfloat16_rows():
    plan = large_plan("16x32", "4x2@6,14", "ring")

    def there_and_back(x, **options):
        row = scatter_rows(x, "data", plan=plan, mean=True, **options)
        return gather_rows(row, "data", plan=plan)

    ones = np.ones((504, 504, 1), BF16)
    assert (on_one_device(there_and_back)(ones) == 1).all()
    asked = on_one_device(lambda x: there_and_back(x, accumulate_dtype=BF16))
    assert float(asked(ones)[0, 0, 0]) < 0.6


@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_float16_rows_whose_sum_would_overflow(algorithm):
    plan = plan_on_cpu(algorithm, "4x4", "2x2@0,0")
    x = np.full((12, 12, 5), 60000, F16)
    mean = per_rank(plan, lambda x: scatter_rows(x, "data", plan=plan, mean=True), x)
    assert (mean == 60000).all()


class TestWithoutReduceScatter:
    """An all-reduce in which nobody owns a sum before it goes out."""

    def plan(self, plan):
        return dataclasses.replace(plan, schedule=without_reduce_scatter(plan.schedule), proof=None)

    @pytest.mark.parametrize(
        ("dtype", "options"),
        [
            (np.int32, {}),
            slow(np.int32, {"wire_dtype": BF16}),
            slow(F32, {}),
            (F32, {"wire_dtype": BF16}),
            (BF16, {}),
            slow(BF16, {"wire_dtype": BF16}),
            slow(F16, {}),
            slow(F16, {"wire_dtype": BF16}),
        ],
        ids=str,
    )
    def test_sums_and_means(self, twelve, dtype, options):
        plan = self.plan(twelve)
        assert not plan.program.reduce_scatter
        x = np.random.default_rng(0).integers(0, 5, (12, 31)).astype(dtype)
        run = on_one_device(
            lambda x: (plan.psum(x, "data", **options), plan.pmean(x, "data", **options))
        )
        total, mean = jax.device_get(run(x))
        exact = x.astype(np.float64).sum(axis=0)
        for result, want in ((total, exact), (mean, exact / 12)):
            assert (result == result[0]).all()
            np.testing.assert_allclose(result[0].astype(np.float64), want, rtol=2**-8)

    def test_psum_scatter_and_all_gather(self, twelve):
        plan = self.plan(twelve)
        x = np.random.default_rng(0).integers(0, 5, (12, 12)).astype(BF16)
        mine, every = on_one_device(
            lambda x: (plan.psum_scatter(x, "data"), plan.all_gather(x, "data"))
        )(x)
        np.testing.assert_array_equal(mine, x.astype(np.float32).sum(axis=0))
        np.testing.assert_array_equal(every, np.broadcast_to(x, (12, 12, 12)))


@pytest.mark.parametrize(
    "name",
    [
        "float8_e5m2fnuz",
        *map(slow, ("float8_e4m3fnuz", "float8_e3m4", "float8_e4m3b11fnuz")),
    ],
)
def test_other_float_formats_are_added_in_float32(name):
    plan = ftmesh.plan(ftmesh.Topology.grid("8x8", failed="2x2@2,2"), "row_pair")
    result = on_one_device(lambda x: plan.pmean(x, "data"))(jnp.ones((60, 3), name))
    assert result.dtype == name
    np.testing.assert_array_equal(result.astype(np.float32), 1)


def test_all_gather_of_a_format_without_zero():
    plan = plan_on_cpu("row_pair", "4x4", "2x2@0,0")  # some own nothing: sums stand in for a gather
    result = on_one_device(lambda x: plan.all_gather(x, "data"))(
        jnp.ones((12, 3), "float8_e8m0fnu")
    )
    np.testing.assert_array_equal(result.astype(np.float32), 1)
