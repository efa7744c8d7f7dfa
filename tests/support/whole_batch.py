"""A loss over a batch, weights and examples for it; compiling and comparing what it comes to."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 8)), "v": RNG.normal(size=8)}
X, Y, WEIGHTS = RNG.normal(size=(36, 6)), RNG.normal(size=36), RNG.uniform(size=36)


def losses(params, x, y):
    """One for each example."""
    return (jnp.sum(jnp.tanh(x @ params["w"]) * params["v"], axis=-1) - y) ** 2


def loss(params, x, y):
    return losses(params, x, y).mean()


def single(*args):
    """In float32."""
    return jax.tree.map(np.float32, args)


ARGS = single(PARAMS, X, Y)


def put(mesh, args, specs):
    """Arguments on a mesh; the spec of each may be a dict of them."""

    def one(spec, x):
        return jax.device_put(x, NamedSharding(mesh, spec))

    return [
        jax.tree.map(one, spec, arg, is_leaf=lambda x: not isinstance(x, dict))
        for spec, arg in zip(specs, args, strict=True)
    ]


def compiled(function, *args):
    """The program, and what it returns."""
    program = jax.jit(function).lower(*args).compile()
    return program, program(*args)


def assert_close(found, wanted, rtol=2e-5):
    """A few roundings of float32, unless told otherwise."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, rtol), found, wanted)
