"""A loop over jit on a mesh of ("data", "model"), the hidden units of a net cut along "model"."""

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.loops.digits import Net, batches, cross_entropy

SPECS = {
    "params": {
        "Dense_0": {"kernel": P(None, "model"), "bias": P("model")},
        "Dense_1": {"kernel": P("model", None), "bias": P()},
    }
}


def train(devices, plan=None, size=48, steps=20):
    mesh = Mesh(np.array(devices).reshape(-1, 2), ("data", "model"))
    net = Net()
    optimizer = optax.sgd(0.05, momentum=0.9)

    def loss_of(params, images, labels):
        return cross_entropy(net.apply(params, images), labels).mean()

    @jax.jit
    def step(params, opt_state, images, labels):
        loss, grads = jax.value_and_grad(loss_of)(params, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = net.init(jax.random.key(0), np.zeros((1, 8, 8), np.float32))
    params = jax.tree.map(lambda s, x: jax.device_put(x, NamedSharding(mesh, s)), SPECS, params)
    opt_state = optimizer.init(params)
    losses = []
    for batch in batches(size, steps):
        images, labels = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params, opt_state, loss = step(params, opt_state, images, labels)
        losses.append(float(loss))
    return losses, step.lower(params, opt_state, images, labels)
