"""Loops: the rounds of a plan, found again in the text of a compiled program.

Overlap: what a compiled program computes while its permutations are under way.

Read from the compiled text, whose instructions are in the order in which they are started.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product, zip_longest

from ftmesh.execute.hlo_text import Instruction, computations
from ftmesh.execute.lowering import Loop
from ftmesh.tpu.cycles import (
    PERMUTE,
    UNCOUNTED,
    Cycles,
    RoundCycles,
    Stretch,
    has_estimates,
    stretches,
)

MOST_LOOPS = 8  # of which it is tried whether they have two streams, and which run how often


@dataclass(frozen=True)
class CompiledLoop:
    """The permutations of one round; `in_flight` of them before the first is waited for.

    Where the compiler keeps them synchronous, nothing else happens while one travels.
    """

    name: str
    permutations: int
    in_flight: int
    synchronous: bool
    cycles: RoundCycles | None = None  # beside them, where the compiler estimates any

    def __str__(self) -> str:
        lanes = f"{self.permutations} permutation{'s' * (self.permutations > 1)} a round"
        how = "synchronous here" if self.synchronous else f"{self.in_flight} in flight at once"
        return f"{self.name}: {lanes}, {how}"


def compiled_loops(
    text: str, names: Sequence[str] = (), planned: Sequence[Loop] = ()
) -> tuple[CompiledLoop, ...]:
    """Every loop with permutations, in the order they run; permutations outside loops are one too.

    A loop may run several rounds in a turn, and the last ones after it; a short one is unrolled,
    and may then not be told from the next. The `planned` loops say what a round is. Where there are
    none, or they are of another program, a turn counts as a round, and loops get their `names`, if
    there are as many.
    """
    found = [stretch for stretch in stretches(text) if stretch.permutations]
    is_priced = has_estimates(text)
    if matched := _matched(found, planned):
        return tuple(_loop(*each, is_priced) for each in matched)
    if len(found) != len(names):
        names = [f"loop {i}" for i in range(len(found))]
    each_alone = zip(names, found, strict=True)
    return tuple(_loop(name, [one], one.rounds, is_priced) for name, one in each_alone)


def _matched(
    found: Sequence[Stretch], planned: Sequence[Loop]
) -> list[tuple[str, list[Stretch], int]]:
    """The names of planned loops, the stretches that they are, and how many rounds.

    As few of either together as have the same number of permutations; nothing where no number of
    them has. A loop has as many in a round as lanes, or twice that, where chunks travel in halves.
    Numbers of different dtypes are summed one after the other, each by all of the loops.
    """
    ran = sum((one.rounds or 0) * len(one.permutations) for one in found)
    once = sum(loop.num_rounds * len(loop.lanes) for loop in planned)
    most = min(ran // once, MOST_LOOPS) if once else 1
    every = (
        _if_split(found, [*planned] * times, streams)
        for times in range(1, max(most, 1) + 1)
        for streams in product((1, 2), repeat=min(times * len(planned), MOST_LOOPS))
    )
    return max(every, key=len)


def _if_split(
    found: Sequence[Stretch], planned: Sequence[Loop], streams: Sequence[int]
) -> list[tuple[str, list[Stretch], int]]:
    """The same, if the first of the planned loops have so many streams."""
    sizes = [loop.num_rounds * len(loop.lanes) for loop in planned]
    sizes = [size * number for size, number in zip_longest(sizes, streams, fillvalue=1)]
    if len(found) == len(planned):
        found = [
            replace(one, rounds=size // len(one.permutations)) if one.rounds is None else one
            for one, size in zip(found, sizes, strict=True)
        ]
    ran = list(accumulate((one.rounds or 0) * len(one.permutations) for one in found))
    wanted = list(accumulate(sizes))
    if not planned or ran[-1:] != wanted[-1:]:
        return []
    matched = []
    for begin, end in pairwise([0, *sorted({*ran} & {*wanted})]):
        some = [one for one, at in zip(found, ran, strict=True) if begin < at <= end]
        loops = [loop for loop, at in zip(planned, wanted, strict=True) if begin < at <= end]
        name = " and ".join(loop.name for loop in loops)
        matched.append((name, some, sum(loop.num_rounds for loop in loops)))
    return matched


def _loop(name: str, some: Sequence[Stretch], rounds: int | None, is_priced: bool) -> CompiledLoop:
    """Stretches of so many rounds in all."""
    first = some[0]
    opcodes = [each.opcode for each in first.instructions]
    start, done = f"{PERMUTE}-start", f"{PERMUTE}-done"
    until = opcodes.index(done) if done in opcodes else len(opcodes)
    times = rounds or 1
    ran = sum(len(one.permutations) * (one.rounds or 1) for one in some)
    return CompiledLoop(
        name=name,
        permutations=-(-ran // times),
        in_flight=opcodes[:until].count(start) or 1,
        synchronous=start not in opcodes,
        cycles=_a_round(some, rounds) if is_priced else None,
    )


def _a_round(some: Sequence[Stretch], rounds: int | None) -> RoundCycles:
    """One of so many rounds."""
    every = [one.round_cycles for one in some]
    total = sum((each * (each.rounds or 1) for each in every), Cycles())
    sent = sum(each.sent_bytes * (each.rounds or 1) for each in every)
    times = rounds or 1
    return RoundCycles(
        exposed=round(total.exposed / times),
        hidden=round(total.hidden / times),
        unknown=total.unknown,
        rounds=rounds,
        sent_bytes=round(sent / times),
    )


def cycles_of_all(loops: Iterable[CompiledLoop]) -> Cycles:
    """All rounds of all loops beside their permutations."""
    return sum((loop.cycles.in_all for loop in loops if loop.cycles), Cycles())


def cycles_outside(text: str) -> Cycles | None:
    """What a compiled program does beside its rounds; None where nothing is estimated."""
    if not has_estimates(text):
        return None
    every = [(one.others, one.rounds) for one in stretches(text)]
    found = sum((others * (rounds or 1) for others, rounds in every), Cycles())
    is_counted = all(rounds is not None for others, rounds in every if others.total)
    return found if is_counted else found + UNCOUNTED


def loop_lines(loops: Sequence[CompiledLoop]) -> list[str]:
    """What there is to say of loops, a line for each thing."""
    lines = []
    for loop in loops:
        lines.append(f"  {loop}")
        if loop.cycles:
            lines.append(f"    {loop.cycles}")
    if any(loop.cycles for loop in loops):
        found = cycles_of_all(loops)
        lines.append(
            f"  {found.total:,} cycles in all rounds beside permutations, {found.hidden:,} hidden, "
            "as the compiler estimates"
        )
    return lines


@dataclass(frozen=True)
class Overlap:
    """Some permutations outside loops, all convolutions, and which are under way at once."""

    permutations: int  # that are started and waited for apart
    beside_convolutions: int  # of these, with a convolution in between
    convolutions: int
    beside_permutations: int  # of these, started while a permutation is under way

    def __str__(self) -> str:
        return (
            f"{self.beside_convolutions} of {self.permutations} permutations are under way while a "
            f"convolution is, and {self.beside_permutations} of {self.convolutions} convolutions "
            "while a permutation is"
        )


def overlap(text: str, scope: str = "") -> Overlap:
    """What the main computation of a compiled program does at once.

    Looks at the permutations under the name `scope`, as `jax.named_scope` gives it, or at all.
    """
    named = re.compile(rf"(?<!\w){re.escape(scope)}(?!\w)" if scope else "")
    known, entry = computations(text)
    under_way: dict[str, bool] = {}  # by name, and whether a convolution has been started since
    permutations = beside = convolutions = busy = 0
    for instruction in known[entry]:
        if instruction.opcode == "collective-permute-start" and named.search(instruction.source):
            under_way[instruction.name] = False
            permutations += 1
        elif instruction.opcode == "collective-permute-done":
            beside += under_way.pop(instruction.operands[0], False)
        elif _convolves(instruction, known):
            convolutions += 1
            busy += bool(under_way)
            under_way = dict.fromkeys(under_way, True)
    return Overlap(permutations, beside, convolutions, busy)


def _convolves(instruction: Instruction, known: dict[str, list[Instruction]]) -> bool:
    """Whether an instruction is a convolution, or a fusion with one in it."""
    return instruction.opcode == "convolution" or any(
        _convolves(inner, known) for called in instruction.calls for inner in known.get(called, ())
    )
