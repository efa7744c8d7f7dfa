"""Frames: which line of Python an instruction of a compiled program was made by.

Programs have their stacks in tables in front of the computations, or files and lines beside each
instruction, as the version of the compiler has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ftmesh.execute.text import Instruction

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
