"""Measure a training step of BERT on the devices present, and PyTorch's for comparison.

    python -m examples.bert.bench_step --batch 64 --attention cudnn --unrolled
    python -m examples.bert.bench_step --batch 64 --attention cudnn --unrolled --torch

Random tokens on the device, all rows full, in bfloat16. PyTorch's is `BertForPreTraining` of
transformers, compiled, with autocast to bfloat16 and AdamW: unchanged, with logits at all
positions, and with logits at the masked ones only. All are timed alternately in one run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from examples.bert.config import PRESETS, Config
from examples.bert.data import Batch
from examples.bert.trainer import bert_trainer, first_state
from examples.common.measure import RunSteps, measure, read_arguments, trainer_steps
from ftmesh.command_line import Parser
from ftmesh.topology.topology import Topology

FLOPS_PER_SEQUENCE = 1019.8e9  # of a step of BERT-large at length 512


def random_batch(config: Config, rows: Any) -> Batch:
    """Return full rows of random tokens, with the most masked words."""
    rng = np.random.default_rng(0)
    shape = (len(rows), config.length)
    masked = (len(rows), config.predictions)
    positions = rng.permuted(np.broadcast_to(np.arange(config.length), shape), axis=1)
    columns = (
        rng.integers(0, config.vocabulary, shape),
        np.broadcast_to(np.arange(config.length) >= config.length // 2, shape),
        np.full((len(rows), 1), config.length),
        np.sort(positions[:, : config.predictions]),
        rng.integers(0, config.vocabulary, masked),
        rng.integers(0, 2, (len(rows), 1)),
    )
    return Batch(*(np.ascontiguousarray(column, np.int32) for column in columns))


def our_steps(config: Config, attention: Any, unrolled: bool) -> RunSteps:
    """Return the steps of the trainer."""
    topology = Topology.from_devices(jax.devices())
    trainer = bert_trainer(config, topology, attention=attention, unrolled=unrolled)
    batch = random_batch(config, trainer.parallel.local_rows(trainer.shares))
    return trainer_steps(trainer, first_state(config, trainer, seed=0), batch)


def torch_steps(config: Config, *, everywhere: bool) -> RunSteps:
    """Return the steps of transformers' model, with logits everywhere or where masked."""
    import torch
    import transformers

    settings = transformers.BertConfig(
        vocab_size=config.vocabulary,
        hidden_size=config.hidden,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=4 * config.hidden,
        max_position_embeddings=config.length,
        hidden_act="gelu_new",
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: Any = transformers.BertForPreTraining(settings).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    columns = random_batch(config, range(config.batch))
    batch = Batch(*(torch.tensor(column, dtype=torch.long, device="cuda") for column in columns))
    cross_entropy = torch.nn.functional.cross_entropy

    def loss_fn() -> Any:
        outputs = model.bert(batch.tokens, token_type_ids=batch.segments)
        vectors, first = outputs.last_hidden_state, outputs.pooler_output
        positions = batch.positions[..., None]
        if not everywhere:
            vectors = vectors.gather(1, positions.expand(-1, -1, vectors.shape[-1]))
        words, sentences = model.cls(vectors, first)
        if everywhere:
            words = words.gather(1, positions.expand(-1, -1, words.shape[-1]))
        return cross_entropy(words.flatten(0, 1), batch.targets.flatten()) + cross_entropy(
            sentences, batch.is_random[:, 0]
        )

    compiled = torch.compile(loss_fn)

    def run_steps(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16):
                loss = compiled()
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()

    return run_steps


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = Parser(description="Measure a training step of BERT.")
    parser.add_argument("--attention", choices=("xla", "cudnn"), default="xla")
    parser.add_argument("--unrolled", action="store_true", help="no loop over layers")
    args = read_arguments(parser, argv, PRESETS, preset="mlperf-448", batch=64, steps=10)
    config = replace(PRESETS[args.preset], batch=args.batch)
    programs = {"ftmesh": our_steps(config, args.attention, args.unrolled)}
    if args.torch:
        programs["torch, logits everywhere"] = torch_steps(config, everywhere=True)
        programs["torch, logits where masked"] = torch_steps(config, everywhere=False)
    rates = measure(programs, args.batch, args.steps)
    if args.json:
        print(json.dumps(rates))
        return
    device = jax.devices()[0].device_kind
    for name, rate in rates.items():
        speed = (
            f", {rate * FLOPS_PER_SEQUENCE / 1e12:.0f} TFLOP/s" if config.num_layers == 24 else ""
        )
        print(f"{name}: {rate:.1f} sequences/s{speed} ({len(jax.devices())} x {device})")
    for name, rate in list(rates.items())[1:]:
        print(f"ratio to {name}: {rates['ftmesh'] / rate:.3f}")


if __name__ == "__main__":
    main()
