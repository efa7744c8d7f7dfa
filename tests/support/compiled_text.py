"""What collectives a compiled program has: their kinds, devices and sizes, read off its text."""

import re
from math import prod
from typing import NamedTuple

from ftmesh.execute.hlo_text import groups_of

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
        groups = groups_of(self.line, prod(shape.values()))
        steps = [prod(list(shape.values())[i + 1 :]) for i in range(len(shape))]
        places = [
            {device // step % size for device in group}
            for group in groups
            for (name, size), step in zip(shape.items(), steps, strict=True)
            if name == axis
        ]
        return any(len(place) > 1 for place in places)


def collectives(compiled):
    """Every collective of a compiled program, those with several results too."""
    found = []
    for line in compiled.as_text().splitlines():
        if match := LINE.search(line):
            arrays = ARRAY.findall(match["result"])
            elements = sum(prod(map(int, dims.split(","))) if dims else 1 for _, dims in arrays)
            found.append(Collective(match["kind"], elements, line.strip()))
    return found


def moved(compiled, axis, shape):
    """The sizes of permutations along an axis, in elements; one in a loop counts once."""
    return [
        each.elements
        for each in collectives(compiled)
        if each.kind == "collective-permute" and each.is_along(axis, shape)
    ]
