"""Fit a device model to what the compiler estimates for several plans.

    reports = [compile_report(plan, size) for plan in plans for size in sizes]
    print(fit_device_model(reports))

The parameters are those of `ftmesh.cost.device_model.DeviceModel`, in cycles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np

from ftmesh.errors import ArgumentError
from ftmesh.tpu.compile_report import CompileReport
from ftmesh.tpu.compiled_rounds import total_cycles
from ftmesh.units import format_bytes


@dataclass(frozen=True)
class CompiledRound:
    """A compiled round: what a device sends, and its cycles besides the permutations."""

    name: str
    lanes: int
    sent_bytes: int
    cycles: int
    share: float  # the loop's share of its program's cycles


@dataclass(frozen=True)
class DeviceModelFit:
    """Cycles per round, per lane and per byte sent, and of packing per byte of payload."""

    per_round: float
    per_lane: float
    per_byte: float
    packing: float
    rounds: tuple[CompiledRound, ...]

    def cycles(self, compiled: CompiledRound) -> float:
        """The fitted cycles of a round."""
        return self.per_round + compiled.lanes * self.per_lane + compiled.sent_bytes * self.per_byte

    @property
    def worst_error(self) -> float:
        """The largest relative error of a round."""
        return max(abs(self.cycles(r) / r.cycles - 1) for r in self.rounds)

    def __str__(self) -> str:
        lines = [f"  {'round':<60}{'lanes':>6}{'sends':>10}{'estimated':>11}{'fitted':>9}"]
        lines += [
            f"  {r.name:<60}{r.lanes:>6}{format_bytes(r.sent_bytes):>10}{r.cycles:>11,}"
            f"{self.cycles(r):>9,.0f}"
            for r in self.rounds
        ]
        names = ("per_round", "per_lane", "per_byte", "packing")
        parameters = ", ".join(f"{name}={getattr(self, name):.4g}" for name in names)
        lines.append(f"  cycles: {parameters}; errors up to {self.worst_error:.0%}")
        return "\n".join(lines)


def fit_device_model(reports: Sequence[CompileReport]) -> DeviceModelFit:
    """Fit a device model to reports for one TPU generation.

    Minimizes the squares of relative errors, with each round weighted by its loop's share of the
    program, and no parameter below 0. What the rounds cannot tell apart goes to the first parameter
    that explains it.

    Raises:
        ArgumentError: A program was not compiled, or has no estimates.
    """
    for report in reports:
        if not report.accepted:
            raise ArgumentError(f"{report.algorithm} was not compiled: {report.refusal}")
    rounds = tuple(compiled for report in reports for compiled in _rounds(report))
    if not rounds:
        raise ArgumentError(
            "there are no estimates to fit: give reports of programs compiled for a TPU"
        )
    packed = [(r.payload_bytes, r.packing.total) for r in reports if r.packing]
    packing = sum(size * cycles for size, cycles in packed) / sum(size**2 for size, _ in packed)
    per_round, per_lane, per_byte = _least_squares(rounds)
    return DeviceModelFit(per_round, per_lane, per_byte, packing, rounds)


def _rounds(report: CompileReport) -> Iterator[CompiledRound]:
    program_cycles = total_cycles(report.loops).total
    for loop in report.loops:
        if loop.cycles and loop.cycles.total:
            yield CompiledRound(
                name=f"{report.algorithm} {format_bytes(report.payload_bytes)}: {loop.name}",
                lanes=loop.permutations,
                sent_bytes=loop.cycles.sent_bytes,
                cycles=loop.cycles.total,
                share=loop.cycles.all_rounds.total / program_cycles,
            )


def _least_squares(rounds: Sequence[CompiledRound]) -> list[float]:
    """The best of all fits with some of the three parameters, and 0 for the others."""
    weight = np.sqrt([r.share for r in rounds])
    table = np.array([[1, r.lanes, r.sent_bytes] for r in rounds], np.float64)
    table *= (weight / [r.cycles for r in rounds])[:, None]
    scale = np.linalg.norm(table, axis=0)
    table /= scale
    best, least = np.zeros(3), np.inf
    for columns in chain.from_iterable(combinations(range(3), size) for size in (1, 2, 3)):
        solution, *_ = np.linalg.lstsq(table[:, columns], weight, rcond=None)
        error = np.square(table[:, columns] @ solution - weight).sum()
        if (solution >= 0).all() and error < least - 1e-9:
            best, least = np.zeros(3), error
            best[list(columns)] = solution
    return [float(parameter) for parameter in best / scale]
