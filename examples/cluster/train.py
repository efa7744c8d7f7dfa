"""An example training loop, which the recipes of this folder start on every host.

    ftmesh run --run-dir RUN -- python train.py --steps 200 --checkpoints RUN/checkpoints

The same command starts and continues: from host memory after the loss of hosts, and from the newest
checkpoint when all hosts are started again.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh import elastic
from ftmesh.checkpoint import Checkpoints
from ftmesh.command_line import whole_number

rng = np.random.default_rng(0)
xs = rng.normal(size=(1920, 8)).astype(np.float32)
ys = np.tanh(xs.sum(axis=-1))
weights = rng.normal(size=(8, 32)).astype(np.float32)
params = {"in": weights / 3, "out": weights[0] / 6}
tx = optax.adam(1e-2)


@jax.jit
def train_step(state: Any, x: jax.Array, y: jax.Array, mask: jax.Array) -> tuple[Any, jax.Array]:
    """Return the state after a step, and the loss before it."""

    def loss_of(params: Any) -> jax.Array:
        losses = (jnp.tanh(x @ params["in"]) @ params["out"] - y) ** 2
        return losses.mean(where=mask)  # without padding

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, adam = tx.update(grads, state["adam"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "adam": adam}, loss


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=whole_number(1), default=200)
    parser.add_argument("--checkpoints", required=True, metavar="FOLDER", help="on a shared disk")
    parser.add_argument(
        "--every", type=whole_number(1), default=50, metavar="STEPS", help="save every STEPS"
    )
    args = parser.parse_args()
    sampler = elastic.StepSampler(len(xs), 192, num_epochs=-(-args.steps // 10), seed=1)
    for attempt in elastic.attempts(defer_sigterm=True):
        with attempt as run, Checkpoints(args.checkpoints, resume=True) as checkpoints:
            rows = NamedSharding(run.mesh(), P("data"))
            state = {"params": params, "adam": tx.init(params)}
            state = jax.device_put(state, NamedSharding(rows.mesh, P()))
            first, state = run.restore(state, checkpoints=checkpoints)
            own = sampler.for_sharding(rows)  # the examples of this process
            for step in range(first, args.steps):
                parts = xs[own[step]], ys[own[step]], own.mask
                batch = [
                    jax.make_array_from_process_local_data(
                        rows, part, (own.num_rows, *part.shape[1:])
                    )
                    for part in parts
                ]
                state, loss = train_step(state, *batch)
                is_saved = (step + 1) % args.every == 0
                is_ending = run.commit(step + 1, state, wait=is_saved)
                if is_ending or is_saved:
                    run.save(checkpoints, step + 1, state)
                    if run.is_primary:
                        print(f"step {step + 1}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
