"""The command-line arguments that every trainer takes, under the same names."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from examples.common.data_parallel import PSUM
from examples.common.reader import MAX_DAMAGED
from examples.common.reshard import give_shards
from examples.common.trainer import StepOptions
from ftmesh import command_line
from ftmesh.collectives.gradients import BUCKET_BYTES
from ftmesh.command_line import MOST_SEED, ended, number, whole_number
from ftmesh.distributed.consensus import agree_on_code, agree_on_mesh
from ftmesh.distributed.initialize import LONGEST, join
from ftmesh.distributed.process_group import ALONE, LIMIT, Cluster
from ftmesh.elastic.controller_client import Line, Paused
from ftmesh.elastic.generations import through_epochs
from ftmesh.elastic.peer_checkpoint import memory_on_line
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import EXECUTORS, PALLAS, PPERMUTE
from ftmesh.files import check_folder, check_targets
from ftmesh.planning.selection import ALGORITHMS, AUTO
from ftmesh.testing import cpu_grid, fault_injection
from ftmesh.topology.topology import Topology
from ftmesh.units import parse_bytes

MAX_BATCH = 2**24  # examples
positive = whole_number(1)  # the type of an argument that counts something
seconds = number(0.001, LONGEST)  # of one that limits a wait
share = number(0, 0.999)  # of one that is a part of one

# Arguments in which processes may differ: who each is, and where its files are.
_WHO = ("coordinator", "num_processes", "process_id")
_OWN = {*_WHO, "data", "checkpoint_dir", "mllog", "out", "init"}


Train = Callable[[Any, Topology, argparse.Namespace, Cluster], Any]


def start(
    name: str,
    parser: argparse.ArgumentParser,
    presets: Mapping[str, Any],
    train: Train,
    argv: Sequence[str] | None,
) -> int:
    """Read the command line and train with one of the presets, dataclasses; the exit status.

    What is wrong is said in one line, that begins with `name`. Of several processes each trains its
    part, and those without a live device wait for the end.
    """
    add_run(parser, presets)
    args = parser.parse_args(argv)

    def run() -> None:
        check_run(args)
        fault_injection.reach("start")
        with join_as(args, name) as cluster, contextlib.suppress(Paused):
            through_epochs(cluster, lambda cluster: _epoch(cluster, args, presets, train))

    again = "interrupted; --resume goes on from the last checkpoint"
    return ended(name, run, interrupted=again)


def check_run(args: argparse.Namespace) -> None:
    """Refuse arguments of `add_run` that could not end well, before anything is done for them."""
    parse_bytes(args.bucket)
    check_folder(args.checkpoint_dir)


def _epoch(
    cluster: Cluster, args: argparse.Namespace, presets: Mapping[str, Any], train: Train
) -> None:
    """Train with the processes that there are, until all is done or that changes."""
    cluster.at("agree")
    if cluster.line is not None and args.idle:
        raise ArgumentError(
            "--idle keeps the devices of failed chips in the program, and those of lost hosts are "
            "gone: leave it out where hosts may be lost"
        )
    agree_on_code(cluster)
    agree_on_arguments(cluster, args)
    topology = cluster.living(topology_of(args, cluster))
    agree_on_mesh(cluster, topology)
    cluster = cluster.on(topology, with_idle=args.idle)
    if cluster.speaks:  # the others write neither
        check_folder(args.out)
        check_targets(args.mllog)
    if cluster.takes_part:
        cluster.at("plan")
        with jax.default_device(cluster.default_device):
            train(config_of(args, presets), topology, args, cluster)
    elif cluster.line is not None:
        _stand_by(cluster, cluster.line)


def _stand_by(cluster: Cluster, line: Line) -> None:
    """Be there for others, without a chip to train on: first of all with what was held."""
    memory = memory_on_line(cluster.process, cluster.epoch, say=lambda line: None)
    if line.held is not None and memory is not None:
        with memory:
            give_shards(line.held, cluster, memory.keepers)
    line.stand_by()


def add_step(parser: argparse.ArgumentParser, presets: Iterable[str]) -> None:
    """What a step is made of. The rest of the arguments does not change how it is compiled."""
    parser.add_argument("--preset", choices=tuple(presets), default="tiny", help="(%(default)s)")
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
        help="keep the devices of failed chips in the program, idle, for platforms that insist on "
        "whole slices (default: they are left out)",
    )
    parser.add_argument(
        "--algorithm",
        choices=(*ALGORITHMS, PSUM),
        default="auto",
        help="how gradients are summed: auto, the fastest by simulation, which looks at flood and "
        "tree only for TPU v3 to v6e and where no other serves; best, which looks at tree wherever "
        "it could be faster; psum, JAX's own sum, which needs no plan (default: auto)",
    )
    parser.add_argument(
        "--executor",
        choices=(AUTO, *EXECUTORS),
        default=PPERMUTE,
        help="what runs the rounds of a sum: permutations, or for TPUs one Pallas kernel, which is "
        "interpreted elsewhere, and slow there; auto takes what is faster on TPUs by a model of "
        "the kernel that nobody has measured (default: %(default)s)",
    )
    parser.add_argument(
        "--whole-optimizer",
        action="store_true",
        help="keep the optimizer's whole state at every device, rather than a share of it",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="sum gradients during the backward pass; nothing runs beside a Pallas kernel, which "
        "then only starts earlier",
    )
    parser.add_argument(
        "--bucket",
        metavar="SIZE",
        default=f"{BUCKET_BYTES // 2**20}MiB",
        help="how much of them is summed at a time (%(default)s)",
    )
    parser.add_argument(
        "--in-vmem",
        action="store_true",
        help="let sums below 112 MiB stay in the VMEM of a v6e, and not only below 98, so that "
        "whatever else a step computes has less of it: compile_step shows what that is worth",
    )
    _add_failures(parser)


def _add_failures(parser: argparse.ArgumentParser) -> None:
    """How a run goes on through failures; all of it does nothing where nobody watches."""
    group = parser.add_argument_group("through failures", "under 'ftmesh launch --failures N'")
    group.add_argument(
        "--donate",
        action="store_true",
        help="let a step take over the memory of the state before it, as it does where nothing is "
        "to be survived: devices hold one state and not two, and after a failure the steps since "
        "the last --copy-every are repeated (default: none is)",
    )
    group.add_argument(
        "--no-copies",
        action="store_true",
        help="keep no copy of each chip's share of the optimizer's state on another host: a lost "
        "host then means to go back to a copy in host memory, or a checkpoint",
    )


def step_options(args: argparse.Namespace) -> StepOptions:
    """The arguments of `add_step` that say how a step is spread over the chips."""
    return StepOptions(
        algorithm=args.algorithm,
        executor=args.executor,
        sharded=not args.whole_optimizer,
        with_idle=args.idle,
        overlap=args.overlap,
        bucket_bytes=parse_bytes(args.bucket),
        in_vmem=args.in_vmem,
        keeps_state=not args.donate,
        copies=not args.no_copies,
    )


def config_of(args: argparse.Namespace, presets: Mapping[str, Any]) -> Any:
    """The preset of the arguments of `add_step`, a dataclass, with their batch."""
    config = presets[args.preset]
    return replace(config, batch=args.batch) if args.batch else config


def add_run(parser: argparse.ArgumentParser, presets: Iterable[str]) -> None:
    """What is trained, on what, and what is written where."""
    add_step(parser, presets)
    parser.add_argument(
        "--mesh",
        metavar="SHAPE",
        help="shape of the mesh, as 8x8 (default: that of the devices)",
    )
    parser.add_argument(
        "--emulate",
        choices=("one", "many"),
        help="emulate that mesh: all ranks on one device, which is quick, or a CPU device for each "
        "(default: train on the devices there are)",
    )
    parser.add_argument("--steps", type=positive, metavar="N", help="stop after N (the preset's)")
    parser.add_argument("--data", metavar="PATH", help="the data (made up where not given)")
    parser.add_argument(
        "--max-damaged",
        type=share,
        default=MAX_DAMAGED,
        metavar="SHARE",
        help="of the examples that may be damaged, and are left out (%(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, MOST_SEED),
        default=0,
        metavar="N",
        help="of everything random (0)",
    )
    parser.add_argument("--checkpoint-dir", metavar="FOLDER", help="write checkpoints there")
    parser.add_argument(
        "--checkpoint-every", type=positive, default=500, metavar="N", help="steps (500)"
    )
    parser.add_argument("--keep", type=positive, default=3, metavar="N", help="checkpoints (3)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--copy-every",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="copy the state to the memory of two hosts every N steps, under 'ftmesh launch "
        "--failures': what is started anew goes on from there (0, never)",
    )
    parser.add_argument(
        "--check-every",
        type=whole_number(0),
        default=0,
        metavar="N",
        help="see every N steps that all chips have the same parameters; steps count only then, "
        "and a chip that differs is left out from there on (0, never)",
    )
    parser.add_argument(
        "--two-states",
        action="store_true",
        help="commit a step before the next one begins, under 'ftmesh launch --failures': devices "
        "hold two states and not three, and wait for a moment after each step",
    )
    parser.add_argument(
        "--compile-ahead",
        action="store_true",
        help="compile the step for the loss of each host in the background, under 'ftmesh launch "
        "--failures', to go on sooner",
    )
    parser.add_argument("--mllog", metavar="FILE", help="write the lines that MLPerf asks for")
    parser.add_argument("--out", metavar="FOLDER", help="write metrics.jsonl and run.svg there")
    add_processes(parser)


def add_processes(parser: argparse.ArgumentParser) -> None:
    """Which processes take part. Where JAX finds that out by itself, nothing is to be given."""
    group = command_line.add_processes(parser)
    group.add_argument(
        "--limit",
        type=seconds,
        default=LIMIT,
        metavar="SECONDS",
        help="how long to wait for the others to join and to agree, before saying who is missing "
        f"({LIMIT:g})",
    )


def join_as(args: argparse.Namespace, name: str) -> Cluster:
    """The processes of the arguments of `add_processes`; emulation takes one alone."""
    if args.emulate and all(getattr(args, name) is None for name in _WHO):
        return Cluster(limit=args.limit)
    return join(args.coordinator, args.num_processes, args.process_id, limit=args.limit, name=name)


def agree_on_arguments(cluster: Cluster, args: argparse.Namespace) -> None:
    """An error unless all processes train the same thing in the same way."""
    given = {key: value for key, value in vars(args).items() if key not in _OWN}
    cluster.agree({f"--{key.replace('_', '-')}": value for key, value in given.items()})


def topology_of(args: argparse.Namespace, cluster: Cluster = ALONE) -> Topology:
    """The mesh of the arguments of `add_run`, with its devices."""
    if args.resume and not args.checkpoint_dir:
        raise ArgumentError("--resume needs --checkpoint-dir, to know what to go on from")
    if args.emulate and not args.mesh:
        raise ArgumentError("--emulate needs --mesh, to know what to emulate")
    if args.emulate and not cluster.is_alone:
        raise ArgumentError(
            "--emulate is for one process: of several, each brings devices; leave it out"
        )
    damage = {"failed": args.failed, "failed_links": args.failed_links}
    if args.emulate == "many":
        threads = 4 if args.executor == PALLAS else 1
        return cpu_grid(args.mesh, **damage, threads_each=threads)
    if args.emulate == "one":
        return Topology.grid(args.mesh, **damage)
    return Topology.from_devices(jax.devices(), shape=args.mesh, **damage)
