"""The checks of a self-test, in order; those of the mesh, its chips and its ring are here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import jax
import numpy as np

from ftmesh.collectives.audit import audit
from ftmesh.errors import ArgumentError, FtmeshError, PlanError, UnreadableError
from ftmesh.execute.lowering import PALLAS, XLA
from ftmesh.health.doctor import examine
from ftmesh.planning.make_plan import plan
from ftmesh.selftest.context import ONE_DEVICE, CheckContext, left_out, result_from
from ftmesh.selftest.correctness import (
    check_collectives,
    check_gradients,
    check_optimizer,
    check_trainer,
    executors_and_algorithms,
)
from ftmesh.selftest.journal import CheckResult, Problem
from ftmesh.selftest.speed import check_hops, check_speed
from ftmesh.selftest.timing import AXIS, describe_devices
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import Coord, format_coord, format_links
from ftmesh.topology.ring_order import RingOrder, ring_order

DOCTOR_SHARE = 0.25  # of the time limit, for one chip or link to respond
_ORDER_ADVICE = (
    "sums by XLA go from device to device in this order: do not train on plan.jax_mesh until it is "
    "right, and report it with the coordinates of jax.devices()"
)


@dataclass(frozen=True)
class Check:
    """A check: its name, what it calls, and how many times the usual time limit it may take."""

    name: str
    run: Callable[[CheckContext], CheckResult]
    limit_factor: float = 1.0
    advice: str = ""  # if it raises an error


def list_checks(context: CheckContext) -> list[Check]:
    """Return all checks for a mesh, in order; the same in every process."""
    checks = [
        Check("topology", check_topology),
        Check("chips and links", check_health, limit_factor=4),
        Check("hops", check_hops, limit_factor=2),
        Check("ring order", check_ring_order, advice=_ORDER_ADVICE),
    ]
    pairs = executors_and_algorithms(context.topology)
    checks += [_right(*pair) for pair in pairs if pair[0] != PALLAS]
    checks += [
        Check("value_and_grad", check_gradients),
        Check("sharded optimizer", check_optimizer),
        Check("speed", check_speed, limit_factor=3),
        Check("trainer: resnet50", partial(check_trainer, name="resnet50"), limit_factor=2),
        Check("trainer: bert", partial(check_trainer, name="bert"), limit_factor=2),
    ]
    if context.settings.kernels:  # last: one that hangs may leave chips that do not answer
        checks += [_right(*pair) for pair in pairs if pair[0] == PALLAS]
        checks.append(Check("speed of kernels", partial(check_speed, kernels=True), limit_factor=3))
    only = context.settings.only
    chosen = [check for check in checks if not only or check.name.startswith(only)]
    if not chosen:
        names = ", ".join(check.name for check in checks)
        raise ArgumentError(f"--only {','.join(only)} begins no name of a check: {names}")
    return chosen


def _right(executor: str, algorithm: str) -> Check:
    run = partial(check_collectives, executor=executor, algorithm=algorithm)
    return Check(f"right: {executor} {algorithm}", run)


# The mesh ---------------------------------------------------------------------------------------


def check_topology(context: CheckContext) -> CheckResult:
    """Describe the devices and the mesh, and where its wrap links are known from."""
    topology = context.whole
    device = topology.devices[0]
    by_process: dict[int, int] = {}
    for one in topology.devices:
        by_process[process_of(one)] = by_process.get(process_of(one), 0) + 1
    data = {
        "devices": describe_devices(topology),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "mesh": str(topology),
        "shape": topology.shape,
        "wrap": topology.wrap,
        "wrap_source": topology.wrap_source or "no wrap links are known for these devices",
        "failed": sorted(topology.failed),
        "failed_links": format_links(topology.failed_links),
        "devices_per_chip": topology.devices_per_chip,
        "num_devices": len(topology.devices),
        "num_processes": context.group.num_processes,
        "devices_by_process": {str(process): n for process, n in sorted(by_process.items())},
        "python_version": sys.version.split()[0],
        "jax_version": jax.__version__,
        "jaxlib_version": jax.lib.__version__,
        "libtpu_version": _version("libtpu"),
        "platform_version": _platform_version(device),
    }
    notes = []
    if device.platform == "cpu":
        notes.append("CPU devices: this tests the programs, and no network")
    if len(topology.devices) == 1:
        notes.append(f"{ONE_DEVICE}; `ftmesh selftest 4x4` emulates sixteen")
    components = topology.components()
    problems = []
    if len(components) > 1:
        text = f"the live chips are in {len(components)} parts, and no sum can cross between them"
        advice = f"mark those outside of the largest part, {len(components[0])} chips, as --failed"
        problems.append(Problem(text, advice))
    return result_from(problems, notes, data)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _platform_version(device: Any) -> str:
    """What the device's driver says of its version, on one line."""
    return " ".join(str(getattr(device.client, "platform_version", "")).split())[:200]


def check_health(context: CheckContext) -> CheckResult:
    """Examine chips and links, as ``ftmesh doctor`` does."""
    timeout = DOCTOR_SHARE * context.settings.timeout
    findings = examine(context.whole, group=context.group, timeout=timeout)
    advice = {
        "slow": "it works, but everything waits for it: exclude it with --failed or "
        "--failed-links if the slowdown costs more than the chip",
        "wrong": f"exclude it: --failed '{findings.failed}'",
        "silent": f"exclude it: --failed '{findings.failed}'",
    }
    problems = [Problem(str(entry), advice[entry.kind]) for entry in findings.entries]
    notes = [str(findings)] if findings.is_healthy else []
    if findings.untried:
        notes.append(f"{len(findings.untried)} links could not be tried, behind a silent one")
    if findings.quarantined:
        notes.append(f"all later checks leave out --failed '{findings.failed}'")
    data: dict[str, Any] = {"findings": findings.to_json()}
    if findings.quarantined:
        data["quarantined"] = findings.failed
    data["needs_new_worker"] = any(entry.kind == "silent" for entry in findings.entries)
    return result_from(problems, notes, data)


# The order of the devices -----------------------------------------------------------------------


def check_ring_order(context: CheckContext) -> CheckResult:
    """Check that `Plan.jax_mesh` follows the ring, and that XLA's sum over it does."""
    topology = context.topology
    if len(topology.devices) == 1:
        return left_out(ONE_DEVICE)
    made = plan(topology)
    mesh = made.jax_mesh(AXIS)
    devices, per_chip = list(mesh.devices.flat), topology.devices_per_chip
    order = [topology.coord_of(device) for device in devices]
    ring = ring_order(topology)
    problems = find_wrong_steps(ring, order[::per_chip])
    expected = [coord for coord in order[::per_chip] for _ in range(per_chip)]
    if order != expected:
        rank = next(i for i, (a, b) in enumerate(zip(order, expected, strict=True)) if a != b)
        text = f"the devices of a chip do not stand side by side: rank {rank} of plan.jax_mesh"
        problems.append(Problem(text, _ORDER_ADVICE))
    notes, data = [str(ring)], {"ring": [list(coord) for coord in ring.coords]}
    try:
        xla = plan(topology, executor=XLA)
    except PlanError as error:
        notes.append(f"lax.psum was not compiled: {error}")
        return result_from(problems, notes, data)
    spec = jax.sharding.PartitionSpec(AXIS)
    psum = jax.shard_map(
        lambda x: jax.lax.psum(x, AXIS),
        mesh=mesh,
        in_specs=spec,
        out_specs=jax.sharding.PartitionSpec(),
    )
    x = jax.ShapeDtypeStruct(
        (mesh.size, 1024), np.float32, sharding=jax.sharding.NamedSharding(mesh, spec)
    )
    try:
        audited = audit(jax.jit(psum).lower(x).compile(), AXIS, plan=xla, mesh=mesh)
    except UnreadableError as error:
        notes.append(f"the order that XLA compiled is not known: {error}")
    except FtmeshError as error:
        problems.append(Problem(f"the compiled lax.psum cannot be judged: {error}", _ORDER_ADVICE))
    else:
        problems += [
            Problem(f"lax.psum over plan.jax_mesh, compiled: {entry.problem}", _ORDER_ADVICE)
            for entry in audited
        ]
        if audited.native:
            notes.append("the compiled lax.psum has the order of the ring")
    return result_from(problems, notes, data)


def find_wrong_steps(ring: RingOrder, order: list[Coord]) -> list[Problem]:
    """Return where the chips of a mesh axis do not stand along `ring`, by step."""
    if order == list(ring.coords):
        return []
    if sorted(order) != sorted(ring.coords):
        return [Problem("plan.jax_mesh does not have every live chip once", _ORDER_ADVICE)]
    first = next(i for i, coord in enumerate(order) if coord != ring.coords[i])
    there, expected = format_coord(order[first]), format_coord(ring.coords[first])
    where = f"rank {first} of plan.jax_mesh is on chip {there}, where the ring has {expected}"
    actual = RingOrder(ring.topology, tuple(order))
    known = {frozenset(step) for step in ring.steps}
    steps = [
        f"the step from {format_coord(a)} to {format_coord(b)} is no link, it takes {hops} hops"
        for (a, b), hops in zip(actual.steps, actual.hops, strict=True)
        if not ring.topology.is_link(a, b) and frozenset((a, b)) not in known
    ]
    text = "; ".join([where, *(steps or ["all steps are links"])])
    return [Problem(text, _ORDER_ADVICE)]
