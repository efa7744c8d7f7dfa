"""Plan: a proved schedule for a topology and a payload, with the collectives bound to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from ftmesh.algorithms import registry
from ftmesh.cost.executors import OVER_AXES, sums_over_axes
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.wire_precision import (
    LARGEST_ERROR,
    accumulation_dtype,
    addition_depth,
    schedule_partial_dtype,
    wire_dtype_name,
    worst_error,
)
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.execute.check_lowered import check_program
from ftmesh.execute.lowering import (
    EXECUTORS,
    PALLAS,
    PPERMUTE,
    PPERMUTE_UNROLLED,
    XLA,
    Program,
    lower,
    native_program,
)
from ftmesh.execute.types import DTypeLike
from ftmesh.planning.bound_collectives import BoundCollectives
from ftmesh.planning.candidates import Candidate, make_schedule, prove_schedule
from ftmesh.planning.profiles import NOT_MEASURED, LinkArgument, find_costs
from ftmesh.planning.selection import (
    Selection,
    check_executor,
    compare_costs,
    round_up_payload,
    select_algorithm,
)
from ftmesh.schedule.schedule import Schedule, SplitSchedule, check_schedule
from ftmesh.schedule.verify import Proof, verify
from ftmesh.topology.ranks import jax_mesh
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes, format_time

if TYPE_CHECKING:
    from jax.sharding import Mesh


@dataclass(frozen=True, eq=False)
class Plan(BoundCollectives):
    """A schedule for a topology and a payload, and the collectives that run it.

    `ftmesh.plan` makes it, or `from_schedule` from a schedule that was planned before. Put the
    devices in order with `jax_mesh`, and call `value_and_grad`, `psum` or `shard` in the training
    step. Print it to see what it does, phase by phase.

    Attributes:
        schedule: The transfers, round by round.
        payload_bytes: The payload that the schedule was chosen for.
        proof: What `ftmesh.verify` counted.
        with_idle: The mesh axis has the devices of failed chips too, which stay idle.
        network: The links, and the device model, that costs were taken from.
        wire_dtype: The dtype in which the payload travels.
        executor: ``"xla"``, ``"ppermute"``, ``"ppermute_unrolled"`` or ``"pallas"``; see
            `ftmesh.plan`.
        is_auto: The algorithm was chosen by cost; `for_payload` chooses anew for other payloads.
        chooses_executor: So was the executor: XLA's own ring, permutations, or a measured kernel.
        is_given: The schedule was planned before, and is used for every payload.
        measured: Where and when the costs were measured, in words.
    """

    schedule: Schedule
    payload_bytes: int
    proof: Proof | None = None
    with_idle: bool = False
    network: Network = DEFAULT
    wire_dtype: str = "float32"
    executor: str = PPERMUTE
    is_auto: bool = False
    is_given: bool = False
    chooses_executor: bool = False
    measured: str = NOT_MEASURED

    @staticmethod
    def from_schedule(
        schedule: Schedule,
        topology: Topology | None = None,
        *,
        payload_bytes: int = 100_000_000,
        wire_dtype: DTypeLike = "float32",
        link: LinkArgument = None,
        with_idle: bool = False,
        executor: str = PPERMUTE,
    ) -> Plan:
        """Prove `schedule`, as `ftmesh.load` reads it, and bind it to the devices of `topology`.

        Args:
            schedule: A schedule that was planned before; it is used for every payload.
            topology: The same chips, with devices; the schedule's own topology unless given.
            payload_bytes, wire_dtype, link, with_idle, executor: See `ftmesh.plan`; the executor
                cannot be ``"auto"``, nor ``"xla"``, which has a ring of its own.

        Raises:
            ArgumentError: The schedule is for other chips than those of `topology`.
            VerificationError: The schedule is wrong.
        """
        check_schedule(schedule)
        topology = schedule.topology if topology is None else topology
        if not isinstance(topology, Topology):
            raise ArgumentError(f"topology must be a Topology, not {topology!r:.60}")
        if schedule.topology.without_devices() != topology.without_devices():
            raise ArgumentError(
                f"the schedule is for {schedule.topology}, and not for {topology}: plan it again"
            )
        check_executor(executor, [name for name in EXECUTORS if name != XLA])
        schedule = replace(schedule, topology=topology)
        links, measured = find_costs(topology, link)
        links = links.wires_only if executor == PALLAS else links
        size, wire = check_bytes(payload_bytes), wire_dtype_name(wire_dtype)
        proof = verify(schedule)
        plan = Plan(
            schedule, size, proof, with_idle, links, wire, executor,
            is_given=True, measured=measured,
        )  # fmt: skip
        if with_idle:
            _ = plan.program  # raises PlanError for idle chips that nothing can be sent to
        return plan

    @property
    def topology(self) -> Topology:
        """The mesh that this plan is for."""
        return self.schedule.topology

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, also where ``"auto"`` chose it."""
        return self.schedule.algorithm

    @cached_property
    def program(self) -> Program:
        """The lowered schedule that the executor runs; plans with equal schedules share it."""
        first, *_ = self._siblings[self._program_key]
        if first is not self:
            return first.program
        if self.executor == XLA:
            return native_program(self.topology)
        program = lower(
            self.schedule, devices_per_chip=self.topology.devices_per_chip, with_idle=self.with_idle
        )
        is_unrolled = self.executor == PPERMUTE_UNROLLED
        executor = PPERMUTE if is_unrolled else self.executor
        program = replace(program, unrolled=is_unrolled, executor=executor)
        if self.proof is not None:
            check_program(program)
        return program

    # Variants -------------------------------------------------------------------------------

    def for_payload(self, num_bytes: int, *, wire_dtype: str | None = None) -> Plan:
        """Return the plan for a payload of `num_bytes`, in `wire_dtype` or this plan's own.

        A plan with ``"auto"`` chooses again for that size, rounded up to a power of two; owners of
        chunks may differ. A plan with a named algorithm serves all sizes, unless the algorithm
        splits payloads by their size, as `tree` does.
        """
        wire = wire_dtype_name(wire_dtype or self.wire_dtype)
        size = round_up_payload(num_bytes)
        if self._is_for(size, wire) or not (self.is_auto or self._depends_on_size):
            return self
        if not self.is_auto:
            return self._sibling(self.algorithm, self.executor, size, wire)
        return self._sibling_of(self._compare(size, wire)[0], size, wire)

    @cached_property
    def with_reduce_scatter(self) -> Plan:
        """The same plan, or the cheapest whose reduce-scatter leaves every rank an equal part.

        `psum_scatter`, `all_gather` and sharded optimizers use it. It may leave them to XLA, unless
        this plan is for the kernel. A given schedule, and one for idle devices too, stays as it is.
        """
        if self.schedule.owns_evenly and not self.chooses_executor:
            return self
        if self.is_given or self.with_idle:
            return self
        payload = self.payload_bytes, self.wire_dtype
        try:
            best, *_ = self._compare(*payload, reduce_scatter=True)
            return self._sibling_of(best, *payload)
        except PlanError:
            return self  # whose whole all-reduce serves

    @property
    def _halves_are_whole(self) -> bool:
        """Whether `psum_scatter` and `all_gather` run the whole all-reduce, as far as is known."""
        known = self.__dict__.get("with_reduce_scatter")
        return self.is_given or known is self

    @cached_property
    def unrolled_variant(self) -> Plan:
        """The same plan with its rounds unrolled; never with trees, whose rounds are too many.

        A kernel and XLA's ring have no rounds to unroll: plans with them stay with them.
        """
        if self.executor in (PPERMUTE_UNROLLED, XLA):
            return self
        variant = self.with_reduce_scatter
        if PALLAS in (self.executor, variant.executor):
            return variant
        return replace(variant, executor=PPERMUTE_UNROLLED)

    def explain(self) -> Selection:
        """Cost every algorithm on this topology and payload; print the result for a table."""
        selection = select_algorithm(
            self.topology,
            self.payload_bytes,
            self.network,
            self.wire_dtype,
            trees="always" if self._is_dataflow else "if_cheapest",
            with_native=not self.with_idle,
            with_kernel=not self.with_idle,
        )
        is_listed = self._is_dataflow or self.executor == XLA
        return selection if is_listed else selection.with_schedule(self.schedule)

    def partial_sum_dtype(self, dtype: DTypeLike) -> str:
        """Return the dtype in which partial sums of `dtype` travel; see `cost.wire_precision`."""
        if self.executor == XLA:
            return accumulation_dtype(wire_dtype_name(dtype))
        return schedule_partial_dtype(self.schedule, wire_dtype_name(dtype))

    def _compare(
        self, size: int, wire: str, *, reduce_scatter: bool = False
    ) -> tuple[Candidate, ...]:
        is_unrolled = self.executor == PPERMUTE_UNROLLED
        return compare_costs(
            self.topology.without_devices(),
            size,
            self.network,
            wire,
            reduce_scatter=reduce_scatter,
            trees="never" if is_unrolled else "if_cheapest",
            with_native=self.chooses_executor or (reduce_scatter and self.executor != PALLAS),
            with_kernel=self.chooses_executor,
        )

    @property
    def _depends_on_size(self) -> bool:
        return self.algorithm in registry.CHUNKED_BY_PAYLOAD and not self.is_given

    @property
    def _is_dataflow(self) -> bool:
        """Whether the schedule was made for a kernel, which does not wait for rounds to end."""
        return self.executor == PALLAS and self._depends_on_size

    def _sibling_of(self, candidate: Candidate, size: int, wire: str) -> Plan:
        """Return the plan that was selected; rounds of permutations run as those of this plan."""
        executor = candidate.executor
        if executor == PPERMUTE and self.executor != XLA and not self._chose_kernel:
            executor = self.executor
        return self._sibling(candidate.algorithm, executor, size, wire)

    @property
    def _chose_kernel(self) -> bool:
        """Whether the plan runs in a kernel because that was the cheapest, and not on request."""
        return self.executor == PALLAS and self.chooses_executor

    def _sibling(self, algorithm: str, executor: str, size: int, wire: str) -> Plan:
        """Return the plan with another algorithm or executor, or for another payload."""
        for plan in chain.from_iterable(self._siblings.values()):
            is_same = (plan.algorithm, plan.executor) == (algorithm, executor)
            if is_same and plan._is_for(size, wire):
                return plan
        schedule = make_schedule(
            self.topology, algorithm, size, wire, self.network, executor=executor
        )
        sibling = replace(
            self, schedule=schedule, payload_bytes=size, wire_dtype=wire, executor=executor
        )
        equals = self._siblings.setdefault(sibling._program_key, [])
        if equals:
            schedule, proof = equals[0].schedule, equals[0].proof
        else:
            proof = prove_schedule(schedule, executor) if self.proof is not None else None
        sibling = replace(sibling, schedule=schedule, proof=proof)
        sibling.__dict__["_siblings"] = self._siblings
        equals.append(sibling)
        return sibling

    def _is_for(self, size: int, wire: str) -> bool:
        """Whether this plan was made for that payload, sizes rounded as in `for_payload`."""
        own = round_up_payload(self.payload_bytes), self.wire_dtype
        return own == (round_up_payload(size), wire)

    @cached_property
    def _siblings(self) -> dict[tuple[str, str, int, int], list[Plan]]:
        """Plans made from this one, by what their schedules are; equal ones share a program."""
        return {self._program_key: [self]}

    @property
    def _program_key(self) -> tuple[str, str, int, int]:
        """What distinguishes the programs of one topology and network."""
        schedule = self.schedule
        return self.executor, schedule.algorithm, schedule.num_chunks, schedule.num_rounds

    # In a training step ---------------------------------------------------------------------

    def jax_mesh(self, axis_name: str | Sequence[str], *, along: str | None = None) -> Mesh:
        """Return the ``jax.sharding.Mesh`` whose axis this plan's collectives run along.

        Args:
            axis_name: The axis of live ranks; on tiles several names, as ``("data", "model")``.
            along: Which of several names has the ranks; the first unless given.
        """
        return jax_mesh(self.topology, axis_name, along=along, with_idle=self.with_idle)

    def __str__(self) -> str:
        lines = [self.schedule.describe(self.payload_bytes), *self._executor_lines()]
        if self.executor == XLA and sums_over_axes(ring_order(self.topology)):
            lines[0] = f"XLA on {self.topology}: {self.topology.num_live} live chips"
        lines += [f"  costs: {self.measured}", *self._precision_lines()]
        if not (self.schedule.owns_evenly or self.with_idle):
            why = "has no reduce-scatter"
            if isinstance(self.schedule, SplitSchedule):
                why = "leaves some chips more of the sum than others"
            run = "run another plan, print(plan.with_reduce_scatter)"
            if self._halves_are_whole:
                run = "run the whole all-reduce, twice the data"
            lines.append(f"  psum_scatter and all_gather {run}: this one {why}")
        if self.topology.physical.wrap_source:
            lines.append(f"  {self.topology.physical.wrap_source}")
        if isinstance(self.topology, TiledTopology):
            lines.append(self.topology.describe())
        return "\n".join(lines)

    def _executor_lines(self) -> list[str]:
        """What XLA's ring is like, and why it was taken or not."""
        lines = []
        if self.executor == XLA:
            order = ring_order(self.topology)
            how = OVER_AXES if sums_over_axes(order) else f"along the mesh axis: {order}"
            lines.append(f"  summed by XLA {how}")
        if self.chooses_executor:
            candidates = self._compare(self.payload_bytes, self.wire_dtype)
            native = next(one for one in candidates if one.executor == XLA)
            other = next(one for one in candidates if one.executor != XLA)
            costs = [
                f"{one.name} {format_time(one.seconds)}"
                for one in (native, other)
                if not one.rejection
            ]
            if native.rejection:
                lines.append(f"  not summed by XLA: {native.rejection}")
            else:
                lines.append(f"  the cheaper of {' and '.join(costs)}, by simulation")
        return lines

    def _precision_lines(self) -> list[str]:
        if self.executor == XLA:
            return ["  16-bit sums travel as float32, in which they are added"]
        if not isinstance(self.schedule, SplitSchedule):
            return ["  16-bit sums travel as float32: there is no reduce-scatter to end them after"]
        depth = addition_depth(self.schedule)
        return [
            f"  partial sums of bfloat16 travel as {self.partial_sum_dtype('bfloat16')}: "
            f"{depth} additions could be {worst_error('bfloat16', depth):.1%} off, "
            f"{LARGEST_ERROR:.0%} is the bound",
            f"  partial sums of float16 travel as {self.partial_sum_dtype('float16')}, which has "
            "the range for them",
        ]
