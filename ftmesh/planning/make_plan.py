"""`ftmesh.plan`: choose an algorithm and an executor for a topology and a payload, and prove it."""

from __future__ import annotations

from ftmesh.cost.executors import native_obstacle, sums_over_axes
from ftmesh.cost.wire_precision import wire_dtype_name
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.execute.lowering import EXECUTORS, PALLAS, PPERMUTE, PPERMUTE_UNROLLED, XLA
from ftmesh.execute.types import DTypeLike
from ftmesh.planning.candidates import make_schedule, prove_schedule
from ftmesh.planning.plan import Plan
from ftmesh.planning.plan_cache import cache_folder
from ftmesh.planning.profiles import LinkArgument, find_costs
from ftmesh.planning.selection import (
    AUTO,
    check_executor,
    compare_costs,
)
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes

RING = "ring"


def plan(
    topology: Topology,
    algorithm: str = AUTO,
    *,
    payload_bytes: int = 100_000_000,
    wire_dtype: DTypeLike = "float32",
    link: LinkArgument = None,
    with_idle: bool = False,
    reduce_scatter: bool = False,
    executor: str = AUTO,
) -> Plan:
    """Plan an all-reduce of `payload_bytes` over the live chips of `topology`, and prove it.

    The proof is exact: every live chip ends with every contribution exactly once, and nothing goes
    through a failed chip or link.

    >>> topo = Topology.grid("8x8", failed="2x2@2,2")
    >>> plan(topo).algorithm, plan(topo, "ring").schedule.num_rounds
    ('tree', 118)
    >>> plan(topo, link="v6e").executor, plan(Topology.grid("8x8", wrap=True)).executor
    ('xla', 'xla')

    Args:
        topology: The chips, and what has failed. To sum over data-parallel replicas that span
            several chips, give tiles, ``TiledTopology.from_topology(topology, "2x2")``: each tile
            is then one rank and holds one replica. A tile with a failed chip takes no part.
        algorithm: ``ring``, ``two_dim``, ``row_pair``, ``multi_ring``, ``chain``, ``flood``,
            ``tree``, or ``auto``: the one with the lowest simulated cost for this payload.
            `Plan.explain` shows the cost of each.
        payload_bytes: Bytes of gradients at each rank, in `wire_dtype`. A guide for ``"auto"``:
            the collectives choose again for the size of each bucket that they sum.
        wire_dtype: The dtype in which the payload travels. Where partial sums of it would be too
            inexact, they travel in float32 and cost more.
        link: The links: a `Network`, bytes per second (``"50GB/s"``), a TPU generation (``"v6e"``),
            or a profile of this mesh, as ``ftmesh selftest`` writes it: its path, which ends in
            ``.json``, or a `Profile`. By default a profile that fits the devices, if there is one
            (see `ftmesh.planning.profiles`), or the figures of their generation if they are TPUs,
            and else 50 GB/s.
        with_idle: The mesh axis also has the devices of failed chips, which stay idle; for
            platforms that do not run programs on part of a slice.
        reduce_scatter: With ``"auto"``, choose among algorithms that have a reduce-scatter and an
            all-gather phase, as a sharded optimizer needs.
        executor: ``"xla"`` leaves the sum to XLA's own collectives, along the ring in which
            `Plan.jax_mesh` orders the devices; ``"ppermute"`` runs the rounds of the schedule as
            `lax.ppermute` in loops; ``"ppermute_unrolled"`` writes the rounds out, so that the
            compiler can overlap them with other work; ``"pallas"`` runs all rounds in one TPU
            kernel for each bucket (interpreted elsewhere), with the same bits, for numbers of at
            most 32 bits; nothing else runs meanwhile. ``"auto"`` takes xla or ppermute, whichever
            is cheaper by simulation, and pallas only if a profile shows that it sums rightly and is
            cheaper; ppermute for an algorithm that is named, and for idle devices.

    Returns:
        A proved plan. Trees take seconds to plan on hundreds of chips, and are then kept on disk:
        see `ftmesh.planning.plan_cache`.

    Raises:
        PlanError: The algorithm cannot serve the damaged mesh; the message says why, and names
            one that can, if any.
        ArgumentError: An argument is not of the form that it must have.
    """
    if not isinstance(topology, Topology):
        raise ArgumentError(
            f"a plan is for a topology, and not for {topology!r:.60}: give "
            'ftmesh.Topology.grid("8x8"), or Topology.from_devices(jax.devices())'
        )
    check_executor(executor, (AUTO, *EXECUTORS))
    if not isinstance(algorithm, str):
        raise ArgumentError(f"algorithm must be a name, such as 'tree', not {algorithm!r:.60}")
    cache_folder()  # a bad setting is an error also where nothing needs to be read
    payload_bytes, wire = check_bytes(payload_bytes), wire_dtype_name(wire_dtype)
    links, measured = find_costs(topology, link)

    wires = links.wires_only if executor == PALLAS else links  # see `cost.executors`
    chooses_executor = False
    if executor == XLA:
        _check_native(topology, algorithm, with_idle)
        name = RING
    elif algorithm != AUTO:
        name, executor = algorithm, PPERMUTE if executor == AUTO else executor
    else:
        chooses_executor = executor == AUTO and not with_idle
        best, *_ = compare_costs(
            topology.without_devices(),
            payload_bytes,
            wires,
            wire,
            reduce_scatter=reduce_scatter,
            trees="never" if executor == PPERMUTE_UNROLLED else "if_cheapest",
            with_native=chooses_executor,
            with_kernel=chooses_executor,
        )
        name, executor = best.algorithm, best.executor if executor == AUTO else executor
    schedule = make_schedule(topology, name, payload_bytes, wire, wires, executor=executor)
    made = Plan(
        schedule,
        payload_bytes,
        prove_schedule(schedule, executor),
        with_idle,
        wires,
        wire,
        executor,
        is_auto=(algorithm == AUTO and executor != XLA) or chooses_executor,
        chooses_executor=chooses_executor,
        measured=measured,
    )
    if with_idle:
        _ = made.program  # raises PlanError for idle chips that nothing can be sent to
    return made


def _check_native(topology: Topology, algorithm: str, with_idle: bool) -> None:
    if algorithm not in (AUTO, RING):
        raise ArgumentError(
            f"executor 'xla' sums along a ring, and not by {algorithm!r}: leave out the algorithm"
        )
    if with_idle:
        raise ArgumentError(
            "executor 'xla' cannot leave idle devices out of its sum: plan with 'ppermute'"
        )
    order = ring_order(topology)
    if sums_over_axes(order) and (obstacle := native_obstacle(order)):
        raise PlanError(f"executor 'xla' cannot serve {topology}: {obstacle}")
