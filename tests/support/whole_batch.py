"""A loss, parameters and examples for it; helpers that compile and compare."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.testing import cpu_grid

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 8)), "v": RNG.normal(size=8)}
X, Y, WEIGHTS = RNG.normal(size=(36, 6)), RNG.normal(size=36), RNG.uniform(size=36)


def losses(params, x, y):
    """The loss of each example."""
    return (jnp.sum(jnp.tanh(x @ params["w"]) * params["v"], axis=-1) - y) ** 2


def loss(params, x, y):
    return losses(params, x, y).mean()


def as_float32(*args):
    return jax.tree.map(np.float32, args)


ARGS = as_float32(PARAMS, X, Y)


def put(mesh, args, specs):
    """Arguments on a mesh. The spec of an argument may be a dict of specs."""

    def put_leaf(spec, x):
        return jax.device_put(x, NamedSharding(mesh, spec))

    return [
        jax.tree.map(put_leaf, spec, arg, is_leaf=lambda x: not isinstance(x, dict))
        for spec, arg in zip(specs, args, strict=True)
    ]


def compiled(function, *args):
    """The compiled program, and what it returns."""
    program = jax.jit(function).lower(*args).compile()
    return program, program(*args)


def assert_close(result, expected, rtol=2e-5):
    """Equal up to a few roundings of float32, unless `rtol` is given."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol), result, expected)


WEIGHTS_OF_PAIRS = {"w": P(None, "model"), "v": P("model")}


def plan_of_pairs():
    """Six pairs of chips around a hole: a rank is a pair."""
    topology = cpu_grid("4x4", failed="2x2@2,2")
    return ftmesh.plan(ftmesh.TiledTopology.from_topology(topology, "2x1"), executor="ppermute")


def on_tiles(tiles, loss, weights=WEIGHTS_OF_PAIRS, args=ARGS, **options):
    """The compiled value and gradients on the plan, and those of JAX on the same mesh."""
    mesh = tiles.jax_mesh(("data", "model"))
    rows = P("data") if len(args[1]) % 6 == 0 else P()
    args = put(mesh, args, (weights, rows, rows))
    with jax.set_mesh(mesh):
        program, result = compiled(tiles.value_and_grad(loss, specs=weights, **options), *args)
        expected = jax.jit(jax.value_and_grad(loss))(*args)
    return program, result, expected


def on_ranks(even, loss, args=ARGS):
    """The same on a mesh of ranks alone."""
    mesh = even.jax_mesh("data")
    args = put(mesh, args, (P(), P("data"), P("data")))
    with jax.set_mesh(mesh):
        program, result = compiled(even.value_and_grad(loss), *args)
        expected = jax.jit(jax.value_and_grad(loss))(*args)
    return program, result, expected
