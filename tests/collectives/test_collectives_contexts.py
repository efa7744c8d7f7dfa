"""Where collectives may be called, as lax's may, and where they must not.

These depend on JAX more than other tests, so they run on the oldest supported version too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh import CollectiveError, Topology
from ftmesh.testing import on_one_device
from tests.support.on_devices import odd_tree, per_rank, plan_on_cpu
from tests.support.slow import slow

pytestmark = pytest.mark.usefixtures("quick_compiler")


def test_result_is_typed_as_replicated(twelve):
    tree = odd_tree(12)
    mean = per_rank(twelve, lambda t: twelve.pmean(t, "data"), tree, out=P())
    reference = per_rank(twelve, lambda t: lax.pmean(t, "data"), tree, out=P())
    for name in tree:
        assert mean[name].dtype == reference[name].dtype
        np.testing.assert_allclose(mean[name], reference[name], rtol=1e-5, atol=1e-6)


class TestContexts:
    """Whatever lax.psum works in, with the same result."""

    def both(self, plan, write, x, **options):
        """`write(psum)` is a function of one rank; run it with ours and with lax's."""
        ours = per_rank(plan, write(lambda x: plan.psum(x, "data")), x, **options)
        laxs = per_rank(plan, write(lambda x: lax.psum(x, "data")), x, **options)
        np.testing.assert_allclose(ours, laxs, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("check_vma", [True, slow(False)])
    def test_reverse_and_forward_derivatives(self, twelve, check_vma):
        x = np.random.default_rng(0).normal(size=(12, 17)).astype(np.float32)
        options = {"check_vma": check_vma}

        def loss(psum):
            return lambda x: jnp.sin(psum(0.1 * x**2)).sum()

        self.both(twelve, lambda psum: jax.grad(loss(psum)), x, **options)
        self.both(
            twelve, lambda psum: lambda x: jax.jvp(loss(psum), (x,), (x + 1,))[1], x, **options
        )
        twice = lambda psum: jax.grad(lambda x: jax.grad(loss(psum))(x).sum())  # noqa: E731
        self.both(twelve, twice, x, **options)

    @pytest.mark.parametrize("check_vma", [True, slow(False)])
    def test_scan_and_remat(self, twelve, check_vma):
        x = np.random.default_rng(0).normal(size=(12, 9)).astype(np.float32)

        def steps(psum):
            def step(carry, _):
                carry = carry * 0.1 + jax.checkpoint(lambda c: psum(c * carry))(carry)
                return carry, carry.sum()

            def run(x):
                last, sums = lax.scan(step, x, None, length=3)
                return last.sum() + sums.sum()

            return jax.grad(run)

        self.both(twelve, steps, x, check_vma=check_vma)

    @pytest.mark.slow
    def test_derivatives_of_scatter_and_gather(self, twelve):
        x = np.random.default_rng(0).normal(size=(12, 24)).astype(np.float32)

        def gradient(collective, **options):
            return jax.grad(lambda v: (collective(v, "data", **options) ** 2).sum())

        for plan in (twelve, plan_on_cpu("ring", "4x4", "2x2@0,0")):
            for ours, theirs, options in (
                (plan.psum_scatter, lax.psum_scatter, {"tiled": True}),
                (plan.all_gather, lax.all_gather, {}),
            ):
                np.testing.assert_allclose(
                    per_rank(plan, gradient(ours, **options), x),
                    per_rank(plan, gradient(theirs, **options), x),
                    rtol=1e-5,
                )

    def test_nested_vmap(self, twelve):
        x = np.random.default_rng(0).normal(size=(12, 3, 9, 2)).astype(np.float32)
        self.both(twelve, lambda psum: jax.vmap(psum, in_axes=1, out_axes=1), x)

    def test_without_jit(self, twelve):
        x = np.random.default_rng(0).integers(0, 9, (12, 5))
        run = jax.shard_map(
            lambda x: twelve.psum(x[0], "data"),
            mesh=twelve.jax_mesh("data"),
            in_specs=P("data"),
            out_specs=P(),
        )
        np.testing.assert_array_equal(run(x), x.sum(axis=0))

    def test_pmap(self, twelve):
        x = np.random.default_rng(0).integers(0, 9, (12, 5))
        devices = twelve.jax_mesh("data").devices.tolist()
        run = jax.pmap(lambda x: twelve.psum(x, "data"), axis_name="data", devices=devices)
        np.testing.assert_array_equal(run(x)[3], x.sum(axis=0))

    @pytest.mark.parametrize("check_vma", [True, slow(False)])
    def test_mesh_with_another_axis(self, check_vma):
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

    def test_constants_are_multiplied_as_in_lax(self, twelve):
        assert per_rank(twelve, lambda x: x + twelve.psum(1, "data"), np.zeros(12, int))[0] == 12
        assert per_rank(twelve, lambda x: x + twelve.psum(True, "data"), np.zeros(12, int))[0] == 12


class TestBadCalls:
    def test_unbound_axis(self, twelve):
        with pytest.raises(CollectiveError, match="axis 'data' is not bound here"):
            twelve.psum(jnp.ones(3), "data")

    def test_axis_of_wrong_size(self, twelve):
        with pytest.raises(
            CollectiveError,
            match=r"axis 'data' has 16 devices, but the plan for 4x4 less 2x2@0,0 has 12: make the "
            r"mesh with plan.jax_mesh\('data'\)",
        ):
            on_one_device(lambda x: twelve.psum(x, "data"))(jnp.ones((16, 3)))

    @pytest.mark.parametrize("swap", [(0, 1), (5, 9)])
    def test_wrong_devices_or_order(self, twelve, swap):
        devices = twelve.jax_mesh("data").devices.tolist()
        a, b = swap
        devices[a], devices[b] = devices[b], devices[a]
        body = jax.shard_map(
            lambda x: twelve.psum(x[0], "data"),
            mesh=Mesh(np.array(devices), ("data",)),
            in_specs=P("data"),
            out_specs=P(),
        )
        with pytest.raises(CollectiveError, match=f"rank {a} should be .* and is "):
            jax.jit(body)(np.ones((12, 3)))

    def test_axis_index_groups_and_several_axes(self, twelve):
        with pytest.raises(CollectiveError, match="has no axis_index_groups"):
            ftmesh.psum(jnp.ones(3), "data", axis_index_groups=[[0, 1], [2, 3]], plan=twelve)
        with pytest.raises(CollectiveError, match="one axis, not \\('data', 'model'\\)"):
            twelve.psum(jnp.ones(3), ("data", "model"))

    def test_unsummable_dtype(self, twelve):
        with pytest.raises(CollectiveError, match="dtype key<fry> cannot be summed"):
            on_one_device(lambda k: twelve.psum(k, "data"))(jax.random.split(jax.random.key(0), 12))

    def test_already_summed_gradients(self, twelve):
        """Under check_vma the gradient of replicated parameters is a sum; the error says so."""
        x = np.arange(12.0, dtype=np.float32)
        weight = np.float32(3)

        def loss(weight, x):
            return (weight * x[0]) ** 2

        def run(step):
            mesh = twelve.jax_mesh("data")
            body = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
            return float(jax.jit(body)(weight, x))

        with pytest.raises(CollectiveError, match=r"pcast\(params, 'data', to='varying'\)"):
            run(lambda w, x: twelve.pmean(jax.grad(loss)(w, x), "data"))
        varying = run(
            lambda w, x: twelve.pmean(jax.grad(loss)(lax.pcast(w, "data", to="varying"), x), "data")
        )
        assert varying == pytest.approx(2 * 3 * (x**2).mean())

    def test_nan_and_inf_propagate(self, twelve):
        x = np.ones((12, 200), np.float32)
        x[3, 7], x[5, 70], x[6, 71], x[7, 71] = np.nan, np.inf, np.inf, -np.inf
        ours = per_rank(twelve, lambda x: twelve.psum(x, "data"), x, out=P())
        laxs = per_rank(twelve, lambda x: lax.psum(x, "data"), x, out=P())
        np.testing.assert_array_equal(ours, laxs)
        assert np.isnan(ours[[7, 71]]).all()
        assert ours[70] == np.inf
