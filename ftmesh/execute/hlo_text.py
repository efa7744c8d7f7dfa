"""Read the text of compiled HLO programs: instructions, source lines and replica groups."""

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

PACKAGE = Path(__file__).parents[1]
Ids = NDArray[np.int_]


@dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    opcode: str
    text: str
    name: str = ""
    op_name: str = ""  # the JAX operation it comes from, with its name scopes
    type: str = ""  # of its result
    metadata: str = ""  # where it comes from, as the compiler writes it
    config: str = ""  # the target of a custom call, and the backend's configuration
    chain_id: str = ""  # of the collective that this is one of several parts of
    is_root: bool = False  # it is the result of its computation

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        return re.findall(r"%([\w.-]+)", self.text.partition(")")[0])

    @property
    def calls(self) -> list[str]:
        """The computations it runs."""
        called = re.findall(r"\b(?:body|calls|to_apply|\w+_computation)=%?([\w.-]+)", self.text)
        for branches in re.findall(r"\bbranch_computations=\{([^}]*)\}", self.text):
            called += re.findall(r"[\w.-]+", branches)
        return called


Computations = dict[str, list[Instruction]]  # by name


def program_text(program: Any) -> str:
    """The text of what ``jit(...).lower(...).compile()`` returns.

    Raises:
        UnreadableError: JAX cannot print it, because the compiler is newer.
    """
    try:
        return str(program.as_text())
    except RuntimeError as error:
        raise UnreadableError(
            f"this JAX cannot print what was compiled ({one_line(str(error))}): install versions "
            "of JAX and of the compiler, such as libtpu, that belong together"
        ) from error


def parse_computations(text: str) -> tuple[Computations, str]:
    """Parse the computations of a compiled program; also returns the name of the entry."""
    lines: dict[str, list[str]] = {}  # by computation, one line per instruction
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
        elif name and lines[name]:  # the arguments of a kernel span several lines
            lines[name][-1] += line
    if not entry:
        raise ArgumentError("this is not the text of a compiled program: it has no ENTRY")
    return {name: [*filter(None, map(_instruction, some))] for name, some in lines.items()}, entry


def _instruction(line: str) -> Instruction | None:
    assignment = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line)
    kind, rest = _split_type(assignment[2]) if assignment else ("", "")
    opcode = re.match(r"([a-z][\w-]*)\(", rest)
    if not assignment or not opcode:
        return None
    return Instruction(
        opcode=opcode[1],
        text=re.sub(r'"(?:[^"\\]|\\.)*"', '""', rest),
        name=assignment[1],
        op_name="".join(re.findall(r'op_name="([^"]*)"', rest)),
        type=kind,
        metadata=rest.partition(" metadata={")[2],
        config="".join(re.findall(r" ((?:custom_call_target|backend_config)=.*)", rest)),
        is_root=line.lstrip().startswith("ROOT "),
        chain_id="".join(re.findall(r'\bchain_id="?(\d+)', rest)),
    )


# Types ------------------------------------------------------------------------------------------


def _split_type(text: str) -> tuple[str, str]:
    """The type at the start of a text, which may be a tuple of types, and what follows it."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == " " and depth == 0:
            return text[:i], text[i + 1 :]
    return text, ""


def tuple_types(kind: str) -> list[str]:
    """The member types of a tuple type; any other type alone.

    >>> tuple_types("((f32[2], s8[]), u32[])")
    ['(f32[2], s8[])', 'u32[]']
    """
    kind = re.sub(r"/\*.*?\*/", "", kind).strip()
    if not kind.startswith("("):
        return [kind]
    members, depth = [""], 0
    for char in kind[1:-1]:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            members.append("")
        else:
            members[-1] += char
    return [member.strip() for member in members]


def type_bytes(kind: str) -> int:
    """The bytes of a type, or of all members of a tuple type.

    >>> type_bytes("(f32[2,3]{1,0}, bf16[5], pred[])")
    35
    """
    bits = 0
    for name, sizes in re.findall(r"([a-z]\w*)\[([\d,<=]*)\]", kind):
        width = re.search(r"\d+", name)
        element_bits = int(width[0]) if width else 8 * (name == "pred")
        bits += element_bits * math.prod(int(size) for size in re.findall(r"\d+", sizes))
    return -(-bits // 8)


# Source lines -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceFrame:
    """A line of a Python file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class SourceStacks:
    """The Python stacks of the instructions of a compiled program.

    Depending on its version, the compiler writes them as tables in front of the computations, or as
    a file and line next to each instruction.
    """

    def __init__(self, text: str) -> None:
        files = {int(key): name for key, name in _table(text, "FileNames", r'"(.*)"')}
        locations = {
            int(key): SourceFrame(files.get(int(file), ""), int(line))
            for key, file, line in _table(
                text, "FileLocations", r"\{file_name_id=(\d+).*?\bline=(\d+).*\}"
            )
        }
        rows = _table(text, "StackFrames", r"\{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}")
        # No frame can be its own parent. If one seems to be, parents are counted from 1, and it has
        # none.
        shift = any(key == parent for key, _, parent in rows)
        self._frames = {
            int(key): (locations.get(int(place), SourceFrame("", 0)), int(parent or 0) - shift)
            for key, place, parent in rows
        }

    def frames_of(self, instruction: Instruction) -> tuple[SourceFrame, ...]:
        """The stack of an instruction, innermost frame first; empty if not known."""
        frames: list[SourceFrame] = []
        if frame_id := re.search(r"\bstack_frame_id=(\d+)", instruction.metadata):
            key = int(frame_id[1])
            while key in self._frames and len(frames) < len(self._frames):
                frame, key = self._frames[key]
                frames.append(frame)
        if not frames and (file := re.search(r'source_file="([^"]*)"', instruction.metadata)):
            line = re.search(r"\bsource_line=(\d+)", instruction.metadata)
            frames.append(SourceFrame(file[1], int(line[1]) if line else 0))
        return tuple(frames)


def user_frame(frames: Sequence[SourceFrame]) -> SourceFrame | None:
    """The innermost frame of the user's code: not ftmesh's, nor a library's if there are others."""
    libraries = {"site-packages", "dist-packages"}
    foreign = [frame for frame in frames if not Path(frame.file).is_relative_to(PACKAGE)]
    own = [frame for frame in foreign if libraries.isdisjoint(Path(frame.file).parts)]
    return next(iter([*own, *foreign, *frames]), None)


def _table(text: str, name: str, row: str) -> list[tuple[str, ...]]:
    """The rows of a table in front of the computations: the key and the groups of `row`."""
    if not (head := re.search(rf"^{name}$", text, re.MULTILINE)):
        return []
    body = text[head.end() + 1 :].partition("\n\n")[0]
    return [tuple(groups) for groups in re.findall(rf"^(\d+) {row}$", body, re.MULTILINE)]


# Replica groups ---------------------------------------------------------------------------------


def parse_replica_groups(text: str, num_devices: int) -> list[Ids]:
    """The groups of devices that a collective runs among; of a permutation, its pairs.

    Devices are numbered as in the mesh that the program was compiled for.

    >>> groups = parse_replica_groups("x(), replica_groups=[2,3]<=[3,2]T(1,0)", 6)
    >>> [group.tolist() for group in groups]
    [[0, 2, 4], [1, 3, 5]]
    """
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}(?!,\{)", text):
        return _listed_groups(pairs[1])
    written = re.search(r"replica_groups=(.*)", text)
    # With a channel and without global ids, these take all partitions of the replicas named.
    takes_replicas = re.match(r"(all-reduce|all-gather|reduce-scatter)\b", text)
    names_replicas = "channel_id=" in text and "use_global_device_ids=true" not in text
    if not written or written[1].startswith("{}") or (takes_replicas and names_replicas):
        return [np.arange(num_devices)]
    if listed := re.match(r"\{(\{.*?\})\}", written[1]):
        return _listed_groups(listed[1])
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", written[1]):
        return list(_iota(iota[2]).reshape(_integers(iota[1])))
    if mesh := re.match(
        r"@?mesh[\[<](.*?)[\]>](?:, ?device_ids=\(((?:[^()]|\([^()]*\))*)\))? ?\{(.*?)\}",
        written[1],
    ):
        return _mesh_groups(*mesh.groups())
    raise ArgumentError(
        f"replica groups are written in an unknown form: {written[1][:80]}; read the program with "
        "the JAX that compiled it"
    )


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _listed_groups(text: str) -> list[Ids]:
    return [np.array(_integers(group), int) for group in re.findall(r"\{(.*?)\}", f"{text}}}")]


def _iota(text: str) -> Ids:
    """All device ids in the order that ``[2,3]T(1,0)`` gives."""
    sizes, _, order = text.partition("T")
    shape = _integers(sizes)
    ids = np.arange(np.prod(shape)).reshape(shape)
    return ids.transpose(_integers(order)) if order else ids


def _mesh_groups(axes: str, ids: str | None, along: str) -> list[Ids]:
    """Groups along some axes of a mesh, or along parts of axes.

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
        bounds = sorted({1, size, *(bound for part in own for bound in part)})
        for low, high in itertools.pairwise(bounds):
            if any(start <= low and high <= stop for start, stop in own):
                grouped.append(len(shape))
            shape.append(high // low)
    devices = np.arange(np.prod(shape, dtype=int))
    if ids:
        devices = _iota(ids).reshape(-1) if "[" in ids else np.array(_integers(ids))
    rest = [axis for axis in range(len(shape)) if axis not in grouped]
    width = int(np.prod([shape[axis] for axis in grouped], dtype=int))
    return list(devices.reshape(shape).transpose(*rest, *grouped).reshape(-1, width))
