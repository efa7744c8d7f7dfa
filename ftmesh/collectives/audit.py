"""Audit: which collectives of a compiled program are not the plan's, who made them, what to do.

    ftmesh.audit(jax.jit(step).lower(state, batch).compile(), "data").require_none()

A sum that JAX or the compiler puts in by itself takes a way around the damage of its own, if it
finds one, and nothing in the program tells; so this reads what was compiled.

Advice: what to do about a collective that is not the plan's, by what it was made of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ftmesh.errors import ArgumentError, CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.hlo_text import (
    Frame,
    Instruction,
    Stacks,
    computations,
    groups_of,
    members,
    num_bytes,
    text_of,
    users_frame,
)
from ftmesh.units import format_bytes

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)


@dataclass(frozen=True)
class Finding:
    """A collective that is not the plan's.

    `num_bytes` is the larger of what goes in and what comes out at a device, `axes` are those along
    which it runs, `sources` the lines of code it was made of, as ``file:line``; more than one where
    the compiler has joined several. `op_name` is JAX's name of the operation.
    """

    kind: str
    num_bytes: int
    axes: tuple[str, ...]
    sources: tuple[str, ...]
    op_name: str
    advice: str

    def __str__(self) -> str:
        where = ", ".join(self.sources) or "a line that is not known"
        return (
            f"{self.kind} of {format_bytes(self.num_bytes)} along {', '.join(self.axes)}, made at "
            f"{where}\n    as {self.op_name or 'something without a name'}\n    {self.advice}"
        )


@dataclass(frozen=True)
class Audit:
    """The collectives along an axis that are not the plan's; true where there are any."""

    axis_name: str
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        return len(self.findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __str__(self) -> str:
        if not self.findings:
            return f"every collective along {self.axis_name!r} is the plan's"
        number = len(self.findings)
        head = f"{number} collective{'s' * (number > 1)} along {self.axis_name!r} not of the plan"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])

    def require_none(self) -> None:
        """Raises an error that lists what there is, if there is anything."""
        if self.findings:
            raise CollectiveError(str(self))


def audit(program: Any, axis_name: str, *, mesh: Any = None) -> Audit:
    """Every collective along `axis_name` in a program that is not the plan's.

    `program` is what ``jit(...).lower(...)`` returns, or its ``.compile()``, or the text of that;
    those of `nnx.jit` too.
    Which devices stand along the axis is known from its shardings where one has a mesh; otherwise
    give that as `mesh`. What runs along other axes only is not listed. A program from a compilation
    cache has the lines of the code that was compiled first.
    """
    program = getattr(program, "lowered", getattr(program, "compiled", program))  # in nnx's own
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    if not isinstance(program, str | jax.stages.Compiled):
        raise ArgumentError(
            "audit takes what jit(...).lower(...).compile() returns, or its text, not "
            f"{type(program).__name__}"
        )
    text: str = program if isinstance(program, str) else text_of(program)
    known, _ = computations(text)
    stacks = Stacks(text)
    sizes = _sizes(mesh, program, axis_name)
    findings, chains = [], set()
    for body in known.values():
        for instruction in body:
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or _is_plans(instruction):
                continue
            if not sizes:
                raise ArgumentError(
                    "nothing tells which devices of this program stand along which axis: give the "
                    f"mesh, as in audit(..., {axis_name!r}, mesh=plan.jax_mesh({axis_name!r}))"
                )
            groups = groups_of(instruction.text, math.prod(sizes.values()))
            axes = _axes(groups, sizes)
            if axis_name not in axes:
                continue
            if instruction.chain:  # one collective, of which several fusions each do some
                channel = re.findall(r"\bchannel_id=(\d+)", instruction.text)
                part = (kind, instruction.chain, *channel, instruction.source)
                if part in chains:
                    continue
                chains.add(part)
            made = [instruction, *_parts(instruction, body)]
            frames = [stacks.of(each) for each in made]
            lines = [str(frame) for each in frames if (frame := users_frame(each))]
            findings.append(
                Finding(
                    kind,
                    _payload(kind, instruction, max(map(len, groups))),
                    axes,
                    tuple(dict.fromkeys(lines)),
                    instruction.source,
                    advice_for(kind, instruction.source, frames[0], axis_name),
                )
            )
    return Audit(axis_name, tuple(findings))


def _is_plans(instruction: Instruction) -> bool:
    """Whether it is a permutation that was made for a plan, or for groups of chips."""
    is_permutation = instruction.opcode.startswith("collective-permute")
    return is_permutation and bool(
        re.search(rf"(^|[/(]){re.escape(_compat.MARK)}", instruction.source)
    )


def _sizes(mesh: Any, program: Any, axis_name: str) -> dict[str, int]:
    """The axes of the mesh that a program was compiled for, and their sizes; none if not known."""
    if mesh is None and not isinstance(program, str):
        shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
        meshes = [one for each in shardings if (one := getattr(each, "mesh", None)) is not None]
        mesh = max(meshes, key=lambda each: axis_name in each.shape, default=None)
    if mesh is None:
        return {}
    if axis_name not in mesh.shape:
        raise ArgumentError(
            f"the mesh of this program has no axis {axis_name!r}: give one of {tuple(mesh.shape)}"
        )
    return dict(mesh.shape)


def _axes(groups: Sequence[Any], sizes: dict[str, int]) -> tuple[str, ...]:
    """The axes along which members of a group differ."""
    total = math.prod(sizes.values())
    largest = max((int(group.max(initial=0)) for group in groups), default=0)
    if largest >= total:
        raise ArgumentError(
            f"the program names device {largest} and the mesh has {total}: give the mesh that the "
            "program was compiled for"
        )
    places = [np.unravel_index(group, tuple(sizes.values())) for group in groups if len(group)]
    return tuple(
        name
        for axis, name in enumerate(sizes)
        if any(place[axis].min() < place[axis].max() for place in places)
    )


def _parts(instruction: Instruction, body: Sequence[Instruction]) -> list[Instruction]:
    """What takes the parts of a collective that was made of several, each at its own line."""
    names = {instruction.name}
    names |= {
        done.name
        for done in body
        if done.opcode.endswith("-done") and done.operands[:1] == [*names]
    }
    return [
        part
        for part in body
        if part.opcode == "get-tuple-element" and not names.isdisjoint(part.operands)
    ]


def _payload(kind: str, instruction: Instruction, group: int) -> int:
    """The larger of what goes in and what comes out at a device, in bytes."""
    result = instruction.type
    if instruction.opcode.endswith("-start"):
        parts = members(result)
        if kind != "all-reduce" or parts[0].startswith("("):  # the operands stand in front
            result = parts[1] if len(parts) > 1 else result
    return num_bytes(result) * (group if kind == "reduce-scatter" else 1)


ADVICE = {
    "psum": "call plan.psum or plan.pmean in place of jax.lax's",
    "psum2": "call plan.psum or plan.pmean in place of jax.lax's",
    "psum_invariant": "call plan.psum or plan.pmean in place of jax.lax's",
    "reduce_scatter": "call plan.psum_scatter in place of jax.lax's",
    "all_gather": "call plan.all_gather in place of jax.lax's",
    "all_gather_invariant": "call plan.all_gather in place of jax.lax's",
    "pmax": "no plan has maxima: take the maximum of plan.all_gather(x, {axis!r})",
    "pmin": "no plan has minima: take the minimum of plan.all_gather(x, {axis!r})",
    "all_to_all": "no plan has this: exchange along another axis of the mesh",
    "ragged_all_to_all": "no plan has this: exchange along another axis of the mesh",
    "ppermute": "no plan is behind this permutation: whether it crosses failed chips is not known",
}
OF_REPLICATED = (
    "JAX sums the gradient of what is the same everywhere, mostly parameters: take "
    "plan.value_and_grad(loss), or differentiate with respect to jax.lax.pcast(params, {axis!r}, "
    "to='varying') and plan.pmean the gradients"
)
OF_BATCH_NORM = (
    "a batch norm of Flax's takes its statistics along {axis!r}: use ftmesh.nn.GroupBatchNorm, "
    "or ftmesh.nn.NnxGroupBatchNorm, or no axis_name"
)
OF_PARTITIONER = (
    "the compiler put it in to keep arrays sharded as they are: take plan.value_and_grad(loss), or "
    "write the step in jax.shard_map and plan.pmean the gradients"
)
OF_RESHARDING = (
    "the compiler put it in because an array is wanted in another sharding than it has: give both "
    "the same, or call plan.all_gather or plan.psum_scatter in jax.shard_map"
)


def advice_for(kind: str, op_name: str, frames: Sequence[Frame], axis_name: str) -> str:
    """What to do about a collective of a `kind` that was made as `op_name` in `frames`."""
    operation = op_name.rpartition("/")[2]
    if any(_is_batch_norm(frame) for frame in frames):
        said = OF_BATCH_NORM
    elif operation == "psum_invariant" and "transpose(" in op_name:
        said = OF_REPLICATED
    elif operation in ADVICE:
        said = ADVICE[operation]
    else:
        said = OF_PARTITIONER if kind in ("all-reduce", "reduce-scatter") else OF_RESHARDING
    return said.format(axis=axis_name)


def _is_batch_norm(frame: Frame) -> bool:
    path = Path(frame.file)
    return path.name == "normalization.py" and "flax" in path.parts
