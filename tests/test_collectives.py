"""Collectives on emulated devices and logical ranks, against NumPy and against lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import CollectiveError, Topology
from ftmesh.testing import cpu_grid, on_one_device

CASES = [
    ("ring", "4x4", ""),
    ("ring", "4x4", "2x2@2,0"),
    ("ring", "8x8", "2x2@2,2"),
    ("two_dim", "4x4", ""),
    ("two_dim", "8x8", ""),
    ("row_pair", "4x4", ""),
    ("row_pair", "8x6", ""),
    ("row_pair", "6x6", "2x2@2,2"),
    ("row_pair", "8x8", "4x2@2,2"),
    ("row_pair", "8x8", "2x2@0,0;2x4@4,4"),
]


def planned(algorithm, shape, failed):
    return ftmesh.plan(cpu_grid(shape, failed=failed), algorithm)


@pytest.fixture(params=CASES, ids=" ".join)
def plan(request):
    return planned(*request.param)


@pytest.fixture
def small():
    """Twelve devices around a hole at the corner; some chips own nothing."""
    return planned("row_pair", "4x4", "2x2@0,0")


def ranks_of(plan):
    return plan.program.num_ranks


EACH = P("data")


def per_rank(plan, run, *args, out=EACH, check_vma=True):
    """`run` on every device: arguments and results have a leading dimension of ranks."""

    def body(*args):
        result = run(*(jax.tree.map(lambda x: x[0], arg) for arg in args))
        return jax.tree.map(lambda x: x[None], result) if out == EACH else result

    mapped = jax.shard_map(
        body, mesh=plan.jax_mesh("data"), in_specs=P("data"), out_specs=out, check_vma=check_vma
    )
    return jax.device_get(jax.jit(mapped)(*args))


def odd_tree(num_ranks, *, every_dtype=True):
    rng = np.random.default_rng(0)
    tree = {
        "kernel": rng.normal(size=(num_ranks, 13, 7)).astype(np.float32),
        "bias": rng.normal(size=(num_ranks, 5)).astype(np.float32),
        "scalar": rng.normal(size=num_ranks).astype(np.float32),
        "empty": np.zeros((num_ranks, 0, 3), np.float32),
        "count": rng.integers(-100, 100, (num_ranks, 3), np.int32),
        "flags": rng.random((num_ranks, 11)) > 0.5,
        "wave": (rng.normal(size=(num_ranks, 4)) + 1j).astype(np.complex64),
        "half": rng.integers(-8, 8, (num_ranks, 9)).astype(jnp.bfloat16),
    }
    return tree if every_dtype else {name: tree[name] for name in ("kernel", "bias", "count")}


def assert_sums(total, parts):
    """Exact for integers; for floats, the worst that any order of additions can do.

    Adding n numbers in any order is off by at most (n - 1) eps times the sum of magnitudes, and so
    is each of the two results compared.
    """
    exact = parts.astype(np.complex128 if np.iscomplexobj(parts) else np.float64).sum(axis=0)
    if not np.issubdtype(total.dtype, np.inexact) and total.dtype != jnp.bfloat16:
        np.testing.assert_array_equal(total, exact)
        return
    eps = float(jnp.finfo(total.dtype).eps)
    bound = len(parts) * eps * np.abs(parts.astype(exact.dtype)).sum(axis=0)
    assert (np.abs(np.asarray(total, exact.dtype) - exact) <= bound).all()


@pytest.mark.parametrize("check_vma", [True, False])
def test_psum_of_a_tree_of_odd_sizes(plan, check_vma):
    tree = odd_tree(ranks_of(plan), every_dtype=ranks_of(plan) <= 16)
    ours = per_rank(plan, lambda t: plan.psum(t, "data"), tree, check_vma=check_vma)
    laxs = per_rank(plan, lambda t: lax.psum(t, "data"), tree, check_vma=check_vma)
    for name, parts in tree.items():
        assert ours[name].dtype == laxs[name].dtype
        assert ours[name].shape == laxs[name].shape
        assert_sums(ours[name][0], parts)
        assert len({row.tobytes() for row in ours[name]}) == 1, "ranks differ"


def test_two_runs_give_the_same_bits(small):
    tree = odd_tree(12)
    first, second = (per_rank(small, lambda t: small.psum(t, "data"), tree) for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in tree)


def test_the_result_is_typed_as_the_same_everywhere(small):
    tree = odd_tree(12)
    mean = per_rank(small, lambda t: small.pmean(t, "data"), tree, out=P())
    reference = per_rank(small, lambda t: lax.pmean(t, "data"), tree, out=P())
    for name in tree:
        assert mean[name].dtype == reference[name].dtype
        np.testing.assert_allclose(mean[name], reference[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "block", "algorithm", "ranks"),
    [
        ("16x32", "4x2@6,14", "row_pair", 504),
        ("16x32", "4x2@6,14", "ring", 504),
        ("32x32", "4x2@14,14", "row_pair", 1016),
        ("32x32", "4x2@14,14", "ring", 1016),
        ("16x32", "", "two_dim", 512),
    ],
)
def test_the_paper_meshes_on_one_device(shape, block, algorithm, ranks):
    plan = ftmesh.plan(Topology.grid(shape, failed=block), algorithm, verify=False)
    rng = np.random.default_rng(1)
    tree = {
        "ints": rng.integers(-1000, 1000, (ranks, 701), np.int32),
        "floats": rng.normal(size=(ranks, 1301)).astype(np.float32),
    }
    total = jax.device_get(on_one_device(lambda t: plan.psum(t, "data"))(tree))
    for name, parts in tree.items():
        assert_sums(total[name][0], parts)
        assert (total[name] == total[name][0]).all()


class TestScatterAndGather:
    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize(
        "options",
        [
            {"tiled": True},
            {"scatter_dimension": 2, "tiled": True},
            {"scatter_dimension": 2},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
    def test_psum_scatter(self, algorithm, options, check_vma):
        plan = planned(algorithm, "4x4", "2x2@0,0")
        x = np.random.default_rng(0).integers(0, 99, (12, 24, 3, 12), np.int32)
        ours = per_rank(
            plan, lambda x: plan.psum_scatter(x, "data", **options), x, check_vma=check_vma
        )
        laxs = per_rank(
            plan, lambda x: lax.psum_scatter(x, "data", **options), x, check_vma=check_vma
        )
        np.testing.assert_array_equal(ours, laxs)

    @pytest.mark.parametrize("check_vma", [True, False])
    @pytest.mark.parametrize(
        "options", [{}, {"axis": 1}, {"axis": -1}, {"axis": 1, "tiled": True}], ids=str
    )
    @pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
    def test_all_gather(self, algorithm, options, check_vma):
        plan = planned(algorithm, "4x4", "2x2@0,0")
        tree = odd_tree(12)
        tree = {name: tree[name] for name in ("kernel", "flags", "wave", "half")}
        tree = {name: x.reshape(12, 1, -1) for name, x in tree.items()}
        ours, laxs = (
            per_rank(plan, lambda t, g=g: g(t, "data", **options), tree, check_vma=check_vma)
            for g in (plan.all_gather, lax.all_gather)
        )
        for name in tree:
            assert ours[name].dtype == laxs[name].dtype
            np.testing.assert_array_equal(ours[name], laxs[name])

    def test_all_gather_keeps_every_bit(self, small):
        odd = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-37], np.float32)
        x = np.tile(odd, (12, 1))
        ours = per_rank(small, lambda x: small.all_gather(x, "data"), x)
        assert (ours.view(np.uint32) == x.view(np.uint32)).all()

    def test_shapes_that_do_not_divide_are_refused(self, small):
        x = np.zeros((12, 25, 12), np.float32)
        with pytest.raises(CollectiveError, match="dimension 0 has size 25, and must have a multi"):
            per_rank(small, lambda x: small.psum_scatter(x, "data", tiled=True), x)
        with pytest.raises(CollectiveError, match="must have 12, the number of ranks"):
            per_rank(small, lambda x: small.psum_scatter(x, "data"), x)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_owners_hold_the_sum_and_others_nothing(self, small, check_vma):
        x = np.random.default_rng(0).integers(1, 99, (12, 101)).astype(np.float32)
        to_owners = lambda x: ftmesh.reduce_to_owners(x, "data", plan=small)  # noqa: E731
        shards = per_rank(small, to_owners, x, check_vma=check_vma)
        idle = [rank for rank in range(12) if rank not in small.schedule.owner]
        assert len(idle) == 4
        assert (shards[idle] == 0).all()
        assert shards.sum() == x.sum()

        def there_and_back(x):
            shard = ftmesh.reduce_to_owners(x, "data", plan=small)
            return ftmesh.gather_from_owners(2 * shard, "data", plan=small, size=101)

        whole = per_rank(small, there_and_back, x, out=P(), check_vma=check_vma)
        np.testing.assert_array_equal(whole, 2 * x.sum(axis=0))


class TestContexts:
    """Whatever lax.psum works in, with the same result."""

    def both(self, plan, write, x, **options):
        """`write(psum)` is a function of one rank; run it with ours and with lax's."""
        ours = per_rank(plan, write(lambda x: plan.psum(x, "data")), x, **options)
        laxs = per_rank(plan, write(lambda x: lax.psum(x, "data")), x, **options)
        np.testing.assert_allclose(ours, laxs, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_reverse_and_forward_derivatives(self, small, check_vma):
        x = np.random.default_rng(0).normal(size=(12, 17)).astype(np.float32)
        options = {"check_vma": check_vma}

        def loss(psum):
            return lambda x: jnp.sin(psum(0.1 * x**2)).sum()

        self.both(small, lambda psum: jax.grad(loss(psum)), x, **options)
        self.both(
            small, lambda psum: lambda x: jax.jvp(loss(psum), (x,), (x + 1,))[1], x, **options
        )
        twice = lambda psum: jax.grad(lambda x: jax.grad(loss(psum))(x).sum())  # noqa: E731
        self.both(small, twice, x, **options)

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_scan_and_remat(self, small, check_vma):
        x = np.random.default_rng(0).normal(size=(12, 9)).astype(np.float32)

        def steps(psum):
            def step(carry, _):
                carry = carry * 0.1 + jax.checkpoint(lambda c: psum(c * carry))(carry)
                return carry, carry.sum()

            def run(x):
                last, sums = lax.scan(step, x, None, length=3)
                return last.sum() + sums.sum()

            return jax.grad(run)

        self.both(small, steps, x, check_vma=check_vma)

    def test_derivatives_of_scatter_and_gather(self, small):
        x = np.random.default_rng(0).normal(size=(12, 24)).astype(np.float32)

        def gradient(collective, **options):
            return jax.grad(lambda v: (collective(v, "data", **options) ** 2).sum())

        for plan in (small, planned("ring", "4x4", "2x2@0,0")):
            for ours, theirs, options in (
                (plan.psum_scatter, lax.psum_scatter, {"tiled": True}),
                (plan.all_gather, lax.all_gather, {}),
            ):
                np.testing.assert_allclose(
                    per_rank(plan, gradient(ours, **options), x),
                    per_rank(plan, gradient(theirs, **options), x),
                    rtol=1e-5,
                )

    def test_a_vmap_inside(self, small):
        x = np.random.default_rng(0).normal(size=(12, 3, 9, 2)).astype(np.float32)
        self.both(small, lambda psum: jax.vmap(psum, in_axes=1, out_axes=1), x)

    def test_without_jit(self, small):
        x = np.random.default_rng(0).integers(0, 9, (12, 5))
        run = jax.shard_map(
            lambda x: small.psum(x[0], "data"),
            mesh=small.jax_mesh("data"),
            in_specs=P("data"),
            out_specs=P(),
        )
        np.testing.assert_array_equal(run(x), x.sum(axis=0))

    def test_pmap(self, small):
        x = np.random.default_rng(0).integers(0, 9, (12, 5))
        run = jax.pmap(
            lambda x: small.psum(x, "data"), axis_name="data", devices=small.topology.devices
        )
        np.testing.assert_array_equal(run(x)[3], x.sum(axis=0))

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_a_mesh_with_another_axis(self, check_vma):
        plan = ftmesh.plan(Topology.grid("4x4", failed="2x2@0,0"))
        mesh = Mesh(np.array(jax.devices()[:24]).reshape(12, 2), ("data", "model"))
        x = np.random.default_rng(0).integers(0, 9, (12, 2, 5))

        def run(psum):
            body = lambda x: psum(x[0])[None]  # noqa: E731
            out = P(None, "model")
            return jax.jit(
                jax.shard_map(
                    body, mesh=mesh, in_specs=P("data", "model"), out_specs=out, check_vma=check_vma
                )
            )(x)

        ours = run(lambda x: plan.psum(x, "data"))
        np.testing.assert_array_equal(ours, run(lambda x: lax.psum(x, "data")))
        np.testing.assert_array_equal(ours[0], x.sum(axis=0))

    def test_constants_are_multiplied_as_in_lax(self, small):
        assert per_rank(small, lambda x: x + small.psum(1, "data"), np.zeros(12, int))[0] == 12
        assert per_rank(small, lambda x: x + small.psum(True, "data"), np.zeros(12, int))[0] == 12


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "uint32", "float16", "bfloat16", "float32", "complex64"]
)
def test_every_dtype_that_lax_sums(small, dtype):
    x = np.random.default_rng(0).integers(0, 5, (12, 31)).astype(dtype)
    ours = on_one_device(lambda x: small.psum(x, "data"))(x)
    laxs = on_one_device(lambda x: lax.psum(x, "data"))(x)
    assert ours.dtype == laxs.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(ours, laxs)  # small whole numbers: exact in every dtype


def test_double_precision(small):
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(12, 31))
        ours = on_one_device(lambda x: small.psum(x, "data"))(x)
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours[0], x.sum(axis=0), rtol=1e-13, atol=1e-14)


class TestOptions:
    def test_buckets_of_any_size_give_the_same(self, small):
        tree = {str(i): np.random.default_rng(i).integers(0, 99, (12, 50 + i)) for i in range(6)}
        results = [
            per_rank(small, lambda t, b=b: small.psum(t, "data", bucket_bytes=b), tree)
            for b in (1, 300, 10**9)
        ]
        for name, x in tree.items():
            for result in results:
                np.testing.assert_array_equal(result[name][0], x.sum(axis=0))

    def test_bf16_on_the_wire_with_fp32_sums(self, small):
        x = np.random.default_rng(0).normal(size=(12, 400)).astype(np.float32)
        total = per_rank(small, lambda x: small.psum(x, "data", wire_dtype=jnp.bfloat16), x)
        assert total.dtype == np.float32
        assert (total == total[0]).all(), "owners must keep what others get"
        # Each partial sum is rounded to 8 bits of mantissa once per hop, at most 11 hops and the
        # gather: half an ulp, 2**-9, of a partial sum that is no larger than the sum of magnitudes.
        bound = 12 * 2.0**-9 * np.abs(x).sum(axis=0)
        assert (np.abs(total[0] - x.sum(axis=0)) <= bound).all()
        assert (total[0] != x.sum(axis=0)).any()

    def test_bf16_leaves_summed_in_fp32(self, small):
        x = np.full((12, 40), 1 + 3 * 2**-7, jnp.bfloat16)
        plain = per_rank(small, lambda x: small.psum(x, "data"), x)
        wide = per_rank(small, lambda x: small.psum(x, "data", accumulate_dtype=jnp.float32), x)
        assert wide.dtype == plain.dtype == jnp.bfloat16
        exact = 12 * (1 + 3 * 2**-7)
        assert abs(float(wide[0, 0]) - exact) <= 2**-5  # half an ulp of bfloat16 near 12
        assert abs(float(plain[0, 0]) - exact) > abs(float(wide[0, 0]) - exact)


def test_two_devices_per_chip():
    plan = ftmesh.plan(Topology((4, 4), (False, False), frozenset({(0, 0), (1, 0), (0, 1), (1, 1)}),
                                devices_per_chip=2), "row_pair")  # fmt: skip
    assert ranks_of(plan) == 24
    x = np.random.default_rng(0).integers(0, 99, (24, 77))
    total = on_one_device(lambda x: plan.psum(x, "data"))(x)
    np.testing.assert_array_equal(total, np.tile(x.sum(axis=0), (24, 1)))
    mesh = Mesh(np.array(jax.devices()[:24]), ("data",))
    body = jax.shard_map(
        lambda x: plan.psum(x[0], "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    np.testing.assert_array_equal(jax.jit(body)(x), x.sum(axis=0))


class TestIdle:
    plan = property(
        lambda self: ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "row_pair", with_idle=True)
    )

    @pytest.mark.parametrize("dtype", [np.float32, np.int32])
    def test_idle_devices_neither_give_nor_get(self, dtype):
        plan = self.plan
        x = np.random.default_rng(0).integers(0, 99, (16, 53)).astype(dtype)
        total = per_rank(plan, lambda x: plan.psum(x, "data"), x)
        live = plan.program.live
        assert (total[live] == x[live].sum(axis=0)).all()
        idle = np.setdiff1d(np.arange(16), live)
        if dtype == np.float32:
            assert np.isnan(total[idle]).all()
        else:
            assert (total[idle] == np.iinfo(np.int32).min).all()

    def test_the_mean_counts_live_devices(self):
        plan = self.plan
        ones = np.ones((16, 3), np.float32)
        mean = per_rank(plan, lambda x: plan.pmean(x, "data"), ones)
        assert (mean[plan.program.live] == 1).all()

    def test_parts_for_every_rank_make_no_sense(self):
        with pytest.raises(CollectiveError, match="a plan with idle devices cannot"):
            per_rank(self.plan, lambda x: self.plan.all_gather(x, "data"), np.zeros((16, 3)))

    def test_every_device_must_be_there(self):
        topo = Topology.from_devices(jax.devices()[:16], shape="4x4", failed="2x2@0,0")
        half = ftmesh.Topology(topo.shape, topo.wrap, topo.failed, devices=topo.devices)
        with pytest.raises(ftmesh.TopologyError, match="0 of 16 devices of 4x4 are there"):
            half.jax_mesh("data", with_idle=True)


class TestBadCalls:
    def test_an_axis_that_is_not_bound(self, small):
        with pytest.raises(CollectiveError, match="axis 'data' is not bound here"):
            small.psum(jnp.ones(3), "data")

    def test_an_axis_of_another_size(self, small):
        with pytest.raises(
            CollectiveError,
            match=r"axis 'data' has 16 devices, but the plan for 4x4 less 2x2@0,0 has 12: make the "
            r"mesh with plan.jax_mesh\('data'\)",
        ):
            on_one_device(lambda x: small.psum(x, "data"))(jnp.ones((16, 3)))

    @pytest.mark.parametrize("swap", [(0, 1), (5, 9)])
    def test_the_wrong_devices_or_the_wrong_order(self, small, swap):
        devices = list(small.topology.devices)
        a, b = swap
        devices[a], devices[b] = devices[b], devices[a]
        body = jax.shard_map(
            lambda x: small.psum(x[0], "data"),
            mesh=Mesh(np.array(devices), ("data",)),
            in_specs=P("data"),
            out_specs=P(),
        )
        with pytest.raises(CollectiveError, match=f"rank {a} should be .* and is "):
            jax.jit(body)(np.ones((12, 3)))

    def test_groups_and_several_axes(self, small):
        with pytest.raises(CollectiveError, match="has no axis_index_groups"):
            small.psum(jnp.ones(3), "data", axis_index_groups=[[0, 1], [2, 3]])
        with pytest.raises(CollectiveError, match="one axis, not \\('data', 'model'\\)"):
            small.psum(jnp.ones(3), ("data", "model"))

    def test_what_cannot_be_summed(self, small):
        with pytest.raises(CollectiveError, match="dtype key<fry> cannot be summed"):
            on_one_device(lambda k: small.psum(k, "data"))(jax.random.split(jax.random.key(0), 12))

    def test_gradients_that_are_summed_already(self, small):
        """Under check_vma the gradient of replicated parameters is a sum; the error says so."""
        x = np.arange(12.0, dtype=np.float32)
        weight = np.float32(3)

        def loss(weight, x):
            return (weight * x[0]) ** 2

        def run(step):
            mesh = small.jax_mesh("data")
            body = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
            return float(jax.jit(body)(weight, x))

        with pytest.raises(CollectiveError, match=r"pcast\(params, 'data', to='varying'\)"):
            run(lambda w, x: small.pmean(jax.grad(loss)(w, x), "data"))
        varying = run(
            lambda w, x: small.pmean(jax.grad(loss)(lax.pcast(w, "data", to="varying"), x), "data")
        )
        assert varying == pytest.approx(2 * 3 * (x**2).mean())

    def test_nan_and_inf_travel(self, small):
        x = np.ones((12, 200), np.float32)
        x[3, 7], x[5, 70], x[6, 71], x[7, 71] = np.nan, np.inf, np.inf, -np.inf
        ours = per_rank(small, lambda x: small.psum(x, "data"), x, out=P())
        laxs = per_rank(small, lambda x: lax.psum(x, "data"), x, out=P())
        np.testing.assert_array_equal(ours, laxs)
        assert np.isnan(ours[[7, 71]]).all()
        assert ours[70] == np.inf


def test_the_traced_program_does_not_grow_with_the_mesh():
    def size(shape, block):
        plan = ftmesh.plan(Topology.grid(shape, failed=block), "row_pair", verify=False)
        ranks = ranks_of(plan)
        run = on_one_device(lambda x: plan.psum(x, "data"))
        text = run.lower(jax.ShapeDtypeStruct((ranks, 9), np.float32)).as_text()
        return sum(len(line) for line in text.splitlines() if "dense<" not in line)

    assert size("16x32", "4x2@6,14") < 1.05 * size("8x8", "2x2@2,2")
