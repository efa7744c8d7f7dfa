"""Times and checks sums by plans and by `lax.psum`, in turns, on any devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.errors import ArgumentError, PlanError, RoutingError, VerificationError
from ftmesh.execute.lowering import PALLAS, PPERMUTE, XLA
from ftmesh.memory_checks import check_device_memory, check_memory
from ftmesh.planning.make_plan import plan
from ftmesh.planning.plan import Plan
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time

if TYPE_CHECKING:
    from jax.sharding import Mesh

PSUM, PSUM_ON_RING = "lax.psum", "lax.psum on the ring"
AXIS = "data"
COPIES, HOST_COPIES = 10, 4  # of the payload, rounded up: on a device, and on the host that checks
MAX_EXACT = 2**24  # float32 has every whole number up to this
SAMPLE_BYTES = 16 * 2**20  # that a sample of a small payload sums in all
MIN_SUMS, MAX_SUMS, MAX_SUMS_ON_CPU = 4, 32, 4  # in a sample


@dataclass(frozen=True)
class Contender:
    """One way to sum over the devices of `mesh`; `psum` is called like `lax.psum`."""

    name: str
    executor: str
    mesh: Mesh
    psum: Callable[[Any, str], Any]
    algorithm: str = ""  # of a plan
    plan: Plan | None = None  # None for `lax.psum` without ftmesh


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


def describe_devices(topology: Topology) -> str:
    """Say which devices are live: ``12 of 16 emulated CPU devices``, or ``1 NVIDIA H200``."""
    device, live = topology.devices[0], len(topology.devices)
    total = topology.num_chips * topology.devices_per_chip
    emulated = "emulated CPU device" + "s" * (total > 1)
    kind = emulated if device.platform == "cpu" else str(device.device_kind)
    return f"{live} {kind}" if live == total else f"{live} of {total} {kind}"


def check_payload_memory(topology: Topology, payload: int, advice: str) -> None:
    """Raise ArgumentError unless this process and its devices have the memory to time sums."""
    import jax

    task, copies = f"timing sums of {format_bytes(payload)}", HOST_COPIES
    for device in topology.devices:
        if device.process_index == jax.process_index():
            check_device_memory(device, task, COPIES * payload, advice)
            copies += COPIES * (device.platform == "cpu")
    check_memory(task, copies * payload, advice)


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
            mesh = made.jax_mesh(AXIS)
            contenders.append(Contender(name, made.executor, mesh, made.psum, made.algorithm, made))
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
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    least, most = (1, MAX_SUMS_ON_CPU) if is_cpu else (MIN_SUMS, MAX_SUMS)
    for payload in payloads:
        size, sums = max(1, payload // 4), max(least, min(most, SAMPLE_BYTES // payload))
        expected = np.zeros(size, np.float32)
        for rank in range(mesh.size):
            expected += rank_values(rank, mesh.size, size)
        meshes = {contender.mesh for contender in contenders}
        inputs = {mesh: _input(mesh, size) for mesh in meshes}
        calls = []
        for contender in contenders:
            progress(done, total, f"checking {contender.name}, {format_bytes(payload)}")
            program, x = _program(contender, sums), inputs[contender.mesh]
            check_sum(contender.name, payload, program(x), expected)
            calls.append((program, x))
            done += 1
        take_turns(calls)  # warms up
        samples = []
        for _ in range(repeats):
            progress(done, total, f"timing {format_bytes(payload)}")
            samples.append(take_turns(calls))
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


def take_turns(calls: Sequence[tuple[Callable[[Any], Any], Any]]) -> list[float]:
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
