"""A loss, parameters and examples for it; helpers that compile and compare."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

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
