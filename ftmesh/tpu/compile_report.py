"""Report how a TPU compiler compiles a plan: memory, permutations in flight, other cycles.

The compiler gives no estimate for a Pallas kernel, but it leaves the instruction bundles that it
scheduled if ``LIBTPU_INIT_ARGS`` tells it to before it is loaded. A core issues one bundle per
cycle, unless it waits: for a semaphore, a copy or its memory.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh import collectives
from ftmesh.collectives import all_reduce
from ftmesh.collectives.audit import audit
from ftmesh.command_line import one_line
from ftmesh.errors import ArgumentError, UnreadableError
from ftmesh.execute.hlo_text import program_text
from ftmesh.execute.lowering import PALLAS, PPERMUTE, XLA
from ftmesh.files import check_local
from ftmesh.planning.plan import Plan
from ftmesh.topology.devices import platform_of
from ftmesh.tpu.compiled_rounds import (
    CompiledLoop,
    compiled_loops,
    cycles_outside_rounds,
    describe_loops,
    total_cycles,
)
from ftmesh.tpu.compiler import compiler_options
from ftmesh.tpu.estimated_cycles import Cycles
from ftmesh.units import format_bytes

KERNEL_NAME = "ftmesh_loops"
_VARIABLE, _OPTION = "LIBTPU_INIT_ARGS", "--xla_jf_dump_to"
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(\w\w)?\s*:\s*(>*)\s*\{(.*)")
_EXIT_TEST = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+)( /\* loop exit test \*/)?")
_HOW = {PALLAS: " in a Pallas kernel", XLA: " by XLA"}


@dataclass(frozen=True)
class CompileReport:
    """How the compiler compiles a plan's `pmean`; `refusal` is its error, or empty."""

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
    lax_psum: str  # the compiler's strategy for its own all-reduce, or its error
    packing: Cycles | None = None  # outside rounds: packing, unpacking, reading tables
    executor: str = PPERMUTE
    native: tuple[str, ...] = ()  # XLA's own collectives that go around the ring
    astray: tuple[str, ...] = ()  # those that do not, and why
    unread: str = ""  # why `loops` and `packing` are missing, if JAX cannot print the program
    kernels: tuple[KernelBundles, ...] = ()  # of a plan that runs in a Pallas kernel

    @property
    def accepted(self) -> bool:
        """True if the compiler accepts the program."""
        return not self.refusal

    @property
    def temporary_ratio(self) -> float:
        """Temporary memory as a multiple of the payload."""
        return self.temporary_bytes / self.payload_bytes

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        extra = {"accepted": self.accepted, "temporary_ratio": self.temporary_ratio}
        if self.packing:
            rounds = total_cycles(self.loops)
            extra |= {"cycles": rounds.total, "hidden_cycles": rounds.hidden}
        return asdict(self) | extra

    def __str__(self) -> str:
        lines = [
            f"{self.algorithm}{_HOW.get(self.executor, '')} on {self.mesh}, "
            f"{self.num_devices} devices of {self.platform}"
            f"{', including idle ones' * self.with_idle}: "
            f"{'accepted' if self.accepted else 'rejected'}"
        ]
        if self.accepted:
            lines += [
                f"  compiled in {self.compile_seconds:.1f} s to {format_bytes(self.program_bytes)}",
                f"  {format_bytes(self.temporary_bytes)} of temporary memory, "
                f"{self.temporary_ratio:.2f} times the payload",
                *describe_loops(self.loops),
                *(f"  {entry}" for entry in (*self.native, *self.astray)),
                *(f"  a kernel of instruction bundles: {kernel}" for kernel in self.kernels),
            ]
            if self.unread:
                lines.append(f"  {self.unread}")
            if self.packing:
                lines.append(
                    f"  {self.packing.total:,} cycles outside rounds, to pack, unpack and set up"
                    f"{self.packing.unknown_text}"
                )
        else:
            lines.append(f"  the compiler says: {self.refusal}")
            if not self.with_idle and "RESOURCE_EXHAUSTED" not in self.refusal:
                lines.append("  a plan with idle devices (with_idle, --idle) may be accepted")
        lines.append(f"  lax.psum on the same devices: {self.lax_psum}")
        return "\n".join(lines)


def compile_report(
    plan: Plan,
    payload: Any = None,
    *,
    dtype: Any = np.float32,
    bundles: str | os.PathLike[str] | None = None,
) -> CompileReport:
    """Compile `pmean` of a donated payload on the plan's devices, and report the result.

    Args:
        plan: Its devices may be compile-only, as those of `tpu_devices`.
        payload: The bytes of a vector of `dtype`, by default those of the plan; or a pytree of
            arrays or `jax.ShapeDtypeStruct`, such as the gradients of a model.
        dtype: Of the vector.
        bundles: The folder in which the compiler leaves the bundles of kernels, if it was told to:
            see `dump_bundles`.

    Raises:
        ArgumentError: The payload is empty.
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

    psum, psum_error = _compile(lambda x: lax.psum(x, "data"), payload, mesh, {})
    start = time.perf_counter()
    compiled, refusal = _compile(
        lambda x: collectives.pmean(x, "data", plan=plan), payload, mesh, compiler_options(platform)
    )
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis() if compiled else None
    text, unread = _text(compiled)
    audited = (
        audit(text, "data", plan=plan, mesh=mesh) if text and used.program.executor == XLA else None
    )
    psum_text, psum_unread = _text(psum)
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
        loops=compiled_loops(text, used.program.loops) if text else (),
        lax_psum=strategy(psum_text) if psum_text else psum_unread or f"rejected: {psum_error}",
        packing=cycles_outside_rounds(text),
        executor=used.program.executor,
        native=tuple(map(str, audited.native)) if audited is not None else (),
        astray=tuple(map(str, audited.entries)) if audited is not None else (),
        unread=unread,
        kernels=read_bundles(bundles) if bundles is not None else (),
    )


def _compile(
    run: Callable[[Any], Any], payload: Any, mesh: jax.sharding.Mesh, options: dict[str, str]
) -> tuple[Any, str]:
    """Compile a function of every rank's payload: the program and "", or None and the error."""
    ranks = PartitionSpec("data")
    step = jax.shard_map(run, mesh=mesh, in_specs=ranks, out_specs=ranks, check_vma=False)
    sharding = NamedSharding(mesh, ranks)

    def concatenated(x: Any) -> jax.ShapeDtypeStruct:
        first, *others = x.shape or (1,)
        return jax.ShapeDtypeStruct((mesh.size * first, *others), x.dtype, sharding=sharding)

    lowered = jax.jit(step, donate_argnums=0).lower(jax.tree.map(concatenated, payload))
    try:
        return lowered.compile(compiler_options=options), ""
    except jax.errors.JaxRuntimeError as error:
        return None, one_line(str(error))


def _text(program: Any) -> tuple[str, str]:
    try:
        return program_text(program) if program else "", ""
    except UnreadableError as error:
        return "", str(error)


def strategy(text: str) -> str:
    """The all-reduce strategy of a compiled program, in the compiler's words."""
    if detailed := re.search(r"(Strategy\w+\{colors:\d+ phases:\d+)", text):
        return f"{detailed[1]}}}"
    named = re.search(r'"strategy":"([^"]+)"', text)
    return named[1] if named else "strategy not stated"


# The bundles of kernels -------------------------------------------------------------------------


@dataclass(frozen=True)
class BundleLoop:
    """A loop of a kernel: one step runs at most `bundles`, if it takes every branch.

    `inner` loops, such as those over the rows of a piece, are not counted in that.
    """

    bundles: int
    steps: int | None  # how often it runs, if that is known
    inner: tuple[BundleLoop, ...] = ()

    @property
    def total(self) -> int:
        """The most bundles of all steps; an inner loop of unknown length counts as one step."""
        return (self.bundles + sum(loop.total for loop in self.inner)) * (self.steps or 1)

    def __str__(self) -> str:
        steps = "an unknown number of" if self.steps is None else f"{self.steps:,}"
        text = f"{self.bundles:,} in each of {steps} steps"
        if self.inner:
            text += f" and {sum(loop.total for loop in self.inner):,} in its inner loops"
        return text


@dataclass(frozen=True)
class KernelBundles:
    """The bundles of a kernel: those outside its loops, and its loops."""

    outside: int
    loops: tuple[BundleLoop, ...]

    @property
    def total(self) -> int:
        """The most bundles that the kernel runs."""
        return self.outside + sum(loop.total for loop in self.loops)

    def __str__(self) -> str:
        return f"at most {', '.join([*map(str, self.loops), f'{self.outside:,} once'])}"


def dump_bundles(folder: str | os.PathLike[str]) -> None:
    """Have the TPU compiler, which must not be loaded yet, leave the bundles of what it compiles.

    Raises:
        ArgumentError: ``LIBTPU_INIT_ARGS`` names another folder.
    """
    check_local(folder)
    given = os.environ.get(_VARIABLE, "")
    if _OPTION in given:
        raise ArgumentError(f"{_VARIABLE} has {_OPTION} already: leave it out")
    os.environ[_VARIABLE] = f"{given} {_OPTION}={os.fspath(folder)}".strip()


def read_bundles(folder: str | os.PathLike[str]) -> tuple[KernelBundles, ...]:
    """Read the bundles of each of ftmesh's kernels that was compiled, in the order of names."""
    check_local(folder)
    files = sorted(Path(folder).glob(f"*-{KERNEL_NAME}*-final_bundles.txt"))
    files = [file for file in files if "schedule-analysis" not in file.name]
    return tuple(parse_bundles(file.read_text(errors="replace")) for file in files)


def parse_bundles(text: str) -> KernelBundles:
    """Count the bundles of a compiled kernel, loop by loop."""
    bundles = list(_bundles(text))
    outside, loops, position = 0, [], 0
    while position < len(bundles):
        if bundles[position].label == "LB":
            loop, position = _loop(bundles, position)
            loops.append(loop)
        else:
            outside, position = outside + 1, position + 1
    return KernelBundles(outside, tuple(loops))


class _Bundle(NamedTuple):
    label: str  # LB: the first of a loop
    depth: int  # of loops; empty bundles have none
    text: str

    @property
    def is_empty(self) -> bool:
        return self.text.startswith("}")


def _bundles(text: str) -> Iterator[_Bundle]:
    for line in text.splitlines():
        if match := _BUNDLE.match(line):
            yield _Bundle(match[1] or "", len(match[2]), match[3])


def _loop(bundles: list[_Bundle], start: int) -> tuple[BundleLoop, int]:
    """The loop that starts at a position, and the position after it."""
    depth, position, own = bundles[start].depth, start + 1, 1
    inner: list[BundleLoop] = []
    tests = list(_EXIT_TEST.finditer(bundles[start].text))
    while position < len(bundles):
        bundle = bundles[position]
        if bundle.depth < depth and not bundle.is_empty:
            break
        if bundle.label == "LB" and bundle.depth > depth:
            loop, position = _loop(bundles, position)
            inner.append(loop)
            continue
        tests += _EXIT_TEST.finditer(bundle.text) if bundle.depth == depth else ()
        own, position = own + 1, position + 1
    # The compiler marks the test of a loop of ours, and leaves that of a copy's loop unmarked.
    marked = [test for test in tests if test[2]] or tests
    return BundleLoop(own, int(marked[-1][1]) if marked else None, tuple(inner)), position
