"""Measure a training step of the language model on the devices present, and PyTorch's beside it.

    python -m examples.llm.bench_step --preset 124m --batch 32 --torch \
        --set remat=none --set attend=row --set attention=cudnn --set unrolled=true \
        --variant "" --variant logits=bfloat16

Random tokens on the device, in rows of one document each. Each `--variant` is the preset with more
fields changed. PyTorch's is the same model (`examples.llm.torch_model`), compiled, with fused AdamW
and with bfloat16 logits, once with each kernel of attention. All start from the same weights, must
have the same first loss, do whole steps (with clipping and AdamW), and are timed alternately in one
run. What fails, as for lack of memory, is reported, and the others are measured.

On one GPU, JAX and PyTorch share the memory: JAX takes what it needs as it goes, or a fixed part
with XLA_PYTHON_CLIENT_PREALLOCATE=true XLA_PYTHON_CLIENT_MEM_FRACTION=0.5.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import ftmesh
from examples.common.measure import measure, read_arguments
from examples.llm.arguments import add_settings, changed
from examples.llm.config import PRESETS, Config
from examples.llm.report import mfu
from examples.llm.sharding import make_mesh
from examples.llm.step import make_step
from ftmesh.command_line import Parser, run_command
from ftmesh.errors import ArgumentError, TrainingError

Steps = Callable[[int], float]  # runs steps and waits for them; returns the loss of the last one
LOSSES_AGREE = 0.01  # relative, in bfloat16


def random_rows(config: Config, num_rows: int) -> Any:
    """Return rows of one document each, with one token more than a row has."""
    shape = (num_rows, config.length + 1)
    return np.random.default_rng(0).integers(1, config.vocabulary, shape, np.int32)


def our_programs(
    config: Config, variants: Mapping[str, Config], mesh: Mesh
) -> tuple[dict[str, Steps], Any]:
    """Return the steps of our variants, which share a state, and the first weights."""
    common = make_step(replace(config, attention="xla"), mesh)
    state: Any = common.init(0)
    weights = jax.device_get(state["params"])

    def program(config: Config) -> Steps:
        step: Any = None

        def run_steps(steps: int) -> float:
            nonlocal state, step
            is_first = step is None
            if is_first:
                step = make_step(config, mesh)
                if step.types != common.types:
                    raise ArgumentError("variants have other weights: --set them for all")
            if is_first or state is None:
                state = None  # frees its memory
                state = common.init(0)
            given, state = state, None  # a step that fails may have taken it
            for _ in range(steps):
                given, metrics = step.train(given, *rows)
            state = given
            return float(metrics["loss"])

        num_rows = ftmesh.batch_padding(
            config.batch, mesh.size, microbatches=config.microbatches
        ).num_rows
        batch = random_rows(config, num_rows), np.arange(num_rows) < config.batch
        rows = jax.device_put(batch, common.cuts.rows)
        return run_steps

    return {name: program(variant) for name, variant in variants.items()}, weights


def torch_programs(config: Config, weights: Any) -> dict[str, Steps]:
    """Return the steps of PyTorch's model with each kernel of attention; they share the weights."""
    import torch

    from examples.llm.torch_model import make_optimizer, mean_loss, weights_from

    device, kernels = "cpu", {"math": torch.nn.attention.SDPBackend.MATH}
    if torch.cuda.is_available():
        device, backends = "cuda", torch.nn.attention.SDPBackend
        kernels = {"flash": backends.FLASH_ATTENTION, "cudnn": backends.CUDNN_ATTENTION}
    tensors = weights_from(weights, config, device)
    optimizer, rising = make_optimizer(tensors, config, fused=True)
    dtype = getattr(torch, jnp.dtype(config.dtype).name)
    rows = torch.from_numpy(random_rows(config, config.batch)).long().to(device)

    def program(kernel: Any) -> Steps:
        compiled = torch.compile(mean_loss, fullgraph=True, dynamic=False)

        def run_steps(steps: int) -> float:
            for _ in range(steps):
                optimizer.zero_grad(set_to_none=True)
                loss = compiled(tensors, config, dtype, rows, kernel)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(list(tensors.values()), config.clip)
                optimizer.step()
                rising.step()
            return float(loss.detach())

        return run_steps

    return {f"torch, {name}": program(kernel) for name, kernel in kernels.items()}


def working(programs: Mapping[str, Steps]) -> tuple[dict[str, float], dict[str, str]]:
    """Compile and run the first step of each program.

    Returns:
        The first losses of those that work, and why the others do not.
    """
    losses: dict[str, float] = {}
    failures: dict[str, str] = {}
    for name, run_steps in programs.items():
        start = time.perf_counter()
        try:
            loss = run_steps(1)
            for other, expected in losses.items():
                if not abs(loss - expected) <= LOSSES_AGREE * expected:
                    raise TrainingError(f"the first loss is {loss}, and {expected} of {other}")
            losses[name] = loss
        except Exception as error:  # by JAX or PyTorch, of any kind: the others are measured
            text = next(iter(str(error).splitlines()), "")
            failures[name] = f"{type(error).__name__}: {text[:300]}"
        how = "fails" if name in failures else "is done"
        seconds = time.perf_counter() - start
        print(f"{name}: the first step {how} after {seconds:.0f} s", file=sys.stderr, flush=True)
    return losses, failures


def variants_of(config: Config, settings: Sequence[str]) -> dict[str, Config]:
    """Return our programs' settings by name, at least one."""
    return {
        f"ftmesh, {setting}" if setting else "ftmesh": changed(config, setting.split())
        for setting in settings or [""]
    }


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    if any(setting.startswith("batch=") for setting in args.set):
        raise ArgumentError("give the number of rows by --batch")
    config = replace(changed(PRESETS[args.preset], args.set), batch=args.batch)
    variants = variants_of(config, args.variant)
    for variant in variants.values():
        if (variant.batch, variant.length) != (config.batch, config.length):
            raise ArgumentError("variants have other batches: give --batch and --set for all")
        if args.torch and (variant.dropout or variant.microbatches > 1):
            raise ArgumentError("PyTorch's model here has no dropout and no microbatches")
    mesh = make_mesh(ftmesh.Topology.from_devices(jax.devices()), "1x1")
    programs, weights = our_programs(config, variants, mesh)
    if args.torch:
        programs |= torch_programs(config, weights)
    del weights
    losses, failures = working(programs)
    if not losses:
        raise TrainingError("; ".join(f"{name}: {why}" for name, why in failures.items()))
    rates = measure({name: programs[name] for name in losses}, args.batch, args.steps)
    rates = {name: rate * config.length for name, rate in rates.items()}
    if args.json:
        print(json.dumps({"tokens/s": rates, "first loss": losses, "failed": failures}))
        return
    kind = f"{mesh.size} x {jax.devices()[0].device_kind}"
    print(f"{args.preset}, {args.batch} rows of {config.length} tokens ({kind})")
    for name, rate in rates.items():
        speed, share = rate * config.flops_per_token / 1e12, mfu(config, mesh, rate)
        print(
            f"  {name}: {rate:,.0f} tokens/s, {speed:.3g} TFLOP/s"
            + (f", MFU {share:.1%}" if share else "")
            + f", first loss {losses[name]:.4f}"
        )
    for name, failure in failures.items():
        print(f"  {name}: failed: {failure}")
    others = {name: rate for name, rate in rates.items() if name not in variants}
    if others:
        best = max(others, key=others.__getitem__)
        for name in filter(rates.__contains__, variants):
            print(f"  {name}: ratio to {best}: {rates[name] / rates[best]:.3f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.llm.bench_step",
        description="Measure a training step of a language model.",
    )
    add_settings(parser)
    text = "a program with these fields changed as well; may be repeated (default: one with none)"
    parser.add_argument("--variant", action="append", metavar='"NAME=VALUE ..."', help=text)
    args = read_arguments(parser, argv, PRESETS, preset="124m", batch=32, steps=10)
    return run_command("llm", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
