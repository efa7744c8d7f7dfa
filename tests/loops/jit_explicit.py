"""A loop over jit on a mesh whose axes are Explicit, as `jax.make_mesh` makes them."""

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.loops.digits import Net, batches, cross_entropy


def train(devices, plan=None, size=48, steps=20):
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Explicit,))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    net = Net()
    optimizer = optax.adam(0.01)

    def loss_of(params, images, labels):
        return cross_entropy(net.apply(params, images), labels).mean()

    @jax.jit
    def step(params, opt_state, images, labels):
        loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = net.init(jax.random.key(0), np.zeros((1, 8, 8), np.float32))
    params, opt_state = jax.device_put((params, optimizer.init(params)), replicated)
    losses = []
    for batch in batches(size, steps):
        images, labels = jax.device_put(batch, sharded)
        params, opt_state, loss = step(params, opt_state, images, labels)
        losses.append(float(loss))
    return losses, step.lower(params, opt_state, images, labels)
