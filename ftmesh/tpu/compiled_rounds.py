"""The rounds of a plan in the text of a compiled program, and what overlaps with permutations.

The text lists instructions in the order in which they start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from ftmesh.execute.hlo_text import Computations, Instruction, parse_computations
from ftmesh.execute.lowering import Loop
from ftmesh.tpu.estimated_cycles import (
    PERMUTE,
    UNKNOWN_TRIP_COUNT,
    Cycles,
    RoundCycles,
    Segment,
    has_estimates,
    segments,
)

MAX_REPETITIONS = 8  # of a plan in a program, one for each dtype

_Match = tuple[str, list[Segment], int]  # names of planned loops, their segments, their rounds


@dataclass(frozen=True)
class CompiledLoop:
    """The permutations of one round of a compiled loop."""

    name: str  # of the planned loop
    permutations: int  # per round
    in_flight: int  # how many of them start before the program waits for the first
    synchronous: bool  # the compiler keeps them synchronous: nothing else happens meanwhile
    cycles: RoundCycles | None = None  # besides the permutations, if the compiler estimates them

    def __str__(self) -> str:
        permutations = f"{self.permutations} permutation{'s' * (self.permutations > 1)} per round"
        how = "synchronous" if self.synchronous else f"{self.in_flight} in flight at once"
        return f"{self.name}: {permutations}, {how}"


def compiled_loops(text: str, planned: Sequence[Loop] = ()) -> tuple[CompiledLoop, ...]:
    """Find the loops with permutations, in order; permutations outside loops count as a loop too.

    An iteration of a loop may run several rounds, with the last ones after the loop; a short loop
    is unrolled, and may not be distinguishable from the next. The `planned` loops say what a round
    is. If none are given, or they are those of another program, an iteration counts as a round.
    """
    with_permutations = [segment for segment in segments(text) if segment.permutations]
    estimated = has_estimates(text)
    if matches := _match_plan(with_permutations, planned):
        return tuple(_loop(*match, estimated) for match in matches)
    return tuple(
        _loop(f"loop {i}", [segment], segment.rounds, estimated)
        for i, segment in enumerate(with_permutations)
    )


def _match_plan(compiled: Sequence[Segment], planned: Sequence[Loop]) -> list[_Match]:
    """Match segments with planned loops; empty if the numbers of permutations do not fit.

    A match has as few segments and loops as have the same number of permutations. Leaves of
    different dtypes are summed one after another, each by all loops of the plan.
    """
    executed = sum((segment.rounds or 0) * len(segment.permutations) for segment in compiled)
    once = sum(loop.num_rounds * len(loop.lanes) for loop in planned)
    repetitions = max(1, min(executed // once, MAX_REPETITIONS)) if once else 1
    matches = (_match_loops(compiled, [*planned] * times) for times in range(1, repetitions + 1))
    return max(matches, key=len)


def _match_loops(compiled: Sequence[Segment], planned: Sequence[Loop]) -> list[_Match]:
    """`_match_plan` for planned loops that each run once."""
    sizes = [loop.num_rounds * len(loop.lanes) for loop in planned]
    if len(compiled) == len(planned):
        compiled = [
            replace(segment, rounds=size // len(segment.permutations))
            if segment.rounds is None
            else segment
            for segment, size in zip(compiled, sizes, strict=True)
        ]
    executed = list(accumulate((s.rounds or 0) * len(s.permutations) for s in compiled))
    expected = list(accumulate(sizes))
    if not planned or executed[-1:] != expected[-1:]:
        return []
    matches = []
    for begin, end in pairwise([0, *sorted({*executed} & {*expected})]):
        some = [s for s, count in zip(compiled, executed, strict=True) if begin < count <= end]
        loops = [x for x, count in zip(planned, expected, strict=True) if begin < count <= end]
        name = " and ".join(loop.name for loop in loops)
        matches.append((name, some, sum(loop.num_rounds for loop in loops)))
    return matches


def _loop(name: str, some: Sequence[Segment], rounds: int | None, estimated: bool) -> CompiledLoop:
    opcodes = [i.opcode for i in some[0].instructions]
    start, done = f"{PERMUTE}-start", f"{PERMUTE}-done"
    first_done = opcodes.index(done) if done in opcodes else len(opcodes)
    executed = sum(len(segment.permutations) * (segment.rounds or 1) for segment in some)
    return CompiledLoop(
        name=name,
        permutations=-(-executed // (rounds or 1)),
        in_flight=opcodes[:first_done].count(start) or 1,
        synchronous=start not in opcodes,
        cycles=_mean_round(some, rounds) if estimated else None,
    )


def _mean_round(some: Sequence[Segment], rounds: int | None) -> RoundCycles:
    cycles, times = [segment.round_cycles for segment in some], rounds or 1
    total = sum((c * (c.rounds or 1) for c in cycles), Cycles())
    sent = sum(c.sent_bytes * (c.rounds or 1) for c in cycles)
    return RoundCycles(
        exposed=round(total.exposed / times),
        hidden=round(total.hidden / times),
        unknown=total.unknown,
        rounds=rounds,
        sent_bytes=round(sent / times),
    )


def total_cycles(loops: Iterable[CompiledLoop]) -> Cycles:
    """The cycles of all rounds of all loops, besides their permutations."""
    return sum((loop.cycles.all_rounds for loop in loops if loop.cycles), Cycles())


def cycles_outside_rounds(text: str) -> Cycles | None:
    """The cycles of a compiled program outside its rounds; None if nothing is estimated."""
    if not has_estimates(text):
        return None
    parts = [(segment.other_cycles, segment.rounds) for segment in segments(text)]
    total = sum((cycles * (rounds or 1) for cycles, rounds in parts), Cycles())
    is_counted = all(rounds is not None for cycles, rounds in parts if cycles.total)
    return total if is_counted else total + UNKNOWN_TRIP_COUNT


def describe_loops(loops: Sequence[CompiledLoop]) -> list[str]:
    """The lines of a report about loops."""
    lines = []
    for loop in loops:
        lines.append(f"  {loop}")
        if loop.cycles:
            lines.append(f"    {loop.cycles}")
    if any(loop.cycles for loop in loops):
        total = total_cycles(loops)
        lines.append(
            f"  {total.total:,} cycles in all rounds besides permutations, {total.hidden:,} "
            "hidden, by the compiler's estimates"
        )
    return lines


@dataclass(frozen=True)
class Overlap:
    """Asynchronous permutations outside loops, all convolutions, and which of them overlap."""

    permutations: int
    beside_convolutions: int  # permutations with a convolution between start and end
    convolutions: int
    beside_permutations: int  # convolutions that start while a permutation is in flight

    def __str__(self) -> str:
        return (
            f"{self.beside_convolutions} of {self.permutations} permutations overlap with "
            f"convolutions, and {self.beside_permutations} of {self.convolutions} convolutions "
            "with permutations"
        )


def overlap(text: str, scope: str = "") -> Overlap:
    """Find what overlaps in the entry computation of a compiled program.

    Only permutations under the `jax.named_scope` called `scope` count, if one is given.
    """
    in_scope = re.compile(rf"(?<!\w){re.escape(scope)}(?!\w)" if scope else "")
    computations, entry = parse_computations(text)
    in_flight: dict[str, bool] = {}  # by name: whether a convolution has started since
    permutations = overlapped = convolutions = busy = 0
    for instruction in computations[entry]:
        if instruction.opcode == f"{PERMUTE}-start" and in_scope.search(instruction.op_name):
            in_flight[instruction.name] = False
            permutations += 1
        elif instruction.opcode == f"{PERMUTE}-done":
            overlapped += in_flight.pop(instruction.operands[0], False)
        elif _convolves(instruction, computations):
            convolutions += 1
            busy += bool(in_flight)
            in_flight = dict.fromkeys(in_flight, True)
    return Overlap(permutations, overlapped, convolutions, busy)


def _convolves(instruction: Instruction, computations: Computations) -> bool:
    return instruction.opcode == "convolution" or any(
        _convolves(inner, computations)
        for called in instruction.calls
        for inner in computations.get(called, ())
    )
