"""Text: compiled programs as they are printed, read back."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ftmesh.commands import one_line
from ftmesh.errors import ArgumentError, UnreadableError


@dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    opcode: str
    text: str
    name: str = ""
    source: str = ""  # the operation it was made of, with JAX's name scopes around it
    type: str = ""  # of its result
    metadata: str = ""  # where it was made, in the compiler's words
    config: str = ""  # what only a backend knows: the target of a custom call, and its own notes
    chain: str = ""  # the number of the collective of which this is one part of several
    is_root: bool = False  # whether it is the result of its computation

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


def text_of(program: Any) -> str:
    """The text of what ``jit(...).lower(...).compile()`` returns."""
    try:
        return str(program.as_text())
    except RuntimeError as error:  # of a compiler that is newer than JAX
        raise UnreadableError(
            f"this JAX cannot print what was compiled ({one_line(str(error))}): install versions "
            "of JAX and of the compiler, as libtpu, that go together"
        ) from error


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of a compiled program by name, and the name of the one that it enters."""
    lines: dict[str, list[str]] = {}  # of a computation, one for each instruction
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$", line):
            name = head[2]
            lines[name] = []
            entry = name if head[1] else entry
        elif re.match(r"\}(, execution_thread=.*)?$", line):
            name = ""
        elif name and re.match(r"\s+(ROOT )?%?[\w.-]+ = ", line):
            lines[name].append(line)
        elif name and lines[name]:  # what a kernel is called with is printed over several
            lines[name][-1] += line
    if not entry:
        raise ArgumentError("this is not the text of a compiled program: it has no ENTRY")
    return {name: [*filter(None, map(_instruction, some))] for name, some in lines.items()}, entry


def _instruction(line: str) -> Instruction | None:
    """What a line says; None where that is no instruction."""
    made = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line)
    kind, rest = _type_and_rest(made[2]) if made else ("", "")
    opcode = re.match(r"([a-z][\w-]*)\(", rest)
    if not made or not opcode:
        return None
    return Instruction(
        opcode=opcode[1],
        text=_without_strings(rest),
        name=made[1],
        source="".join(re.findall(r'op_name="([^"]*)"', rest)),
        type=kind,
        metadata=rest.partition(" metadata={")[2],
        config="".join(re.findall(r" ((?:custom_call_target|backend_config)=.*)", rest)),
        is_root=line.lstrip().startswith("ROOT "),
        chain="".join(re.findall(r'\bchain_id="?(\d+)', rest)),
    )


def _type_and_rest(text: str) -> tuple[str, str]:
    """The type of a result, which may be a tuple of types, and what follows it."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == " " and depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def members(kind: str) -> list[str]:
    """The types of which a tuple type consists; of any other, that one.

    >>> members("((f32[2], s8[]), u32[])")
    ['(f32[2], s8[])', 'u32[]']
    """
    kind = re.sub(r"/\*.*?\*/", "", kind).strip()
    if not kind.startswith("("):
        return [kind]
    found, depth = [""], 0
    for char in kind[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            found.append("")
        else:
            found[-1] += char
    return [one.strip() for one in found]


def num_bytes(kind: str) -> int:
    """The bytes of a type, or of all types of a tuple.

    >>> num_bytes("(f32[2,3]{1,0}, bf16[5], pred[])")
    35
    """
    bits = 0
    for name, sizes in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", kind):
        width = re.search(r"\d+", name)
        each = int(width[0]) if width else 8 * (name == "pred")
        bits += each * math.prod(int(size) for size in re.findall(r"\d+", sizes))
    return -(-bits // 8)


def _without_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
