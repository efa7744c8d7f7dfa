"""The collectives in the text of a compiled program: kinds, devices and sizes."""

import re
from math import prod
from typing import NamedTuple

from ftmesh.execute.hlo_text import parse_replica_groups

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
        """True if it moves data along an axis of a mesh whose devices are numbered in order."""
        groups = parse_replica_groups(self.line, prod(shape.values()))
        steps = [prod(list(shape.values())[i + 1 :]) for i in range(len(shape))]
        coords = [
            {device // step % size for device in group}
            for group in groups
            for (name, size), step in zip(shape.items(), steps, strict=True)
            if name == axis
        ]
        return any(len(values) > 1 for values in coords)


def collectives(compiled):
    """All collectives of a compiled program, including those with several results."""
    result = []
    for line in compiled.as_text().splitlines():
        if match := LINE.search(line):
            arrays = ARRAY.findall(match["result"])
            elements = sum(prod(map(int, dims.split(","))) if dims else 1 for _, dims in arrays)
            result.append(Collective(match["kind"], elements, line.strip()))
    return result


def moved(compiled, axis, shape):
    """The elements of each permutation along an axis; one in a loop counts once."""
    return [
        collective.elements
        for collective in collectives(compiled)
        if collective.kind == "collective-permute" and collective.is_along(axis, shape)
    ]
