"""A loop over shard_map, with a schedule of the plan and a random key in its state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from tests.processes.loops.points import STEPS, WIDTH, batch, report

tx = optax.adam(1e-2)


def loss_of(params, key, x, y):
    target = y + 0.01 * jax.random.normal(key, ())
    return ((jnp.tanh(x @ params["first"]) @ params["last"] - target) ** 2).mean()


plan = ftmesh.plan(ftmesh.Topology.from_devices(jax.devices()), executor="ppermute")
mesh = plan.jax_mesh("data")


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
def train_step(state, x, y):
    params, adam, key = state
    key, own = jax.random.split(key)
    loss, grads = plan.value_and_grad(loss_of)(params, own, x, y)
    updates, adam = tx.update(grads, adam, params)
    return (optax.apply_updates(params, updates), adam, key), loss


rng = np.random.default_rng(2)
params = {"first": rng.normal(size=(WIDTH, 24)) / 4, "last": rng.normal(size=(24, 1)) / 5}
params = jax.tree.map(np.float32, params)
state = (params, tx.init(params), jax.random.key(3))
state = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))(state)
first_step = 0
for step in range(first_step, STEPS):
    state, loss = train_step(state, *batch(step, NamedSharding(mesh, P("data"))))
report(state[0])
