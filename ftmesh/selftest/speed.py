"""Times sums over payloads: `lax.psum`, along the ring, every algorithm, and kernels on TPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ftmesh.cost.profile_fit import HopTimes, TimedSum
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import PALLAS, XLA
from ftmesh.selftest.context import CheckContext, result_from
from ftmesh.selftest.context import left_out as left_out_check
from ftmesh.selftest.journal import PASSED, CheckResult
from ftmesh.selftest.timing import (
    Contender,
    Timing,
    check_payload_memory,
    find_contenders,
    time_sums,
)
from ftmesh.topology.notation import format_failed
from ftmesh.units import format_bytes

PAYLOADS_ON_CPU = (4_000, 64_000, 1_000_000, 16_000_000)
PAYLOADS = (4_000, 100_000_000, 1_000_000, 16_000_000, 64_000)  # the ends first
REPEATS, REPEATS_ON_CPU = 7, 3
FEW_ALGORITHMS = ("ring", "row_pair", "tree")  # trees work on any mesh
GROWTH = 2.0  # times as long as the payload before: most of it is compiling


def check_speed(context: CheckContext, *, kernels: bool = False) -> CheckResult:
    """Time all that was found to be right, payload by payload while there is time.

    With `kernels`, only Pallas kernels, next to `lax.psum`; otherwise all but those.
    """
    is_cpu = context.platform == "cpu"
    if kernels and context.platform != "tpu":
        return left_out_check("without TPUs kernels are interpreted: their times say nothing")
    contenders, left_out = find_contenders(context.topology, (), {}, kernel=kernels)
    contenders = [
        one for one in contenders if not one.algorithm or (one.executor == PALLAS) == kernels
    ]
    chosen, bad = _without_bad(contenders, context)
    if kernels and len(chosen) == 1:
        return left_out_check("no kernel was found to be right")
    notes = [f"not timed, since it is not known to be right: {name}" for name in bad]
    if is_cpu and not context.group.is_single_process:
        chosen = [one for one in chosen if one.executor == XLA or one.algorithm in FEW_ALGORITHMS]
        notes.append(
            f"of permutations only {', '.join(FEW_ALGORITHMS)} are timed: several processes share "
            "the cores of this machine"
        )
    notes += [f"cannot run on this mesh: {', '.join(left_out)}"] if left_out else []
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
