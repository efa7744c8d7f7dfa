"""Compiled: what a TPU compiler makes of a plan, on any machine, with or without a TPU.

    devices = tpu_devices("v6e:16x16")
    topo = ftmesh.Topology.from_devices(devices, failed="2x2@2,2")
    print(compile_report(ftmesh.plan(topo), 100_000_000))

Says whether the compiler takes the program, what memory it needs, and whether the permutations of
a round travel together or one after the other; all read from the compiled text.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from ftmesh import collectives
from ftmesh.devices import platform_of
from ftmesh.errors import ArgumentError, FtmeshError, TopologyError
from ftmesh.notation import parse_shape
from ftmesh.units import format_bytes

if TYPE_CHECKING:
    from ftmesh.plan import Plan

# For processes without a TPU: libtpu then asks nobody what machine it is on, and several processes
# may have it loaded. It reads these when it is loaded.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

# What it takes to have four permutations under way: v2 and v3 make them synchronous unless told
# otherwise; v5p, v6e and 7x wait for one before they start the next; v4 and v5e need no telling.
_ASYNC = {"xla_enable_async_collective_permute": "true"}
_FOUR_AT_ONCE = {"xla_max_concurrent_async_collective_permutes": "4"}
# What it takes to have them under way while something else is computed: the scheduler looks for the
# longest chains of them, where otherwise it keeps to the order it began with.
_OVERLAP = {"xla_tpu_use_aggressive_scheduling": "true"}
_OPTIONS: dict[str, dict[str, str]] = {
    "v2": _ASYNC,
    "v3": _ASYNC,
    "v4": {},
    "v5e": {},
    "v5p": _FOUR_AT_ONCE,
    "v6e": _FOUR_AT_ONCE,
    "7x": _FOUR_AT_ONCE,
    "cpu": {},
    "gpu": {},
}
_ALSO_CALLED = {
    "v5lite": "v5e",
    "v5litepod": "v5e",
    "v5": "v5p",
    "v6lite": "v6e",
    "v7x": "7x",
    "cuda": "gpu",
    "rocm": "gpu",
}

_MOST_CHIPS = 65_536  # libtpu takes many minutes to say no to more
_NOT_A_SLICE = (
    "{!r} is not a TPU slice: give a generation and a shape, such as v3:16x32, v6e:16x16 or "
    "v5p:4x4x4, {}"
)


class LibtpuMissingError(FtmeshError):
    """The TPU compiler is not installed."""


def compiler_options(platform: str, *, overlap: bool = False) -> dict[str, str]:
    """What to compile a step with so that all permutations of a round travel at once.

    For the outermost jit: ``jax.jit(step, compiler_options=ftmesh.compiler_options("tpu v6e"))``.
    Takes ``jax.devices()[0].device_kind`` of a TPU as well. Empty where there is nothing to set.
    With `overlap`, also so that the backward pass goes on beside the sums of its gradients.

    >>> compiler_options("tpu v6e")
    {'xla_max_concurrent_async_collective_permutes': '4'}
    >>> compiler_options("cpu")
    {}
    """
    words = re.split(r"[:-]", str(platform).lower())[0].replace(" ", "")
    name = words.removeprefix("tpu")
    name = _ALSO_CALLED.get(name, name)
    options = _OPTIONS.get(name)
    if options is None:
        known = ", ".join("tpu7x" if name == "7x" else name for name in _OPTIONS)
        raise ArgumentError(f"platform {platform!r} is not known: give one of {known}")
    return {**options, **(_OVERLAP if overlap and name not in ("cpu", "gpu") else {})}


def has_libtpu() -> bool:
    """Whether the TPU compiler is here."""
    return "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu") is not None


def tpu_devices(name: str) -> list[Any]:
    """The devices of a TPU slice such as ``v6e:16x16``, to compile for and not to run on.

    For processes that do not use a TPU themselves: JAX is kept from looking for one.
    """
    form = re.fullmatch(r"\w+:(\d+(?:x\d+)*)", name)
    if not form or not 0 < math.prod(parse_shape(form[1])) <= _MOST_CHIPS:
        raise TopologyError(_NOT_A_SLICE.format(name, f"of at most {_MOST_CHIPS:,} chips"))
    if not has_libtpu():
        raise LibtpuMissingError(
            f"compiling for {name} needs the TPU compiler, which needs no TPU: "
            "pip install libtpu (x86_64 Linux only)"
        )
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")
    try:
        slice_ = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
        raise TopologyError(_NOT_A_SLICE.format(name, f"({_one_line(error)})")) from error
    return list(slice_.devices)


# The report -------------------------------------------------------------------------------------


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
            return None, _one_line(error)

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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


# Reading compiled text --------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One line of a compiled program."""

    opcode: str
    text: str
    name: str = ""
    source: str = ""  # the operation it was made of, with JAX's name scopes around it

    @property
    def operands(self) -> list[str]:
        """The names of what it takes."""
        return re.findall(r"%([\w.-]+)", self.text.partition(")")[0])

    @property
    def calls(self) -> list[str]:
        """The computations it runs."""
        found = re.findall(r"\b(?:body|calls|to_apply|\w+_computation)=%?([\w.-]+)", self.text)
        for branches in re.findall(r"\bbranch_computations=\{([^}]*)\}", self.text):
            found += re.findall(r"[\w.-]+", branches)
        return found


def computations(text: str) -> tuple[dict[str, list[Instruction]], str]:
    """The computations of a compiled program by name, and the name of the one that it enters."""
    found: dict[str, list[Instruction]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\) -> .*\{$", line):
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name and (made := re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (.*)", line)):
            rest = _after_type(made[2])
            if opcode := re.match(r"([a-z][\w-]*)\(", rest):
                source = "".join(re.findall(r'op_name="([^"]*)"', rest))
                bare = _without_strings(rest)
                found[name].append(Instruction(opcode[1], bare, made[1], source))
    if not entry:
        raise ArgumentError("this is not the text of a compiled program: it has no ENTRY")
    return found, entry


def _after_type(text: str) -> str:
    """What follows the type of a result, which may be a tuple of types."""
    depth = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == " " and depth == 0:
            return text[i + 1 :]
    return ""


def _without_strings(text: str) -> str:
    return re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)


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
