"""A loop with a Flax nnx module and optax."""

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import elastic
from tests.processes.loops.points import STEPS, WIDTH, batch, report


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(WIDTH, 24, rngs=rngs)
        self.last = nnx.Linear(24, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.tanh(self.first(x))))


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(lambda model: ((model(x) - y) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


for attempt in elastic.attempts():
    with attempt as run:
        mesh = run.mesh()
        model = Net(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        replicate = jax.jit(lambda state: state, out_shardings=NamedSharding(mesh, P()))
        state = replicate(nnx.state((model, optimizer)))
        step, state = run.restore(state)
        nnx.update((model, optimizer), state)
        while step < STEPS:
            loss = train_step(model, optimizer, *batch(step, NamedSharding(mesh, P("data"))))
            step += 1
            run.commit(step, nnx.state((model, optimizer)))
            print(f"step {step} loss {loss:.4f}", flush=True)
        report(nnx.state(model, nnx.Param))
