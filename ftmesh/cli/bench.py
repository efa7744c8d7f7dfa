"""``ftmesh bench``: time and check sums by plans and by `lax.psum`, on real or emulated devices."""

from __future__ import annotations

import argparse
import json
import os
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ftmesh.cli import arguments
from ftmesh.cli.arguments import Progress, add_option
from ftmesh.command_line import add_process_arguments, whole_number
from ftmesh.errors import ArgumentError
from ftmesh.memory_checks import check_memory
from ftmesh.schedule.files import load
from ftmesh.schedule.schedule import Schedule
from ftmesh.selftest.timing import (
    COPIES,
    check_payload_memory,
    describe_devices,
    find_contenders,
    format_timings,
    time_sums,
)
from ftmesh.topology.damage import FAILED_VARIABLE
from ftmesh.topology.notation import format_failed, format_links, parse_wrap_axes
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes, format_bytes, parse_bytes

if TYPE_CHECKING:
    from ftmesh.distributed.process_group import ProcessGroup

DEFAULT_MESH = Topology.grid("4x4", failed="2x2@0,0")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "bench",
        help="time and check the algorithms and lax.psum, on real or emulated devices",
        description="Time the sums of every algorithm that works on a mesh, and of lax.psum, and "
        "check every rank's result. Without MESH this runs on the TPUs or GPUs of this machine, or "
        f"of all processes; where there are none, on {DEFAULT_MESH} of emulated CPU devices. With "
        "MESH it always runs on emulated CPU devices, which measure programs and not a network: "
        "compare their ratios only.",
        epilog="examples: ftmesh bench; ftmesh bench --failed 2x2@0,0 --algorithms ring,tree; "
        "ftmesh bench 4x4 --payloads 4KB,1MB; ftmesh bench --compare before.npz after.npz",
    )
    arguments.add_mesh(parser, optional=True)
    sizes, turns = "bytes per device, separated by commas", "samples of each sum, taken in turns"
    add_option(parser, "--payloads", "SIZES", sizes, "4KB,64KB,1MB,16MB")
    add_option(parser, "--repeats", "N", turns, 5, whole_number(1, 1000))
    algorithms = "time these only, separated by commas (default: all that work on the mesh)"
    add_option(parser, "--algorithms", "NAMES", algorithms)
    compare = "time two schedules for one mesh, as ftmesh plan --out writes them"
    parser.add_argument("--compare", nargs=2, metavar="FILE.npz", help=compare)
    parser.add_argument("--kernel", action="store_true", help="time Pallas kernels too, on TPUs")
    parser.add_argument("--json", action="store_true", help="print the timings as JSON")
    add_process_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Find or emulate the devices, time the sums on them, and print a table."""
    payloads = [parse_bytes(size) for size in args.payloads.split(",")]
    for size in payloads:
        check_bytes(size, name="each of --payloads")
    algorithms = arguments.algorithm_names(args.algorithms)
    schedules = _load_schedules(args)
    default = next((saved.topology for saved in schedules.values()), DEFAULT_MESH)
    if args.mesh is not None:  # rejects bad input before JAX is loaded
        _mesh_to_emulate(args, max(payloads))
    with _joined(args) as group:
        if _has_real_devices(args, group, default):
            topology = _real_mesh(args, group, max(payloads))
        else:
            from ftmesh.testing import cpu_grid

            mesh = _mesh_to_emulate(args, max(payloads))
            links = mesh.failed_links
            topology = cpu_grid(mesh.name, failed=mesh.failed, failed_links=links, wrap=mesh.wrap)
        group = group.for_topology(topology)
        if not group.is_member:
            return  # once the others are done
        contenders, left_out = find_contenders(topology, algorithms, schedules, args.kernel)
        progress = Progress() if group.is_primary else lambda *_: None
        timings = time_sums(contenders, payloads, repeats=args.repeats, progress=progress)
        if group.is_primary and args.json:
            summary = _summary(topology) | {"repeats": args.repeats, "left_out": left_out}
            summary["timings"] = [asdict(timing) for timing in timings]
            print(json.dumps(summary, indent=2))
        elif group.is_primary:
            print(f"{describe_devices(topology)}, mesh {topology}, float32, every sum checked")
            print(format_timings(timings, list(schedules)))
            print(*_notes(topology, left_out, args.repeats), sep="\n")


def _load_schedules(args: argparse.Namespace) -> dict[str, Schedule]:
    """Load the files of --compare; what is not given of the damage is taken from the first."""
    if args.compare is None:
        return {}
    first, second = args.compare
    if os.path.realpath(first) == os.path.realpath(second) or args.algorithms is not None:
        raise ArgumentError("--compare takes two different files, and no --algorithms")
    schedules = {path: load(path, verify=False) for path in (first, second)}  # a plan proves them
    mesh = schedules[first].topology
    if mesh.num_positions > 1:
        raise ArgumentError(f"--compare: {first} is for tiles, which bench does not time")
    args.failed = format_failed(mesh.failed) if args.failed is None else args.failed
    args.failed_links = args.failed_links or format_links(mesh.failed_links)
    axes = "".join("xyz"[i] for i, wraps in enumerate(mesh.wrap) if wraps)
    args.wrap = args.wrap or axes or "none"
    return schedules


def _joined(args: argparse.Namespace) -> AbstractContextManager[ProcessGroup]:
    from ftmesh.distributed.process_group import ProcessGroup
    from ftmesh.elastic.elastic_group import initialize

    given = (args.coordinator, args.num_processes, args.process_id)
    if args.mesh is None:
        return initialize(*given, name="ftmesh bench")
    if any(value is not None for value in given):
        raise ArgumentError("MESH emulates devices in one process: leave it out with several")
    return ProcessGroup()


def _has_real_devices(args: argparse.Namespace, group: ProcessGroup, default: Topology) -> bool:
    """Whether to time the devices that JAX has; if not, `args.mesh` is what to emulate."""
    import jax

    from ftmesh.testing import request_cpu_devices

    if args.mesh is not None or not group.is_single_process:
        return args.mesh is None
    request_cpu_devices(default.num_chips)  # before JAX creates its devices
    if jax.default_backend() != "cpu":
        return True
    args.mesh = default.name
    if args.failed is None and not os.environ.get(FAILED_VARIABLE):
        args.failed = format_failed(default.failed)
    return False


def _mesh_to_emulate(args: argparse.Namespace, payload: int) -> Topology:
    mesh = arguments.topology_of(args)
    check_memory(
        f"timing sums of {format_bytes(payload)} on {mesh.num_live} emulated devices",
        COPIES * payload * mesh.num_live,
        "give smaller --payloads, or a smaller mesh",
    )
    return mesh


def _real_mesh(args: argparse.Namespace, group: ProcessGroup, payload: int) -> Topology:
    """The mesh of JAX's devices, which must be the same in all processes and have the memory."""
    import jax

    from ftmesh.distributed.consensus import agreed_topology

    shape = Topology.from_devices(jax.devices(), failed="").shape
    wrap = parse_wrap_axes(args.wrap, shape)
    topology = Topology.from_devices(
        jax.devices(), failed=args.failed, failed_links=args.failed_links, wrap=wrap
    )
    agreed_topology(group, topology)
    options = ("payloads", "repeats", "algorithms", "compare", "kernel")
    group.agree({f"--{name}": getattr(args, name) for name in options})
    check_payload_memory(topology, payload, "give smaller --payloads")
    return topology


def _notes(topology: Topology, left_out: dict[str, str], repeats: int) -> list[str]:
    lines = [f"samples: {repeats}; the time of a sample is divided by the number of sums in it"]
    if left_out:
        lines.append(f"cannot run on this mesh: {', '.join(left_out)}")
    if len(topology.devices) == 1:
        lines.append("one device has nothing to exchange: this times a program without a network")
    if topology.devices[0].platform == "cpu":
        lines.append("emulated devices share this machine's cores: compare ratios only")
    return lines


def _summary(topology: Topology) -> dict[str, Any]:
    """Describe the devices as JSON values."""
    import jax

    return {
        "devices": describe_devices(topology),
        "device_kind": topology.devices[0].device_kind,
        "num_devices": len(topology.devices),
        "num_processes": jax.process_count(),
        **arguments.mesh_summary(topology),
        "jax_version": jax.__version__,
    }
