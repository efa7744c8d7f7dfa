"""Report: what a TPU compiler makes of a plan.

    devices = tpu_devices("v6e:16x16")
    topo = ftmesh.Topology.from_devices(devices, failed="2x2@2,2")
    print(compile_report(ftmesh.plan(topo), 100_000_000))

Says whether the compiler takes the program, what memory it needs, and whether the permutations of
a round travel together or one after the other; all read from the compiled text.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh import collectives
from ftmesh.execute.text import Instruction, computations
from ftmesh.mesh.devices import platform_of
from ftmesh.plans import Plan
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

    def __str__(self) -> str:
        lanes = f"{self.permutations} permutation{'s' * (self.permutations > 1)} a round"
        how = "synchronous here" if self.synchronous else f"{self.in_flight} in flight at once"
        return f"{self.name}: {lanes}, {how}"


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
                *(f"  {loop}" for loop in self.loops),
            ]
        else:
            lines.append(f"  the compiler says: {self.refusal}")
            if not self.with_idle:
                lines.append("  a plan with idle devices (with_idle, --idle) may be taken")
        lines.append(f"  lax.psum on the same devices: {self.lax_psum}")
        return "\n".join(lines)


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
    names = [loop.name for loop in plan.program.loops]
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
        loops=compiled_loops(ours.as_text(), names) if ours else (),
        lax_psum=strategy(theirs.as_text()) if theirs else f"refused: {their_refusal}",
    )


def compiled_loops(text: str, names: list[str]) -> tuple[CompiledLoop, ...]:
    """Every loop with permutations, in the order they run; permutations outside loops are one too.

    Loops get their `names`, if there are as many; the compiler may have unrolled a short one.
    """
    known, entry = computations(text)
    rounds = [ops for ops in _rounds(known, entry) if ops]
    if len(rounds) != len(names):
        names = [f"loop {i}" for i in range(len(rounds))]
    return tuple(_loop(name, ops) for name, ops in zip(names, rounds, strict=True))


def _rounds(known: dict[str, list[Instruction]], name: str) -> Iterator[list[str]]:
    """The permutation opcodes of each loop body, and of what runs between loops."""
    here: list[str] = []
    for instruction in known[name]:
        if instruction.opcode.startswith("collective-permute"):
            here.append(instruction.opcode)
        for called in instruction.calls:
            inside = list(_rounds(known, called)) if called in known else []
            if instruction.opcode == "while":
                yield here
                here = []
                yield from inside
            else:
                here += [opcode for ops in inside for opcode in ops]
    yield here


def _loop(name: str, opcodes: list[str]) -> CompiledLoop:
    starts = opcodes.count("collective-permute-start")
    done = "collective-permute-done"
    until = opcodes.index(done) if done in opcodes else len(opcodes)
    return CompiledLoop(
        name=name,
        permutations=starts + opcodes.count("collective-permute"),
        in_flight=opcodes[:until].count("collective-permute-start") or 1,
        synchronous=starts == 0,
    )


def strategy(text: str) -> str:
    """How a compiled program goes about its all-reduce, in the compiler's words."""
    detailed = re.search(r"(Strategy\w+\{colors:\d+ phases:\d+)", text)
    if detailed:
        return f"{detailed[1]}}}"
    named = re.search(r'"strategy":"([^"]+)"', text)
    return named[1] if named else "strategy not stated"
