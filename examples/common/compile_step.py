"""Compile a step: whether a TPU compiler takes a whole step of training, and what that needs.

    report = compile_step(resnet50_trainer(config, topology))

Nothing runs: the devices may be those of `ftmesh.tpu.slices.tpu_devices`, which are not there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.console import Console

from examples.common.arguments import add_step, config_of
from examples.common.trainer import Trainer
from ftmesh.collectives import gradients
from ftmesh.command_line import ended
from ftmesh.errors import ArgumentError, FtmeshError, UnreadableError
from ftmesh.execute.hlo_text import text_of
from ftmesh.topology.topology import Topology
from ftmesh.tpu.compiled_rounds import (
    CompiledLoop,
    Overlap,
    compiled_loops,
    cycles_of_all,
    cycles_outside,
    overlap,
)
from ftmesh.tpu.cycles import Cycles
from ftmesh.tpu.slices import tpu_devices
from ftmesh.units import format_bytes


class RefusedError(FtmeshError):
    """The compiler does not take a program."""


@dataclass(frozen=True)
class StepReport:
    """What the compiler made of a step. All bytes are those of one device."""

    platform: str
    num_devices: int
    sums_on: str
    batch: int  # of all devices together
    compile_seconds: float
    program_bytes: int
    argument_bytes: int  # the state, which a step takes over, and the batch
    temporary_bytes: int
    overlap: Overlap | None  # of the sums of gradients
    loops: tuple[CompiledLoop, ...] = ()  # all rounds of all sums, the packing not among them
    others: Cycles | None = None  # all else that a step does
    unread: str = ""  # why nothing is said of these, where JAX cannot print the program

    @property
    def device_bytes(self) -> int:
        """All that a device must hold."""
        return self.argument_bytes + self.temporary_bytes + self.program_bytes

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        return asdict(self) | {"device_bytes": self.device_bytes}

    def __str__(self) -> str:
        lines = [
            f"{self.num_devices} devices of {self.platform}, global batch {self.batch}, gradients "
            f"summed by {self.sums_on}",
            f"  compiled in {self.compile_seconds:.1f} s",
            f"  {format_bytes(self.device_bytes)} at each device: the state and the batch "
            f"{format_bytes(self.argument_bytes)}, temporary {format_bytes(self.temporary_bytes)}, "
            f"the program {format_bytes(self.program_bytes)}",
        ]
        if self.unread:
            lines.append(f"  {self.unread}")
        if self.overlap and self.overlap.permutations:
            lines.append(f"  {self.overlap}")
        if any(loop.cycles for loop in self.loops):
            found, number = cycles_of_all(self.loops), len(self.loops)
            lines.append(
                f"  {found.total:,} cycles beside the permutations of {number} "
                f"loop{'s' * (number != 1)}, "
                f"{found.hidden:,} of them hidden, as the compiler estimates{found.doubts}"
            )
        if self.others:
            lines.append(f"  {self.others.total:,} cycles for all else{self.others.doubts}")
        return "\n".join(lines)


def compile_step(trainer: Trainer) -> StepReport:
    """Compile the step of a trainer, and say what came out."""
    parallel = trainer.parallel
    if parallel.mesh is None:
        raise ArgumentError("to compile for a mesh takes its devices; these ranks are emulated")
    lowered = trainer.step.lower(*trainer.inputs)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise RefusedError(f"the compiler says: {' '.join(str(error).split())[:600]}") from error
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    text = unread = ""
    try:
        text = text_of(compiled)
    except UnreadableError as error:
        unread = str(error)
    return StepReport(
        platform=parallel.platform,
        num_devices=parallel.num_ranks,
        sums_on=parallel.sums_on,
        batch=trainer.shares.global_batch,
        compile_seconds=seconds,
        program_bytes=memory.generated_code_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        overlap=overlap(text, gradients.SCOPE) if text else None,
        loops=compiled_loops(text) if text else (),
        others=cycles_outside(text),
        unread=unread,
    )


def start(
    name: str,
    parser: argparse.ArgumentParser,
    presets: Mapping[str, Any],
    make: Callable[[Any, Topology, argparse.Namespace], Trainer],
    argv: Sequence[str] | None,
) -> int:
    """Read the command line, compile the step of the trainer that `make` makes, and report.

    The exit status: what is wrong is said in one line, that begins with `name`.
    """
    parser.add_argument("slice", metavar="SLICE", help="the TPUs to compile for, as v6e:16x16")
    add_step(parser, presets)
    parser.set_defaults(preset=next(name for name in presets if name.startswith("mlperf")))
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    args = parser.parse_args(argv)
    console = Console(stderr=True)

    def run() -> None:
        with console.status(f"compiling for {args.slice}, which may take minutes"):
            topology = Topology.from_devices(
                tpu_devices(args.slice), failed=args.failed, failed_links=args.failed_links
            )
            report = compile_step(make(config_of(args, presets), topology, args))
        print(json.dumps(report.as_dict()) if args.json else report)

    return ended(name, run)
