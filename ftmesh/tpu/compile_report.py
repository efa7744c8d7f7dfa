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
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh import collectives
from ftmesh.collectives import all_reduce
from ftmesh.command_line import one_line
from ftmesh.errors import ArgumentError, UnreadableError
from ftmesh.execute.hlo_text import text_of
from ftmesh.execute.lowering import PALLAS, PPERMUTE
from ftmesh.planning.plan import Plan
from ftmesh.topology.devices import platform_of
from ftmesh.tpu.compiled_rounds import (
    CompiledLoop,
    compiled_loops,
    cycles_of_all,
    cycles_outside,
    loop_lines,
)
from ftmesh.tpu.compiler_options import compiler_options
from ftmesh.tpu.cycles import Cycles
from ftmesh.units import format_bytes


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
    executor: str = PPERMUTE
    unread: str = ""  # why nothing is said of loops and packing, where JAX cannot print the program

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
            f"{self.algorithm}{' in a Pallas kernel' * (self.executor == PALLAS)} on {self.mesh}, "
            f"{self.num_devices} devices of {self.platform}"
            f"{', idle ones among them' * self.with_idle}"
            ": "
            f"{'accepted' if self.accepted else 'refused'}"
        ]
        if self.accepted:
            lines += [
                f"  compiled in {self.compile_seconds:.1f} s to {format_bytes(self.program_bytes)}",
                f"  {format_bytes(self.temporary_bytes)} of temporary memory, "
                f"{self.temporary_ratio:.2f} times the payload",
                *loop_lines(self.loops),
            ]
            if self.unread:
                lines.append(f"  {self.unread}")
            if self.packing:
                lines.append(
                    f"  {self.packing.total:,} cycles to pack, unpack and begin, outside of rounds"
                    f"{self.packing.doubts}"
                )
        else:
            lines.append(f"  the compiler says: {self.refusal}")
            if not self.with_idle and "RESOURCE_EXHAUSTED" not in self.refusal:
                lines.append("  a plan with idle devices (with_idle, --idle) may be taken")
        lines.append(f"  lax.psum on the same devices: {self.lax_psum}")
        return "\n".join(lines)


def compile_report(
    plan: Plan,
    payload: Any = None,
    *,
    dtype: Any = np.float32,
    in_vmem: bool = False,
) -> CompileReport:
    """Compile `pmean` of a payload on the plan's devices, and say what came out.

    The devices may be compile-only, as those of `tpu_devices`. The payload is a number of bytes,
    for a vector of that size, or a pytree of arrays or `jax.ShapeDtypeStruct`, as of the gradients
    of a model; the plan's own number of bytes unless given. It is donated, as gradients are. For
    `in_vmem` see `compiler_options`.
    """
    payload = plan.payload_bytes if payload is None else payload
    if isinstance(payload, int):
        length = math.ceil(payload / np.dtype(dtype).itemsize)
        payload = jax.ShapeDtypeStruct((length,), dtype)
    payload_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(payload))
    if not payload_bytes:
        raise ArgumentError("there is nothing to sum: the arrays of the payload have no elements")
    plans = all_reduce.bucket_plans(payload, plan)
    used = plans[0]  # of the largest bucket
    mesh = plan.jax_mesh("data")
    platform = platform_of(mesh.devices.flat[0])
    options = compiler_options(platform, in_vmem=in_vmem)

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
            return None, one_line(str(error))

    theirs, their_refusal = compiled(lambda x: lax.psum(x, "data"), {})
    start = time.perf_counter()
    ours, refusal = compiled(
        lambda x: collectives.pmean(x, "data", plan=plan), options
    )
    seconds = time.perf_counter() - start
    memory = ours.memory_analysis() if ours else None
    text, unread = _text(ours)
    their_text, their_unread = _text(theirs)
    return CompileReport(
        platform=platform,
        mesh=str(plan.topology),
        algorithm=" and ".join(sorted({bucket.algorithm for bucket in plans})),
        num_devices=mesh.size,
        with_idle=plan.with_idle,
        payload_bytes=payload_bytes,
        refusal=refusal,
        compile_seconds=seconds,
        program_bytes=memory.generated_code_size_in_bytes if memory else 0,
        temporary_bytes=memory.temp_size_in_bytes if memory else 0,
        loops=compiled_loops(text, planned=used.program.loops) if text else (),
        lax_psum=strategy(their_text)
        if their_text
        else their_unread or f"refused: {their_refusal}",
        packing=cycles_outside(text),
        executor=used.program.executor,
        unread=unread,
    )


def _text(program: Any) -> tuple[str, str]:
    """The text of a program, if there is one, or else why it cannot be read."""
    try:
        return text_of(program) if program else "", ""
    except UnreadableError as error:
        return "", str(error)


def strategy(text: str) -> str:
    """How a compiled program goes about its all-reduce, in the compiler's words."""
    detailed = re.search(r"(Strategy\w+\{colors:\d+ phases:\d+)", text)
    if detailed:
        return f"{detailed[1]}}}"
    named = re.search(r'"strategy":"([^"]+)"', text)
    return named[1] if named else "strategy not stated"
