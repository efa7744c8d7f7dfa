"""Times messages and sums: what a hop costs, and how long each way to sum takes.

Permutations are timed over each kind of link, which also shows whether axes wrap as is said. Sums
are timed over payloads: `lax.psum`, along the ring, every algorithm, and kernels on TPUs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from ftmesh.cost.profile_fit import HopTimes, TimedSum
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import PALLAS, XLA
from ftmesh.selftest.context import ONE_DEVICE, CheckContext, left_out, result_from
from ftmesh.selftest.journal import PASSED, CheckResult, Problem
from ftmesh.selftest.timing import (
    AXIS,
    Contender,
    Timing,
    check_payload_memory,
    find_contenders,
    time_sums,
)
from ftmesh.topology.notation import Coord, format_failed, step_along
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes

SMALL_BYTES = 512  # to time latency
LARGE_BYTES, LARGE_BYTES_ON_CPU = 16 * 2**20, 2**20  # to time the rate of a link
NUM_SENDS, NUM_SENDS_ON_CPU = 64, 4  # in a program
REPEATS, REPEATS_ON_CPU = 7, 3
MIN_LATENCY = 50e-9  # seconds per hop that can be told from noise
PAYLOADS_ON_CPU = (4_000, 64_000, 1_000_000, 16_000_000)
PAYLOADS = (4_000, 100_000_000, 1_000_000, 16_000_000, 64_000)  # the ends first
FEW_ALGORITHMS = ("ring", "row_pair", "tree")  # trees work on any mesh
GROWTH = 2.0  # times as long as the payload before: most of it is compiling
_AXES = "xyz"

Pairs = tuple[tuple[int, int], ...]  # of positions along the mesh axis


# Hops -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hop:
    """A kind of message: between all pairs of chips that are `hops` apart along an axis.

    `hops` is None for messages over the wrap of an axis, whose number of hops is the question.
    """

    axis: str  # "x", "y", "z", or "ring" for the order of the plan
    hops: int | None
    pairs: Pairs

    @property
    def name(self) -> str:
        """What a table calls it."""
        if self.axis == "ring":
            return "along the ring of the plan"
        if self.hops is None:
            return f"{self.axis}, from the last chip to the first"
        return f"{self.axis}, {self.hops} hop{'s' * (self.hops > 1)}"


@dataclass(frozen=True)
class TimedHop:
    """Seconds that one permutation took: of a small payload and of a large one."""

    hop: Hop
    small_s: float
    large_s: float


def check_hops(context: CheckContext) -> CheckResult:
    """Time messages over each kind of link, and compare wrap links with what is said of them."""
    topology = context.topology
    if topology.num_live == 1:
        return left_out(ONE_DEVICE if len(topology.devices) == 1 else "one chip has no links")
    is_cpu = context.platform == "cpu"
    large = LARGE_BYTES_ON_CPU if is_cpu else LARGE_BYTES
    timed = time_hops(
        topology,
        find_hops(topology),
        large_bytes=large,
        num_sends=NUM_SENDS_ON_CPU if is_cpu else NUM_SENDS,
        repeats=REPEATS_ON_CPU if is_cpu else REPEATS,
    )
    rows = [
        {
            "name": one.hop.name,
            "pairs": len(one.hop.pairs),
            "small_s": one.small_s,
            "large_s": one.large_s,
        }
        for one in timed
    ]
    data: dict[str, Any] = {
        "hops": rows,
        "small_bytes": SMALL_BYTES,
        "large_bytes": large,
        "latency_s": None,
        "bytes_per_second": None,
    }
    if context.platform != "tpu":
        where = "CPU devices share one memory" if is_cpu else "these are no TPUs"
        note = f"{where}: a hop's latency and a link's rate cannot be told from these times"
        return result_from([], [note], data)
    latency = hop_latency(timed)
    neighbours = [one for one in timed if one.hop.hops == 1]
    spans = [one.large_s - one.small_s for one in neighbours]
    rate = large / statistics.median(spans) if spans and min(spans) > 0 else None
    data |= {"latency_s": latency, "bytes_per_second": rate}
    judged = [judge_wrap(timed, topology, axis) for axis in range(len(topology.shape))]
    problems = [problem for problem, _ in judged if problem is not None]
    notes = [note for _, note in judged if note]
    return result_from(problems, notes, data)


def find_hops(topology: Topology) -> list[Hop]:
    """Return the messages to time: 1, 2, 4, ... hops along each axis, over its wrap, and the ring.

    Routes go straight along an axis, over live chips and links. Only the first device of each chip
    takes part.
    """
    per_chip = topology.devices_per_chip
    position = {coord: per_chip * rank for rank, coord in enumerate(topology.coords)}
    hops = []
    for axis, size in enumerate(topology.shape):
        distances = [2**i for i in range(size.bit_length()) if 2**i <= max(1, size // 2)]
        for distance in distances if size > 1 else []:
            ends = [(coord, step_along(coord, axis, distance)) for coord in topology.coords]
            pairs = [(a, b) for a, b in ends if _is_clear(topology, a, axis, distance)]
            hops.append(
                Hop(_AXES[axis], distance, tuple((position[a], position[b]) for a, b in pairs))
            )
        if size > 2:
            firsts = [coord for coord in topology.coords if coord[axis] == 0]
            clear = [coord for coord in firsts if _is_clear(topology, coord, axis, size - 1)]
            ends = [(step_along(coord, axis, size - 1), coord) for coord in clear]
            if topology.wrap[axis]:
                ends = [(a, b) for a, b in ends if topology.is_link(a, b)]
            hops.append(Hop(_AXES[axis], None, tuple((position[a], position[b]) for a, b in ends)))
    ring = tuple((position[a], position[b]) for a, b in ring_order(topology).steps)
    hops.append(Hop("ring", None, ring))
    return [hop for hop in hops if hop.pairs]


def _is_clear(topology: Topology, coord: Coord, axis: int, distance: int) -> bool:
    """Whether the way from `coord` along an axis is over live chips and links."""
    route = [step_along(coord, axis, step) for step in range(distance + 1)]
    return all(map(topology.is_link, route, route[1:]))


def time_hops(
    topology: Topology, hops: Sequence[Hop], *, large_bytes: int, num_sends: int, repeats: int
) -> list[TimedHop]:
    """Time each permutation: programs of `num_sends` in a row, which take turns."""
    mesh = jax.sharding.Mesh(np.array(topology.devices), (AXIS,))
    seconds: dict[tuple[Hop, int], list[float]] = {}
    for size in (SMALL_BYTES, large_bytes):
        x = _payload(mesh, size // 4)
        programs = {hop: _program(mesh, hop.pairs, num_sends) for hop in hops}
        for program in programs.values():
            program(x).block_until_ready()  # compiles
        for _ in range(repeats):
            for hop, program in programs.items():
                start = time.perf_counter()
                program(x).block_until_ready()
                took = (time.perf_counter() - start) / num_sends
                seconds.setdefault((hop, size), []).append(took)
    median = {key: statistics.median(times) for key, times in seconds.items()}
    return [TimedHop(hop, median[hop, SMALL_BYTES], median[hop, large_bytes]) for hop in hops]


def _payload(mesh: Any, size: int) -> Any:
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
    return jax.make_array_from_callback(
        (mesh.size, size), sharding, lambda index: np.ones((1, size), np.float32)
    )


def _program(mesh: Any, pairs: Pairs, num_sends: int) -> Callable[[Any], Any]:
    """Return a jitted program of permutations, each of what came by the one before it."""
    spec = jax.sharding.PartitionSpec(AXIS)

    def send(_: Any, values: Any) -> Any:
        return jax.lax.ppermute(values, AXIS, pairs)

    def send_all(x: Any) -> Any:
        return jax.lax.fori_loop(0, num_sends, send, x)

    program: Callable[[Any], Any] = jax.jit(
        jax.shard_map(send_all, mesh=mesh, in_specs=spec, out_specs=spec)
    )
    return program


def hop_latency(timed: Sequence[TimedHop]) -> float | None:
    """The time that each further hop adds to a small message; None if it cannot be told."""
    slopes = [
        slope
        for axis in _AXES
        if (slope := _fit([one for one in timed if one.hop.axis == axis])[1]) is not None
    ]
    latency = statistics.median(slopes) if slopes else 0.0
    return latency if latency >= MIN_LATENCY else None


def _fit(timed: Sequence[TimedHop]) -> tuple[float, float | None]:
    """The time of no hop, and what each adds, by least squares over messages along one axis."""
    points = [(one.hop.hops, one.small_s) for one in timed if one.hop.hops is not None]
    if len({hops for hops, _ in points}) < 2:
        return 0.0, None
    hops, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
    slope, start = np.polyfit(hops, seconds, 1).tolist()
    return start, slope


def judge_wrap(
    timed: Sequence[TimedHop], topology: Topology, axis: int
) -> tuple[Problem | None, str]:
    """Compare the time from the last chip of an axis to its first with that of one hop and of all.

    Returns a problem if an axis wraps that is said not to, or the reverse, and a note.
    """
    name, size = _AXES[axis], topology.shape[axis]
    own = [one for one in timed if one.hop.axis == name]
    around = next((one.small_s for one in own if one.hop.hops is None), None)
    start, slope = _fit(own)
    if size < 4 or around is None:
        return None, ""
    if slope is None or slope < MIN_LATENCY:
        return None, f"whether {name} wraps cannot be told: further hops take no longer"
    near, far = start + slope, start + slope * (size - 1)
    does_wrap = around < (near + far) / 2
    if does_wrap == topology.wrap[axis]:
        return None, f"{name} {'wraps' if does_wrap else 'does not wrap'}, as its times show"
    wraps = [_AXES[i] for i, on in enumerate(topology.wrap) if on != (i == axis)]
    times = (
        f"a message from its last chip to its first takes {1e6 * around:.3g} us, one over a hop "
        f"{1e6 * near:.3g} us, and one over {size - 1} hops would take {1e6 * far:.3g} us"
    )
    claim = "is said to wrap, and does not" if topology.wrap[axis] else "wraps, and is not said to"
    advice = (
        f"give --wrap {''.join(wraps) or 'none'} to the commands, and wrap= to "
        f"Topology.from_devices; it was known so far from: {topology.wrap_source or 'nothing'}"
    )
    return Problem(f"axis {name} {claim}: {times}", advice), ""


# Sums -------------------------------------------------------------------------------------------


def check_speed(context: CheckContext, *, kernels: bool = False) -> CheckResult:
    """Time all that was found to be right, payload by payload while there is time.

    With `kernels`, only Pallas kernels, next to `lax.psum`; otherwise all but those.
    """
    is_cpu = context.platform == "cpu"
    if kernels and context.platform != "tpu":
        return left_out("without TPUs kernels are interpreted: their times say nothing")
    contenders, rejected = find_contenders(context.topology, (), {}, kernel=kernels)
    contenders = [
        one for one in contenders if not one.algorithm or (one.executor == PALLAS) == kernels
    ]
    chosen, bad = _without_bad(contenders, context)
    if kernels and len(chosen) == 1:
        return left_out("no kernel was found to be right")
    notes = [f"not timed, since it is not known to be right: {name}" for name in bad]
    if is_cpu and not context.group.is_single_process:
        chosen = [one for one in chosen if one.executor == XLA or one.algorithm in FEW_ALGORITHMS]
        notes.append(
            f"of permutations only {', '.join(FEW_ALGORITHMS)} are timed: several processes share "
            "the cores of this machine"
        )
    notes += [f"cannot run on this mesh: {', '.join(rejected)}"] if rejected else []
    timings: list[Timing] = []
    usual: Sequence[int] = PAYLOADS_ON_CPU if is_cpu else PAYLOADS
    if is_cpu and context.group.num_processes > 1:
        usual = PAYLOADS_ON_CPU[::2]  # every process compiles every program, on the same cores
    payloads = context.settings.payloads or usual
    took = 0.0
    for i, payload in enumerate(payloads):
        if reason := _why_not(context, payload, GROWTH * took):
            sizes = ", ".join(map(format_bytes, payloads[i:]))
            notes.append(f"not timed: {sizes}: {reason}")
            break
        start = time.monotonic()
        repeats = REPEATS_ON_CPU if is_cpu else REPEATS
        timings += time_sums(chosen, [payload], repeats=repeats, progress=lambda *_: None)
        took = time.monotonic() - start
    if is_cpu:
        notes.append("CPU devices share this machine's cores: compare ratios only")
    failed = format_failed(context.topology.failed) if context.topology.failed else ""
    hop_times = _hop_times(context.results.get("hops"))
    data = {
        "timings": [asdict(timing) for timing in timings],
        "hop_times": asdict(hop_times) if hop_times else None,
        "sums": [asdict(one) for one in _timed_sums(chosen, timings, hop_times)],
        "bad": bad,
        "failed": failed,
    }
    return result_from([], notes, data)


def _timed_sums(
    contenders: Sequence[Contender], timings: Sequence[Timing], hop_times: HopTimes | None
) -> list[TimedSum]:
    """The sums by plans as a profile has them, with what each makes devices and links do."""
    plans = {contender.name: contender.plan for contender in contenders}
    sums = []
    for timing in timings:
        if plan := plans[timing.contender]:
            quartiles = timing.low_s, timing.median_s, timing.high_s
            size = timing.payload_bytes
            schedule = plan.for_payload(size).schedule
            sums.append(TimedSum.from_schedule(schedule, plan.executor, size, quartiles, hop_times))
    return sums


def _hop_times(hops: CheckResult | None) -> HopTimes | None:
    """What the check of hops measured of a link; None where links cannot be told apart."""
    data: Mapping[str, Any] = hops.data if hops else {}
    latency, rate = (data.get(key) for key in ("latency_s", "bytes_per_second"))
    return HopTimes(latency, rate) if latency and rate else None


def _without_bad(
    contenders: Sequence[Contender], context: CheckContext
) -> tuple[list[Contender], list[str]]:
    """The contenders to time, and the names of those that are wrong, or kernels not checked."""
    chosen: list[Contender] = []
    bad: list[Contender] = []
    for contender in contenders:
        result = context.results.get(f"right: {contender.executor} {contender.algorithm}")
        is_bad = contender.algorithm and result is not None and result.is_bad
        if contender.executor == PALLAS:
            is_bad = result is None or result.status != PASSED
        (bad if is_bad else chosen).append(contender)
    return chosen, [contender.name for contender in bad]


def _why_not(context: CheckContext, payload: int, estimate: float) -> str:
    """Why the next payload cannot be timed, as any process sees it; empty if it can."""
    reason = ""
    if time.monotonic() + estimate > context.deadline:
        reason = "no time left"
    try:
        check_payload_memory(context.topology, payload, "give smaller --payloads")
    except ArgumentError as error:
        reason = str(error)
    reasons: dict[int, Any] = context.group.gather(reason, "whether to time a payload")
    return next((str(one) for one in reasons.values() if one), "")
