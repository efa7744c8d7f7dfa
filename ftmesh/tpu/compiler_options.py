"""Options: what to compile a step with, by kind of device."""

from __future__ import annotations

import os
import re
import warnings
from functools import cache

from ftmesh.errors import ArgumentError, TopologyWarning

# What it takes to have one permutation under way for each link of a chip, of which it has four, and
# six on three axes: v2 and v3 make them synchronous unless told otherwise; v5p, v6e and 7x wait for
# one before they start the next; v4 has five at once untold, and v5e all of its four.
_ASYNC = {"xla_enable_async_collective_permute": "true"}
_AT_ONCE = "xla_max_concurrent_async_collective_permutes"
_FOUR, _SIX = {_AT_ONCE: "4"}, {_AT_ONCE: "6"}
# What it takes to have them under way while something else is computed: the scheduler looks for the
# longest chains of them, where otherwise it keeps to the order it began with.
_OVERLAP = {"xla_tpu_use_aggressive_scheduling": "true"}
# What it takes to have more of VMEM, the memory beside the processor, for buffers as large as sums
# have: a single instruction of a v6e gets 30 MiB of it and not 32, which leaves 98 of 128 MiB, so
# that 100 MB stay there with what fills up their chunks; or 16, which leaves 112.
_INSTRUCTION = "xla_tpu_scoped_vmem_limit_kib"
_SOME_VMEM, _IN_VMEM = ({"v6e": {_INSTRUCTION: str(mib * 1024)}} for mib in (30, 16))
_ARGUMENTS = "LIBTPU_INIT_ARGS"  # in which libtpu takes options for all programs of a process
_OPTIONS: dict[str, dict[str, str]] = {
    "v2": _ASYNC,
    "v3": _ASYNC,
    "v4": _SIX,
    "v5e": {},
    "v5p": _SIX,
    "v6e": _FOUR,
    "7x": _SIX,
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


def compiler_options(
    platform: str, *, overlap: bool = False, in_vmem: bool = False
) -> dict[str, str]:
    """What to compile a step with: what its sums need, and something that they gain by.

    For the outermost jit: ``jax.jit(step, compiler_options=ftmesh.compiler_options("tpu v6e"))``.
    Takes ``jax.devices()[0].device_kind`` of a TPU as well. Empty where there is nothing to set.
    With these, all permutations of a round travel at once. On a v6e, also, what is summed can stay
    in VMEM if it takes less than 98 MiB, and not 96: a single instruction, or a Pallas kernel that
    asks for no more itself, gets 30 MiB and not 32. Where ``LIBTPU_INIT_ARGS`` says how much,
    nothing is said here, unless `in_vmem` is asked for: with that, which is for v6e alone, it can
    if it takes less than 112 MiB, and an instruction gets 16: rounds then cost two thirds or three
    quarters, and what else is computed more, so look at both. With `overlap`, the backward pass
    goes on beside the sums of its gradients. A TPU that is newer than this module gets no options,
    and a `TopologyWarning`, once.

    >>> compiler_options("tpu v5p")
    {'xla_max_concurrent_async_collective_permutes': '6'}
    >>> compiler_options("cpu")
    {}
    """
    words = re.split(r"[:-]", str(platform).lower())[0].replace(" ", "")
    name = words.removeprefix("tpu")
    name = _ALSO_CALLED.get(name, name)
    options = _OPTIONS.get(name)
    if options is None:
        if not re.fullmatch(r"tpu\w+|v[0-9]+\w*", words):
            known = ", ".join("tpu7x" if name == "7x" else name for name in _OPTIONS)
            raise ArgumentError(f"platform {platform!r} is not known: give one of {known}")
        _warn_of(str(platform))
        return {}
    if in_vmem and name not in _IN_VMEM:
        known = ", ".join(_IN_VMEM)
        raise ArgumentError(f"in_vmem is for {known}, not for {platform!r}: leave it out")
    is_told = re.search(rf"\b{_INSTRUCTION}\b", os.environ.get(_ARGUMENTS, ""))
    vmem = _IN_VMEM if in_vmem else {} if is_told else _SOME_VMEM
    also = _OVERLAP if overlap and name not in ("cpu", "gpu") else {}
    return {**options, **also, **vmem.get(name, {})}


@cache
def _warn_of(platform: str) -> None:
    """A step is compiled several times; this is said once."""
    warnings.warn(
        f"what {platform!r} wants to be told is not known, so it is compiled for without options: "
        "the permutations of a round may travel one after another; `ftmesh compile` shows whether",
        TopologyWarning,
        stacklevel=3,
    )
