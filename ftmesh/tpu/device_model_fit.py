"""Fit: what an executor costs, as a line through what the compiler estimates for several plans.

    reports = [compile_report(plan, size) for plan in plans for size in sizes]
    print(fit(reports))

The numbers are those of `ftmesh.cost.device_model.DeviceModel`, in cycles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np

from ftmesh.errors import ArgumentError
from ftmesh.tpu.compile_report import CompileReport
from ftmesh.tpu.compiled_rounds import cycles_of_all
from ftmesh.units import format_bytes


@dataclass(frozen=True)
class Round:
    """A round as it was compiled: what a device sends, and what it does beside that."""

    name: str
    lanes: int
    sent_bytes: int
    cycles: int
    share: float  # of all that its program does beside permutations, all rounds of its loop


@dataclass(frozen=True)
class Fit:
    """Cycles per round, per lane and per byte sent, and of packing per byte of payload."""

    per_round: float
    per_lane: float
    per_byte: float
    packing: float
    rounds: tuple[Round, ...]

    def cycles(self, one: Round) -> float:
        """A round by the fit."""
        return self.per_round + one.lanes * self.per_lane + one.sent_bytes * self.per_byte

    @property
    def worst_error(self) -> float:
        """The largest that any round is off, as a share of its estimate."""
        return max(abs(self.cycles(one) / one.cycles - 1) for one in self.rounds)

    def __str__(self) -> str:
        lines = [f"  {'round':<60}{'lanes':>6}{'sends':>10}{'estimated':>11}{'fitted':>9}"]
        lines += [
            f"  {one.name:<60}{one.lanes:>6}{format_bytes(one.sent_bytes):>10}{one.cycles:>11,}"
            f"{self.cycles(one):>9,.0f}"
            for one in self.rounds
        ]
        numbers = ("per_round", "per_lane", "per_byte", "packing")
        said = ", ".join(f"{name}={getattr(self, name):.4g}" for name in numbers)
        lines.append(f"  cycles: {said}; at most {self.worst_error:.0%} off")
        return "\n".join(lines)


def fit(reports: Sequence[CompileReport]) -> Fit:
    """The executor that explains reports of one generation best.

    Relative errors are least in their squares, where each round counts by its loop's share of the
    program; no number is below 0. What the rounds cannot tell apart is put on the first that
    explains it.
    """
    for report in reports:
        if not report.accepted:
            raise ArgumentError(f"{report.algorithm} was not compiled: {report.refusal}")
    rounds = tuple(one for report in reports for one in _rounds(report))
    if not rounds:
        raise ArgumentError(
            "there are no estimates to fit: give reports of programs that were compiled for a TPU"
        )
    packed = [(each.payload_bytes, each.packing.total) for each in reports if each.packing]
    packing = sum(size * cycles for size, cycles in packed) / sum(size**2 for size, _ in packed)
    per_round, per_lane, per_byte = _least_squares(rounds)
    return Fit(per_round, per_lane, per_byte, packing, rounds)


def _rounds(report: CompileReport) -> Iterator[Round]:
    whole = cycles_of_all(report.loops).total
    for loop in report.loops:
        if loop.cycles and loop.cycles.total:
            yield Round(
                name=f"{report.algorithm} {format_bytes(report.payload_bytes)}: {loop.name}",
                lanes=loop.permutations,
                sent_bytes=loop.cycles.sent_bytes,
                cycles=loop.cycles.total,
                share=loop.cycles.in_all.total / whole,
            )


def _least_squares(rounds: Sequence[Round]) -> list[float]:
    """The best of all fits with some of the three numbers, where the others are 0."""
    weight = np.sqrt([one.share for one in rounds])
    table = np.array([[1, one.lanes, one.sent_bytes] for one in rounds], np.float64)
    table *= (weight / [one.cycles for one in rounds])[:, None]
    scale = np.linalg.norm(table, axis=0)
    table /= scale
    best, least = np.zeros(3), np.inf
    for some in chain.from_iterable(combinations(range(3), size) for size in (1, 2, 3)):
        found, *_ = np.linalg.lstsq(table[:, some], weight, rcond=None)
        error = np.square(table[:, some] @ found - weight).sum()
        if (found >= 0).all() and error < least - 1e-9:
            best, least = np.zeros(3), error
            best[list(some)] = found
    return [float(number) for number in best / scale]
