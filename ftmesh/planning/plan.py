"""Plan: a proven schedule for a topology and a payload, with the collectives bound to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from ftmesh.algorithms import registry
from ftmesh.cost.device_model import Sends
from ftmesh.cost.kernel_model import kernel_is_faster, may_have_kernel
from ftmesh.cost.links import DEFAULT, Network, network, network_of
from ftmesh.cost.simulate import DATAFLOW
from ftmesh.cost.wire_precision import LARGEST_ERROR, name_of, worst_error
from ftmesh.errors import ArgumentError
from ftmesh.execute.check_lowered import check_program
from ftmesh.execute.lowering import EXECUTORS, PALLAS, PPERMUTE, Loop, Program, lower
from ftmesh.planning.chunking import KERNEL, schedule_for
from ftmesh.planning.selection import (
    AUTO,
    BEST,
    CHOSEN,
    Choice,
    carried_bytes,
    choose,
    depth_on_devices,
    partials_of,
)
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import ADD, COPY
from ftmesh.schedule.verify import Proof
from ftmesh.schedule.verify import verify as _verify
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes

ASKED = AUTO, *EXECUTORS  # for executors


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule chosen for a topology and payload; `proof` is what verification counted.

    With `with_idle` the mesh axis has the devices of failed chips too, which stay idle. `network`
    and `wire_dtype` are what the choice was made for, where ``auto`` was asked for; such a plan
    `is_auto`, and has siblings for other payloads: see `for_payload`. One that `is_best` has trees among the
    choices. With `unrolled` the rounds are written out in the program, not as loops: it grows with
    their number, and the compiler can do other work while they travel, which it does not do across
    a loop. The `executor` runs them: one permutation after the other, or on TPUs a Pallas kernel
    that runs all of them, unrolled or not, and nothing beside it. A schedule that `is_given` was
    made before, and stays what it is for all payloads.
    """

    schedule: Schedule
    payload_bytes: int
    proof: Proof | None = None
    with_idle: bool = False
    network: Network = DEFAULT
    unrolled: bool = False
    wire_dtype: str = "float32"
    is_auto: bool = False
    executor: str = PPERMUTE
    is_given: bool = False
    is_best: bool = False

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
        """The schedule as an executor runs it; JAX compiles it once, also for siblings."""
        first, *_ = self._siblings[_program_key(self.schedule)]
        if first is not self:
            return first.program
        program = lower(
            self.schedule,
            devices_per_chip=self.topology.devices_per_chip,
            with_idle=self.with_idle,
        )
        program = replace(program, unrolled=self.unrolled, executor=self.executor)
        if not self.unrolled:
            program = program.split(self._split_bytes)
        if self.proof is not None:
            check_program(program)
        return program

    def _split_bytes(self, loop: Loop) -> float:
        """The bytes of a chunk from which it is worth it, by price, that they travel in halves."""
        if self.network.device_model is None:
            return math.inf
        counts = [lane.count for lane in loop.lanes]
        is_mixed = {lane.op for lane in loop.lanes} not in ({ADD}, {COPY})
        sends = Sends(len(counts), sum(counts), max(counts), is_mixed)
        executor = replace(self.network.device_model, devices=self.topology.devices_per_chip)
        return executor.split_bytes(sends, self.network.bandwidth)

    @cached_property
    def unrolled_variant(self) -> Plan:
        """The same plan, unrolled; where trees were chosen, the fastest sibling without them."""
        return self if self.unrolled else replace(self.with_reduce_scatter, unrolled=True)

    def for_payload(self, num_bytes: int, *, wire_dtype: str | None = None) -> Plan:
        """The plan for a payload of so many bytes, in `wire_dtype` or that of this plan.

        Where ``auto`` was asked for, that is one with the algorithm that is fastest for it, rounded
        up to a power of two so that few sizes are looked at; its chunks may have other owners. One
        with a named algorithm stays with that, and is for all sizes, unless that algorithm cuts
        payloads by their size.
        """
        kind = name_of(wire_dtype or self.wire_dtype)
        size = _power_of_two(num_bytes)
        if self._is_for(size, kind) or not (self.is_auto or self._is_cut_by_size):
            return self
        algorithm = self.algorithm
        if self.is_auto:
            algorithm = self._choose(size, kind).algorithm
        return self._sibling(algorithm, size, kind)

    @cached_property
    def with_reduce_scatter(self) -> Plan:
        """The same plan, or where its algorithm has no halves, the fastest sibling that has.

        What is left with owners, or gathered from them, goes by this: `psum_scatter`, `all_gather`
        and sharded optimizers. A schedule that was given stays what it is.
        """
        is_split = isinstance(self.schedule, SplitSchedule)
        if is_split or not (self.is_auto or self._is_cut_by_size):
            return self
        found = self._choose(self.payload_bytes, self.wire_dtype, halves=True)
        return self._sibling(found.algorithm, self.payload_bytes, self.wire_dtype)

    def _choose(self, size: int, kind: str, *, halves: bool = False, trees: bool = False) -> Choice:
        """Every algorithm for a payload: without trees where rounds are written out."""
        halves, best = halves or self.unrolled, self.is_best
        return choose(
            self.topology, size, self.network, kind, best=best, halves=halves, trees=trees
        )

    @property
    def _is_cut_by_size(self) -> bool:
        return self.algorithm in registry.CUT_BY_SIZE and not self.is_given

    @property
    def _is_flowing(self) -> bool:
        """Whether the schedule is for a clock without rounds, by which others are not priced."""
        return self.executor == PALLAS and self._is_cut_by_size

    def _sibling(self, algorithm: str, size: int, kind: str) -> Plan:
        """The plan with another algorithm, or cut for another size."""
        for one in chain.from_iterable(self._siblings.values()):
            if one.algorithm == algorithm and one._is_for(size, kind):
                return one
        carried = carried_bytes(algorithm, size, kind)
        schedule = _planned(self.topology, algorithm, carried, self.network, self.executor)
        alike = self._siblings.setdefault(_program_key(schedule), [])
        if alike:
            schedule, proof = alike[0].schedule, alike[0].proof
        else:
            proof = _verify(schedule) if self.proof is not None else None
        sibling = replace(self, schedule=schedule, proof=proof, payload_bytes=size, wire_dtype=kind)
        sibling.__dict__["_siblings"] = self._siblings
        alike.append(sibling)
        return sibling

    def _is_for(self, size: int, kind: str) -> bool:
        """Whether this plan was made for a payload of that size, as `for_payload` rounds it, and dtype."""
        own = _power_of_two(self.payload_bytes), self.wire_dtype
        return own == (_power_of_two(size), kind)

    @cached_property
    def _siblings(self) -> dict[tuple[str, int, int], list[Plan]]:
        """The plans that were given, by what their schedules are; those alike have one program."""
        return {_program_key(self.schedule): [self]}

    def partial_sum_dtype(self, dtype: Any) -> str:
        """The dtype in which partial sums of a payload travel, by name; see `cost.wire_precision`."""
        return partials_of(self.schedule, name_of(dtype))

    def explain(self) -> Choice:
        """Every algorithm on this topology and payload beside this one; print it for a table."""
        found = self._choose(self.payload_bytes, self.wire_dtype, trees=self._is_flowing)
        return found if self._is_flowing else found.beside(self.schedule)

    def jax_mesh(self, axis_name: str | Sequence[str], *, along: str | None = None) -> Any:
        """The ``jax.sharding.Mesh`` whose axis this plan's collectives run along.

        On tiles that is one of several, as ``("data", "model")``; see `Topology.jax_mesh`.
        """
        return self.topology.jax_mesh(axis_name, along=along, with_idle=self.with_idle)

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

    def value_and_grad(
        self,
        loss: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        **options: Any,
    ) -> Any:
        """As `jax.value_and_grad`, with means over all examples made by this plan.

        In jit, of a whole batch; in shard_map and pmap, of a rank's share of it. See
        `ftmesh.collectives.value_and_grad`.
        """
        from ftmesh.collectives.value_and_grad import value_and_grad

        return value_and_grad(loss, argnums, has_aux, plan=self, **options)

    def shard(self, transformation: Any, axis_name: Any = "data", **options: Any) -> Any:
        """An optax transformation whose state is shared out among the owners of chunks.

        See `ftmesh.optim.sharded.ShardedOptimizer` for the options. Needs optax.
        """
        from ftmesh.optim.sharded import ShardedOptimizer

        return ShardedOptimizer(transformation, self, axis_name, **options)

    def __str__(self) -> str:
        depth = depth_on_devices(self.schedule)
        lines = [
            f"  partial sums of bfloat16 travel as {self.partial_sum_dtype('bfloat16')}: "
            f"{depth} additions could be {worst_error('bfloat16', depth):.1%} off, "
            f"{LARGEST_ERROR:.0%} is the bound",
            f"  partial sums of float16 travel as {self.partial_sum_dtype('float16')}, which has "
            "the range for them",
        ]
        if not isinstance(self.schedule, SplitSchedule):
            lines = [
                "  sums of 16 bits travel as float32: without halves, nothing tells partial sums "
                "from results"
            ]
        if isinstance(self.topology, TiledTopology):
            lines.append(self.topology.describe())
        return "\n".join([self.schedule.describe(self.payload_bytes), *lines])


def _collectives() -> Any:
    """Planning does without JAX; the first collective imports it."""
    from ftmesh import collectives

    return collectives


def plan(
    topology: Topology,
    algorithm: str = AUTO,
    *,
    tile: str | Sequence[int] | None = None,
    payload_bytes: int = 100_000_000,
    wire_dtype: Any = "float32",
    link: Network | float | str | None = None,
    verify: bool = True,
    with_idle: bool = False,
    unrolled: bool = False,
    halves: bool = False,
    schedule: Schedule | None = None,
    executor: str = PPERMUTE,
) -> Plan:
    """Plan an all-reduce of `payload_bytes` on `topology`, and prove it right.

    ``"auto"`` simulates every algorithm for this payload, on links as `ftmesh.simulate` takes them,
    and takes the fastest; `Plan.explain` shows them all. It looks at `tree`, which takes longer to
    plan, where no other serves, on damaged tori and three axes, and on TPU v3 to v6e where that is
    a matter of seconds; ``"best"`` also where else that could be faster. Unless given, the links
    are those of the TPUs that `topology` has, with what the executor costs there. The payload has
    so many bytes in `wire_dtype`, a dtype or its name: where an algorithm's partial sums may not
    travel in it, they count for more. `with_idle` is for a mesh axis that has the devices of failed
    chips too, `unrolled` for sums beside which other work is to be done, `halves` for those that
    are left with owners: ``"auto"`` has no trees for either. The `executor` is
    ``"ppermute"``, or ``"pallas"``: one kernel for all rounds, for TPUs, and interpreted elsewhere.
    Nothing else is computed while it runs. ``"auto"`` is the one that takes less, by a model of the
    kernel that nobody has measured (`ftmesh.cost.kernel_model`).

    With a `tile`, as ``"2x2"``, each tile of so many chips is one rank, and its devices are a model
    group. Every position in it has a payload; all are summed at once, over links that they share. A
    tile with a failed chip takes no part.

    A `schedule` that was made before, as `ftmesh.load` reads it, is taken in place of a new one,
    for the devices of `topology`; it must be for the same chips.

    >>> topo = Topology.grid("8x8", failed="2x2@2,2")
    >>> plan(topo, "ring").schedule.num_rounds
    118
    >>> [plan(topo, payload_bytes=size).algorithm for size in (100_000, 100_000_000)]
    ['row_pair', 'ring']
    >>> plan(topo, tile="2x1").topology.num_live
    30
    """
    if not isinstance(topology, Topology):
        raise ArgumentError(
            f"a plan is for a topology, and not for {topology!r:.60}: give "
            'ftmesh.Topology.grid("8x8"), or Topology.from_devices(jax.devices())'
        )
    payload_bytes = check_bytes(payload_bytes)
    if executor not in ASKED:
        raise ArgumentError(f"executor must be one of {', '.join(ASKED)}, not {executor!r}")
    if tile is not None:
        topology = TiledTopology.of(topology, tile)
    wire = name_of(wire_dtype)
    on = network_of(topology) if link is None else network(link)
    if executor == AUTO:
        make = partial(
            plan, topology, algorithm, payload_bytes=payload_bytes, wire_dtype=wire_dtype, link=on,
            verify=verify, with_idle=with_idle, unrolled=unrolled, halves=halves, schedule=schedule,
        )  # fmt: skip
        made = make()
        if unrolled or not may_have_kernel(topology, on):
            return made
        kernel = make(executor=PALLAS)
        is_faster = kernel_is_faster(made.schedule, kernel.schedule, payload_bytes, on, wire)
        return kernel if is_faster else made
    is_given = schedule is not None
    is_auto = algorithm in CHOSEN and not is_given
    is_best = is_auto and looks_at_trees(algorithm, on, executor)
    if executor == PALLAS:
        on = on.wires
    if schedule is not None:
        schedule = _on(topology, schedule)
    else:
        if is_auto:
            halves = halves or unrolled
            found = choose(topology, payload_bytes, on, wire, best=is_best, halves=halves)
            algorithm = found.algorithm
        carried = carried_bytes(algorithm, payload_bytes, wire)
        schedule = _planned(topology, algorithm, carried, on, executor)
    proof = _verify(schedule) if verify else None
    made = Plan(
        schedule, payload_bytes, proof, with_idle, on, unrolled, wire, is_auto, executor, is_given,
        is_best,
    )  # fmt: skip
    if with_idle:
        _ = made.program  # refuses idle chips that nothing can be sent to
    return made


def looks_at_trees(algorithm: str, on: Network, executor: str) -> bool:
    """Whether trees are among the choices of all payloads: for a kernel, as on the TPUs it is for.

    For the other executor `choose` looks at its costs, and at how long trees take to plan.
    """
    return algorithm == BEST or (executor == PALLAS and on.device_model is not None)


def _planned(
    topology: Topology, algorithm: str, carried: int, on: Network, executor: str
) -> Schedule:
    """A schedule for an executor: a kernel does not wait for a round to end."""
    if executor == PALLAS:
        return schedule_for(topology, algorithm, carried, on, DATAFLOW, most=KERNEL)
    return schedule_for(topology, algorithm, carried, on)


def _program_key(schedule: Schedule) -> tuple[str, int, int]:
    """What tells the schedules of one topology and network from each other."""
    return schedule.algorithm, schedule.num_chunks, schedule.num_rounds


def _on(topology: Topology, schedule: Schedule) -> Schedule:
    """A schedule for the same chips, on the devices of `topology`."""
    if schedule.topology.without_devices() != topology.without_devices():
        raise ArgumentError(
            f"the schedule is for {schedule.topology}, and the plan for {topology}: plan it again"
        )
    return replace(schedule, topology=topology)


def _power_of_two(num_bytes: Any) -> int:
    """The least power of two that is not below a number of bytes."""
    if not hasattr(num_bytes, "__index__") or isinstance(num_bytes, bool) or num_bytes < 0:
        raise ArgumentError(f"a payload has a whole number of bytes, not {num_bytes!r}")
    number = check_bytes(num_bytes, name="a payload's bytes") if num_bytes else 1
    return 1 << (number - 1).bit_length()
