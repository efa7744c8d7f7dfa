"""Agreed: one mesh, one damage, one plan and one program, in all processes of a run.

Processes that run different programs wait for each other for ever. So what each of them has is
compared before they do anything together, and one process plans for all.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import ftmesh
from ftmesh.cost.links import network_of
from ftmesh.distributed.process_group import Cluster
from ftmesh.elastic import precompile
from ftmesh.planning.plan import Plan, looks_at_trees, plan
from ftmesh.planning.selection import AUTO, CHOSEN
from ftmesh.schedule.files import dump, load
from ftmesh.topology.notation import Failed, format_failed
from ftmesh.topology.topology import Topology


def agree_on_code(cluster: Cluster) -> None:
    """An error unless all processes run the same versions of what makes a program, and alike."""
    if cluster.is_alone:
        return
    cluster.agree(
        {
            "the version of ftmesh": ftmesh.__version__,
            "the version of JAX": f"{jax.__version__} with jaxlib {jax.lib.__version__}",
            "the version of Python": ".".join(platform.python_version_tuple()[:2]),
            "the source of ftmesh": source_of(Path(ftmesh.__file__).parent),
            "LIBTPU_INIT_ARGS": _in_order(os.environ.get("LIBTPU_INIT_ARGS", "")) or "nothing",
        }
    )


def _in_order(arguments: str) -> str:
    """Arguments, of which the order does not matter; JAX adds some of its own on a TPU."""
    return " ".join(sorted(arguments.split()))


def agree_on_mesh(cluster: Cluster, topology: Topology) -> None:
    """An error unless all processes see the same mesh, and the same chips as failed."""
    if cluster.is_alone:
        return
    cluster.agree(
        {
            "the mesh": topology.name + ", wrapping" * any(topology.wrap),
            "failed chips": format_failed(topology.failed) if topology.failed else "none",
            "failed links": sorted(topology.failed_links) or "none",
            "the devices": [device.id for device in topology.all_devices] or topology.num_live,
        }
    )


def agreed_topology(
    cluster: Cluster, *, shape: str | None = None, failed: Failed = None, failed_links: str = ""
) -> Topology:
    """The mesh of the devices there are, the same in all processes."""
    topology = Topology.from_devices(
        jax.devices(), shape=shape, failed=failed, failed_links=failed_links
    )
    agree_on_code(cluster)
    agree_on_mesh(cluster, topology)
    return topology


def agreed_plan(cluster: Cluster, topology: Topology, algorithm: str, **options: Any) -> Plan:
    """As `ftmesh.plan`, made by one process, the same in all of them."""
    if cluster.is_alone:
        return precompile.planned(topology, algorithm, **options)
    agree_on_mesh(cluster, topology)
    cluster.agree({"the algorithm": algorithm, **options})
    made = precompile.planned(topology, algorithm, **options) if cluster.speaks else None
    written = dump(made.schedule) if made else b""
    if options.get("executor") == AUTO:
        executor = cluster.broadcast(made.executor if made else "", "the executor")
        options = options | {"executor": executor}
    schedule = load(cluster.broadcast(written, "the schedule"), verify=False)  # as `plan` does
    agreed = plan(topology, algorithm, schedule=schedule, **options)
    # Others, for other payloads or with halves, are made alike.
    is_auto = algorithm in CHOSEN
    is_best = is_auto and looks_at_trees(algorithm, network_of(topology), agreed.executor)
    agreed = replace(agreed, is_auto=is_auto, is_best=is_best, is_given=False)
    cluster.agree({"the schedule": digest(*agreed.schedule.columns)})
    return agreed


def agree_on_program(
    cluster: Cluster,
    name: str,
    jitted: Any,
    inputs: Sequence[Any],
    topology: Topology | None = None,
) -> Any:
    """An error unless `jitted` is the same program for `inputs`, or types, in all processes.

    What to call instead of it: where processes may be lost, the program, compiled by now, perhaps
    ahead of time for this `topology`.
    """
    if cluster.is_alone:
        return jitted
    found = None if topology is None else precompile.program(name, topology)
    if found is None:
        lowered = jitted.lower(*inputs)
        cluster.agree({name: digest_of(lowered)})
        return jitted if cluster.line is None else lowered.compile()
    cluster.agree({name: found[0]})
    return found[1]


def compile_ahead(name: str, jitted: Any, inputs: Sequence[Any], topology: Topology) -> None:
    """Have a program ready for when `agree_on_program` asks for it, for this mesh."""
    lowered = jitted.lower(*inputs)
    precompile.keep_program(name, topology, digest_of(lowered), lowered.compile())


def digest_of(lowered: Any) -> str:
    """A short name of a program."""
    return digest(lowered.as_text().encode())


def digest(*data: Any) -> str:
    """A short name of some bytes or arrays, that others do not have.

    >>> digest(b"sched", b"ule")
    '5f72005e81c4ecbd'
    """
    found = hashlib.sha256()
    for part in data:
        found.update(part)
    return found.hexdigest()[:16]


def source_of(package: Path) -> str:
    """A short name of all Python files of a package."""
    found = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        found.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]
