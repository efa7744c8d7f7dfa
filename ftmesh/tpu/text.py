"""Text: compiled programs as they are printed, read back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ftmesh.errors import ArgumentError


@dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    opcode: str
    text: str
    name: str = ""
    source: str = ""  # the operation it was made of, with JAX's name scopes around it

    @property
    def operands(self) -> list[str]:
        """The names of what it takes."""
        return re.findall(r"%([\w.-]+)", self.text.partition(")")[0])

    @property
    def calls(self) -> list[str]:
        """The computations it runs."""
        found = re.findall(r"\b(?:body|calls|to_apply|\w+_computation)=%?([\w.-]+)", self.text)
        for branches in re.findall(r"\bbranch_computations=\{([^}]*)\}", self.text):
            found += re.findall(r"[\w.-]+", branches)
        return found


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of a compiled program by name, and the name of the one that it enters."""
    found: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$", line):
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name and (made := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line)):
            rest = _after_type(made[2])
            if opcode := re.match(r"([a-z][\w-]*)\(", rest):
                source = "".join(re.findall(r'op_name="([^"]*)"', rest))
                bare = _without_strings(rest)
                found[name].append(Instruction(opcode[1], bare, made[1], source))
    if not entry:
        raise ArgumentError("this is not the text of a compiled program: it has no ENTRY")
    return found, entry


def _after_type(text: str) -> str:
    """What follows the type of a result, which may be a tuple of types."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == " " and depth == 0:
            return text[i + 1 :]
    return ""


def _without_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
