"""Plan: a proven schedule for a topology and a payload, with the collectives bound to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ftmesh import planners
from ftmesh.cost.choice import AUTO, Choice, choose
from ftmesh.cost.network import DEFAULT, Network, network
from ftmesh.errors import ArgumentError
from ftmesh.execute.lower import Program, lower
from ftmesh.execute.read_back import check_program
from ftmesh.mesh.topology import Topology
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.verify import Proof
from ftmesh.schedule.verify import verify as _verify


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule chosen for a topology and payload; `proof` is what verification counted.

    With `with_idle` the mesh axis has the devices of failed chips too, which stay idle. `network`
    is what the choice was made for, where ``auto`` was asked for. With `unrolled` the rounds are
    written out in the program, not as loops: it grows with their number, and the compiler can do
    other work while they travel, which it does not do across a loop.
    """

    schedule: Schedule
    payload_bytes: int
    proof: Proof | None = None
    with_idle: bool = False
    network: Network = DEFAULT
    unrolled: bool = False

    @property
    def topology(self) -> Topology:
        """The mesh this plan is for."""
        return self.schedule.topology

    @property
    def algorithm(self) -> str:
        """The algorithm that was taken, also where ``auto`` was asked for."""
        return self.schedule.algorithm

    @cached_property
    def program(self) -> Program:
        """The schedule as an executor runs it."""
        program = lower(
            self.schedule,
            devices_per_chip=self.topology.devices_per_chip,
            with_idle=self.with_idle,
        )
        program = replace(program, unrolled=self.unrolled)
        if self.proof is not None:
            check_program(program)
        return program

    @cached_property
    def as_unrolled(self) -> Plan:
        """The same plan, unrolled."""
        return self if self.unrolled else replace(self, unrolled=True)

    def explain(self) -> Choice:
        """Every algorithm on this topology and payload beside this one; print it for a table."""
        return choose(self.topology, self.payload_bytes, self.network)

    def jax_mesh(self, axis_name: str) -> Any:
        """The ``jax.sharding.Mesh`` whose axis this plan's collectives run along."""
        return self.topology.jax_mesh(axis_name, with_idle=self.with_idle)

    def psum(self, x: Any, axis_name: Any, **options: Any) -> Any:
        """`ftmesh.psum` on this plan."""
        return _collectives().psum(x, axis_name, plan=self, **options)

    def pmean(self, x: Any, axis_name: Any, **options: Any) -> Any:
        """`ftmesh.pmean` on this plan."""
        return _collectives().pmean(x, axis_name, plan=self, **options)

    def psum_scatter(self, x: Any, axis_name: Any, **options: Any) -> Any:
        """`ftmesh.psum_scatter` on this plan."""
        return _collectives().psum_scatter(x, axis_name, plan=self, **options)

    def all_gather(self, x: Any, axis_name: Any, **options: Any) -> Any:
        """`ftmesh.all_gather` on this plan."""
        return _collectives().all_gather(x, axis_name, plan=self, **options)

    def __str__(self) -> str:
        return self.schedule.describe(self.payload_bytes)


def _collectives() -> Any:
    """Planning does without JAX; the first collective imports it."""
    from ftmesh import collectives

    return collectives


def plan(
    topology: Topology,
    algorithm: str = AUTO,
    *,
    payload_bytes: int = 100_000_000,
    link: Network | float | str = DEFAULT,
    verify: bool = True,
    with_idle: bool = False,
    unrolled: bool = False,
) -> Plan:
    """Plan an all-reduce of `payload_bytes` on `topology`, and prove it right.

    ``"auto"`` simulates every algorithm for this payload, on links as `ftmesh.simulate` takes them,
    and takes the fastest; `Plan.explain` shows them all. `with_idle` is for a mesh axis that has
    the devices of failed chips too, `unrolled` for sums beside which other work is to be done.

    >>> topo = Topology.grid("8x8", failed="2x2@2,2")
    >>> plan(topo, "ring").schedule.num_rounds
    118
    >>> [plan(topo, payload_bytes=size).algorithm for size in (100_000, 100_000_000)]
    ['row_pair', 'ring']
    """
    if not isinstance(payload_bytes, int) or payload_bytes < 1:
        raise ArgumentError(f"payload_bytes must be a positive whole number, not {payload_bytes!r}")
    on = network(link)
    if algorithm == AUTO:
        algorithm = choose(topology, payload_bytes, on).algorithm
    schedule = planners.schedule(topology, algorithm)
    proof = _verify(schedule) if verify else None
    return Plan(schedule, payload_bytes, proof, with_idle, on, unrolled)
