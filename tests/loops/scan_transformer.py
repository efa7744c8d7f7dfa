"""A language model over jit and NamedShardings: layers in a scan, dropout, packed and masked loss.

Nothing in it sums over devices. With `fsdp`, weights and optimizer state are cut along "data", and
activations are held to be cut by examples, which keeps the compiler from exchanging them.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

VOCABULARY, LENGTH, WIDTH, NUM_LAYERS = 36, 10, 24, 3


class Layer(nn.Module):
    pin: Callable

    @nn.compact
    def __call__(self, x, visible):
        y = self.pin(nn.LayerNorm()(self.pin(x)))
        attention = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)
        y = attention(y, y, mask=visible)
        x = self.pin(x + nn.Dropout(0.1, deterministic=False)(self.pin(y)))
        y = self.pin(nn.gelu(nn.Dense(2 * WIDTH)(self.pin(nn.LayerNorm()(x)))))
        y = self.pin(nn.Dense(WIDTH)(y))
        return self.pin(x + nn.Dropout(0.1, deterministic=False)(y)), None


class Transformer(nn.Module):
    pin: Callable

    @nn.compact
    def __call__(self, tokens, segments):
        same = segments[:, :, None] == segments[:, None, :]
        visible = (same & np.tri(LENGTH, dtype=bool))[:, None]
        x = self.pin(nn.Embed(VOCABULARY, WIDTH)(tokens))
        layers = nn.scan(
            nn.remat(Layer),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=NUM_LAYERS,
        )
        x, _ = layers(self.pin)(x, visible)
        return self.pin(nn.Dense(VOCABULARY)(self.pin(nn.LayerNorm()(x))))


def batches(size, steps):
    """Sequences that count up by one or two, two packed in a row, with padding after them."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        start = rng.integers(0, VOCABULARY, (size, 2, 1))
        step = rng.integers(1, 3, (size, 2, 1))
        runs = (start + step * np.arange(LENGTH + 1)) % VOCABULARY
        segments = np.repeat(np.arange(LENGTH)[None] >= LENGTH // 2, size, axis=0).astype(np.int32)
        which = segments[..., None] == np.arange(2)
        inputs = (runs[:, :, :-1].transpose(0, 2, 1) * which).sum(-1)
        targets = (runs[:, :, 1:].transpose(0, 2, 1) * which).sum(-1)
        lengths = rng.integers(3, LENGTH + 1, (size, 1))
        yield {
            "inputs": inputs.astype(np.int32),
            "targets": targets.astype(np.int32),
            "segments": segments,
            "mask": (np.arange(LENGTH) < lengths).astype(np.float32),
        }


def sharding_of(mesh, fsdp):
    """Where an array of the state goes: its first dimension that the devices divide is cut."""

    def place(x):
        dims = [i for i, size in enumerate(x.shape) if size and size % mesh.shape["data"] == 0]
        spec = P(*[None] * dims[0], "data") if fsdp and dims else P()
        return NamedSharding(mesh, spec)

    return place


def train(devices, plan=None, size=24, steps=20, fsdp=False):
    mesh = Mesh(np.array(devices), ("data",))
    sharded = NamedSharding(mesh, P("data"))
    model = Transformer(lambda x: jax.lax.with_sharding_constraint(x, sharded) if fsdp else x)
    tx = optax.adamw(3e-3)

    def init(key):
        tokens = jnp.zeros((len(devices), LENGTH), jnp.int32)
        params = model.init({"params": key, "dropout": key}, tokens, tokens)
        return {"params": params, "opt_state": tx.init(params), "step": jnp.int32(0)}

    placed = jax.tree.map(sharding_of(mesh, fsdp), jax.eval_shape(init, jax.random.key(0)))

    def train_step(state, batch, key):
        dropout = jax.random.fold_in(key, state["step"])

        def loss_of(params):
            rngs = {"dropout": dropout}
            logits = model.apply(params, batch["inputs"], batch["segments"], rngs=rngs)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return (losses * batch["mask"]).sum() / batch["mask"].sum()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    step = jax.jit(train_step, out_shardings=(placed, None))
    state = jax.jit(init, out_shardings=placed)(jax.random.key(0))
    key = jax.device_put(jax.random.key(1), NamedSharding(mesh, P()))
    losses = []
    for batch in batches(size, steps):
        batch = jax.device_put(batch, sharded)
        state, loss = step(state, batch, key)
        losses.append(float(loss))
    return losses, step.lower(state, batch, key)
