"""The command-line arguments shared by all trainers, and how a trainer starts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from examples.common.data_parallel import PSUM
from examples.common.reader import MAX_DAMAGED
from examples.common.trainer import StepOptions
from ftmesh import command_line
from ftmesh.algorithms.registry import current_name
from ftmesh.checkpoint.checkpoints import USE_ORBAX
from ftmesh.collectives.gradients import BUCKET_BYTES
from ftmesh.command_line import MAX_SEED, number, run_command, whole_number
from ftmesh.distributed.process_group import TIMEOUT
from ftmesh.distributed.startup import MAX_TIMEOUT
from ftmesh.elastic.attempt import Attempt, attempts
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup, initialize
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import EXECUTORS, PALLAS
from ftmesh.files import check_local, check_output_files, check_output_folder
from ftmesh.planning.selection import ALGORITHMS, AUTO
from ftmesh.testing import cpu_grid
from ftmesh.topology.damage import CoordFrame, environment_failed_chips
from ftmesh.topology.topology import Topology
from ftmesh.units import parse_bytes

MAX_BATCH = 2**24  # examples
positive = whole_number(1)  # types of arguments
seconds = number(0.001, MAX_TIMEOUT)
fraction = number(0, 0.999)

# Arguments in which processes may differ: their identity and their files.
_IDENTITY = ("coordinator", "num_processes", "process_id")
_PER_PROCESS = {*_IDENTITY, "data", "checkpoint_dir", "mllog", "out", "init"}


Train = Callable[[Any, Attempt, argparse.Namespace], Any]


def start(
    name: str,
    parser: argparse.ArgumentParser,
    presets: Mapping[str, Any],
    train: Train,
    argv: Sequence[str] | None,
) -> int:
    """Parse the command line and train through failures; return the exit status.

    Args:
        name: Starts the one line that an error is printed as.
        parser: With the arguments of one trainer only.
        presets: Configurations by name; dataclasses with a field `batch`.
        train: Called with configuration, attempt and arguments; again after a loss.
        argv: The command line (default: that of the process).
    """
    add_run(parser, presets)
    args = parser.parse_args(argv)

    def run() -> None:
        check_run(args)

        def topology(group: ElasticGroup) -> Topology:
            agree_on_arguments(group, args)
            return topology_from(args, group)

        for attempt in start_attempts(join_as(args, name), args, topology):
            with attempt as run:
                run.group.report_phase("plan")
                if run.is_primary:  # the only process that writes them
                    check_output_folder(args.out)
                    check_output_files(args.mllog)
                train(config_from(args, presets), run, args)

    interrupted = "interrupted; --resume continues from the last checkpoint"
    return run_command(name, run, interrupted=interrupted)


def start_attempts(
    group: ElasticGroup, args: argparse.Namespace, topology: Callable[[ElasticGroup], Topology]
) -> Iterator[Attempt]:
    """Return `ftmesh.elastic.attempts` with the arguments of `add_run`."""
    return attempts(
        group,
        topology=topology,
        with_idle=args.idle,
        copy_every=args.copy_every,
        check_every=args.check_every,
        shard_copies=not args.no_copies,
        two_states=args.two_states,
        defer_sigterm=bool(args.checkpoint_dir),  # else there is nothing to save
    )


def check_run(args: argparse.Namespace) -> None:
    """Raise ArgumentError for arguments of `add_run` that would fail later."""
    parse_bytes(args.bucket)
    check_local(args.checkpoint_dir or "", USE_ORBAX)
    check_output_folder(args.checkpoint_dir)
    for name in ("data", "init", "mllog", "out"):
        check_local(getattr(args, name, None) or "")


def add_step(parser: argparse.ArgumentParser, presets: Iterable[str]) -> None:
    """Add the arguments that change how a step is compiled."""
    parser.add_argument(
        "--preset", choices=tuple(presets), default="tiny", help="default: %(default)s"
    )
    parser.add_argument(
        "--batch", type=whole_number(1, MAX_BATCH), metavar="N", help="global batch (the preset's)"
    )
    parser.add_argument(
        "--failed",
        metavar="BLOCKS",
        help="failed chips, as 2x2@2,2 (default: the environment variable FTMESH_FAILED)",
    )
    parser.add_argument(
        "--failed-links",
        metavar="LINKS",
        default="",
        help="failed links, as '3,2-4,2;0,0-0,1' (default: none)",
    )
    parser.add_argument(
        "--idle",
        action="store_true",
        help="keep the devices of failed chips in the program, idle, for platforms that require "
        "whole slices (default: leave them out)",
    )
    parser.add_argument(
        "--algorithm",
        type=current_name,
        choices=(*ALGORITHMS, PSUM),
        default="auto",
        help="how gradients are summed: auto, the fastest by simulation; psum, lax.psum without a "
        "plan; or an algorithm by name (default: auto)",
    )
    parser.add_argument(
        "--executor",
        choices=(AUTO, *EXECUTORS),
        default=AUTO,
        help="what runs a sum: XLA's own ring, rounds of ppermute, in loops or unrolled, or one "
        "Pallas kernel, for TPUs (interpreted, slowly, elsewhere); auto takes xla or ppermute, the "
        "cheaper by simulation, and ppermute for a named algorithm (default: %(default)s)",
    )
    parser.add_argument(
        "--whole-optimizer",
        action="store_true",
        help="replicate the optimizer's state instead of sharding it",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="sum gradients during the backward pass; a Pallas kernel then starts earlier, but "
        "nothing else runs while it does",
    )
    parser.add_argument(
        "--bucket",
        metavar="SIZE",
        default=f"{BUCKET_BYTES // 2**20}MiB",
        help="with --overlap, bytes of gradients summed at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--donate",
        action="store_true",
        help="under 'ftmesh launch --failures', donate the state to a step, as other runs do: "
        "devices hold one state instead of three, and after a failure the steps since the last "
        "copy to host memory are repeated",
    )


def step_options(args: argparse.Namespace) -> StepOptions:
    """Return the arguments of `add_step` as `StepOptions`."""
    return StepOptions(
        algorithm=args.algorithm,
        executor=args.executor,
        sharded=not args.whole_optimizer,
        with_idle=args.idle,
        overlap=args.overlap,
        bucket_bytes=parse_bytes(args.bucket),
        keeps_state=not args.donate,
    )


def config_from(args: argparse.Namespace, presets: Mapping[str, Any]) -> Any:
    """Return the preset that the arguments of `add_step` name, with their batch size."""
    config = presets[args.preset]
    return replace(config, batch=args.batch) if args.batch else config


def add_run(parser: argparse.ArgumentParser, presets: Iterable[str]) -> None:
    """Add the arguments of a training run, those of `add_step` included."""
    add_step(parser, presets)
    parser.add_argument(
        "--mesh",
        metavar="SHAPE",
        help="shape of the mesh, as 8x8 (default: that of the devices)",
    )
    parser.add_argument(
        "--emulate",
        choices=("one", "many"),
        help="emulate that mesh: all ranks on one device, which is fast, or one CPU device each "
        "(default: use the real devices)",
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="stop after N (the preset's)")
    parser.add_argument("--data", metavar="PATH", help="the data (default: synthetic)")
    parser.add_argument(
        "--max-damaged",
        type=fraction,
        default=MAX_DAMAGED,
        metavar="FRACTION",
        help="fraction of examples that may be damaged; they are left out (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, MAX_SEED),
        default=0,
        metavar="N",
        help="random seed (default: 0)",
    )
    parser.add_argument("--checkpoint-dir", metavar="FOLDER", help="write checkpoints there")
    parser.add_argument(
        "--checkpoint-every",
        type=positive,
        default=500,
        metavar="N",
        help="in steps (default: 500)",
    )
    parser.add_argument(
        "--keep",
        type=positive,
        default=3,
        metavar="N",
        help="number of checkpoints to keep (default: 3)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
    parser.add_argument(
        "--copy-every",
        type=positive,
        metavar="N",
        help="copy the state to the memory of two hosts every N steps, under 'ftmesh launch "
        "--failures': restarted processes continue from there (default: as often as takes 1 %% of "
        "the time)",
    )
    parser.add_argument(
        "--check-every",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="compare the parameters of all chips every N steps, commit steps only then, and "
        "quarantine a chip that differs (0: never)",
    )
    parser.add_argument(
        "--two-states",
        action="store_true",
        help="commit a step before the next one starts, under 'ftmesh launch --failures': devices "
        "hold two states instead of three, and wait briefly after each step",
    )
    parser.add_argument(
        "--no-copies",
        action="store_true",
        help="keep no copy of each chip's optimizer shard on another host: after losing a host the "
        "run goes back to a copy in host memory, or to a checkpoint",
    )
    parser.add_argument(
        "--compile-ahead",
        action="store_true",
        help="compile the step for the loss of each host in the background, under 'ftmesh launch "
        "--failures', for faster recovery",
    )
    parser.add_argument("--mllog", metavar="FILE", help="write an MLPerf log")
    parser.add_argument("--out", metavar="FOLDER", help="write metrics.jsonl and run.svg there")
    add_process_arguments(parser)


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name the processes; not needed where JAX detects them."""
    group = command_line.add_process_arguments(parser)
    group.add_argument(
        "--limit",
        type=seconds,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"how long to wait for other processes to join and to agree ({TIMEOUT:g})",
    )


def join_as(args: argparse.Namespace, name: str) -> ElasticGroup:
    """Join the processes that the arguments name; emulation takes one process."""
    if args.emulate and all(getattr(args, name) is None for name in _IDENTITY):
        return ElasticGroup(timeout=args.limit)
    return initialize(
        args.coordinator, args.num_processes, args.process_id, timeout=args.limit, name=name
    )


def agree_on_arguments(group: ElasticGroup, args: argparse.Namespace) -> None:
    """Raise unless all processes were given the same arguments."""
    shared = {key: value for key, value in vars(args).items() if key not in _PER_PROCESS}
    group.agree({f"--{key.replace('_', '-')}": value for key, value in shared.items()})


def topology_from(args: argparse.Namespace, group: ElasticGroup = SINGLE_PROCESS) -> Topology:
    """Return the mesh that the arguments of `add_run` describe, with its devices."""
    if args.resume and not args.checkpoint_dir:
        raise ArgumentError("--resume needs --checkpoint-dir")
    if args.emulate and not args.mesh:
        raise ArgumentError("--emulate needs --mesh")
    if args.emulate and not group.is_single_process:
        raise ArgumentError("--emulate is for one process: leave it out with several")
    damage = {"failed": args.failed, "failed_links": args.failed_links}
    if args.emulate == "many":
        threads = 4 if args.executor == PALLAS else 1
        return cpu_grid(args.mesh, **damage, threads_per_device=threads)
    if args.emulate == "one":
        if args.failed is None:
            damage["failed"] = environment_failed_chips(CoordFrame.for_grid(args.mesh))
        return Topology.grid(args.mesh, **damage)
    return Topology.from_devices(jax.devices(), shape=args.mesh, **damage)
