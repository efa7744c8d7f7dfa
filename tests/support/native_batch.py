"""A batch of 256 on the live chips of a mesh, padded, and on the whole mesh, which divides it.

``python -m tests.support.native_batch 16x16 2x2@2,2`` prints the differences, as JSON; 256 devices
need a process of their own.
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ftmesh
from ftmesh.testing import cpu_grid

NUM_EXAMPLES, LENGTH, VOCABULARY = 256, 5, 11


def make_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (NUM_EXAMPLES, LENGTH + 1)).astype(np.int32)
    lengths = rng.integers(1, LENGTH + 1, NUM_EXAMPLES)
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "token_mask": (np.arange(LENGTH) < lengths[:, None]).astype(np.float32),
    }


def make_params():
    rng = np.random.default_rng(1)
    return {
        "embed": rng.normal(size=(VOCABULARY, 8)).astype(np.float32),
        "out": rng.normal(size=(8, VOCABULARY)).astype(np.float32) / 3,
    }


def token_losses(params, batch):
    logits = jnp.tanh(params["embed"][batch["inputs"]]) @ params["out"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)
    return -picked[..., 0]


def plain_mean(params, batch, mask):
    losses = token_losses(params, batch).mean(axis=1)
    return losses.mean() if mask is None else losses.mean(where=mask)


def masked_mean(params, batch, mask):
    weights = batch["token_mask"]
    if mask is not None:
        weights = weights * mask[:, None]
    return (token_losses(params, batch) * weights).sum() / weights.sum()


LOSSES = {"plain mean": plain_mean, "masked mean": masked_mean}


def value_and_grad(topology, loss, *, pad):
    """Run one step of a jit loop on the mesh of a topology."""
    mesh, batch, mask = ftmesh.jax_mesh(topology, "data"), make_batch(), None
    if pad:
        batch, mask = ftmesh.pad_batch(batch, topology)
    params = jax.device_put(make_params(), NamedSharding(mesh, P()))
    batch, mask = jax.device_put((batch, mask), NamedSharding(mesh, P("data")))
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(params, batch, mask))


def differences(shape, failed):
    """The largest difference of losses and of gradients, for each loss."""
    damaged, whole = cpu_grid(shape, failed=failed), cpu_grid(shape, failed="")
    errors = {"ranks": damaged.num_live}
    for name, loss in LOSSES.items():
        ours = value_and_grad(damaged, loss, pad=True)
        plain = value_and_grad(whole, loss, pad=False)
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True)
        errors[name] = max(float(np.abs(a - b).max()) for a, b in pairs)
    return errors


if __name__ == "__main__":
    print(json.dumps(differences(*sys.argv[1:])))
