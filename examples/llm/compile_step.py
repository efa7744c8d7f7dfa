"""Compile the training step of a language model for TPUs, on a machine without TPUs.

    python -m examples.llm.compile_step v6e:16x16 --failed 2x2@2,2 --preset 1b --replica 2x1

Needs libtpu, the TPU compiler. Prints the memory of a device, its cycles besides collectives by the
compiler's estimates, and the collectives along each axis.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

import ftmesh
from examples.llm.arguments import add_model, config_from
from examples.llm.config import PRESETS, Config
from examples.llm.sharding import EVERY_CHIP, make_mesh, replicas
from examples.llm.step import make_step
from ftmesh.collectives.audit import KINDS
from ftmesh.command_line import Parser, run_command
from ftmesh.execute.hlo_text import program_text
from ftmesh.tpu.compiled_rounds import compiled_loops, cycles_outside_rounds, total_cycles
from ftmesh.tpu.compiler import tpu_devices
from ftmesh.units import format_bytes, format_time


def main(argv: Sequence[str] | None = None) -> int:
    """Compile from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.llm.compile_step",
        description="Compile the training step of a language model, without TPUs.",
    )
    parser.add_argument("slice", metavar="SLICE", help="the TPUs to compile for, as v6e:16x16")
    add_model(parser)
    args = parser.parse_args(argv)
    return run_command("llm", lambda: report(config_from(PRESETS[args.preset], args), args))


def report(config: Config, args: argparse.Namespace) -> None:
    """Compile, and print."""
    topology = ftmesh.Topology.from_devices(tpu_devices(args.slice), failed=args.failed)
    mesh = make_mesh(topology, args.replica)
    step = make_step(config, mesh)
    padding = ftmesh.batch_padding(config.batch, mesh.size, microbatches=config.microbatches)
    tokens, mask = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=step.cuts.rows)
        for shape, dtype in (
            ((padding.num_rows, config.length + 1), jnp.int32),
            ((padding.num_rows,), bool),
        )
    )
    start = time.perf_counter()
    compiled = step.train.lower(step.types, tokens, mask, 0).compile()
    seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
    state, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    print(
        f"{topology}: {dict(mesh.shape)}; {padding} of {config.length} tokens\n"
        f"  {config.num_params:,} weights; compiled in {seconds:.0f} s\n"
        f"  {format_bytes(state + temporary)} a device: state and batch {format_bytes(state)}, "
        f"temporary {format_bytes(temporary)}"
    )
    text = program_text(compiled)
    if (cycles := cycles_outside_rounds(text)) is not None:
        cycles += total_cycles(compiled_loops(text))
        others = tuple(one for one in cycles.unknown if one[0] not in KINDS)
        cycles = replace(cycles, unknown=others)
        print(f"  {cycles.total:,} cycles besides collectives{cycles.unknown_text}")
    is_whole = args.replica == EVERY_CHIP
    ranks = topology if is_whole else replicas(topology, args.replica)
    for axis in mesh.axis_names:
        found = ftmesh.audit(compiled, axis, plan=ranks)
        for name, entries in (("follow the ring", found.native), ("do not", found.entries)):
            kinds = Counter(entry.kind for entry in entries)
            text = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            time_each = format_time(sum(entry.seconds or 0.0 for entry in entries))
            print(f"  along {axis!r} {name}: {text or 'none'} ({time_each} if each runs once)")
        for entry in found.entries:
            print(f"    {entry}")


if __name__ == "__main__":
    sys.exit(main())
