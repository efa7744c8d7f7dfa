"""What collectives a compiled program has: their kinds and sizes, and how permutations move."""

import re
from math import prod
from typing import NamedTuple

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
        """Whether a permutation moves anything along an axis of a mesh with devices in order."""
        steps = [prod(list(shape.values())[i + 1 :]) for i in range(len(shape))]
        places = [
            {device // step % size for device in group}
            for group in _pairs(self.line)
            for (name, size), step in zip(shape.items(), steps, strict=True)
            if name == axis
        ]
        return any(len(place) > 1 for place in places)


def _pairs(line):
    """The pairs of devices between which a permutation carries something."""
    inside = re.search(r"source_target_pairs=\{(.*?)\}\}?[,\s]", line + " ")[1]
    return [{int(a), int(b)} for a, b in re.findall(r"(\d+),(\d+)", inside)]


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
