"""What collectives a compiled program has: their kinds, devices and sizes, read off its text."""

import re
from math import prod
from typing import NamedTuple

import numpy as np

LINE = re.compile(
    r"= (?P<result>\(.*?\)|\S+) "
    r"(?P<kind>all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute|"
    r"collective-broadcast|ragged-all-to-all)(?:-start)?\("
)
ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Collective(NamedTuple):
    kind: str
    elements: int  # of all arrays of the result
    line: str

    def is_along(self, axis, shape):
        """Whether it moves anything along an axis of a mesh whose devices are numbered in order."""
        groups = _groups(self.line)
        steps = [prod(list(shape.values())[i + 1 :]) for i in range(len(shape))]
        places = [
            {device // step % size for device in group}
            for group in groups
            for (name, size), step in zip(shape.items(), steps, strict=True)
            if name == axis
        ]
        return any(len(place) > 1 for place in places)


def _groups(line):
    """The sets of devices that exchange something."""
    if "source_target_pairs=" in line:
        inside = re.search(r"source_target_pairs=\{(.*?)\}\}?[,\s]", line + " ")[1]
        return [{int(a), int(b)} for a, b in re.findall(r"(\d+),(\d+)", inside)]
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed:
        return [set(map(int, each.split(","))) for each in re.findall(r"\{([\d,]+)\}", listed[1])]
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", named[1])}
        along = [i for i, name in enumerate(sizes) if name in named[2].split(",")]
        assert along, f"cannot tell who takes part in: {line}"
        devices = np.arange(prod(sizes.values())).reshape(*sizes.values())
        devices = np.moveaxis(devices, along, range(len(along)))
        size = prod(devices.shape[: len(along)])
        return [set(group.tolist()) for group in devices.reshape(size, -1).T]
    counted = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if counted is None:
        raise AssertionError(f"cannot tell who takes part in: {line}")
    shape, dims, order = (
        [int(n) for n in part.split(",")] if part else None for part in counted.groups()
    )
    devices = np.arange(prod(dims)).reshape(dims).transpose(order or range(len(dims)))
    return [set(row.tolist()) for row in devices.reshape(shape)]


def collectives(compiled):
    """Every collective of a compiled program, those with several results too."""
    found = []
    for line in compiled.as_text().splitlines():
        if match := LINE.search(line):
            arrays = ARRAY.findall(match["result"])
            elements = sum(prod(map(int, dims.split(","))) if dims else 1 for _, dims in arrays)
            found.append(Collective(match["kind"], elements, line.strip()))
    return found


def foreign(compiled, axis, shape):
    """Collectives along an axis that are no plan's: all but permutations."""
    return [
        each.line
        for each in collectives(compiled)
        if each.kind != "collective-permute" and each.is_along(axis, shape)
    ]


def moved(compiled, axis, shape):
    """The sizes of permutations along an axis, in elements; one in a loop counts once."""
    return [
        each.elements
        for each in collectives(compiled)
        if each.kind == "collective-permute" and each.is_along(axis, shape)
    ]
