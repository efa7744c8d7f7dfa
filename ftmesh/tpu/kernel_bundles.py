"""What a Pallas kernel costs in instruction bundles, as the TPU compiler dumps them.

The compiler gives no estimate for a kernel, but it leaves the bundles that it scheduled if
``LIBTPU_INIT_ARGS`` tells it to before it is loaded. A core issues one bundle per cycle, unless it
waits: for a semaphore, a copy or its memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ftmesh.errors import ArgumentError

KERNEL_NAME = "ftmesh_loops"
_VARIABLE, _OPTION = "LIBTPU_INIT_ARGS", "--xla_jf_dump_to"
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(\w\w)?\s*:\s*(>*)\s*\{(.*)")
_EXIT_TEST = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+)( /\* loop exit test \*/)?")


@dataclass(frozen=True)
class BundleLoop:
    """A loop of a kernel: one step runs at most `bundles`, if it takes every branch.

    `inner` loops, such as those over the rows of a piece, are not counted in that.
    """

    bundles: int
    steps: int | None  # how often it runs, if that is known
    inner: tuple[BundleLoop, ...] = ()

    @property
    def total(self) -> int:
        """The most bundles of all steps; an inner loop of unknown length counts as one step."""
        return (self.bundles + sum(loop.total for loop in self.inner)) * (self.steps or 1)

    def __str__(self) -> str:
        steps = "an unknown number of" if self.steps is None else f"{self.steps:,}"
        text = f"{self.bundles:,} in each of {steps} steps"
        if self.inner:
            text += f" and {sum(loop.total for loop in self.inner):,} in its inner loops"
        return text


@dataclass(frozen=True)
class KernelBundles:
    """The bundles of a kernel: those outside its loops, and its loops."""

    outside: int
    loops: tuple[BundleLoop, ...]

    @property
    def total(self) -> int:
        """The most bundles that the kernel runs."""
        return self.outside + sum(loop.total for loop in self.loops)

    def __str__(self) -> str:
        return f"at most {', '.join([*map(str, self.loops), f'{self.outside:,} once'])}"


def dump_bundles(folder: str | os.PathLike[str]) -> None:
    """Have the TPU compiler, which must not be loaded yet, leave the bundles of what it compiles.

    Raises:
        ArgumentError: ``LIBTPU_INIT_ARGS`` names another folder.
    """
    given = os.environ.get(_VARIABLE, "")
    if _OPTION in given:
        raise ArgumentError(f"{_VARIABLE} has {_OPTION} already: leave it out")
    os.environ[_VARIABLE] = f"{given} {_OPTION}={os.fspath(folder)}".strip()


def read_bundles(folder: str | os.PathLike[str]) -> tuple[KernelBundles, ...]:
    """Read the bundles of each of ftmesh's kernels that was compiled, in the order of names."""
    files = sorted(Path(folder).glob(f"*-{KERNEL_NAME}*-final_bundles.txt"))
    files = [file for file in files if "schedule-analysis" not in file.name]
    return tuple(parse_bundles(file.read_text(errors="replace")) for file in files)


def parse_bundles(text: str) -> KernelBundles:
    """Count the bundles of a compiled kernel, loop by loop."""
    bundles = list(_bundles(text))
    outside, loops, position = 0, [], 0
    while position < len(bundles):
        if bundles[position].label == "LB":
            loop, position = _loop(bundles, position)
            loops.append(loop)
        else:
            outside, position = outside + 1, position + 1
    return KernelBundles(outside, tuple(loops))


class _Bundle(NamedTuple):
    label: str  # LB: the first of a loop
    depth: int  # of loops; empty bundles have none
    text: str

    @property
    def is_empty(self) -> bool:
        return self.text.startswith("}")


def _bundles(text: str) -> Iterator[_Bundle]:
    for line in text.splitlines():
        if match := _BUNDLE.match(line):
            yield _Bundle(match[1] or "", len(match[2]), match[3])


def _loop(bundles: list[_Bundle], start: int) -> tuple[BundleLoop, int]:
    """The loop that starts at a position, and the position after it."""
    depth, position, own = bundles[start].depth, start + 1, 1
    inner: list[BundleLoop] = []
    tests = list(_EXIT_TEST.finditer(bundles[start].text))
    while position < len(bundles):
        bundle = bundles[position]
        if bundle.depth < depth and not bundle.is_empty:
            break
        if bundle.label == "LB" and bundle.depth > depth:
            loop, position = _loop(bundles, position)
            inner.append(loop)
            continue
        tests += _EXIT_TEST.finditer(bundle.text) if bundle.depth == depth else ()
        own, position = own + 1, position + 1
    # The compiler marks the test of a loop of ours, and leaves that of a copy's loop unmarked.
    marked = [test for test in tests if test[2]] or tests
    return BundleLoop(own, int(marked[-1][1]) if marked else None, tuple(inner)), position
