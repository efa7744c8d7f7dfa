"""The same language model in PyTorch, on one device, to measure ours against.

It is written as one does for speed there: float32 weights, cast where they are used (what autocast
does), scaled dot-product attention, and nothing but what `torch.compile` can fuse. Each row is one
document. Weights have our names with the number of the layer, and are out x in.

    weights = weights_from(params, config, "cuda")
    loss = mean_loss(weights, config, torch.bfloat16, rows, SDPBackend.FLASH_ATTENTION)
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from examples.llm.config import Config
from examples.llm.model import EPSILON
from examples.llm.tokens import END

Weights = dict[str, Any]  # name -> tensor; those of layer 3 are named "3.query" and so on


def weights_from(params: Any, config: Config, device: str) -> Weights:
    """Copy the weights of our model: whole ones, on one device."""

    def tensor(array: Any, turned: bool) -> Any:
        array = np.array(array.T if turned else array, order="C")  # a copy, which can be written
        return torch.from_numpy(array).to(device).requires_grad_()

    weights = {
        name: tensor(array, name == "head") for name, array in params.items() if name != "layers"
    }
    for name, stack in params["layers"].items():
        for layer, array in enumerate(jax.device_get(stack)):
            weights[f"{layer}.{name}"] = tensor(array, array.ndim == 2)
    assert len(weights) == 9 * config.num_layers + (2 if config.tied else 3)
    return weights


def logits_of(weights: Weights, config: Config, dtype: Any, tokens: Any) -> Any:
    """Return the logits of the next token at each position, in `dtype`, of rows of one document."""

    def linear(x: Any, name: str) -> Any:
        return functional.linear(x, weights[name].to(dtype))

    def norm(x: Any, name: str) -> Any:
        wide = x.float()
        mean = wide.square().mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean + EPSILON) * weights[name]).to(dtype)

    def heads(x: Any, name: str, count: int) -> Any:
        return linear(x, name).unflatten(-1, (count, config.head_size)).transpose(1, 2)

    half = config.head_size // 2
    rates = config.rope_theta ** (-torch.arange(half, device=tokens.device) / half)
    angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
    cosine, sine = angles.cos(), angles.sin()

    def rotate(x: Any) -> Any:
        first, second = x.float().chunk(2, dim=-1)
        turned = (first * cosine - second * sine, second * cosine + first * sine)
        return torch.cat(turned, dim=-1).to(dtype)

    x = functional.embedding(tokens, weights["embedding"]).to(dtype)
    for layer in range(config.num_layers):
        y = norm(x, f"{layer}.attention_norm")
        query = rotate(heads(y, f"{layer}.query", config.num_heads))
        key = rotate(heads(y, f"{layer}.key", config.num_kv_heads))
        value = heads(y, f"{layer}.value", config.num_kv_heads)
        y = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=config.num_heads != config.num_kv_heads
        )
        x = x + linear(y.transpose(1, 2).flatten(-2), f"{layer}.project")
        y = norm(x, f"{layer}.ffn_norm")
        y = functional.silu(linear(y, f"{layer}.gate")) * linear(y, f"{layer}.up")
        x = x + linear(y, f"{layer}.down")
    return linear(norm(x, "norm"), "embedding" if config.tied else "head")


def mean_loss(weights: Weights, config: Config, dtype: Any, rows: Any, kernel: Any) -> Any:
    """Return the mean loss, given one token more than a row has, with a kernel of attention."""
    with sdpa_kernel(kernel):
        logits = logits_of(weights, config, dtype, rows[:, :-1]).flatten(0, 1).float()
    targets = rows[:, 1:].flatten()
    counts = (rows[:, :-1] != END).flatten().float()
    losses = functional.cross_entropy(logits, targets, reduction="none")
    losses = losses + config.z_loss * logits.logsumexp(-1).square()
    return (losses * counts).sum() / counts.sum()


def make_optimizer(weights: Weights, config: Config, *, fused: bool) -> tuple[Any, Any]:
    """Return AdamW and its schedule; norms are not decayed."""
    norms = [tensor for name, tensor in weights.items() if name.endswith("norm")]
    others = [tensor for name, tensor in weights.items() if not name.endswith("norm")]
    optimizer = torch.optim.AdamW(
        [
            {"params": others, "weight_decay": config.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=(config.beta_1, config.beta_2),
        eps=config.epsilon,
        fused=fused,
    )
    # The warm-up alone: a benchmark ends long before the rate decays.
    rising = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(step / max(config.warmup, 1), 1.0)
    )
    return optimizer, rising
