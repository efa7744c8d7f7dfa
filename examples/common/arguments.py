"""The command-line arguments shared by all trainers, and how a trainer starts."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from examples.common.data_parallel import PSUM
from examples.common.reader import MAX_DAMAGED
from examples.common.reshard import publish_shards
from examples.common.trainer import StepOptions
from ftmesh import command_line
from ftmesh.algorithms.registry import current_name
from ftmesh.collectives.gradients import BUCKET_BYTES
from ftmesh.command_line import MAX_SEED, number, run_command, whole_number
from ftmesh.distributed.consensus import agree_on_code, agree_on_mesh
from ftmesh.distributed.process_group import TIMEOUT
from ftmesh.distributed.startup import MAX_TIMEOUT
from ftmesh.elastic.controller_client import ControllerClient, Paused
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup, initialize, run_generations
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import EXECUTORS, PALLAS
from ftmesh.files import check_output_files, check_output_folder
from ftmesh.planning.selection import ALGORITHMS, AUTO
from ftmesh.testing import cpu_grid, fault_injection
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


Train = Callable[[Any, Topology, argparse.Namespace, ElasticGroup], Any]


def start(
    name: str,
    parser: argparse.ArgumentParser,
    presets: Mapping[str, Any],
    train: Train,
    argv: Sequence[str] | None,
) -> int:
    """Parse the command line and train; return the exit status.

    Processes without a live device wait for the end.

    Args:
        name: Starts the one line that an error is printed as.
        parser: With the arguments of one trainer only.
        presets: Configurations by name; dataclasses with a field `batch`.
        train: Called with configuration, topology, arguments and group.
        argv: The command line (default: that of the process).
    """
    add_run(parser, presets)
    args = parser.parse_args(argv)

    def run() -> None:
        check_run(args)
        fault_injection.inject("start")
        with join_as(args, name) as group, contextlib.suppress(Paused):
            run_generations(group, lambda group: _generation(group, args, presets, train))

    interrupted = "interrupted; --resume continues from the last checkpoint"
    return run_command(name, run, interrupted=interrupted)


def check_run(args: argparse.Namespace) -> None:
    """Raise for arguments of `add_run` that would fail later."""
    parse_bytes(args.bucket)
    check_output_folder(args.checkpoint_dir)


def _generation(
    group: ElasticGroup, args: argparse.Namespace, presets: Mapping[str, Any], train: Train
) -> None:
    """Train with the current processes, until the run ends or they change."""
    group.report_phase("agree")
    if group.controller is not None and args.idle:
        raise ArgumentError(
            "--idle keeps the devices of failed chips in the program, but those of lost hosts are "
            "gone: leave it out if hosts may be lost"
        )
    agree_on_code(group)
    agree_on_arguments(group, args)
    topology = group.live_topology(topology_from(args, group))
    agree_on_mesh(group, topology)
    group = group.for_topology(topology, with_idle=args.idle)
    if group.is_primary:  # the only process that writes them
        check_output_folder(args.out)
        check_output_files(args.mllog)
    if group.is_member:
        group.report_phase("plan")
        with jax.default_device(group.default_device):
            train(config_from(args, presets), topology, args, group)
    elif group.controller is not None:
        _stand_by(group, group.controller)


def _stand_by(group: ElasticGroup, controller: ControllerClient) -> None:
    """Wait for the next generation without a chip, after publishing the shards held."""
    peer_checkpoint = PeerCheckpoint.from_environment(
        group.process, group.generation, say=lambda line: None
    )
    if controller.held_state is not None and peer_checkpoint is not None:
        with peer_checkpoint:
            publish_shards(controller.held_state, group, peer_checkpoint.stores)
    controller.stand_by()


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
    _add_failures(parser)


def _add_failures(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that matter only under a controller."""
    group = parser.add_argument_group("fault tolerance", "under 'ftmesh launch --failures N'")
    group.add_argument(
        "--donate",
        action="store_true",
        help="donate the state to a step, as runs without fault tolerance do: devices hold one "
        "state instead of two, and after a failure the steps since the last --copy-every are "
        "repeated (default: no step is)",
    )
    group.add_argument(
        "--no-copies",
        action="store_true",
        help="keep no copy of each chip's optimizer shard on another host: after losing a host the "
        "run goes back to a copy in host memory, or to a checkpoint",
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
        copies=not args.no_copies,
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
        type=whole_number(0),
        default=0,
        metavar="N",
        help="copy the state to the memory of two hosts every N steps, under 'ftmesh launch "
        "--failures': restarted processes continue from there (0: never)",
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
