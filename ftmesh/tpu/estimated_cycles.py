"""What a compiled program does besides its permutations, by the TPU compiler's estimates.

Most instructions that occupy a core carry an estimate in the compiled text. They are listed in the
order in which they start, so those between the start and the end of a permutation are *hidden*
behind it, and the others are *exposed*. Instructions on single numbers and asynchronous copies have
no estimate and count as free. Any other instruction without an estimate is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftmesh.execute._compat import SCOPE_PREFIX
from ftmesh.execute.hlo_text import (
    Computations,
    Instruction,
    parse_computations,
    tuple_types,
    type_bytes,
)
from ftmesh.units import format_bytes

PERMUTE = "collective-permute"
_FREE = {
    "after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter",
    "partition-id", "replica-id", "tuple", "while",
}  # fmt: skip
_FREE_TARGETS = 'custom_call_target="(AllocateBuffer|ConcatBitcast)"'


@dataclass(frozen=True)
class Cycles:
    """Cycles of some instructions: outside permutations, and while one is in flight.

    `unknown` has opcode and result bytes of each instruction that takes time without an estimate.
    """

    exposed: int = 0
    hidden: int = 0
    unknown: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """All cycles that are known."""
        return self.exposed + self.hidden

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(
            self.exposed + other.exposed, self.hidden + other.hidden, self.unknown + other.unknown
        )

    def __mul__(self, times: int) -> Cycles:
        return Cycles(times * self.exposed, times * self.hidden, self.unknown)

    @property
    def unknown_text(self) -> str:
        """What has no estimate, in words; empty if everything has one."""
        if not self.unknown:
            return ""
        sizes: dict[str, list[int]] = {}
        for opcode, size in sorted(self.unknown):
            sizes.setdefault(opcode, []).append(size)
        parts = (
            f"{len(some)} {opcode} of {format_bytes(sum(some))}" for opcode, some in sizes.items()
        )
        return f"; without an estimate: {', '.join(parts)}"


UNKNOWN_TRIP_COUNT = Cycles(unknown=(("while", 0),))


@dataclass(frozen=True)
class RoundCycles(Cycles):
    """The cycles of one round besides its permutations, and the number of rounds, if known."""

    rounds: int | None = 1
    sent_bytes: int = 0  # of a device, in a round

    @property
    def all_rounds(self) -> Cycles:
        """The cycles of all rounds; of one, marked unknown, if their number is not known."""
        return self * (self.rounds or 1) + (UNKNOWN_TRIP_COUNT if self.rounds is None else Cycles())

    def __str__(self) -> str:
        rounds = "unknown number of rounds"
        if self.rounds is not None:
            rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        return (
            f"{self.total:,} cycles per round besides the permutations, {self.hidden:,} of them "
            f"hidden; {rounds}{self.unknown_text}"
        )


@dataclass
class Segment:
    """Instructions that run one after another: the body of a loop, or what is between loops.

    It includes the computations they call. A loop without permutations counts as what it costs.
    """

    is_loop: bool = False
    is_plan_loop: bool = False  # the loop is a plan's
    rounds: int | None = 1
    instructions: list[Instruction] = field(default_factory=list)
    inner_loops: dict[str, Cycles] = field(default_factory=dict)  # by name

    @property
    def permutations(self) -> list[Instruction]:
        """The permutations that start here."""
        opcodes = (PERMUTE, f"{PERMUTE}-start")
        return [i for i in self.instructions if i.opcode in opcodes]

    @property
    def round_instructions(self) -> list[Instruction]:
        """What belongs to the permutations: all of their loop, or what is in their scope.

        A plan's permutations are in a scope of their own, also inside a user's loop.
        """
        op_names = (i.op_name for i in self.permutations)
        scopes = tuple({name.rpartition("/")[0] for name in op_names if SCOPE_PREFIX in name})
        if self.permutations and self.is_loop and (self.is_plan_loop or not scopes):
            return self.instructions
        return [
            i
            for i in self.instructions
            if i.opcode.startswith(PERMUTE) or i.op_name.startswith(scopes)
        ]

    @property
    def round_cycles(self) -> RoundCycles:
        """The cycles of one round besides the permutations."""
        cycles = self._sum(self.round_instructions)
        sent = sum(type_bytes(tuple_types(i.type)[0]) for i in self.permutations)
        return RoundCycles(cycles.exposed, cycles.hidden, cycles.unknown, self.rounds, sent)

    @property
    def other_cycles(self) -> Cycles:
        """The cycles of what does not belong to the permutations."""
        own = {i.name for i in self.round_instructions}
        return self._sum([i for i in self.instructions if i.name not in own])

    def _sum(self, instructions: list[Instruction]) -> Cycles:
        total, in_flight = Cycles(), set()
        for instruction in instructions:
            if instruction.opcode == f"{PERMUTE}-start":
                in_flight.add(instruction.name)
            elif instruction.opcode == f"{PERMUTE}-done":
                in_flight.discard(instruction.operands[0])
            elif instruction.opcode != PERMUTE:
                cycles = self.inner_loops.get(instruction.name) or estimate(instruction)
                if in_flight:
                    cycles = Cycles(0, cycles.total, cycles.unknown)
                total += cycles
        return total


def estimate(instruction: Instruction) -> Cycles:
    """The compiler's estimate for one instruction."""
    if cycles := re.search(r'"estimated_cycles":"?(\d+)', instruction.config):
        return Cycles(int(cycles[1]))
    types = tuple_types(instruction.type)
    is_scalar = all(re.fullmatch(r"\w+\[(1(,1)*)?\].*", kind) for kind in types)
    is_free = instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done"))
    if is_scalar or is_free or re.search(_FREE_TARGETS, instruction.config):
        return Cycles()
    return Cycles(unknown=((instruction.opcode, type_bytes(instruction.type)),))


def has_estimates(text: str) -> bool:
    """True if a compiled program carries estimates; programs for TPUs do."""
    return '"estimated_cycles":' in text


def segments(text: str) -> list[Segment]:
    """The loops of a compiled program that have permutations, and what is between them."""
    computations, entry = parse_computations(text)
    return list(_segments(computations, entry, Segment()))


def _segments(computations: Computations, name: str, first: Segment) -> Iterator[Segment]:
    """The segments of a computation; `first` is the one that it starts in."""
    current = first
    for caller, instruction in _in_order(computations, name):
        if instruction.opcode == "while":
            count = trip_count(instruction, caller, computations)
            rounds = None if count is None or current.rounds is None else count * current.rounds
            is_plan_loop = SCOPE_PREFIX in instruction.op_name
            inside = [
                segment
                for body in instruction.calls
                for segment in _segments(computations, body, Segment(True, is_plan_loop, rounds))
            ]
            if any(segment.permutations for segment in inside):
                yield current
                yield from inside
                current = Segment(current.is_loop, current.is_plan_loop, current.rounds)
            else:
                once = sum((segment.other_cycles for segment in inside), Cycles())
                current.inner_loops[instruction.name] = (
                    once * count if count else once + UNKNOWN_TRIP_COUNT
                )
        current.instructions.append(instruction)
    yield current


def _in_order(computations: Computations, name: str) -> Iterator[tuple[str, Instruction]]:
    """The instructions of a computation, those of a call before the call; with their computation.

    The parts of a fusion have no time of their own, and callers look into loops themselves.
    """
    for instruction in computations.get(name, ()):
        if instruction.opcode not in ("fusion", "while"):
            for called in instruction.calls:
                yield from _in_order(computations, called)
        yield name, instruction


# Trip counts ------------------------------------------------------------------------------------

_Body = dict[str, Instruction]  # the instructions of a computation by name


def trip_count(loop: Instruction, caller: str, computations: Computations) -> int | None:
    """How often a loop in the computation `caller` runs; None if not known.

    The compiler states it, or the loop counts up from one constant to another.
    """
    if stated := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.config):
        return int(stated[1])
    called = [re.search(rf"\b{part}=%?([\w.-]+)", loop.text) for part in ("condition", "body")]
    before, condition, body = (
        {i.name: i for i in computations.get(name, ())}
        for name in (caller, *(part[1] if part else "" for part in called))
    )
    test, after = (
        next((i for i in part.values() if i.is_root), None) for part in (condition, body)
    )
    if not test or test.opcode != "compare" or "direction=LT" not in test.text:
        return None
    counter, end = (_original(name, condition) for name in test.operands)
    index = _integer(r"get-tuple-element\(.*\), index=", counter)
    begin = _original(_member(before.get(loop.operands[0]), index), before)
    step = _step(_original(_member(after, index), body), index, body)
    first, last = _integer(r"constant\(", begin), _integer(r"constant\(", end)
    if first is None or last is None or not step:
        return None
    return max(0, -(-(last - first) // step))


def _step(following: Instruction | None, index: int | None, body: _Body) -> int | None:
    """The increment of a counter, if its next value is its previous one plus a constant."""
    if not following or following.opcode != "add":
        return None
    terms = [_original(name, body) for name in following.operands]
    steps = [_integer(r"constant\(", term) for term in terms]
    if index not in [_integer(r"get-tuple-element\(.*\), index=", term) for term in terms]:
        return None
    return next((step for step in steps if step is not None), None)


def _member(state: Instruction | None, index: int | None) -> str:
    """The name of a member of a tuple; empty if there is none."""
    return state.operands[index] if state and state.opcode == "tuple" and index is not None else ""


def _original(name: str, body: _Body) -> Instruction | None:
    """The instruction of a name, or the one that it is a copy of."""
    instruction = body.get(name)
    while instruction and instruction.opcode == "copy":
        instruction = body.get(instruction.operands[0])
    return instruction


def _integer(prefix: str, instruction: Instruction | None) -> int | None:
    """The integer that follows `prefix` at the start of an instruction."""
    match = re.match(rf"{prefix}(-?\d+)", instruction.text) if instruction else None
    return int(match[1]) if match else None
