"""The compiler options for a step that runs a plan, by TPU generation."""

from __future__ import annotations

import os
import re
import warnings
from functools import cache

from ftmesh.errors import ArgumentError, TopologyWarning
from ftmesh.topology.devices import tpu_generation

# To have one permutation in flight for each link of a chip, of which there are four, or six with
# three axes: v2 and v3 keep permutations synchronous by default; v5p, v6e and 7x wait for one
# before they start the next; v4 has five in flight by default, and v5e all of its four.
_ASYNC = {"xla_enable_async_collective_permute": "true"}
_MAX_IN_FLIGHT = "xla_max_concurrent_async_collective_permutes"
_FOUR, _SIX = {_MAX_IN_FLIGHT: "4"}, {_MAX_IN_FLIGHT: "6"}
# To overlap permutations with other computation: the scheduler then looks for the longest chains of
# them, where otherwise it keeps to its initial order.
_OVERLAP = {"xla_tpu_use_aggressive_scheduling": "true"}
# To have more VMEM for large buffers: a single instruction of a v6e gets 30 MiB and not 32, which
# leaves 98 of 128 MiB, so that 100 MB stay there with the padding of their chunks.
_SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"
_VMEM = {"v6e": {_SCOPED_VMEM: str(30 * 1024)}}
_OPTIONS: dict[str, dict[str, str]] = {
    "v2": _ASYNC, "v3": _ASYNC, "v4": _SIX, "v5e": {}, "v5p": _SIX, "v6e": _FOUR, "v7x": _SIX,
    "cpu": {}, "gpu": {},
}  # fmt: skip
_ALIASES = {"cuda": "gpu", "rocm": "gpu"}


def compiler_options(platform: str, *, overlap: bool = False) -> dict[str, str]:
    """The compiler options for a step, so that all permutations of a round are in flight at once.

    For the outermost jit: ``jax.jit(step, compiler_options=ftmesh.compiler_options("tpu v6e"))``.
    On a v6e they also let a payload of up to 98 MiB, not 96, stay in VMEM: a single instruction, or
    a Pallas kernel that sets no limit of its own, gets 30 MiB and not 32. That option is left out
    if ``LIBTPU_INIT_ARGS`` sets it.

    Args:
        platform: A TPU generation, ``cpu`` or ``gpu``, or ``jax.devices()[0].device_kind``.
        overlap: Overlap the backward pass with the sums of its gradients.

    Returns:
        The options; empty if there is nothing to set. A TPU that is newer than this module gets
        none, and a `TopologyWarning`, once.

    Raises:
        ArgumentError: The platform is not known.

    >>> compiler_options("tpu v5p")
    {'xla_max_concurrent_async_collective_permutes': '6'}
    >>> compiler_options("cpu")
    {}
    """
    words = re.split(r"[:-]", str(platform).lower())[0].replace(" ", "")
    name = tpu_generation(words) or _ALIASES.get(words, words)
    options = _OPTIONS.get(name)
    if options is None:
        if not re.fullmatch(r"tpu\w+|v[0-9]+\w*", words):
            known = ", ".join("tpu7x" if name == "v7x" else name for name in _OPTIONS)
            raise ArgumentError(f"platform {platform!r} is not known: give one of {known}")
        _warn_unknown(str(platform))
        return {}
    is_set = re.search(rf"\b{_SCOPED_VMEM}\b", os.environ.get("LIBTPU_INIT_ARGS", ""))
    vmem = {} if is_set else _VMEM.get(name, {})
    scheduling = _OVERLAP if overlap and name not in ("cpu", "gpu") else {}
    return {**options, **scheduling, **vmem}


@cache
def _warn_unknown(platform: str) -> None:
    """Warn once: a step is compiled several times."""
    warnings.warn(
        f"the compiler options for {platform!r} are not known, so none are set: the permutations "
        "of a round may run one after another; `ftmesh compile` shows whether they do",
        TopologyWarning,
        stacklevel=3,
    )
