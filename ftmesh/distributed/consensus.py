"""Consensus: one mesh, one plan and one program in all processes of a run.

Processes that run different programs would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import os
import platform
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
from ftmesh.topology.notation import Failed, format_failed
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


def agreed_topology(
    group: ProcessGroup,
    *,
    shape: str | None = None,
    failed: Failed = None,
    failed_links: str = "",
    wrap: bool | Sequence[bool] | None = None,
) -> Topology:
    """Return `Topology.from_devices(jax.devices(), ...)`, checked to be the same everywhere."""
    topology = Topology.from_devices(
        jax.devices(), shape=shape, failed=failed, failed_links=failed_links, wrap=wrap
    )
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
        ClusterError: Members passed different arguments, or one did not come.
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
    if chosen[0] == XLA:  # a ring takes less time to find than to load
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
