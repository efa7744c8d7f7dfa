"""Measure a training step of ResNet-50 on the devices present, and PyTorch's for comparison.

    python -m examples.resnet50.bench_step --batch 256
    python -m examples.resnet50.bench_step --batch 256 --torch --json

Random images on the device, in bfloat16. PyTorch's is torchvision's ResNet-50, compiled, with
channels last, autocast to bfloat16 and SGD; it needs a GPU, torch and torchvision. Both are timed
alternately in one run; the best repeat of each counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from examples.common.measure import RunSteps, measure, read_arguments, trainer_steps
from examples.resnet50.config import PRESETS
from examples.resnet50.data import Batch
from examples.resnet50.trainer import first_state, resnet50_trainer
from ftmesh.command_line import Parser
from ftmesh.topology.topology import Topology


def our_steps(preset: str, batch: int) -> RunSteps:
    """Return the steps of the trainer."""
    config = replace(PRESETS[preset], batch=batch)
    trainer = resnet50_trainer(config, Topology.from_devices(jax.devices()))
    rng, size = np.random.default_rng(0), config.image_size
    rows = trainer.parallel.local_rows(trainer.shares)
    images = Batch(
        rng.integers(0, 256, (len(rows), size, size, 3), np.uint8),
        np.where(rows < 0, -1, rows % config.num_classes).astype(np.int32),
    )
    return trainer_steps(trainer, first_state(config, trainer, seed=0), images)


def torch_steps(batch: int) -> RunSteps:
    """Return the steps of torchvision's ResNet-50."""
    import torch
    import torchvision

    torch.backends.cudnn.benchmark = True
    model: Any = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True
    )
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.arange(batch, device="cuda") % 1000
    loss_fn = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    compiled = torch.compile(model)

    def run_steps(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_fn(compiled(images), labels)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()

    return run_steps


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = Parser(description="Measure a training step of ResNet-50.")
    args = read_arguments(parser, argv, PRESETS, preset="mlperf-4096", batch=256, steps=30)
    programs = {"ftmesh": our_steps(args.preset, args.batch)}
    if args.torch:
        programs["torch"] = torch_steps(args.batch)
    rates = measure(programs, args.batch, args.steps)
    if args.json:
        print(json.dumps(rates))
        return
    device = jax.devices()[0].device_kind
    for name, rate in rates.items():
        print(f"{name}: {rate:.0f} images/s ({len(jax.devices())} x {device}, batch {args.batch})")
    if args.torch:
        print(f"ratio: {rates['ftmesh'] / rates['torch']:.3f}")


if __name__ == "__main__":
    main()
