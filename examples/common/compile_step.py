"""Compile a training step for TPUs on a machine without TPUs; report memory and overlap.

    report = compile_step(resnet50_trainer(config, topology))

Nothing runs: the topology's devices may be those of `ftmesh.tpu.compiler.tpu_devices`.
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

from examples.common.arguments import add_step, config_from
from examples.common.trainer import Trainer
from ftmesh.collectives import gradients
from ftmesh.command_line import run_command
from ftmesh.errors import ArgumentError, FtmeshError, UnreadableError
from ftmesh.execute.hlo_text import program_text
from ftmesh.topology.topology import Topology
from ftmesh.tpu.compiled_rounds import (
    CompiledLoop,
    Overlap,
    compiled_loops,
    cycles_outside_rounds,
    overlap,
    total_cycles,
)
from ftmesh.tpu.compiler import tpu_devices
from ftmesh.tpu.estimated_cycles import Cycles
from ftmesh.units import format_bytes


class CompilerError(FtmeshError):
    """The compiler rejects a program."""


@dataclass(frozen=True)
class StepReport:
    """What the compiler says of a step. All sizes are of one device."""

    platform: str
    num_devices: int
    sums_on: str
    batch: int  # global
    compile_seconds: float
    program_bytes: int
    argument_bytes: int  # the state, which is donated, and the batch
    temporary_bytes: int
    overlap: Overlap | None  # of the gradient sums
    loops: tuple[CompiledLoop, ...] = ()  # the rounds of all sums, without the packing
    others: Cycles | None = None  # the rest of the step
    unread: str = ""  # why the last three are missing, if JAX cannot print the program

    @property
    def device_bytes(self) -> int:
        """Memory that a device needs."""
        return self.argument_bytes + self.temporary_bytes + self.program_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self) | {"device_bytes": self.device_bytes}

    def __str__(self) -> str:
        lines = [
            f"{self.num_devices} devices of {self.platform}, global batch {self.batch}, gradients "
            f"summed by {self.sums_on}",
            f"  compiled in {self.compile_seconds:.1f} s",
            f"  {format_bytes(self.device_bytes)} per device: state and batch "
            f"{format_bytes(self.argument_bytes)}, temporary {format_bytes(self.temporary_bytes)}, "
            f"program {format_bytes(self.program_bytes)}",
        ]
        if self.unread:
            lines.append(f"  {self.unread}")
        if self.overlap and self.overlap.permutations:
            lines.append(f"  {self.overlap}")
        if any(loop.cycles for loop in self.loops):
            cycles, number = total_cycles(self.loops), len(self.loops)
            lines.append(
                f"  {cycles.total:,} cycles besides the permutations of {number} "
                f"loop{'s' * (number != 1)}, {cycles.hidden:,} of them hidden, by the compiler's "
                f"estimate{cycles.unknown_text}"
            )
        if self.others:
            lines.append(f"  {self.others.total:,} cycles for the rest{self.others.unknown_text}")
        return "\n".join(lines)


def compile_step(trainer: Trainer) -> StepReport:
    """Compile the step of a trainer.

    Raises:
        ArgumentError: If the trainer's ranks are emulated.
        CompilerError: If the compiler rejects the program.
    """
    parallel = trainer.parallel
    if parallel.mesh is None:
        raise ArgumentError("compiling for a mesh needs its devices; these ranks are emulated")
    lowered = trainer.step.lower(*trainer.inputs)
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise CompilerError(f"the compiler says: {' '.join(str(error).split())[:600]}") from error
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    text = unread = ""
    try:
        text = program_text(compiled)
    except UnreadableError as error:
        unread = str(error)
    return StepReport(
        platform=parallel.platform,
        num_devices=parallel.num_ranks,
        sums_on=parallel.sums_description,
        batch=trainer.shares.global_batch,
        compile_seconds=seconds,
        program_bytes=memory.generated_code_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        overlap=overlap(text, gradients.SCOPE) if text else None,
        loops=compiled_loops(text) if text else (),
        others=cycles_outside_rounds(text),
        unread=unread,
    )


def start(
    name: str,
    parser: argparse.ArgumentParser,
    presets: Mapping[str, Any],
    make_trainer: Callable[[Any, Topology, argparse.Namespace], Trainer],
    argv: Sequence[str] | None,
) -> int:
    """Parse the command line, compile a trainer's step, print the report; return the exit status.

    Errors are printed as one line that starts with `name`.
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
            report = compile_step(make_trainer(config_from(args, presets), topology, args))
        print(json.dumps(report.as_dict()) if args.json else report)

    return run_command(name, run)
