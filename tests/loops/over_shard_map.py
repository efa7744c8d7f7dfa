"""A loop over shard_map with its defaults: JAX sums the gradients of replicated weights."""

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from tests.loops.digits import Net, batches, cross_entropy


def train(devices, plan=None, size=48, steps=20):
    mesh = Mesh(np.array(devices), ("data",))
    net = Net()
    optimizer = optax.sgd(0.05, momentum=0.9)

    def step(params, opt_state, images, labels):
        def loss_of(params):
            return cross_entropy(net.apply(params, images), labels).mean()

        loss, grads = jax.value_and_grad(lambda p: lax.pmean(loss_of(p), "data"))(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    specs = P(), P(), P("data"), P("data")
    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))
    params = net.init(jax.random.key(0), np.zeros((1, 8, 8), np.float32))
    opt_state = optimizer.init(params)
    losses = []
    for images, labels in batches(size, steps):
        params, opt_state, loss = step(params, opt_state, images, labels)
        losses.append(float(loss))
    return losses, step.lower(params, opt_state, images, labels)
