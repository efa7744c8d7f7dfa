"""Time the algorithms and `lax.psum` on emulated devices, in one run.

Emulated devices share a few cores and their memory, so this measures the programs, not a network.
Compare the ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ftmesh.algorithms.registry import ALGORITHMS
from ftmesh.errors import PlanError
from ftmesh.planning.make_plan import plan
from ftmesh.planning.plan import Plan
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Timing:
    """The median time of one algorithm for one payload."""

    algorithm: str
    payload_bytes: int
    seconds: float
    times_psum: float  # relative to lax.psum in the same run


def run_benchmark(
    topology: Topology,
    payloads: Sequence[int],
    *,
    repeats: int = 5,
    progress: Progress = lambda done, total, what: None,
) -> list[Timing]:
    """Time every algorithm that fits `topology`, and `lax.psum`, at every payload."""
    plans: list[Plan] = []
    for name in ALGORITHMS:
        try:
            plans.append(plan(topology, name))
        except PlanError:
            continue
    sums: dict[str, Callable[[Any], Any]] = {"lax.psum": lambda x: lax.psum(x, "data")}
    sums |= {fitting.algorithm: partial(fitting.psum, axis_name="data") for fitting in plans}
    mesh = topology.jax_mesh("data")
    timings: list[Timing] = []
    total = len(payloads) * len(sums)
    for payload in payloads:
        shape = (len(topology.devices), max(1, payload // 4))
        x = jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P("data")))
        base = 0.0
        for name, run in sums.items():
            progress(len(timings), total, f"{name}, {format_bytes(payload)}")
            seconds = _seconds(mesh, run, x, repeats)
            base = base or seconds
            timings.append(Timing(name, payload, seconds, seconds / base))
    progress(total, total, "")
    return timings


def _seconds(mesh: Any, run: Callable[[Any], Any], x: jax.Array, repeats: int) -> float:
    body = jax.shard_map(
        lambda x: run(x[0])[None], mesh=mesh, in_specs=P("data"), out_specs=P(None)
    )
    call = jax.jit(body)
    result = jax.block_until_ready(call(x))
    if float(result[0, 0]) != len(x):
        raise AssertionError(f"the sum of {len(x)} ones came out as {result[0, 0]}")
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call(x))
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
