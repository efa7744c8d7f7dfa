"""Find the collectives in a compiled program that do not go around the failed chips.

    ftmesh.audit(jax.jit(step).lower(state, batch).compile(), "data", plan=plan).require_none()

An all-reduce that JAX or the compiler inserts goes from device to device in the order of the mesh,
and no source line shows it. Along the ring of ``plan.jax_mesh("data")`` that is as it should be.
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

from ftmesh.collectives.exchange import XLA_SCOPE
from ftmesh.collectives.reduce_scatter import WHOLE_ALL_REDUCE
from ftmesh.collectives.ring_audit import CompiledCollective, NativeRing, RingVerdict
from ftmesh.cost.links import Network
from ftmesh.errors import ArgumentError, CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.hlo_text import (
    Instruction,
    SourceFrame,
    SourceStacks,
    parse_computations,
    parse_replica_groups,
    program_text,
    tuple_types,
    type_bytes,
    user_frame,
)
from ftmesh.topology.ranks import HasTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time

KINDS = (
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)


MAX_SOURCES, MAX_NAME = 4, 160  # that are printed of a collective


@dataclass(frozen=True)
class AuditEntry:
    """A collective of the compiled program, what is wrong with it and what to do about it."""

    kind: str  # the HLO operation, such as "all-reduce"
    num_bytes: int  # the larger of its input and its output on a device
    axes: tuple[str, ...]  # the mesh axes it runs along
    sources: tuple[str, ...]  # lines as "file:line"; several if the compiler combined collectives
    op_name: str  # JAX's name of the operation
    advice: str = ""
    problem: str = ""  # found with a plan: in the order of its devices, or in its rounding
    seconds: float | None = None  # each time it runs, if around the ring, on the plan's network

    def __str__(self) -> str:
        source = _some(self.sources) or "an unknown line"
        cost = "" if self.seconds is None else f", {format_time(self.seconds)}"
        head = f"{self.kind} of {format_bytes(self.num_bytes)} along {', '.join(self.axes)}{cost}"
        lines = [
            f"{head}, from {source}",
            _short(self.op_name) or "(no name)",
            self.problem,
            self.advice,
        ]
        return "\n    ".join(filter(None, lines))


def _total_bytes(entries: Sequence[AuditEntry]) -> str:
    return format_bytes(sum(entry.num_bytes for entry in entries))


def _some(sources: Sequence[str]) -> str:
    """The first of many source lines, and how many there are."""
    others = len(sources) - MAX_SOURCES
    if others <= 1:
        return ", ".join(sources)
    return ", ".join((*sources[:MAX_SOURCES], f"and {others} more lines"))


def _short(op_name: str) -> str:
    """A name of moderate length; the compiler joins those of all that it combines."""
    return op_name if len(op_name) <= MAX_NAME else f"{op_name[:MAX_NAME]}..."


@dataclass(frozen=True)
class Audit:
    """The collectives along an axis that do not go around the failed chips. True if there are any.

    Attributes:
        axis_name: The axis.
        entries: What is to be changed.
        native: XLA's own collectives that are as they should be. Known only with a plan.
        whole: Source lines of the plan's reduce-scatters and all-gathers that run the whole
            all-reduce, which moves twice as much. The compiler may keep one line for several.
        network: The links that they are costed for.
    """

    axis_name: str
    entries: tuple[AuditEntry, ...]
    native: tuple[AuditEntry, ...] = ()
    network: Network | None = None
    whole: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[AuditEntry]:
        return iter(self.entries)

    def __str__(self) -> str:
        lines = []
        if self.entries:
            verb = "collectives do" if len(self) > 1 else "collective does"
            lines.append(f"{len(self)} {verb} not follow the plan along {self.axis_name!r}")
            lines += [f"  {entry}" for entry in self.entries]
        else:
            lines.append(f"all collectives along {self.axis_name!r} follow the plan")
        around = [entry for entry in self.native if entry.seconds is not None]
        inside = [entry for entry in self.native if entry.seconds is None]
        if around:
            verb = "collectives go" if len(around) > 1 else "collective goes"
            seconds = sum(entry.seconds or 0.0 for entry in around)
            lines.append(
                f"{len(around)} {verb} around the ring: {_total_bytes(around)} in "
                f"{format_time(seconds)} if each runs once, on {self.network}"
            )
            lines += [f"  {entry}" for entry in around]
        if inside:
            verb = "collectives stay" if len(inside) > 1 else "collective stays"
            lines.append(f"{len(inside)} {verb} inside chips or tiles: {_total_bytes(inside)}")
            lines += [f"  {entry}" for entry in inside]
        if self.whole:
            lines.append(
                "psum_scatter and all_gather run the whole all-reduce of the plan, twice the data, "
                f"as at {', '.join(self.whole)}: some ranks own more of the sum than others; plan "
                "with 'auto' or 'flood'"
            )
        return "\n".join(lines)

    def require_none(self) -> None:
        """Raise CollectiveError with a list of the entries, if there are any."""
        if self.entries:
            raise CollectiveError(str(self))


def audit(
    program: jax.stages.Lowered | jax.stages.Compiled | str,
    axis_name: str,
    *,
    plan: HasTopology | Topology | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
) -> Audit:
    """List the collectives along `axis_name` that JAX inserted and that do not avoid failed chips.

    With `plan`, the order of their devices is judged: a collective is good if it goes from chip to
    neighbouring chip, as all do on ``plan.jax_mesh(axis_name)``; where no such ring exists, if it
    is as short as the plan's. Listed are those whose steps are longer or cross failed chips or
    links, and sums in so few bits that rounding could put them off by more than 1 %.

    Without `plan`, all collectives are listed that are not the plan's own permutations: for loops
    that leave nothing to XLA.

    Each comes with the line of your code that caused it and what to do. Collectives along other
    axes are not listed. If JAX took the program from its compilation cache, the lines are those of
    the code that was compiled first.

    Args:
        program: What ``jit(...).lower(...)`` returns (`nnx.jit` too), its ``.compile()``, or
            ``.compile().as_text()``.
        axis_name: The axis of ``plan.jax_mesh(axis_name)``.
        plan: The plan or the topology whose devices the program runs on.
        mesh: The mesh that the program was compiled for. Needed for text, and for a program whose
            shardings have no mesh.

    Returns:
        An `Audit`: print it to see what each collective moves and costs, iterate over what it
        lists, or call `require_none`, which raises if it lists any.
    """
    program = getattr(program, "lowered", getattr(program, "compiled", program))  # of nnx.jit
    if isinstance(program, jax.stages.Lowered):
        program = program.compile()
    if not isinstance(program, str | jax.stages.Compiled):
        raise ArgumentError(
            "audit takes what jit(...).lower(...).compile() returns, or its text, not "
            f"{type(program).__name__}"
        )
    text: str = program if isinstance(program, str) else program_text(program)
    bodies, _ = parse_computations(text)
    stacks = SourceStacks(text)
    mesh = _mesh_of(mesh, program, axis_name)
    ring = _ring_of(mesh, plan, axis_name)
    bad: list[AuditEntry] = []
    good: list[AuditEntry] = []
    whole: dict[str, None] = {}
    seen = set()
    for body in bodies.values():
        for instruction in body:
            kind = instruction.opcode.removesuffix("-start")
            is_own = _is_from_plan(instruction)
            if kind not in KINDS or (is_own and WHOLE_ALL_REDUCE not in instruction.op_name):
                continue
            if mesh is None:
                raise ArgumentError(
                    "the mesh of this program is not known: give it, as in "
                    f"audit(..., {axis_name!r}, mesh=plan.jax_mesh({axis_name!r}))"
                )
            groups = parse_replica_groups(instruction.text, mesh.size)
            axes = _axes_along(groups, dict(mesh.shape))
            if axis_name not in axes:
                continue
            if instruction.chain_id:  # several fusions each run part of one collective
                channel = re.findall(r"\bchannel_id=(\d+)", instruction.text)
                part = (kind, instruction.chain_id, *channel, instruction.op_name)
                if part in seen:
                    continue
                seen.add(part)
            frames = [stacks.frames_of(part) for part in (instruction, *_users(instruction, body))]
            lines = [str(frame) for stack in frames if (frame := user_frame(stack))]
            sources, name = tuple(dict.fromkeys(lines)), instruction.op_name
            if is_own:
                whole |= dict.fromkeys(sources or ("an unknown line",))
                continue
            num_bytes = _payload(kind, instruction, max(map(len, groups)))
            if ring is None:
                verdict = RingVerdict(advice=_advice_for(kind, name, frames[0]))
            else:
                verdict = ring.judge(
                    CompiledCollective(kind, instruction, groups, num_bytes, bodies)
                )
            advice = verdict.advice.format(axis=axis_name)
            entry = AuditEntry(
                kind, num_bytes, axes, sources, name, advice, verdict.problem, verdict.seconds
            )
            (bad if advice else good).append(entry)
    return Audit(axis_name, tuple(bad), tuple(good), ring.network if ring else None, tuple(whole))


def _is_from_plan(instruction: Instruction) -> bool:
    """True for a permutation of a plan, or of a sum over groups of chips."""
    mark = re.search(rf"(^|[/(]){re.escape(_compat.SCOPE_PREFIX)}", instruction.op_name)
    return mark is not None and instruction.opcode.startswith("collective-permute")


def _mesh_of(mesh: Any, program: Any, axis_name: str) -> Any:
    """The mesh that a program was compiled for; None if unknown."""
    if mesh is None and not isinstance(program, str):
        shardings = jax.tree.leaves((program.input_shardings, program.output_shardings))
        meshes = [sharding.mesh for sharding in shardings if hasattr(sharding, "mesh")]
        mesh = max(meshes, key=lambda mesh: axis_name in mesh.shape, default=None)
    if mesh is not None and axis_name not in mesh.shape:
        raise ArgumentError(
            f"the mesh of this program has no axis {axis_name!r}: give one of {tuple(mesh.shape)}"
        )
    return mesh


def _ring_of(mesh: Any, plan: HasTopology | Topology | None, axis_name: str) -> NativeRing | None:
    if plan is None or mesh is None:
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ArgumentError(
            "an abstract mesh has no devices, whose order is to be judged: give "
            f"mesh=plan.jax_mesh({axis_name!r}), or whichever the program was compiled for"
        )
    return NativeRing.for_devices(plan, list(mesh.devices.flat))


def _axes_along(groups: Sequence[Any], axis_sizes: dict[str, int]) -> tuple[str, ...]:
    """The axes along which members of a group differ."""
    shape = tuple(axis_sizes.values())
    num_devices = math.prod(shape)
    largest = max((int(group.max(initial=0)) for group in groups), default=0)
    if largest >= num_devices:
        raise ArgumentError(
            f"the program names device {largest} and the mesh has {num_devices}: give the mesh "
            "that the program was compiled for"
        )
    extents = [np.ptp(np.unravel_index(group, shape), axis=1) for group in groups if len(group)]
    return tuple(name for i, name in enumerate(axis_sizes) if any(extent[i] for extent in extents))


def _users(instruction: Instruction, body: Sequence[Instruction]) -> list[Instruction]:
    """What takes the results of a combined collective; these name the original source lines."""
    name = instruction.name
    done = [x.name for x in body if x.opcode.endswith("-done") and x.operands[:1] == [name]]
    parts = (x for x in body if x.opcode == "get-tuple-element")
    return [part for part in parts if not {name, *done}.isdisjoint(part.operands)]


def _payload(kind: str, instruction: Instruction, group_size: int) -> int:
    """The larger of input and output on a device, in bytes."""
    result = instruction.type
    if instruction.opcode.endswith("-start"):
        parts = tuple_types(result)
        if kind != "all-reduce" or parts[0].startswith("("):  # operands come first
            result = parts[1] if len(parts) > 1 else result
    return type_bytes(result) * (group_size if kind == "reduce-scatter" else 1)


_PSUM = "call plan.psum or plan.pmean instead of jax.lax's"
_GATHER = "call plan.all_gather instead of jax.lax's"
_EXCHANGE = "call plan.all_to_all instead of jax.lax's, or exchange along another mesh axis"
ADVICE = {
    "psum": _PSUM,
    "psum2": _PSUM,
    "psum_invariant": _PSUM,
    "reduce_scatter": "call plan.psum_scatter instead of jax.lax's",
    "all_gather": _GATHER,
    "all_gather_invariant": _GATHER,
    "pmax": "call plan.pmax instead of jax.lax's",
    "pmin": "call plan.pmin instead of jax.lax's",
    "all_to_all": _EXCHANGE,
    "ragged_all_to_all": _EXCHANGE,
    "ppermute": "call plan.ppermute instead of jax.lax's: it may cross failed chips",
}
REPLICATED_GRADIENT = (
    "JAX sums the gradient of replicated values, usually parameters: use plan.value_and_grad(loss),"
    " or differentiate with respect to jax.lax.pcast(params, {axis!r}, to='varying') and plan.pmean"
    " the gradients"
)
OF_PLAN = (
    "XLA computes it along the ring, as plan.pmax does: check the order by audit(..., plan=plan)"
)
BATCH_NORM = (
    "a Flax batch norm averages its statistics along {axis!r}: use ftmesh.nn.GroupBatchNorm or "
    "ftmesh.nn.NnxGroupBatchNorm, or leave out axis_name"
)
PARTITIONER = (
    "the compiler inserted it to keep arrays sharded as they are: on plan.jax_mesh({axis!r}) it "
    "goes around the failed chips, which audit(..., plan=plan) checks; for a schedule of the plan "
    "use plan.value_and_grad(loss), or write the step in jax.shard_map and plan.pmean the gradients"
)
RESHARDING = (
    "the compiler inserted it because an array is used in another sharding than it has: make them "
    "the same, or call plan.all_gather or plan.psum_scatter in jax.shard_map"
)


def _advice_for(kind: str, op_name: str, frames: Sequence[SourceFrame]) -> str:
    operation = op_name.rpartition("/")[2]
    paths = [Path(frame.file) for frame in frames]
    if any(path.name == "normalization.py" and "flax" in path.parts for path in paths):
        return BATCH_NORM
    if operation == "psum_invariant" and "transpose(" in op_name:
        return REPLICATED_GRADIENT
    if f"/{XLA_SCOPE}p" in op_name:
        return OF_PLAN
    if operation in ADVICE:
        return ADVICE[operation]
    return PARTITIONER if kind in ("all-reduce", "reduce-scatter") else RESHARDING
