"""Presets of a decoder-only language model.

    preset    parameters   rows x tokens   a run
    tiny            0.1 M       24 x 64    40 steps on synthetic text, on a CPU: half a minute
    124m            124 M     512 x 1024   the size of GPT-2 small: 10 G tokens
    1b              1.2 B     512 x 4096   the size of Llama 3.2 1B: 40 G tokens
    8b              8.0 B     512 x 8192   the size of Llama 3.1 8B: 160 G tokens

Only tiny has been trained. Change a field with `dataclasses.replace(PRESETS["tiny"], batch=48)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp

from ftmesh.errors import ArgumentError

Remat = Literal["none", "dots", "full"]
Attention = Literal["xla", "cudnn"]
Attend = Literal["document", "row"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run."""

    # The model.
    vocabulary: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn: int
    tied: bool = False  # embedding and head are one matrix
    rope_theta: float = 10_000.0
    stddev: float = 0.02  # of initial weights
    dropout: float = 0.0
    dtype: Any = jnp.bfloat16  # of the compute; weights are float32
    logits: Any = jnp.float32  # dtype of the logits; the loss is float32
    attend: Attend = "document"  # tokens attend to their document, or to all of the row before them

    # How a step runs.
    length: int  # tokens of a row
    batch: int  # rows of a step, over all chips
    microbatches: int = 1  # parts that a chip's rows are taken in
    remat: Remat = "dots"  # what the backward pass recomputes
    attention: Attention = "xla"  # "cudnn" is for NVIDIA GPUs; fastest with attend="row"
    unrolled: bool = False  # no loop over layers: on a GPU faster, a program that grows with them

    # The optimizer and the loss.
    steps: int  # of the whole learning-rate schedule
    warmup: int
    lr: float
    end_lr: float = 0.1  # of `lr`
    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1  # of matrices
    clip: float = 1.0  # norm of the gradients
    z_loss: float = 1e-4

    def __post_init__(self) -> None:
        for name in ("length", "batch", "microbatches", "steps", "num_layers", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}: give 1 or more")
        for name, kind in (("remat", Remat), ("attention", Attention), ("attend", Attend)):
            if getattr(self, name) not in get_args(kind):
                rule = f"give one of {', '.join(get_args(kind))}"
                raise ArgumentError(f"{name} is {getattr(self, name)!r}: {rule}")
        for name in ("dtype", "logits"):
            if not jnp.issubdtype(getattr(self, name), jnp.floating):
                raise ArgumentError(
                    f"{name} is {jnp.dtype(getattr(self, name))}: give float32 or bfloat16"
                )
        if self.num_heads % self.num_kv_heads:
            raise ArgumentError(
                f"{self.num_kv_heads} key heads do not divide {self.num_heads} query heads"
            )
        if not self.warmup < self.steps:
            raise ArgumentError(f"{self.warmup} steps of warm-up are not less than {self.steps}")

    @property
    def num_params(self) -> int:
        """Number of weights."""
        heads = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_size
        layer = self.hidden * (heads + 3 * self.ffn + 2)
        embeddings = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return self.num_layers * layer + embeddings + self.hidden

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of forward and backward pass, without what is recomputed.

        Six for each weight that a token is multiplied by, and causal attention over whole rows.
        """
        multiplied = self.num_params - (0 if self.tied else self.vocabulary * self.hidden)
        pairs = self.length / 2
        return 6 * multiplied + 12 * self.num_layers * self.num_heads * self.head_size * pairs


PRESETS: Mapping[str, Config] = {
    "tiny": Config(
        vocabulary=264, hidden=48, num_layers=3, num_heads=4, num_kv_heads=2, head_size=12,
        ffn=128, length=64, batch=24, steps=40, warmup=5, lr=1e-2, stddev=0.1,
        dtype=jnp.float32,
    ),
    "124m": Config(
        vocabulary=50_304, hidden=768, num_layers=12, num_heads=12, num_kv_heads=12, head_size=64,
        ffn=2048, tied=True, length=1024, batch=512, steps=19_000, warmup=700, lr=6e-4,
    ),
    "1b": Config(
        vocabulary=128_256, hidden=2048, num_layers=16, num_heads=32, num_kv_heads=8, head_size=64,
        ffn=8192, tied=True, rope_theta=500_000.0, length=4096, batch=512, steps=19_000,
        warmup=1000, lr=3e-4,
    ),
    "8b": Config(
        vocabulary=128_256, hidden=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_size=128,
        ffn=14_336, rope_theta=500_000.0, length=8192, batch=512, steps=38_000, warmup=2000,
        lr=3e-4, remat="full",
    ),
}  # fmt: skip
