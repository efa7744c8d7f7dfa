"""Weights of the language model: replicas, padded shards, gathers, products and their gradients."""

import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

import ftmesh
from examples.llm.sharding import Cuts, make_mesh, replicas
from examples.llm.step import make_step
from ftmesh.testing import cpu_grid
from tests.support.small_llm import SMALL, one_device

pytestmark = [
    pytest.mark.usefixtures("quick_compiler"),
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated"),
]


def compiled_fsdp(config):
    """The compiled step of weights sharded among 16 chips."""
    step = make_step(config, make_mesh(cpu_grid("4x4"), "all"))
    rows = jax.ShapeDtypeStruct((config.batch, config.length + 1), jnp.int32)
    arguments = (rows, jax.ShapeDtypeStruct((config.batch,), bool))
    arguments = [a.update(sharding=step.cuts.rows) for a in arguments]
    return step.train.lower(step.types, *arguments, 0).compile()


@pytest.mark.parametrize(
    ("shape", "failed", "live"), [("1", "", 1), ("2x2", "1x1@0,0", 3), ("2x2x2", "1x1x1@0,0,0", 7)]
)
def test_a_chip_is_a_replica_on_any_number_of_axes(shape, failed, live):
    devices = jax.devices()[: math.prod(map(int, shape.split("x")))]
    topology = ftmesh.Topology.from_devices(devices, shape=shape, failed=failed)
    assert dict(make_mesh(topology, "1x1").shape) == {"data": live, "fsdp": 1}


@pytest.mark.parametrize("tile", ["11", "x", "", "1x"])
def test_tiles_that_only_look_like_a_chip(tile):
    with pytest.raises(ftmesh.FtmeshError, match=r"tile|mesh shape"):
        replicas(cpu_grid("4x4"), tile)


@pytest.fixture(scope="module")
def fifteen():
    return Cuts(make_mesh(cpu_grid("4x4", failed="1x1@3,3"), "all"))


class TestCuts:
    def test_which_dimension(self, fifteen):
        assert fifteen.spec((48, 128)) == P(None, "fsdp")  # the larger, padded
        assert fifteen.spec((45, 128)) == P("fsdp")  # needs no padding
        assert fifteen.spec((48,)) == P()

    def test_padded_shapes_are_cut_alike(self, fifteen):
        for shape in [(48, 128), (45, 128), (264, 48), (7, 7)]:
            padded = fifteen.pad(jnp.ones(shape)).shape
            assert fifteen.spec(padded) == fifteen.spec(shape)
            assert padded[fifteen.dim(shape)] % 15 == 0

    def test_gathered_and_back(self, fifteen):
        weight = fifteen.pad(jnp.arange(48.0 * 20).reshape(48, 20))

        def total(weight):
            return (fifteen.gather(weight, (48, 20), jnp.float32) * 3).sum()

        value, gradient = jax.jit(jax.value_and_grad(total))(weight)
        assert value == 3 * sum(range(960))
        assert gradient.sharding.spec == P("fsdp")
        assert gradient.shape == (60, 20)
        assert (np.asarray(gradient) == 3 * (np.arange(60) < 48)[:, None]).all()

    @pytest.mark.parametrize(("remat", "times"), [("none", 1), ("dots", 2), ("full", 2)])
    def test_a_weight_is_gathered_once_for_each_time_it_is_computed(self, remat, times):
        """Seven weights of a layer, the table for the rows and for the head."""
        config = replace(SMALL, length=8, batch=16, remat=remat)
        gathers = re.findall(r" all-gather(?:-start)?\(", compiled_fsdp(config).as_text())
        assert 7 * times + 2 <= len(gathers) <= 7 * times + 4

    @pytest.mark.parametrize("parts", [12, 15, 252])
    def test_optimizers_on_padded_weights(self, parts):
        """Adam with a bound on the norm does the same as without padding, which stays zero."""
        cuts = Cuts(AbstractMesh((1, parts), ("data", "fsdp")))
        shape, tx = (50, 64), optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
        weight, *gradients = jax.random.normal(jax.random.key(0), (4, *shape))

        @jax.jit
        def train(weight, gradients):
            state = tx.init(weight)
            for gradient in gradients:
                updates, state = tx.update(gradient, state)
                weight = optax.apply_updates(weight, updates)
            return weight, state

        padded = train(cuts.pad(weight), [cuts.pad(gradient) for gradient in gradients])
        assert padded[0].shape[cuts.dim(shape)] % parts == 0
        for have, want in zip(
            *map(jax.tree.leaves, (padded, train(weight, gradients))), strict=True
        ):
            kept = cuts.unpad(have, want.shape)
            np.testing.assert_allclose(kept, want, rtol=1e-5, atol=1e-7)
            assert np.count_nonzero(have) == np.count_nonzero(kept)

    @pytest.mark.parametrize("remat", ["dots", "full"])
    def test_memory_does_not_grow_with_gathered_layers(self, remat):
        """A layer more costs activations and shards, not a whole layer."""
        sizes = []
        wide = replace(SMALL, hidden=192, ffn=512, length=8, batch=16, remat=remat)
        for num_layers in (2, 6):
            config = replace(wide, num_layers=num_layers)
            sizes.append(compiled_fsdp(config).memory_analysis().temp_size_in_bytes)
        layer = 4 * (config.num_params - replace(config, num_layers=5).num_params)
        assert (sizes[1] - sizes[0]) / 4 < 0.5 * layer


class TestProducts:
    def test_factors_are_narrow_and_sums_of_gradients_are_not(self):
        """No product has a float32 factor, and the gradient of a weight is added in float32."""
        cuts = Cuts(one_device())
        x, weight = jnp.ones((4, 3), jnp.bfloat16), jnp.ones((3, 5), jnp.float32)

        def total(x, weight):
            logits = cuts.product(x, weight, (3, 5), jnp.float32)
            return (logits * 0.5).sum()

        traced = jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(x, weight)
        products = [e for e in traced.jaxpr.eqns if e.primitive.name == "dot_general"]
        assert len(products) == 3
        assert {var.aval.dtype for e in products for var in e.invars} == {jnp.dtype(jnp.bfloat16)}
        gradients = jax.grad(total, argnums=(0, 1))(x, weight)
        assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]
        assert [float(g[0, 0]) for g in gradients] == [2.5, 2.0]
        dtypes = sorted(e.outvars[0].aval.dtype.name for e in products)
        assert dtypes == ["bfloat16", "float32", "float32"]  # of x; the logits, and of the weight

    @pytest.mark.parametrize("turned", [False, True])
    def test_products_and_rows_of_padded_weights(self, turned):
        """Values and gradients are those of plain arrays, though 13 rows are cut along 12 chips."""
        mesh = make_mesh(cpu_grid("4x4", failed="2x2@2,2"), "all")
        cuts, shape = Cuts(mesh), (13, 5)
        rng = np.random.default_rng(0)
        table = rng.normal(size=shape).astype(np.float32)
        x = rng.normal(size=(24, 5 if turned else 13)).astype(np.float32)
        rows = rng.integers(0, 13, 24)

        def ours(x, weight):
            y = cuts.product(x, weight, shape, jnp.float32, turned=turned)
            return jnp.sin(y).sum() + jnp.sin(cuts.look_up(weight, rows, shape, jnp.float32)).sum()

        def plain(x, weight):
            y = x @ (weight.T if turned else weight)
            return jnp.sin(y).sum() + jnp.sin(weight[rows]).sum()

        stored = jax.device_put(cuts.pad(table), jax.NamedSharding(mesh, cuts.spec(shape)))
        value, (of_x, of_weight) = jax.jit(jax.value_and_grad(ours, (0, 1)))(x, stored)
        want, (want_x, want_weight) = jax.value_and_grad(plain, (0, 1))(x, table)
        assert of_weight.sharding.spec == cuts.spec(shape)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        np.testing.assert_allclose(of_x, want_x, rtol=1e-4, atol=1e-5)
        whole = jax.device_get(of_weight)
        np.testing.assert_allclose(whole[:13, :5], want_weight, rtol=1e-4, atol=1e-5)
        assert not whole[13:].any()
