"""A loop over pmap, as older code has it."""

import jax
import numpy as np
import optax
from jax import lax

from tests.loops.digits import Net, batches, cross_entropy


def train(devices, plan=None, size=48, steps=20):
    net = Net()
    optimizer = optax.sgd(0.05, momentum=0.9)

    def step(params, opt_state, images, labels):
        def loss_of(params):
            return cross_entropy(net.apply(params, images), labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        loss, grads = lax.pmean((loss, grads), axis_name="batch")
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    axes = {"in_axes": (None, None, 0, 0), "out_axes": None}
    step = jax.pmap(step, axis_name="batch", devices=list(devices), **axes)
    params = net.init(jax.random.key(0), np.zeros((1, 8, 8), np.float32))
    opt_state = optimizer.init(params)
    losses = []
    for batch in batches(size, steps):
        images, labels = (x.reshape(len(devices), -1, *x.shape[1:]) for x in batch)
        params, opt_state, loss = step(params, opt_state, images, labels)
        losses.append(float(loss))
    return losses, step.lower(params, opt_state, images, labels)
