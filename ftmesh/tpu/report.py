"""Report: what a TPU compiler makes of a plan.

    devices = tpu_devices("v6e:16x16")
    topo = ftmesh.Topology.from_devices(devices, failed="2x2@2,2")
    print(compile_report(ftmesh.plan(topo), 100_000_000))

Says whether the compiler takes the program, what memory it needs, whether the permutations of a
round travel together or one after the other, and what a round costs beside them; all read from the
compiled text.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh import collectives
from ftmesh.mesh.devices import platform_of
from ftmesh.plans import Plan
from ftmesh.tpu.cycles import (
    PERMUTE,
    Cycles,
    RoundCycles,
    Stretch,
    has_estimates,
    stretches,
)
from ftmesh.tpu.options import compiler_options
from ftmesh.tpu.slices import one_line
from ftmesh.units import format_bytes


@dataclass(frozen=True)
class CompiledLoop:
    """The permutations of one round; `in_flight` of them before the first is waited for.

    Where the compiler keeps them synchronous, nothing else happens while one travels.
    """

    name: str
    permutations: int
    in_flight: int
    synchronous: bool
    cycles: RoundCycles | None = None  # beside them, where the compiler estimates any

    def __str__(self) -> str:
        lanes = f"{self.permutations} permutation{'s' * (self.permutations > 1)} a round"
        how = "synchronous here" if self.synchronous else f"{self.in_flight} in flight at once"
        return f"{self.name}: {lanes}, {how}"


def cycles_of_all(loops: Iterable[CompiledLoop]) -> Cycles:
    """All rounds of all loops beside their permutations."""
    return sum((loop.cycles.in_all for loop in loops if loop.cycles), Cycles())


@dataclass(frozen=True)
class CompileReport:
    """What the compiler made of a plan's `pmean`; `refusal` is empty where it took it."""

    platform: str
    mesh: str
    algorithm: str
    num_devices: int
    with_idle: bool
    payload_bytes: int
    refusal: str
    compile_seconds: float
    program_bytes: int
    temporary_bytes: int
    loops: tuple[CompiledLoop, ...]
    lax_psum: str  # how the compiler's own sum goes about it, or its refusal
    packing: Cycles | None = None  # outside of rounds: packing and unpacking, reading of tables

    @property
    def accepted(self) -> bool:
        """Whether the compiler took the program."""
        return not self.refusal

    @property
    def temporary_ratio(self) -> float:
        """Temporary memory, in payloads."""
        return self.temporary_bytes / self.payload_bytes

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        extra = {"accepted": self.accepted, "temporary_ratio": self.temporary_ratio}
        if self.packing:
            rounds = cycles_of_all(self.loops)
            extra |= {"cycles": rounds.total, "hidden_cycles": rounds.hidden}
        return asdict(self) | extra

    def __str__(self) -> str:
        lines = [
            f"{self.algorithm} on {self.mesh}, {self.num_devices} devices of {self.platform}"
            f"{', idle ones among them' * self.with_idle}: "
            f"{'accepted' if self.accepted else 'refused'}"
        ]
        if self.accepted:
            lines += [
                f"  compiled in {self.compile_seconds:.1f} s to {format_bytes(self.program_bytes)}",
                f"  {format_bytes(self.temporary_bytes)} of temporary memory, "
                f"{self.temporary_ratio:.2f} times the payload",
                *loop_lines(self.loops),
            ]
            if self.packing:
                lines.append(
                    f"  {self.packing.total:,} cycles to pack, unpack and begin, outside of rounds"
                    f"{self.packing.doubts}"
                )
        else:
            lines.append(f"  the compiler says: {self.refusal}")
            if not self.with_idle:
                lines.append("  a plan with idle devices (with_idle, --idle) may be taken")
        lines.append(f"  lax.psum on the same devices: {self.lax_psum}")
        return "\n".join(lines)


def loop_lines(loops: Sequence[CompiledLoop]) -> list[str]:
    """What there is to say of loops, a line for each thing."""
    lines = []
    for loop in loops:
        lines.append(f"  {loop}")
        if loop.cycles:
            lines.append(f"    {loop.cycles}")
    if any(loop.cycles for loop in loops):
        found = cycles_of_all(loops)
        lines.append(
            f"  {found.total:,} cycles in all rounds beside permutations, {found.hidden:,} hidden, "
            "as the compiler estimates"
        )
    return lines


def compile_report(plan: Plan, payload: Any = None, *, dtype: Any = np.float32) -> CompileReport:
    """Compile `pmean` of a payload on the plan's devices, and say what came out.

    The devices may be compile-only, as those of `tpu_devices`. The payload is a number of bytes,
    for a vector of that size, or a pytree of arrays or `jax.ShapeDtypeStruct`, as of the gradients
    of a model; the plan's own number of bytes unless given. It is donated, as gradients are.
    """
    payload = plan.payload_bytes if payload is None else payload
    if isinstance(payload, int):
        length = math.ceil(payload / np.dtype(dtype).itemsize)
        payload = jax.ShapeDtypeStruct((length,), dtype)
    payload_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(payload))
    mesh = plan.jax_mesh("data")
    platform = platform_of(mesh.devices.flat[0])
    options = compiler_options(platform)

    def compiled(run: Any, options: dict[str, str]) -> tuple[Any, str]:
        """The program, and no refusal; or none, and the compiler's words."""
        ranks = PartitionSpec("data")
        step = jax.shard_map(run, mesh=mesh, in_specs=ranks, out_specs=ranks, check_vma=False)
        sharding = NamedSharding(mesh, ranks)

        def of_all_ranks(x: Any) -> jax.ShapeDtypeStruct:
            first, *others = x.shape or (1,)
            return jax.ShapeDtypeStruct((mesh.size * first, *others), x.dtype, sharding=sharding)

        lowered = jax.jit(step, donate_argnums=0).lower(jax.tree.map(of_all_ranks, payload))
        try:
            return lowered.compile(compiler_options=options), ""
        except jax.errors.JaxRuntimeError as error:
            return None, one_line(error)

    theirs, their_refusal = compiled(lambda x: lax.psum(x, "data"), {})
    start = time.perf_counter()
    ours, refusal = compiled(lambda x: collectives.pmean(x, "data", plan=plan), options)
    seconds = time.perf_counter() - start
    memory = ours.memory_analysis() if ours else None
    planned = plan.program.loops
    text = ours.as_text() if ours else ""
    return CompileReport(
        platform=platform,
        mesh=str(plan.topology),
        algorithm=plan.algorithm,
        num_devices=mesh.size,
        with_idle=plan.with_idle,
        payload_bytes=payload_bytes,
        refusal=refusal,
        compile_seconds=seconds,
        program_bytes=memory.generated_code_size_in_bytes if memory else 0,
        temporary_bytes=memory.temp_size_in_bytes if memory else 0,
        loops=compiled_loops(
            text, [loop.name for loop in planned], [loop.num_rounds for loop in planned]
        )
        if ours
        else (),
        lax_psum=strategy(theirs.as_text()) if theirs else f"refused: {their_refusal}",
        packing=cycles_outside(text) if ours else None,
    )


def compiled_loops(
    text: str, names: Sequence[str], rounds: Sequence[int] = ()
) -> tuple[CompiledLoop, ...]:
    """Every loop with permutations, in the order they run; permutations outside loops are one too.

    Loops get their `names`, if there are as many; the compiler may have unrolled a short one. So
    they do their `rounds`, where the text does not tell.
    """
    found = [stretch for stretch in stretches(text) if stretch.permutations]
    if len(found) == len(rounds):
        for stretch, number in zip(found, rounds, strict=True):
            stretch.rounds = number if stretch.rounds is None else stretch.rounds
    if len(found) != len(names):
        names = [f"loop {i}" for i in range(len(found))]
    is_priced = has_estimates(text)
    return tuple(_loop(*each, is_priced) for each in zip(names, found, strict=True))


def _loop(name: str, stretch: Stretch, is_priced: bool) -> CompiledLoop:
    opcodes = [each.opcode for each in stretch.instructions]
    start, done = f"{PERMUTE}-start", f"{PERMUTE}-done"
    until = opcodes.index(done) if done in opcodes else len(opcodes)
    return CompiledLoop(
        name=name,
        permutations=len(stretch.permutations),
        in_flight=opcodes[:until].count(start) or 1,
        synchronous=start not in opcodes,
        cycles=stretch.round_cycles if is_priced else None,
    )


def cycles_outside(text: str) -> Cycles | None:
    """What a compiled program does beside its rounds; None where nothing is estimated."""
    if not has_estimates(text):
        return None
    return sum((stretch.others for stretch in stretches(text)), Cycles())


def strategy(text: str) -> str:
    """How a compiled program goes about its all-reduce, in the compiler's words."""
    detailed = re.search(r"(Strategy\w+\{colors:\d+ phases:\d+)", text)
    if detailed:
        return f"{detailed[1]}}}"
    named = re.search(r'"strategy":"([^"]+)"', text)
    return named[1] if named else "strategy not stated"
