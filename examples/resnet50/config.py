"""Presets of ResNet-50.

    tiny          a small network on 12x12 images, for a laptop: some 200 steps, a minute or two
    mlperf-4096   ImageNet with the settings of MLPerf 0.7, closed division, by global batch;
    mlperf-32768  the target is 75.9 % on the validation images
    mlperf-65536

Change a field with `dataclasses.replace(PRESETS["tiny"], batch=64)`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of a run. Defaults are MLPerf's for ImageNet."""

    batch: int  # global
    epochs: int
    warmup_epochs: float
    base_lr: float
    momentum: float
    weight_decay: float
    end_lr: float = 1e-4
    lr_power: float = 2
    lars_epsilon: float = 0.0
    label_smoothing: float = 0.1
    norm_group: int = 64  # examples per batch norm group
    epochs_per_eval: int = 4
    target: float = 0.759

    stage_sizes: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    small_images: bool = False
    num_classes: int = 1000
    image_size: int = 224
    train_images: int = 1_281_167  # of ImageNet; also the number of synthetic ones
    eval_images: int = 50_000

    @property
    def dtype(self) -> Any:
        """Of activations; parameters are float32."""
        return jnp.float32 if self.small_images else jnp.bfloat16

    @property
    def steps_per_eval(self) -> int:
        """Steps from one evaluation to the next."""
        return max(1, round(self.epochs_per_eval * self.train_images / self.batch))

    @property
    def total_steps(self) -> int:
        """Steps in all epochs."""
        return math.ceil(self.epochs * self.train_images / self.batch)

    @property
    def warmup_steps(self) -> int:
        """Steps of learning-rate warm-up."""
        return round(self.warmup_epochs * self.train_images / self.batch)

    def mlperf_settings(self) -> Mapping[str, Any]:
        """Return the settings under the keys that MLPerf logs require."""
        return {
            "global_batch_size": self.batch,
            "opt_name": "lars",
            "lars_opt_base_learning_rate": self.base_lr,
            "lars_opt_end_learning_rate": self.end_lr,
            "lars_opt_learning_rate_decay_poly_power": self.lr_power,
            "lars_opt_learning_rate_decay_steps": self.total_steps - self.warmup_steps,
            "lars_opt_learning_rate_warmup_epochs": self.warmup_epochs,
            "lars_opt_momentum": self.momentum,
            "lars_opt_weight_decay": self.weight_decay,
            "lars_epsilon": self.lars_epsilon,
        }


PRESETS: Mapping[str, Config] = {
    "tiny": Config(
        batch=96, epochs=10, warmup_epochs=2, base_lr=8, momentum=0.9, weight_decay=1e-4,
        stage_sizes=(1, 1), width=8, small_images=True, num_classes=10, image_size=12,
        train_images=2048, eval_images=1000, norm_group=32, target=0.999,
    ),
    "mlperf-4096": Config(
        batch=4096, epochs=56, warmup_epochs=5, base_lr=10, momentum=0.9, weight_decay=2e-4
    ),
    "mlperf-32768": Config(
        batch=32768, epochs=64, warmup_epochs=18, base_lr=29, momentum=0.929, weight_decay=1e-4
    ),
    "mlperf-65536": Config(
        batch=65536, epochs=92, warmup_epochs=33, base_lr=23.081, momentum=0.95372,
        weight_decay=1e-4,
    ),
}  # fmt: skip
