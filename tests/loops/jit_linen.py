"""A loop over jit and NamedShardings, with Flax's linen: nothing in it sums gradients."""

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.loops.digits import Net, batches, cross_entropy


def train(devices, plan=None, size=48, steps=20):
    mesh = Mesh(np.array(devices), ("data",))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    @jax.jit
    def step(state, images, labels):
        def loss_of(params, images, labels):
            return cross_entropy(state.apply_fn(params, images), labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(state.params, images, labels)
        return state.apply_gradients(grads=grads), loss

    net = Net()
    params = net.init(jax.random.key(0), np.zeros((1, 8, 8), np.float32))
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.05, momentum=0.9))
    state = jax.device_put(state, replicated)
    losses = []
    for batch in batches(size, steps):
        images, labels = jax.device_put(batch, sharded)
        state, loss = step(state, images, labels)
        losses.append(float(loss))
    return losses, step.lower(state, images, labels)
