"""``ftmesh bench``: time the algorithms against `lax.psum` on emulated devices."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.cli.arguments import Progress, add_mesh, add_option, topology_of
from ftmesh.command_line import whole_number
from ftmesh.errors import PlanError
from ftmesh.memory_limits import check_memory
from ftmesh.planning.make_plan import plan
from ftmesh.planning.plan import Plan
from ftmesh.topology.ranks import jax_mesh
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes, format_bytes, parse_bytes

COPIES = 8  # copies of the payload per device during a sum, rounded up


@dataclass(frozen=True)
class Timing:
    """The median time of one algorithm for one payload."""

    algorithm: str
    payload_bytes: int
    seconds: float
    times_psum: float  # relative to lax.psum in the same run


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "bench",
        help="time the algorithms against lax.psum on emulated devices",
        description="Time every algorithm that works on a mesh against lax.psum, on emulated CPU "
        "devices. This measures programs, not a network: compare ratios only.",
        epilog="example: ftmesh bench 4x4 --failed 2x2@0,0 --payloads 4KB,1MB,64MB",
    )
    add_mesh(parser, optional=True)
    payloads, repeats = "bytes per device, separated by commas", "report the median of N runs"
    add_option(parser, "--payloads", "SIZES", payloads, "4KB,64KB,1MB,16MB")
    add_option(parser, "--repeats", "N", repeats, 5, whole_number(1, 1000))
    parser.add_argument("--json", action="store_true", help="print the timings as JSON")


def run(args: argparse.Namespace) -> None:
    """Create the devices, time the algorithms, and print a table."""
    if args.mesh is None:
        args.mesh, args.failed = "4x4", "2x2@0,0" if args.failed is None else args.failed
    payloads = [parse_bytes(size) for size in args.payloads.split(",")]
    for size in payloads:
        check_bytes(size, name="each of --payloads")
    mesh = topology_of(args)  # rejects bad input before JAX is loaded
    check_memory(
        f"timing sums of {format_bytes(max(payloads))} on {mesh.num_live} emulated devices",
        COPIES * max(payloads) * mesh.num_live,
        "give smaller --payloads, or a smaller mesh",
    )

    from ftmesh.testing import cpu_grid

    topology = cpu_grid(
        mesh.name, failed=mesh.failed, failed_links=mesh.failed_links, wrap=mesh.wrap
    )
    timings = run_benchmark(topology, payloads, repeats=args.repeats, progress=Progress())
    if args.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=2))
        return
    print(f"{topology}: {topology.num_live} emulated devices, float32, median of {args.repeats}")
    print(format_timings(timings))


def run_benchmark(
    topology: Topology, payloads: Sequence[int], *, repeats: int, progress: Callable[..., None]
) -> list[Timing]:
    """Time every algorithm that fits `topology`, and `lax.psum`, at every payload."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    plans: list[Plan] = []
    for name in ALGORITHMS:
        try:
            plans.append(plan(topology, name))
        except PlanError:
            continue
    mesh, spec = jax_mesh(topology, "data"), PartitionSpec("data")

    def compiled(psum: Callable[..., Any]) -> Any:
        specs: Any = {"in_specs": spec, "out_specs": PartitionSpec(None)}
        return jax.jit(jax.shard_map(lambda x: psum(x[0], "data")[None], mesh=mesh, **specs))

    sums = {"lax.psum": jax.lax.psum} | {fitting.algorithm: fitting.psum for fitting in plans}
    timings: list[Timing] = []
    total = len(payloads) * len(sums)
    for payload in payloads:
        shape = (len(topology.devices), max(1, payload // 4))
        x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, spec))
        base = 0.0
        for name, psum in sums.items():
            progress(len(timings), total, f"{name}, {format_bytes(payload)}")
            seconds = _median_seconds(compiled(psum), x, repeats)
            base = base or seconds
            timings.append(Timing(name, payload, seconds, seconds / base))
    progress(total, total, "")
    return timings


def _median_seconds(total: Callable[[Any], Any], ones: Any, repeats: int) -> float:
    result = total(ones).block_until_ready()
    if float(result[0, 0]) != len(ones):
        raise AssertionError(f"the sum of {len(ones)} ones came out as {result[0, 0]}")
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        total(ones).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def format_timings(timings: Sequence[Timing]) -> str:
    """A table with a row per payload: milliseconds, and the ratio to lax.psum."""
    names = list(dict.fromkeys(timing.algorithm for timing in timings))
    lines = ["payload   " + "".join(f"{name:>22}" for name in names)]
    for payload in dict.fromkeys(timing.payload_bytes for timing in timings):
        row = [t for t in timings if t.payload_bytes == payload]
        cells = (f"{1e3 * t.seconds:>11.2f} ms {t.times_psum:>6.2f}x" for t in row)
        lines.append(f"{format_bytes(payload):<10}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)
