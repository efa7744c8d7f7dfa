"""Presets of BERT.

    tiny          two narrow layers on synthetic text, for a laptop: a few minutes
    base          BERT-base with settings for one machine
    mlperf-448    BERT-large with the settings of MLPerf 0.7, closed division, by global batch;
    mlperf-4096   starts from MLPerf's first checkpoint; the target is 71.2 % of the masked words
    mlperf-8192   of 10,000 sequences

Change a field with `dataclasses.replace(PRESETS["tiny"], batch=64)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

TRAIN_SEQUENCES = 156_725_653  # of MLPerf's training set


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run. Defaults are MLPerf's for BERT-large."""

    batch: int  # global
    total_steps: int
    base_lr: float
    warmup_steps: int = 0
    beta_1: float = 0.9
    beta_2: float = 0.999
    weight_decay: float = 0.01
    epsilon: float = 1e-6
    end_lr: float = 0.0
    lr_power: float = 1
    target: float = 0.712
    sequences_per_eval: int | None = None  # default: MLPerf's

    num_layers: int = 24
    hidden: int = 1024
    num_heads: int = 16
    vocabulary: int = 30_522
    length: int = 512  # tokens per row
    predictions: int = 76  # most masked words per row
    packed: int = 1  # maximum number of sequences per row
    stddev: float = 0.02  # of initial weights
    dtype: Any = jnp.bfloat16  # of activations; parameters are float32
    train_sequences: int = TRAIN_SEQUENCES  # also the number of synthetic ones
    eval_sequences: int = 10_000

    @property
    def steps_per_eval(self) -> int:
        """Steps from one evaluation to the next.

        MLPerf evaluates less often with larger batches, in multiples of 25,000 sequences.
        """
        sequences = self.sequences_per_eval
        if sequences is None:
            sequences = int(0.05 * (230.23 * self.batch + 3_000_000)) // 25_000 * 25_000
        return max(1, round(sequences / self.batch))

    def mlperf_settings(self) -> Mapping[str, Any]:
        """Return the settings under the keys that MLPerf logs require."""
        return {
            "global_batch_size": self.batch,
            "opt_base_learning_rate": self.base_lr,
            "opt_epsilon": self.epsilon,
            "opt_learning_rate_training_steps": self.total_steps,
            "opt_learning_rate_warmup_steps": self.warmup_steps,
            "num_warmup_steps": self.warmup_steps,
            "start_warmup_step": 0,
            "opt_lamb_beta_1": self.beta_1,
            "opt_lamb_beta_2": self.beta_2,
            "opt_lamb_weight_decay_rate": self.weight_decay,
        }


PRESETS: Mapping[str, Config] = {
    "tiny": Config(
        batch=336, total_steps=200, base_lr=0.02, warmup_steps=20, stddev=0.1, dtype=jnp.float32,
        num_layers=2, hidden=48, num_heads=2, vocabulary=256, length=32, predictions=5,
        train_sequences=8192, eval_sequences=500, sequences_per_eval=16_800, target=0.5,
    ),
    "base": Config(
        batch=256, total_steps=100_000, base_lr=1e-3, warmup_steps=3_000,
        num_layers=12, hidden=768, num_heads=12,
    ),
    "mlperf-448": Config(batch=448, total_steps=6_700, base_lr=4.25e-4),
    "mlperf-4096": Config(
        batch=4096, total_steps=855, base_lr=0.0024, beta_1=0.66, beta_2=0.998
    ),
    "mlperf-8192": Config(
        batch=8192, total_steps=560, base_lr=0.00288293, warmup_steps=287, beta_1=0.88,
        beta_2=0.88, weight_decay=0.0166629,
    ),
}  # fmt: skip
