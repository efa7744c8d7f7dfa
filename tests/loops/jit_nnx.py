"""A loop over jit with Flax nnx: a module and an optimizer."""

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.loops.digits import batches, cross_entropy


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x.reshape(len(x), -1)))))


def train(devices, plan=None, size=48, steps=20):
    mesh = Mesh(np.array(devices), ("data",))
    replicated, sharded = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)
    nnx.update((model, optimizer), jax.device_put(nnx.state((model, optimizer)), replicated))

    @nnx.jit
    def step(model, optimizer, images, labels):
        def loss_of(model, images, labels):
            logits = model(images)
            accuracy = (logits.argmax(axis=-1) == labels).mean()
            return cross_entropy(logits, labels).mean(), accuracy

        (loss, _), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, images, labels)
        optimizer.update(model, grads)
        return loss

    losses = []
    for batch in batches(size, steps):
        images, labels = jax.device_put(batch, sharded)
        losses.append(float(step(model, optimizer, images, labels)))
    return losses, step.lower(model, optimizer, images, labels)
