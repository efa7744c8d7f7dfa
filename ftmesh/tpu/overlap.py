"""Overlap: what a compiled program computes while its permutations are under way.

Read from the compiled text, whose instructions are in the order in which they are started.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ftmesh.execute.hlo_text import Instruction, computations


@dataclass(frozen=True)
class Overlap:
    """Some permutations outside loops, all convolutions, and which are under way at once."""

    permutations: int  # that are started and waited for apart
    beside_convolutions: int  # of these, with a convolution in between
    convolutions: int
    beside_permutations: int  # of these, started while a permutation is under way

    def __str__(self) -> str:
        return (
            f"{self.beside_convolutions} of {self.permutations} permutations are under way while a "
            f"convolution is, and {self.beside_permutations} of {self.convolutions} convolutions "
            "while a permutation is"
        )


def overlap(text: str, scope: str = "") -> Overlap:
    """What the main computation of a compiled program does at once.

    Looks at the permutations under the name `scope`, as `jax.named_scope` gives it, or at all.
    """
    named = re.compile(rf"(?<!\w){re.escape(scope)}(?!\w)" if scope else "")
    known, entry = computations(text)
    under_way: dict[str, bool] = {}  # by name, and whether a convolution has been started since
    permutations = beside = convolutions = busy = 0
    for instruction in known[entry]:
        if instruction.opcode == "collective-permute-start" and named.search(instruction.source):
            under_way[instruction.name] = False
            permutations += 1
        elif instruction.opcode == "collective-permute-done":
            beside += under_way.pop(instruction.operands[0], False)
        elif _convolves(instruction, known):
            convolutions += 1
            busy += bool(under_way)
            under_way = dict.fromkeys(under_way, True)
    return Overlap(permutations, beside, convolutions, busy)


def _convolves(instruction: Instruction, known: dict[str, list[Instruction]]) -> bool:
    """Whether an instruction is a convolution, or a fusion with one in it."""
    return instruction.opcode == "convolution" or any(
        _convolves(inner, known) for called in instruction.calls for inner in known.get(called, ())
    )
