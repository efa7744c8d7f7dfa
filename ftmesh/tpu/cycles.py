"""Cycles: what a compiled program does beside its permutations, as the TPU compiler estimates it.

Most instructions that take a core's time carry an estimate in the compiled text. They stand there
in the order in which they are started, so what stands between the start of a permutation and its
end is *hidden* behind it, and the rest is *exposed*. Free are those that compute single numbers,
which have no estimate either, and those that copy beside the core. What else has none is named.

Turns: how often a loop of a compiled program runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftmesh.execute._compat import MARK
from ftmesh.execute.hlo_text import Instruction, computations, members, num_bytes
from ftmesh.units import format_bytes

PERMUTE = "collective-permute"
_FREE = {
    "after-all", "bitcast", "constant", "get-tuple-element", "opt-barrier", "parameter",
    "partition-id", "replica-id", "tuple", "while",
}  # fmt: skip
_FREE_TARGETS = 'custom_call_target="(AllocateBuffer|ConcatBitcast)"'


@dataclass(frozen=True)
class Cycles:
    """Cycles of some instructions, hidden behind permutations or not.

    `unknown` has the opcodes of those without an estimate that take some time nevertheless, and the
    bytes of their results.
    """

    exposed: int = 0
    hidden: int = 0
    unknown: tuple[tuple[str, int], ...] = ()

    @property
    def total(self) -> int:
        """All that is known."""
        return self.exposed + self.hidden

    def __add__(self, other: Cycles) -> Cycles:
        return Cycles(
            self.exposed + other.exposed,
            self.hidden + other.hidden,
            self.unknown + other.unknown,
        )

    def __mul__(self, times: int) -> Cycles:
        return Cycles(times * self.exposed, times * self.hidden, self.unknown)

    @property
    def doubts(self) -> str:
        """What has no estimate, in words; nothing where all has one."""
        if not self.unknown:
            return ""
        sizes: dict[str, list[int]] = {}
        for opcode, size in sorted(self.unknown):
            sizes.setdefault(opcode, []).append(size)
        said = (
            f"{len(some)} {opcode} of {format_bytes(sum(some))}" for opcode, some in sizes.items()
        )
        return f"; without an estimate: {', '.join(said)}"


UNCOUNTED = Cycles(unknown=(("while", 0),))


@dataclass(frozen=True)
class RoundCycles(Cycles):
    """One round beside its permutations; how many rounds there are, if that can be told."""

    rounds: int | None = 1
    sent_bytes: int = 0  # of a device, in a round

    @property
    def in_all(self) -> Cycles:
        """All rounds, or one, with a doubt, where their number is not known."""
        return self * (self.rounds or 1) + (UNCOUNTED if self.rounds is None else Cycles())

    def __str__(self) -> str:
        rounds = "how many rounds is not known"
        if self.rounds is not None:
            rounds = f"{self.rounds} round{'s' * (self.rounds != 1)}"
        return (
            f"{self.total:,} cycles a round beside the permutations, {self.hidden:,} of them "
            f"hidden; {rounds}{self.doubts}"
        )


@dataclass
class Stretch:
    """Instructions that run one after another: the body of a loop, or what is between loops.

    Those of the computations they call are among them, and loops without permutations count as
    what they cost.
    """

    is_loop: bool = False
    is_plans: bool = False  # whether a plan made the loop
    rounds: int | None = 1
    instructions: list[Instruction] = field(default_factory=list)
    inner: dict[str, Cycles] = field(default_factory=dict)  # by name, loops that are in it

    @property
    def permutations(self) -> list[Instruction]:
        """Permutations that are started here."""
        opcodes = (PERMUTE, f"{PERMUTE}-start")
        return [each for each in self.instructions if each.opcode in opcodes]

    @property
    def own(self) -> list[Instruction]:
        """What belongs to the permutations: all of a loop of theirs, or what is in their scope.

        A plan's permutations stand in a scope of their own, also where they are in somebody else's
        loop or in none.
        """
        sources = (each.source for each in self.permutations)
        scopes = tuple({source.rpartition("/")[0] for source in sources if MARK in source})
        if self.permutations and self.is_loop and (self.is_plans or not scopes):
            return self.instructions
        return [
            each
            for each in self.instructions
            if each.opcode.startswith(PERMUTE) or each.source.startswith(scopes)
        ]

    @property
    def round_cycles(self) -> RoundCycles:
        """What stands beside the permutations, once."""
        found = self._sum(self.own)
        sent = sum(num_bytes(members(each.type)[0]) for each in self.permutations)
        return RoundCycles(found.exposed, found.hidden, found.unknown, self.rounds, sent)

    @property
    def others(self) -> Cycles:
        """What does not belong to the permutations."""
        own = {each.name for each in self.own}
        return self._sum([each for each in self.instructions if each.name not in own])

    def _sum(self, instructions: list[Instruction]) -> Cycles:
        total, under_way = Cycles(), set()
        for each in instructions:
            if each.opcode == f"{PERMUTE}-start":
                under_way.add(each.name)
            elif each.opcode == f"{PERMUTE}-done":
                under_way.discard(each.operands[0])
            elif each.opcode != PERMUTE:
                found = self.inner.get(each.name) or estimate(each)
                if under_way:
                    found = Cycles(0, found.total, found.unknown)
                total += found
        return total


def estimate(instruction: Instruction) -> Cycles:
    """The compiler's estimate for one instruction."""
    if said := re.search(r'"estimated_cycles":"?(\d+)', instruction.config):
        return Cycles(int(said[1]))
    is_small = all(re.fullmatch(r"\w+\[(1(,1)*)?\].*", kind) for kind in members(instruction.type))
    is_free = instruction.opcode in _FREE or instruction.opcode.endswith(("-start", "-done"))
    if is_small or is_free or re.search(_FREE_TARGETS, instruction.config):
        return Cycles()
    return Cycles(unknown=((instruction.opcode, num_bytes(instruction.type)),))


def has_estimates(text: str) -> bool:
    """Whether a compiled program carries estimates; those of TPUs do."""
    return '"estimated_cycles":' in text


def stretches(text: str) -> list[Stretch]:
    """The loops of a compiled program that have permutations, and all between them, in order."""
    known, entry = computations(text)
    return list(_stretches(known, entry, Stretch()))


def _stretches(known: dict[str, list[Instruction]], name: str, here: Stretch) -> Iterator[Stretch]:
    """The stretches of a computation; `here` is the first, which begins with it."""
    for around, each in _in_order(known, name):
        if each.opcode == "while":
            count = turns(each, around, known)
            rounds = None if count is None or here.rounds is None else count * here.rounds
            inside = [
                stretch
                for body in each.calls
                for stretch in _stretches(known, body, Stretch(True, MARK in each.source, rounds))
            ]
            if any(stretch.permutations for stretch in inside):
                yield here
                yield from inside
                here = Stretch(here.is_loop, here.is_plans, here.rounds)
            else:
                once = sum((stretch.others for stretch in inside), Cycles())
                here.inner[each.name] = once * count if count else once + UNCOUNTED
        here.instructions.append(each)
    yield here


def _in_order(known: dict[str, list[Instruction]], name: str) -> Iterator[tuple[str, Instruction]]:
    """The instructions of a computation, each with its name, and before each those of its calls.

    The parts of a fusion have no time of their own, and loops are the caller's to look into.
    """
    for each in known.get(name, ()):
        if each.opcode not in ("fusion", "while"):
            for called in each.calls:
                yield from _in_order(known, called)
        yield name, each


Body = dict[str, Instruction]  # those of a computation by name


def turns(loop: Instruction, around: str, known: dict[str, list[Instruction]]) -> int | None:
    """How often a loop in the computation `around` runs; None where that cannot be told.

    As the compiler says, or as the loop counts up from one constant to another.
    """
    if said := re.search(r'"known_trip_count":\{"n":"?(\d+)', loop.config):
        return int(said[1])
    called = [re.search(rf"\b{part}=%?([\w.-]+)", loop.text) for part in ("condition", "body")]
    before, condition, body = (
        {each.name: each for each in known.get(name, ())}
        for name in (around, *(part[1] if part else "" for part in called))
    )
    test, after = _root(condition), _root(body)
    if not test or test.opcode != "compare" or "direction=LT" not in test.text:
        return None
    counter, end = (_original(name, condition) for name in test.operands)
    place = _number(r"get-tuple-element\(.*\), index=", counter)
    begin = _original(_member(before.get(loop.operands[0]), place), before)
    step = _step(_original(_member(after, place), body), place, body)
    first, last = _number(r"constant\(", begin), _number(r"constant\(", end)
    if first is None or last is None or not step:
        return None
    return max(0, -(-(last - first) // step))


def _step(following: Instruction | None, place: int | None, body: Body) -> int | None:
    """By how much a counter grows in a turn, if its next value is the one before and a constant."""
    if not following or following.opcode != "add":
        return None
    terms = [_original(name, body) for name in following.operands]
    steps = [_number(r"constant\(", term) for term in terms]
    if place not in [_number(r"get-tuple-element\(.*\), index=", term) for term in terms]:
        return None
    return next((step for step in steps if step is not None), None)


def _root(body: Body) -> Instruction | None:
    """The result of a computation."""
    return next((each for each in body.values() if each.is_root), None)


def _member(state: Instruction | None, place: int | None) -> str:
    """The name of what stands at a place of a tuple; none where it is none."""
    return state.operands[place] if state and state.opcode == "tuple" and place is not None else ""


def _original(name: str, body: Body) -> Instruction | None:
    """What has a name, or what that is a copy of."""
    found = body.get(name)
    while found and found.opcode == "copy":
        found = body.get(found.operands[0])
    return found


def _number(front: str, instruction: Instruction | None) -> int | None:
    """The number in an instruction that begins so."""
    found = re.match(rf"{front}(-?\d+)", instruction.text) if instruction else None
    return int(found[1]) if found else None
