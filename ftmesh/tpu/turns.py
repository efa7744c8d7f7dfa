"""Turns: how often a loop of a compiled program runs."""

from __future__ import annotations

import re

from ftmesh.execute.hlo_text import Instruction

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
