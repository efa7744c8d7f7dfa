"""Weights and rows of a small language model, made from names, and PyTorch's results with them.

Arrays have the names and the layout of the Flax model, with the number of the layer: "2.query".
"""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from examples.llm.config import PRESETS
from tests.support.torch_resnet50 import uniform

CONFIG = replace(
    PRESETS["tiny"],
    vocabulary=61,
    hidden=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_size=8,
    ffn=40,
    length=16,
    batch=3,
    z_loss=0.01,
    attend="row",
    dtype=jnp.float32,
)


def rows():
    """Rows of token ids; 0, the end of a document, is among them, and its targets do not count."""
    made = uniform("rows", (CONFIG.batch, CONFIG.length + 1), 1, CONFIG.vocabulary)
    made[:, 5] = 0
    return made.astype(np.int32)


def params(config):
    """Weights of ordinary magnitude, nested and stacked as in the Flax model."""

    def weight(name, *shape):
        if name.endswith("norm"):
            return uniform(name, shape, 0.5, 1.5).astype(np.float32)
        bound = 1.0 if name == "embedding" else np.sqrt(3 / shape[0])
        return uniform(name, shape, -bound, bound).astype(np.float32)

    hidden, ffn, heads = config.hidden, config.ffn, config.num_heads * config.head_size
    kv = config.num_kv_heads * config.head_size
    shapes = {
        "attention_norm": (hidden,), "query": (hidden, heads), "key": (hidden, kv),
        "value": (hidden, kv), "project": (heads, hidden), "ffn_norm": (hidden,),
        "gate": (hidden, ffn), "up": (hidden, ffn), "down": (ffn, hidden),
    }  # fmt: skip
    layers = {
        name: np.stack([weight(f"{layer}.{name}", *shape) for layer in range(config.num_layers)])
        for name, shape in shapes.items()
    }
    rest = {
        "embedding": weight("embedding", config.vocabulary, hidden),
        "norm": weight("norm", hidden),
    }
    if not config.tied:
        rest["head"] = weight("head", hidden, config.vocabulary)
    return {**rest, "layers": layers}


def flat(nested):
    """Weights or gradients by name."""
    layers = {
        f"{layer}.{name}": np.asarray(one)
        for name, stack in nested["layers"].items()
        for layer, one in enumerate(stack)
    }
    rest = {name: np.asarray(one) for name, one in nested.items() if name != "layers"}
    return {**rest, **layers}


def torch_results(config):
    """Logits, the mean loss, and its gradients."""
    import torch

    from examples.llm.torch_model import logits_of, mean_loss, weights_from

    weights = weights_from(params(config), config, "cpu")
    tokens, math = torch.from_numpy(rows()).long(), torch.nn.attention.SDPBackend.MATH
    logits = logits_of(weights, config, torch.float32, tokens[:, :-1])
    loss = mean_loss(weights, config, torch.float32, tokens, math)
    loss.backward()
    turned = {
        name for name, tensor in weights.items() if tensor.ndim == 2 and name != "embedding"
    }  # they are out x in there
    return {
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
        "gradients": {
            name: tensor.grad.numpy().T if name in turned else tensor.grad.numpy()
            for name, tensor in weights.items()
        },
    }
