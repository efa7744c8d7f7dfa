"""A loop with a Flax Linen module and its TrainState, which the step donates."""

import jax
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import elastic
from tests.processes.loops.points import STEPS, WIDTH, batch, report


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(24)(x)))


def train_step(state, x, y):
    def loss_of(params):
        return ((state.apply_fn(params, x) - y) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


for attempt in elastic.attempts():
    with attempt as run:
        mesh = run.mesh()
        net = Net()
        params = net.init(jax.random.key(0), np.zeros((1, WIDTH), np.float32))
        state = TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-2))
        state = jax.device_put(state, NamedSharding(mesh, P()))
        jitted = jax.jit(train_step, donate_argnums=0)
        _, state = run.restore(state)
        for step in range(int(state.step), STEPS):
            state, loss = jitted(state, *batch(step, NamedSharding(mesh, P("data"))))
            run.commit(step + 1, state)
            print(f"step {step + 1} loss {loss:.4f}", flush=True)
        report(state.params)
