"""Collectives on emulated devices and logical ranks, against NumPy and against lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import CollectiveError, Topology
from ftmesh.collectives.reduce_scatter import gather_rows, scatter_rows
from ftmesh.testing import cpu_grid, on_one_device
from tests.support.more import more
from tests.support.on_devices import odd_tree, per_rank, plan_on_cpu
from tests.support.slow import slow

CASES = [
    slow(("ring", "4x4", "")),
    ("ring", "4x4", "2x2@2,0"),
    slow(("ring", "8x8", "2x2@2,2")),
    slow(("xla", "4x4", "2x2@2,0")),
    ("xla", "4x4", "1x1@2,1"),  # no closed walk over single links
    ("two_dim", "4x4", ""),
    pytest.param(("two_dim", "8x8", ""), marks=pytest.mark.slow),
    pytest.param(("row_pair", "4x4", ""), marks=pytest.mark.slow),
    pytest.param(("row_pair", "8x6", ""), marks=pytest.mark.slow),
    ("row_pair", "6x6", "2x2@2,2"),
    pytest.param(("row_pair", "8x8", "4x2@2,2"), marks=pytest.mark.slow),
    pytest.param(("row_pair", "8x8", "2x2@0,0;2x4@4,4"), marks=pytest.mark.slow),
]

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.fixture(params=CASES, ids=" ".join)
def plan(request):
    return plan_on_cpu(*request.param)


def ranks_of(plan):
    return plan.program.num_ranks


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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
def test_psum_without_check_vma(algorithm):
    plan = plan_on_cpu(algorithm, "4x4", "2x2@2,0")
    assert_psum_of_odd_sizes(plan, check_vma=False)


def test_psum_of_odd_sizes(plan):
    assert_psum_of_odd_sizes(plan)


def assert_psum_of_odd_sizes(plan, **how):
    tree = odd_tree(ranks_of(plan), every_dtype=ranks_of(plan) <= 16)
    ours = per_rank(plan, lambda t: plan.psum(t, "data"), tree, **how)
    laxs = per_rank(plan, lambda t: lax.psum(t, "data"), tree, **how)
    for name, parts in tree.items():
        assert ours[name].dtype == laxs[name].dtype
        assert ours[name].shape == laxs[name].shape
        assert_sums(ours[name][0], parts)
        assert len({row.tobytes() for row in ours[name]}) == 1, "ranks differ"


@pytest.mark.slow
def test_two_runs_give_the_same_bits(twelve):
    tree = odd_tree(12)
    first, second = (per_rank(twelve, lambda t: twelve.psum(t, "data"), tree) for _ in range(2))
    assert all(first[name].tobytes() == second[name].tobytes() for name in tree)


@pytest.mark.parametrize(
    ("shape", "block", "algorithm", "ranks"),
    [
        slow("16x32", "4x2@6,14", "row_pair", 504),
        slow("16x32", "4x2@6,14", "ring", 504),
        pytest.param("32x32", "4x2@14,14", "row_pair", 1016, marks=pytest.mark.slow),
        pytest.param("32x32", "4x2@14,14", "ring", 1016, marks=(pytest.mark.slow, more)),
        pytest.param("16x32", "", "two_dim", 512, marks=pytest.mark.slow),
    ],
)
def test_paper_meshes_on_one_device(shape, block, algorithm, ranks):
    plan = ftmesh.plan(Topology.grid(shape, failed=block), algorithm)
    rng = np.random.default_rng(1)
    tree = {
        "ints": rng.integers(-1000, 1000, (ranks, 701), np.int32),
        "floats": rng.normal(size=(ranks, 1301)).astype(np.float32),
    }
    total = jax.device_get(on_one_device(lambda t: plan.psum(t, "data"))(tree))
    for name, parts in tree.items():
        assert_sums(total[name][0], parts)
        assert (total[name] == total[name][0]).all()


def test_each_bucket_uses_the_plan_for_its_size():
    """Gradients of a large model and a loss, in a function that is traced and not run."""
    plan = ftmesh.plan(Topology.grid("8x8", failed="2x2@2,2"), payload_bytes=672_000_000)

    def means(grads, loss):
        return plan.pmean(grads, "data"), plan.pmean(loss, "data")

    step = jax.shard_map(
        means,
        mesh=AbstractMesh((60,), ("data",), axis_types=(AxisType.Auto,)),
        in_specs=P("data"),
        out_specs=P(),
    )
    traced = jax.make_jaxpr(step)(
        jax.ShapeDtypeStruct((60 * 1000, 168_000), np.float32),
        jax.ShapeDtypeStruct((60,), np.float32),
    )
    (mapped,) = traced.jaxpr.eqns
    programs = [eqn.params["program"] for eqn in mapped.params["jaxpr"].eqns if eqn.effects]
    assert programs == [plan.program, plan.for_payload(4).program]
    assert programs[0] is not programs[1]


class TestScatterAndGather:
    @pytest.mark.parametrize("check_vma", [True, slow(False)])
    @pytest.mark.parametrize(
        "options",
        [
            slow({"tiled": True}),
            {"scatter_dimension": 2, "tiled": True},
            {"scatter_dimension": 2},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("algorithm", ["ring", "row_pair"])
    def test_psum_scatter(self, algorithm, options, check_vma):
        plan = plan_on_cpu(algorithm, "4x4", "2x2@0,0")
        x = np.random.default_rng(0).integers(0, 99, (12, 24, 3, 12), np.int32)
        ours = per_rank(
            plan, lambda x: plan.psum_scatter(x, "data", **options), x, check_vma=check_vma
        )
        laxs = per_rank(
            plan, lambda x: lax.psum_scatter(x, "data", **options), x, check_vma=check_vma
        )
        np.testing.assert_array_equal(ours, laxs)

    @pytest.mark.parametrize(
        ("algorithm", "options", "check_vma"),
        [
            slow("ring", {}, True),
            slow("ring", {"axis": 1}, True),
            ("ring", {"axis": -1}, True),
            ("ring", {"axis": 1, "tiled": True}, True),
            ("row_pair", {}, True),
            pytest.param("row_pair", {"axis": 1, "tiled": True}, False, marks=pytest.mark.slow),
            pytest.param("ring", {"axis": -1}, False, marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_all_gather(self, algorithm, options, check_vma):
        plan = plan_on_cpu(algorithm, "4x4", "2x2@0,0")
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

    def test_all_gather_preserves_bits(self, twelve):
        odd = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-37], np.float32)
        x = np.tile(odd, (12, 1))
        ours = per_rank(twelve, lambda x: twelve.all_gather(x, "data"), x)
        assert (ours.view(np.uint32) == x.view(np.uint32)).all()

    def test_indivisible_shapes_raise(self, twelve):
        x = np.zeros((12, 25, 12), np.float32)
        with pytest.raises(CollectiveError, match="dimension 0 has size 25, and must have a multi"):
            per_rank(twelve, lambda x: twelve.psum_scatter(x, "data", tiled=True), x)
        with pytest.raises(CollectiveError, match="must have 12, the number of ranks"):
            per_rank(twelve, lambda x: twelve.psum_scatter(x, "data"), x)

    @pytest.mark.parametrize(
        ("algorithm", "check_vma"),
        [("ring", True), slow("ring", False), slow("row_pair", True), ("row_pair", False)],
    )
    def test_rows_and_back(self, algorithm, check_vma):
        """All ranks get the sums, typed as replicated."""
        plan = plan_on_cpu(algorithm, "4x4", "2x2@0,0")
        x = np.random.default_rng(0).integers(1, 99, (12, 12, 101)).astype(np.float32)
        own = per_rank(plan, lambda x: scatter_rows(x, "data", plan=plan), x, check_vma=check_vma)
        np.testing.assert_array_equal(own, x.sum(axis=0))

        def there_and_back(x):
            return gather_rows(2 * scatter_rows(x, "data", plan=plan), "data", plan=plan)

        whole = per_rank(plan, there_and_back, x, out=P(), check_vma=check_vma)
        np.testing.assert_array_equal(whole, 2 * x.sum(axis=0))


@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        *map(slow, ("uint8", "int16", "uint32", "float16")),
        "bfloat16",
        slow("float32"),
        "complex64",
    ],
)
def test_dtypes(twelve, dtype):
    x = np.random.default_rng(0).integers(0, 5, (12, 31)).astype(dtype)
    ours = on_one_device(lambda x: twelve.psum(x, "data"))(x)
    laxs = on_one_device(lambda x: lax.psum(x, "data"))(x)
    assert ours.dtype == laxs.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(ours, laxs)  # small whole numbers: exact in every dtype


def test_double_precision(twelve):
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(12, 31))
        ours = on_one_device(lambda x: twelve.psum(x, "data"))(x)
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours[0], x.sum(axis=0), rtol=1e-13, atol=1e-14)


class TestOptions:
    @pytest.mark.slow
    def test_bucket_bytes_does_not_change_results(self, twelve):
        tree = {str(i): np.random.default_rng(i).integers(0, 99, (12, 50 + i)) for i in range(6)}
        results = [
            per_rank(twelve, lambda t, b=b: twelve.psum(t, "data", bucket_bytes=b), tree)
            for b in (1, 300, 10**9)
        ]
        for name, x in tree.items():
            for result in results:
                np.testing.assert_array_equal(result[name][0], x.sum(axis=0))

    def test_bfloat16_wire_dtype(self, twelve):
        x = np.random.default_rng(0).normal(size=(12, 400)).astype(np.float32)
        total = per_rank(twelve, lambda x: twelve.psum(x, "data", wire_dtype=jnp.bfloat16), x)
        assert total.dtype == np.float32
        assert (total == total[0]).all(), "owners must keep what others get"
        # Results are rounded once, by at most 2**-8 of them, and sums are those of float32.
        exact = x.astype(np.float64).sum(axis=0)
        assert (np.abs(total[0] - exact) <= 2.0**-8 * np.abs(exact) + 1e-5).all()
        assert (total[0] == total[0].astype(jnp.bfloat16)).all()

    def test_bfloat16_leaves_are_summed_in_float32_by_default(self, twelve):
        x = np.full((12, 40), 1 + 5 * 2**-7, jnp.bfloat16)
        wide = per_rank(twelve, lambda x: twelve.psum(x, "data"), x)
        narrow = per_rank(twelve, lambda x: twelve.psum(x, "data", accumulate_dtype=x.dtype), x)
        assert wide.dtype == narrow.dtype == jnp.bfloat16
        exact = 12 * (1 + 5 * 2**-7)
        assert abs(float(wide[0, 0]) - exact) <= 2**-5  # half an ulp of bfloat16 near 12
        assert abs(float(narrow[0, 0]) - exact) > abs(float(wide[0, 0]) - exact)


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


@pytest.mark.parametrize(
    ("shape", "failed", "check_vma"),
    [
        ("4x4", "2x2@0,0", True),
        slow("4x4", "2x2@0,0", False),
        slow("8x8", "2x2@0,0;2x2@4,4", False),
    ],
)
class TestIdleDevicesGetResults:
    """Idle devices contribute nothing and get the same result as the others."""

    def plan(self, shape, failed):
        return ftmesh.plan(cpu_grid(shape, failed=failed), "row_pair", with_idle=True)

    def test_sums_and_means(self, shape, failed, check_vma):
        plan = self.plan(shape, failed)
        ranks, live = plan.program.num_ranks, plan.program.live
        assert len(live) < ranks
        rng = np.random.default_rng(0)
        integers = rng.integers(0, 99, (ranks, 53), np.int32)
        floats = integers.astype(np.float32)

        def run(integers, floats):
            return plan.psum((integers, floats), "data"), plan.pmean(floats, "data")

        for out in (P("data"), P()):
            sums, mean = per_rank(plan, run, integers, floats, out=out, check_vma=check_vma)
            total = integers[live].sum(axis=0)
            for result in (*sums, mean * len(live)):
                np.testing.assert_allclose(result, np.broadcast_to(total, result.shape), rtol=1e-6)
            assert (sums[0] == total).all()

    def test_scalar(self, shape, failed, check_vma):
        """A replicated result may be read from any device, here the first, which is idle."""
        plan = self.plan(shape, failed)
        ones = np.ones(plan.program.num_ranks, np.float32)
        mean = per_rank(plan, lambda x: plan.pmean(x, "data"), ones, out=P(), check_vma=check_vma)
        assert float(mean) == 1


class TestIdle:
    plan = property(
        lambda self: ftmesh.plan(cpu_grid("4x4", failed="2x2@0,0"), "row_pair", with_idle=True)
    )

    def test_all_gather_raises(self):
        with pytest.raises(CollectiveError, match="a plan with idle devices cannot"):
            per_rank(self.plan, lambda x: self.plan.all_gather(x, "data"), np.zeros((16, 3)))

    def test_missing_devices_raise(self):
        topo = Topology.from_devices(jax.devices()[:16], shape="4x4", failed="2x2@0,0")
        half = ftmesh.Topology(topo.shape, topo.wrap, topo.failed, devices=topo.devices)
        with pytest.raises(
            ftmesh.TopologyError, match="needs every device of 4x4, and only 0 of 16"
        ):
            ftmesh.jax_mesh(half, "data", with_idle=True)


def test_traced_program_does_not_grow_with_the_mesh():
    def size(shape, block):
        plan = ftmesh.plan(Topology.grid(shape, failed=block), "row_pair")
        ranks = ranks_of(plan)
        run = on_one_device(lambda x: plan.psum(x, "data"))
        text = run.lower(jax.ShapeDtypeStruct((ranks, 9), np.float32)).as_text()
        return sum(len(line) for line in text.splitlines() if "dense<" not in line)

    assert size("16x32", "4x2@6,14") < 1.05 * size("8x8", "2x2@2,2")
