"""A data-parallel training loop as people write it in Flax, of the size of MNIST.

The tests run it as it stands, and again with the two lines changed that ftmesh asks for.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(10)(x)


def batches(num_devices, steps):
    """Images of ten noisy prototypes, 8 per device."""
    rng = np.random.default_rng(0)
    prototypes = rng.normal(size=(10, 28, 28)).astype(np.float32)
    for _ in range(steps):
        labels = rng.integers(0, 10, 8 * num_devices)
        noise = rng.normal(size=(len(labels), 28, 28)).astype(np.float32)
        yield prototypes[labels] + 2 * noise, labels


def train(devices, plan=None, steps=50):
    mesh = Mesh(np.array(devices), ("data",))
    model = Net()
    optimizer = optax.sgd(0.05, momentum=0.9)

    def step(params, opt_state, images, labels):
        def loss_of(params):
            logits = model.apply(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        loss, grads = lax.pmean((loss, grads), "data")
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P(), P("data"), P("data")),
            out_specs=P(),
            check_vma=False,
        )
    )
    params = model.init(jax.random.key(0), jnp.zeros((1, 28, 28)))
    opt_state = optimizer.init(params)
    losses = []
    for images, labels in batches(len(devices), steps):
        params, opt_state, loss = step(params, opt_state, images, labels)
        losses.append(float(loss))
    return losses
