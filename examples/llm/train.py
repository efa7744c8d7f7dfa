"""Train a language model on a mesh with failed chips.

    python -m examples.llm.train --emulate 4x4 --failed 2x2@2,2 --replica 2x1
    python -m examples.llm.train --preset 1b --replica 2x2 --data tokens.npy \
        --checkpoint-dir gs://bucket/run1
    ftmesh launch --hosts 4 --devices-per-host 4 --mesh 4x4 --host-shape 2x2 --failures 3 -- \
        python -m examples.llm.train --replica 2x1

`train` reads from top to bottom: data, mesh, state, loop.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from functools import partial

from examples.llm.arguments import add_model, config_from
from examples.llm.checkpoints import open_manager, restore_state, save_state
from examples.llm.config import PRESETS, Config
from examples.llm.data import batches, open_rows
from examples.llm.report import Report
from examples.llm.sharding import make_mesh
from examples.llm.step import make_step
from ftmesh import elastic
from ftmesh.command_line import MAX_SEED, Parser, run_command, whole_number
from ftmesh.files import check_local
from ftmesh.testing.emulation import request_cpu_devices
from ftmesh.topology.notation import parse_shape


def train(config: Config, args: argparse.Namespace) -> Report:
    """Train to the end, through failures."""
    # Data: opened first, so that errors come before anything is compiled.
    for path in (args.data, args.tokenizer, args.metrics):
        check_local(path or "")
    rows = open_rows(args.data, args.tokenizer, config)
    steps = min(args.steps or config.steps, config.steps)

    for attempt in elastic.attempts(copy_every=args.copy_every, defer_sigterm=True):
        with attempt as run:
            # Mesh: replicas along a ring around the failed chips, and the chips of a replica.
            mesh = make_mesh(run.topology, args.replica)
            step = make_step(config, mesh, donate=not args.keep_state)

            # State: the newest there is, on devices, in host memory or in files; or a first one.
            state = step.init(args.seed)
            if args.checkpoint_dir is None:
                manager = None
                done, state = run.restore(state)
            else:
                manager = open_manager(
                    args.checkpoint_dir, run.group, every=args.checkpoint_every, keep=args.keep
                )
                done, state = run.restore(
                    state,
                    latest_step=manager.latest_step(),
                    load=partial(restore_state, manager, step.types),
                )
            if run.is_primary:
                print(f"{run.topology}: {dict(mesh.shape)}, from step {done}", flush=True)

            # Loop.
            report = Report(
                config, mesh, args.metrics if run.is_primary else None, args.print_every
            )
            cut = step.cuts.rows
            for batch in batches(rows, config, cut, first_step=done, steps=steps, seed=args.seed):
                state, metrics = step.train(state, *batch, args.seed)
                done += 1
                is_last = run.commit(done, state) or done == steps
                if manager is not None:
                    save_state(manager, done, state, force=is_last)
                if run.is_primary:
                    report.step(done, metrics)
            report.settle()
            if manager is not None:
                manager.close()
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Train from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.llm.train",
        description="Train a language model on a mesh with failed chips.",
        epilog="Under `ftmesh launch --failures N` a run continues when hosts are lost. The same "
        "command continues from the newest checkpoint in --checkpoint-dir.",
    )
    positive = whole_number(1)
    add = parser.add_argument
    add_model(parser)
    add("--steps", type=positive, metavar="N", help="stop after N (the preset's)")
    add("--data", metavar="FILE", help=".npy of token ids, .jsonl or .txt (default: synthetic)")
    add("--tokenizer", metavar="FILE", help="see examples.llm.tokens (default: bytes)")
    add("--seed", type=whole_number(0, MAX_SEED), default=0, metavar="N", help="default: 0")
    add(
        "--checkpoint-dir",
        metavar="FOLDER",
        help="write Orbax checkpoints there, and resume from them",
    )
    add("--checkpoint-every", type=positive, default=500, metavar="N", help="steps (default: 500)")
    add("--keep", type=positive, default=3, metavar="N", help="checkpoints to keep (default: 3)")
    add("--metrics", metavar="FILE", help="append a line of JSON for each step")
    add("--print-every", type=positive, default=10, metavar="N", help="steps (default: 10)")
    add("--emulate", metavar="SHAPE", help="emulate a mesh of CPU devices, as 4x4")
    group = parser.add_argument_group("fault tolerance", "under 'ftmesh launch --failures N'")
    group.add_argument("--keep-state", action="store_true", help="do not donate the state to a "
        "step: two more states on the devices, and no step is repeated")  # fmt: skip
    group.add_argument("--copy-every", type=positive, metavar="N", help="copy the state to host "
        "memory every N steps (default: as often as takes 1 %% of the time)")  # fmt: skip
    args = parser.parse_args(argv)

    def run() -> None:
        if args.emulate:
            request_cpu_devices(_count(args.emulate))
            os.environ["FTMESH_MESH"] = args.emulate
        if args.failed is not None:
            os.environ["FTMESH_FAILED"] = args.failed
        train(config_from(PRESETS[args.preset], args), args)

    return run_command("llm", run, interrupted="interrupted; the same command continues")


def _count(shape: str) -> int:
    return math.prod(parse_shape(shape))


if __name__ == "__main__":
    sys.exit(main())
