"""Consensus: one mesh, one plan and one program in all processes of a run.

Processes that run different programs would wait for each other forever.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from ftmesh.cost.profile import Profile
from ftmesh.distributed.process_group import ProcessGroup
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import XLA
from ftmesh.planning.make_plan import plan
from ftmesh.planning.plan import Plan
from ftmesh.planning.profiles import LinkArgument, find_costs
from ftmesh.planning.selection import AUTO
from ftmesh.schedule.files import dumps, load
from ftmesh.topology.notation import format_failed
from ftmesh.topology.topology import Topology


def agree_on_code(group: ProcessGroup) -> None:
    """Raise ClusterError unless all processes run the same versions of what shapes a program."""
    if group.is_single_process:
        return
    libtpu_args = " ".join(sorted(os.environ.get("LIBTPU_INIT_ARGS", "").split()))
    group.agree(
        {
            "the version of JAX": f"{jax.__version__} with jaxlib {jax.lib.__version__}",
            "the version of Python": ".".join(platform.python_version_tuple()[:2]),
            "the source of ftmesh": _source_digest(Path(__file__).parent.parent),
            "LIBTPU_INIT_ARGS": libtpu_args or "nothing",
        }
    )


def agree_on_mesh(group: ProcessGroup, topology: Topology) -> None:
    """Check that all processes see the same mesh with the same failed chips and links.

    Raises:
        ClusterError: Two processes differ; the message says who has what.
    """
    whole = replace(topology.without_devices(), failed=frozenset(), failed_links=frozenset())
    group.agree(
        {
            "the mesh": str(whole),
            "failed chips": format_failed(topology.failed) if topology.failed else "none",
            "failed links": sorted(topology.failed_links) or "none",
            "the devices": [device.id for device in topology.all_devices] or topology.num_live,
        }
    )


def agreed_topology(group: ProcessGroup, topology: Topology | None = None) -> Topology:
    """Return `topology`, by default that of all devices, checked to be the same everywhere."""
    if topology is None:
        topology = Topology.from_devices(jax.devices())
    agree_on_code(group)
    agree_on_mesh(group, topology)
    return topology


def agreed_plan(
    group: ProcessGroup,
    topology: Topology,
    algorithm: str = AUTO,
    *,
    payload_bytes: int = 100_000_000,
    wire_dtype: Any = "float32",
    link: LinkArgument = None,
    with_idle: bool = False,
    reduce_scatter: bool = False,
    executor: str = AUTO,
    planner: Callable[..., Plan] = plan,
) -> Plan:
    """Plan in the primary process and return the same plan in all members.

    All other arguments are those of `ftmesh.plan`, and must be the same in all members.

    Args:
        group: The processes, as `ProcessGroup.for_topology` returns them.
        reduce_scatter: "auto" chooses among algorithms with a reduce-scatter phase.
        planner: Called in place of `ftmesh.plan`, for one that caches plans.

    Raises:
        ClusterError: Members passed different arguments, or one did not call this in time.
    """
    options: dict[str, Any] = {
        "payload_bytes": payload_bytes,
        "wire_dtype": wire_dtype,
        "link": link,
        "with_idle": with_idle,
    }
    planning = {**options, "reduce_scatter": reduce_scatter, "executor": executor}
    if group.is_single_process:
        return planner(topology, algorithm, **planning)
    agree_on_mesh(group, topology)
    problem = None
    try:  # a profile may be missing on some hosts only, and the others must know
        network = find_costs(topology, link).network
    except ArgumentError as error:
        problem = error
    costs = str(problem) if problem else digest(repr(network).encode())
    facts = {**planning, "the costs that link= or FTMESH_PROFILE gives": costs}
    facts["link"] = "a profile" if isinstance(link, Profile) else link  # not all of its sums
    group.agree({"the algorithm": algorithm, **facts})
    if problem is not None:
        raise problem
    own = planner(topology, algorithm, **planning) if group.is_primary else None
    chosen = group.broadcast((own.executor, own.is_auto) if own else ("", False), "the executor")
    if chosen[0] == XLA:  # a ring is computed faster than it is loaded
        agreed = plan(topology, executor=XLA, **options)
    else:
        data = group.broadcast(dumps(own.schedule) if own else b"", "the schedule")
        schedule = load(data, verify=False)  # `from_schedule` proves it
        agreed = Plan.from_schedule(schedule, topology, executor=chosen[0], **options)
    # Plans for other payloads, or with a reduce-scatter, are then made alike in every process.
    chooses_executor = (algorithm, executor, with_idle) == (AUTO, AUTO, False)
    agreed = replace(
        agreed,
        is_auto=chosen[1],
        is_given=False,
        chooses_executor=chooses_executor,
        network=network if chooses_executor else agreed.network,  # also where it chose the kernel
    )
    group.agree({"the schedule": digest(*agreed.schedule.transfers)})
    return agreed


def agree_on_program(
    group: ProcessGroup, name: str, jitted: Any, inputs: Sequence[Any]
) -> jax.stages.Lowered:
    """Lower `jitted` for `inputs`; raise ClusterError unless all processes have that program."""
    lowered: jax.stages.Lowered = jitted.lower(*inputs)
    if not group.is_single_process:
        group.agree({name: program_digest(lowered)})
    return lowered


class AgreedSteps:
    """Steps at which all processes do something: every `every` steps, or some seconds apart.

    Args:
        group: The processes.
        purpose: What they do, for messages.
        done: Steps that are done.
        every: Interval in steps; None to choose by time.
    """

    def __init__(self, group: ProcessGroup, purpose: str, done: int, every: int | None) -> None:
        self._group, self._purpose, self._every = group, purpose, every
        self._interval, self._since = 1, time.monotonic()
        self.next_step = done + 1 if every is None else (done // every + 1) * every

    def choose_next(self, step: int, seconds: float, value: Any = None) -> list[Any]:
        """Choose the next step, `seconds` after `step`; return the `value` of each process."""
        if self._every is not None:
            self.next_step = (step // self._every + 1) * self._every
            return [value]
        now = time.monotonic()
        own = [seconds, now - self._since, value]
        wanted, elapsed, values = zip(*self._group.gather(own, self._purpose).values(), strict=True)
        interval = math.ceil(max(wanted) * self._interval / max(*elapsed, 1e-6))
        self._interval = max(1, min(interval, 2 * self._interval))  # the first steps are slow
        self.next_step, self._since = step + self._interval, now
        return list(values)


def program_digest(lowered: jax.stages.Lowered) -> str:
    """Return a short hash of a program."""
    return digest(lowered.as_text().encode())


def digest(*data: Any) -> str:
    """Return a short hash of bytes or arrays."""
    sha256 = hashlib.sha256()
    for part in data:
        sha256.update(part)
    return sha256.hexdigest()[:16]


def _source_digest(package: Path) -> str:
    files = sorted(package.rglob("*.py"))
    names = [f"{file.relative_to(package).as_posix()}\n".encode() for file in files]
    return digest(*(name + file.read_bytes() for name, file in zip(names, files, strict=True)))
