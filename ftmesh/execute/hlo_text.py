"""Text: compiled programs as they are printed, read back.

Frames: which line of Python an instruction of a compiled program was made by.

Programs have their stacks in tables in front of the computations, or files and lines beside each
instruction, as the version of the compiler has it.

Replica groups: which devices a compiled collective runs among, in all the forms it is written.

Devices are numbered as in the mesh that the program was compiled for.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.command_line import one_line
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


PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Frame:
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def is_ours(self) -> bool:
        """Whether it is ftmesh's own."""
        return Path(self.file).is_relative_to(PACKAGE)

    @property
    def is_installed(self) -> bool:
        """Whether it is of a library that is installed, and so of none that is being written."""
        return not {"site-packages", "dist-packages"}.isdisjoint(Path(self.file).parts)


class Stacks:
    """The stacks of a compiled program."""

    def __init__(self, text: str) -> None:
        files = {int(key): name for key, name in _table(text, "FileNames", r'"(.*)"')}
        places = {
            int(key): Frame(files.get(int(file), ""), int(line))
            for key, file, line in _table(
                text, "FileLocations", r"\{file_name_id=(\d+).*?\bline=(\d+).*\}"
            )
        }
        rows = _table(text, "StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}")
        # No frame can be its own parent. Where one is said to be, it has none, and parents are
        # counted from 1 on.
        shift = any(key == parent for key, _, parent in rows)
        self.frames = {
            int(key): (places.get(int(place), Frame("", 0)), int(parent or 0) - shift)
            for key, place, parent in rows
        }

    def of(self, instruction: Instruction) -> tuple[Frame, ...]:
        """Where an instruction was made, the innermost frame first; empty where nothing tells."""
        found: list[Frame] = []
        if said := re.search(r"\bstack_frame_id=(\d+)", instruction.metadata):
            at = int(said[1])
            while at in self.frames and len(found) < len(self.frames):
                frame, at = self.frames[at]
                found.append(frame)
        if not found and (said := re.search(r'source_file="([^"]*)"', instruction.metadata)):
            line = re.search(r"\bsource_line=(\d+)", instruction.metadata)
            found.append(Frame(said[1], int(line[1]) if line else 0))
        return tuple(found)


def users_frame(frames: Sequence[Frame]) -> Frame | None:
    """The innermost frame that is the user's: not ftmesh's, nor of a library where others are."""
    foreign = [frame for frame in frames if not frame.is_ours]
    own = [frame for frame in foreign if not frame.is_installed]
    return next(iter([*own, *foreign, *frames]), None)


def _table(text: str, name: str, row: str) -> list[tuple[str, ...]]:
    """The rows of a table in front of the computations: the number of each, and what it says."""
    if not (head := re.search(rf"^{name}$", text, re.MULTILINE)):
        return []
    body = text[head.end() + 1 :].partition("\n\n")[0]
    return [tuple(found) for found in re.findall(rf"^(\d+) {row}$", body, re.MULTILINE)]


Ids = NDArray[np.int_]


def groups_of(text: str, num_devices: int) -> list[Ids]:
    """The devices of each group in which a collective runs; of a permutation, each pair.

    >>> [group.tolist() for group in groups_of("x(), replica_groups=[2,3]<=[3,2]T(1,0)", 6)]
    [[0, 2, 4], [1, 3, 5]]
    """
    everyone = np.arange(num_devices)
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}(?!,\{)", text):
        return _listed(pairs[1])
    written = re.search(r"replica_groups=(.*)", text)
    # With a channel and without global ids, these take all partitions of the replicas named.
    takes_replicas = re.match(r"(all-reduce|all-gather|reduce-scatter)\b", text)
    names_replicas = "channel_id=" in text and "use_global_device_ids=true" not in text
    if not written or written[1].startswith("{}") or (takes_replicas and names_replicas):
        return [everyone]
    if listed := re.match(r"\{(\{.*?\})\}", written[1]):
        return _listed(listed[1])
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", written[1]):
        return list(_iota(iota[2]).reshape(_numbers(iota[1])))
    if mesh := re.match(
        r"@?mesh[\[<](.*?)[\]>](?:, ?device_ids=\(((?:[^()]|\([^()]*\))*)\))? ?\{(.*?)\}",
        written[1],
    ):
        return _along_axes(*mesh.groups())
    raise ArgumentError(
        f"replica groups are written in a form that is not known here: {written[1][:80]}; read the "
        "program with the JAX that compiled it"
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _listed(text: str) -> list[Ids]:
    return [np.array(_numbers(group), int) for group in re.findall(r"\{(.*?)\}", f"{text}}}")]


def _iota(text: str) -> Ids:
    """All numbers in the order that ``[2,3]T(1,0)`` says."""
    sizes, _, order = text.partition("T")
    shape = _numbers(sizes)
    every = np.arange(np.prod(shape)).reshape(shape)
    return every.transpose(_numbers(order)) if order else every


def _along_axes(axes: str, ids: str | None, along: str) -> list[Ids]:
    """Groups along some axes of a mesh, or along parts of them.

    ``'b':(2)2`` is the part of axis b that has size 2 and comes after one of size 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    parts = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", along)
    ]
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        own = [(start, stop) for part, start, stop in parts if part == name]
        cuts = sorted({1, size, *(cut for part in own for cut in part)})
        for low, high in itertools.pairwise(cuts):
            if any(start <= low and high <= stop for start, stop in own):
                grouped.append(len(shape))
            shape.append(high // low)
    every = np.arange(np.prod(shape, dtype=int))
    if ids:
        every = _iota(ids).reshape(-1) if "[" in ids else np.array(_numbers(ids))
    rest = [axis for axis in range(len(shape)) if axis not in grouped]
    width = int(np.prod([shape[axis] for axis in grouped], dtype=int))
    return list(every.reshape(shape).transpose(*rest, *grouped).reshape(-1, width))
