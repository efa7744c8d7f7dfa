"""A loop over jit with weights cut along "shard" and replicated along "replica"."""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import elastic
from tests.processes.loops.points import STEPS, WIDTH, batch, report

SHARDS = int(os.environ.get("SHARDS", "2"))  # at most
tx = optax.adam(1e-2)


def init():
    shapes = {"first": (WIDTH, 24), "middle": (24, 24), "last": (24, 1)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    named = zip(keys, shapes.items(), strict=True)
    params = {name: jax.random.normal(key, shape) / 5 for key, (name, shape) in named}
    return {"params": params, "adam": tx.init(params)}


def train_step(state, x, y):
    def loss_of(params):
        hidden = jnp.tanh(jnp.tanh(x @ params["first"]) @ params["middle"])
        return ((hidden @ params["last"] - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, adam = tx.update(grads, state["adam"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "adam": adam}, loss


def shaped(devices):
    return np.reshape(devices, (-1, math.gcd(SHARDS, len(devices))))


def spec_of(leaf):
    if leaf.ndim < 2:
        return P()
    return P("shard") if leaf.shape[1] == 1 else P(None, "shard")


for attempt in elastic.attempts():
    with attempt as run:
        mesh = jax.sharding.Mesh(shaped(run.mesh().devices), ("replica", "shard"))
        types = jax.eval_shape(init)
        shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, spec_of(leaf)), types)
        rows = NamedSharding(mesh, P(("replica", "shard")))
        jitted = jax.jit(train_step, out_shardings=(shardings, None))
        state = jax.jit(init, out_shardings=shardings)()
        step, state = run.restore(state)
        while step < STEPS:
            state, loss = jitted(state, *batch(step, rows))
            step += 1
            run.commit(step, state)
        report(state["params"])
