"""``ftmesh bench``: time and check sums by plans and by `lax.psum`, on real or emulated devices."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.cli import arguments
from ftmesh.cli.arguments import Progress, add_option, describe_devices
from ftmesh.command_line import add_process_arguments, whole_number
from ftmesh.errors import ArgumentError, PlanError, RoutingError, VerificationError
from ftmesh.execute.lowering import PALLAS, PPERMUTE, XLA
from ftmesh.memory_limits import check_device_memory, check_memory
from ftmesh.planning.make_plan import plan
from ftmesh.planning.plan import Plan
from ftmesh.schedule.files import load
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.damage import FAILED_VARIABLE
from ftmesh.topology.notation import format_failed, format_links
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes, format_bytes, format_time, parse_bytes

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ftmesh.distributed.process_group import ProcessGroup

DEFAULT_MESH = Topology.grid("4x4", failed="2x2@0,0")
PSUM, PSUM_ON_RING = "lax.psum", "lax.psum on the ring"
AXIS = "data"
COPIES, HOST_COPIES = 10, 4  # of the payload, rounded up: on a device, and on the host that checks
MAX_EXACT = 2**24  # float32 has every whole number up to this
SAMPLE_BYTES = 16 * 2**20  # that a sample of a small payload sums in all
MAX_SUMS, MAX_SUMS_ON_CPU = 32, 4  # in a sample


@dataclass(frozen=True)
class Contender:
    """One way to sum over the devices of `mesh`; `psum` is called like `lax.psum`."""

    name: str
    executor: str
    mesh: Mesh
    psum: Callable[[Any, str], Any]


@dataclass(frozen=True)
class Timing:
    """Seconds that one sum of a payload took: the median and the quartiles of all samples."""

    contender: str
    executor: str
    payload_bytes: int
    sums_per_sample: int
    median_s: float
    low_s: float
    high_s: float
    times_psum: float  # the median, relative to that of lax.psum in the same run


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
    if first == second or args.algorithms is not None:
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
    wrap = arguments.parse_wrap_option(args.wrap, shape)
    topology = agreed_topology(group, failed=args.failed, failed_links=args.failed_links, wrap=wrap)
    options = ("payloads", "repeats", "algorithms", "compare", "kernel")
    group.agree({f"--{name}": getattr(args, name) for name in options})
    task, advice = f"timing sums of {format_bytes(payload)}", "give smaller --payloads"
    copies = HOST_COPIES
    for device in topology.devices:
        if device.process_index == jax.process_index():
            check_device_memory(device, task, COPIES * payload, advice)
            copies += COPIES * (device.platform == "cpu")
    check_memory(task, copies * payload, advice)
    return topology


def find_contenders(
    topology: Topology, algorithms: Sequence[str], schedules: Mapping[str, Schedule], kernel: bool
) -> tuple[list[Contender], dict[str, str]]:
    """Return `lax.psum` in the order of coordinates, along the ring, and the plans to time.

    Plans are by `algorithms` and from `schedules`, or where there are neither by every algorithm
    that works on this mesh; with `kernel` each runs as a Pallas kernel too. Also returns why others
    do not work, by name.
    """
    import jax

    if kernel and topology.devices[0].platform != "tpu":
        devices = describe_devices(topology)
        raise ArgumentError(f"--kernel needs TPUs, and these are {devices}: leave it out")
    by_coord = jax.sharding.Mesh(np.array(topology.devices), (AXIS,))
    contenders, left_out = [Contender(PSUM, XLA, by_coord, jax.lax.psum)], dict[str, str]()
    is_chosen = bool(algorithms or schedules)
    if len(topology.devices) == 1 and not is_chosen:
        return contenders, left_out  # there is nothing to plan
    plans = {PSUM_ON_RING: partial(plan, topology, executor=XLA)}
    for executor in (PPERMUTE, PALLAS) if kernel else (PPERMUTE,):
        suffix = ", kernel" if executor == PALLAS else ""
        for name, saved in schedules.items():
            plans[name + suffix] = partial(Plan.from_schedule, saved, topology, executor=executor)
        for name in algorithms if is_chosen else ALGORITHMS:
            plans[name + suffix] = partial(plan, topology, name, executor=executor)
    for name, make_plan in plans.items():
        try:
            made = make_plan()
        except (PlanError, RoutingError, VerificationError) as error:
            if is_chosen and name != PSUM_ON_RING:
                raise
            left_out[name] = str(error)
        else:
            contenders.append(Contender(name, made.executor, made.jax_mesh(AXIS), made.psum))
    return contenders, left_out


def time_sums(
    contenders: Sequence[Contender],
    payloads: Sequence[int],
    *,
    repeats: int,
    progress: Callable[..., None],
) -> list[Timing]:
    """Check and time every contender at every payload, relative to the first of them.

    A sample is one call of a compiled program, from the call until all its results are there. The
    program sums small payloads several times, so that starting it does not outweigh the sums. The
    contenders take turns, so that what else the machine does slows all of them alike. A wrong sum
    raises VerificationError.
    """
    timings: list[Timing] = []
    total, done = len(payloads) * (len(contenders) + repeats), 0
    mesh = contenders[0].mesh
    most = MAX_SUMS_ON_CPU if mesh.devices.flat[0].platform == "cpu" else MAX_SUMS
    for payload in payloads:
        size, sums = max(1, payload // 4), max(1, min(most, SAMPLE_BYTES // payload))
        expected = np.zeros(size, np.float32)
        for rank in range(mesh.size):
            expected += rank_values(rank, mesh.size, size)
        inputs = {each: _input(each, size) for each in {one.mesh for one in contenders}}
        calls = []
        for contender in contenders:
            progress(done, total, f"checking {contender.name}, {format_bytes(payload)}")
            program, x = _program(contender, sums), inputs[contender.mesh]
            check_sum(contender.name, payload, program(x), expected)
            calls.append((program, x))
            done += 1
        _take_turns(calls)  # warms up
        samples = []
        for _ in range(repeats):
            progress(done, total, f"timing {format_bytes(payload)}")
            samples.append(_take_turns(calls))
            done += 1
        quartiles = np.percentile(np.array(samples) / sums, [50, 25, 75], axis=0)
        for contender, (median, low, high) in zip(contenders, quartiles.T.tolist(), strict=True):
            seconds = (median, low, high, median / float(quartiles[0, 0]))
            timings.append(Timing(contender.name, contender.executor, payload, sums, *seconds))
    progress(total, total, "")
    return timings


def rank_values(rank: int, num_ranks: int, size: int) -> NDArray[np.float32]:
    """What a rank adds: random whole numbers of its own, so small that no sum is rounded."""
    largest = MAX_EXACT // num_ranks
    values = np.random.default_rng(rank).integers(1, largest, size, np.int32, endpoint=True)
    return values.astype(np.float32)


def check_sum(name: str, payload: int, result: Any, expected: NDArray[np.float32]) -> None:
    """Raise VerificationError unless every rank of this process has the sum in every element."""
    for shard in result.addressable_shards:
        values = np.asarray(shard.data)[0]
        wrong = np.flatnonzero(values != expected)
        if wrong.size:
            first = int(wrong[0])
            raise VerificationError(
                f"{name} summed {format_bytes(payload)} wrongly: rank {shard.index[0].start or 0} "
                f"({shard.device}) has {values[first]:.9g} for {expected[first]:.9g} at element "
                f"{first}, and {wrong.size:,} of {expected.size:,} elements are wrong"
            )


def _input(mesh: Mesh, size: int) -> Any:
    import jax

    def one_rank(index: tuple[slice, ...]) -> NDArray[np.float32]:
        return rank_values(index[0].start or 0, mesh.size, size)[None]

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
    return jax.make_array_from_callback((mesh.size, size), sharding, one_rank)


def _program(contender: Contender, sums: int) -> Any:
    """Return a jitted program of `sums` sums, each of what the one before it gave.

    Between two sums rank 0 keeps the total and the others take zeros. So the total stays the same,
    a wrong one at another rank stays there, and XLA cannot replace a sum of equal numbers by a
    product. This adds a pass over the payload in the device's own memory.
    """
    import jax
    import jax.numpy as jnp

    spec = jax.sharding.PartitionSpec(AXIS)

    def sum_again(_: Any, values: Any) -> Any:
        total = contender.psum(values, AXIS)
        return jnp.where(jax.lax.axis_index(AXIS) == 0, total, 0)

    def all_sums(x: Any) -> Any:
        values = jax.lax.fori_loop(0, sums - 1, sum_again, x[0]) if sums > 1 else x[0]
        return contender.psum(values, AXIS)[None]

    return jax.jit(jax.shard_map(all_sums, mesh=contender.mesh, in_specs=spec, out_specs=spec))


def _take_turns(calls: Sequence[tuple[Callable[[Any], Any], Any]]) -> list[float]:
    """Run each program once, and return the seconds of each."""
    seconds = []
    for program, x in calls:
        start = time.perf_counter()
        program(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return seconds


def format_timings(timings: Sequence[Timing], compared: Sequence[str] = ()) -> str:
    """A table with a line for each payload and contender; then the ratio of two of them."""
    width = max(len(timing.contender) for timing in timings)
    lines = [f"payload    sums  {'':<{width}}      median             quartiles  x {PSUM}"]
    median = {(timing.payload_bytes, timing.contender): timing.median_s for timing in timings}
    for timing in timings:
        head = f"{format_bytes(timing.payload_bytes):<10}{timing.sums_per_sample:>5}"
        head = head if timing.contender == PSUM else " " * len(head)
        spread = f"{format_time(timing.low_s)} .. {format_time(timing.high_s)}"
        lines.append(
            f"{head}  {timing.contender:<{width}}{format_time(timing.median_s):>12}"
            f"{spread:>22}{timing.times_psum:>12.2f}"
        )
    for payload in dict.fromkeys(timing.payload_bytes for timing in timings) if compared else ():
        first, second = (median[payload, name] for name in compared)
        ratio = f"{compared[0]} takes {first / second:.2f} times as long as {compared[1]}"
        lines.append(f"{format_bytes(payload)}: {ratio}")
    return "\n".join(lines)


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
