"""Plan: a proved schedule for a topology and a payload, with the collectives bound to it.

The collectives are imported by the methods that need them, so that planning works without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT, Network, network_for, parse_network
from ftmesh.cost.wire_precision import (
    LARGEST_ERROR,
    addition_depth,
    schedule_partial_dtype,
    wire_dtype_name,
    worst_error,
)
from ftmesh.errors import ArgumentError
from ftmesh.execute.check_lowered import check_program
from ftmesh.execute.lowering import EXECUTORS, PALLAS, PPERMUTE, PPERMUTE_UNROLLED, Program, lower
from ftmesh.execute.types import AxisName, DTypeLike, PyTree, Specs
from ftmesh.planning.selection import (
    Selection,
    check_executor,
    make_schedule,
    round_up_payload,
    select_algorithm,
)
from ftmesh.schedule.schedule import Schedule, SplitSchedule, check_schedule
from ftmesh.schedule.verify import Proof, verify
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes

if TYPE_CHECKING:
    import optax
    from jax.sharding import Mesh

    from ftmesh.collectives.check_loss import LossCheck
    from ftmesh.optim.sharded import ShardedOptimizer

BUCKET_BYTES = 256 * 2**20  # of leaves that are summed together


@dataclass(frozen=True, eq=False)
class Plan:
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
        executor: ``"ppermute"``, ``"ppermute_unrolled"`` or ``"pallas"``; see `ftmesh.plan`.
        is_auto: The algorithm was chosen by cost; `for_payload` chooses anew for other payloads.
        is_given: The schedule was planned before, and is used for every payload.
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

    @staticmethod
    def from_schedule(
        schedule: Schedule,
        topology: Topology | None = None,
        *,
        payload_bytes: int = 100_000_000,
        wire_dtype: DTypeLike = "float32",
        link: Network | float | str | None = None,
        with_idle: bool = False,
        executor: str = PPERMUTE,
    ) -> Plan:
        """Prove `schedule`, as `ftmesh.load` reads it, and bind it to the devices of `topology`.

        Args:
            schedule: A schedule that was planned before; it is used for every payload.
            topology: The same chips, with devices; the schedule's own topology unless given.
            payload_bytes, wire_dtype, link, with_idle, executor: See `ftmesh.plan`; the executor
                cannot be ``"auto"``.

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
        check_executor(executor, EXECUTORS)
        schedule = replace(schedule, topology=topology)
        links = network_for(topology) if link is None else parse_network(link)
        links = links.wires_only if executor == PALLAS else links
        size, wire = check_bytes(payload_bytes), wire_dtype_name(wire_dtype)
        proof = verify(schedule)
        plan = Plan(schedule, size, proof, with_idle, links, wire, executor, is_given=True)
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
        first, *_ = self._siblings[_program_key(self.schedule)]
        if first is not self:
            return first.program
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
        algorithm = self._select(size, wire).algorithm if self.is_auto else self.algorithm
        return self._sibling(algorithm, size, wire)

    @cached_property
    def with_reduce_scatter(self) -> Plan:
        """The same plan, or if it has no reduce-scatter phase, the cheapest sibling with one.

        `psum_scatter`, `all_gather` and sharded optimizers use it. A given schedule stays as it is.
        """
        is_split = isinstance(self.schedule, SplitSchedule)
        if is_split or not (self.is_auto or self._depends_on_size):
            return self
        payload = self.payload_bytes, self.wire_dtype
        return self._sibling(self._select(*payload, reduce_scatter=True).algorithm, *payload)

    @cached_property
    def unrolled_variant(self) -> Plan:
        """The same plan with its rounds unrolled; never with trees, whose rounds are too many.

        A kernel has no rounds to unroll: a plan with ``"pallas"`` stays with it.
        """
        if self.executor == PPERMUTE_UNROLLED:
            return self
        if self.executor == PALLAS:
            return self.with_reduce_scatter
        return replace(self.with_reduce_scatter, executor=PPERMUTE_UNROLLED)

    def explain(self) -> Selection:
        """Cost every algorithm on this topology and payload; print the result for a table."""
        selection = self._select(self.payload_bytes, self.wire_dtype, with_trees=self._is_dataflow)
        return selection if self._is_dataflow else selection.with_schedule(self.schedule)

    def partial_sum_dtype(self, dtype: DTypeLike) -> str:
        """Return the dtype in which partial sums of `dtype` travel; see `cost.wire_precision`."""
        return schedule_partial_dtype(self.schedule, wire_dtype_name(dtype))

    def _select(
        self, size: int, wire: str, *, reduce_scatter: bool = False, with_trees: bool = False
    ) -> Selection:
        split = reduce_scatter or self.executor == PPERMUTE_UNROLLED
        return select_algorithm(
            self.topology, size, self.network, wire, reduce_scatter=split, with_trees=with_trees
        )

    @property
    def _depends_on_size(self) -> bool:
        return self.algorithm in registry.CHUNKED_BY_PAYLOAD and not self.is_given

    @property
    def _is_dataflow(self) -> bool:
        """Whether the schedule was made for a kernel, which does not wait for rounds to end."""
        return self.executor == PALLAS and self._depends_on_size

    def _sibling(self, algorithm: str, size: int, wire: str) -> Plan:
        """Return the plan with another algorithm, or for another payload."""
        for plan in chain.from_iterable(self._siblings.values()):
            if plan.algorithm == algorithm and plan._is_for(size, wire):
                return plan
        schedule = make_schedule(
            self.topology, algorithm, size, wire, self.network, executor=self.executor
        )
        equals = self._siblings.setdefault(_program_key(schedule), [])
        if equals:
            schedule, proof = equals[0].schedule, equals[0].proof
        else:
            proof = verify(schedule) if self.proof is not None else None
        sibling = replace(self, schedule=schedule, proof=proof, payload_bytes=size, wire_dtype=wire)
        sibling.__dict__["_siblings"] = self._siblings
        equals.append(sibling)
        return sibling

    def _is_for(self, size: int, wire: str) -> bool:
        """Whether this plan was made for that payload, sizes rounded as in `for_payload`."""
        own = round_up_payload(self.payload_bytes), self.wire_dtype
        return own == (round_up_payload(size), wire)

    @cached_property
    def _siblings(self) -> dict[tuple[str, int, int], list[Plan]]:
        """Plans made from this one, by what their schedules are; equal ones share a program."""
        return {_program_key(self.schedule): [self]}

    # In a training step ---------------------------------------------------------------------

    def jax_mesh(self, axis_name: str | Sequence[str], *, along: str | None = None) -> Mesh:
        """Return the ``jax.sharding.Mesh`` whose axis this plan's collectives run along.

        Args:
            axis_name: The axis of live ranks; on tiles several names, as ``("data", "model")``.
            along: Which of several names has the ranks; the first unless given.
        """
        return self.topology.jax_mesh(axis_name, along=along, with_idle=self.with_idle)

    def psum(
        self,
        x: PyTree,
        axis_name: AxisName,
        *,
        wire_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        specs: Specs = None,
    ) -> PyTree:
        """Sum `x` over the live chips; see `ftmesh.psum`."""
        from ftmesh.collectives.all_reduce import psum

        return psum(
            x, axis_name, plan=self, wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype,
            bucket_bytes=bucket_bytes, specs=specs,
        )  # fmt: skip

    def pmean(
        self,
        x: PyTree,
        axis_name: AxisName,
        *,
        wire_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        specs: Specs = None,
    ) -> PyTree:
        """Average `x` over the live chips; see `ftmesh.pmean`."""
        from ftmesh.collectives.all_reduce import pmean

        return pmean(
            x, axis_name, plan=self, wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype,
            bucket_bytes=bucket_bytes, specs=specs,
        )  # fmt: skip

    def psum_scatter(
        self,
        x: PyTree,
        axis_name: AxisName,
        *,
        scatter_dimension: int = 0,
        tiled: bool = False,
        wire_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        specs: Specs = None,
    ) -> PyTree:
        """Sum `x` and give each rank its block; see `ftmesh.psum_scatter`."""
        from ftmesh.collectives.reduce_scatter import psum_scatter

        return psum_scatter(
            x, axis_name, scatter_dimension=scatter_dimension, tiled=tiled, plan=self,
            wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype, specs=specs,
        )  # fmt: skip

    def all_gather(
        self,
        x: PyTree,
        axis_name: AxisName,
        *,
        axis: int = 0,
        tiled: bool = False,
        specs: Specs = None,
    ) -> PyTree:
        """Gather every rank's `x`; see `ftmesh.all_gather`."""
        from ftmesh.collectives.reduce_scatter import all_gather

        return all_gather(x, axis_name, axis=axis, tiled=tiled, plan=self, specs=specs)

    def value_and_grad(
        self,
        loss: Callable[..., Any],
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        *,
        axis_name: AxisName = "data",
        weighted: bool = False,
        per_rank: bool = False,
        replicated: int | Sequence[int] = (),
        specs: Specs = None,
        mesh: Mesh | None = None,
        reduce_aux: Callable[[PyTree], PyTree] | None = None,
        wire_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> Callable[..., Any]:
        """Return a function like `jax.value_and_grad`'s, that computes on the plan.

        In jit it takes the whole batch, and returns what JAX's would or raises ArgumentError; in
        shard_map and pmap it takes a rank's share. See `ftmesh.collectives.value_and_grad`.
        """
        from ftmesh.collectives.value_and_grad import value_and_grad

        return value_and_grad(
            loss, argnums, has_aux, plan=self, axis_name=axis_name, weighted=weighted,
            per_rank=per_rank, replicated=replicated, specs=specs, mesh=mesh, reduce_aux=reduce_aux,
            wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype, bucket_bytes=bucket_bytes,
        )  # fmt: skip

    def check(self, loss: Callable[..., Any], *args: PyTree, **options: Any) -> LossCheck:
        """Compare `value_and_grad` with JAX's own; see `ftmesh.collectives.check_loss`."""
        from ftmesh.collectives.check_loss import check_loss

        return check_loss(loss, args, plan=self, **options)

    def shard(
        self,
        transformation: optax.GradientTransformation,
        axis_name: AxisName = "data",
        *,
        wire_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        bucket_bytes: int | None = None,
        reduce: Literal["mean", "sum", "none"] = "mean",
        norm_plan: Plan | None = None,
        overlap: bool = False,
        order: Sequence[int] | None = None,
        specs: Specs = None,
        mesh: Mesh | None = None,
    ) -> ShardedOptimizer:
        """Return `transformation` with its state sharded over the live chips. Needs optax.

        See `ftmesh.optim.ShardedOptimizer` for the arguments.
        """
        from ftmesh.optim.sharded import ShardedOptimizer

        return ShardedOptimizer(
            transformation, self, axis_name, wire_dtype=wire_dtype,
            accumulate_dtype=accumulate_dtype, bucket_bytes=bucket_bytes, reduce=reduce,
            norm_plan=norm_plan, overlap=overlap, order=order, specs=specs, mesh=mesh,
        )  # fmt: skip

    def __str__(self) -> str:
        lines = [self.schedule.describe(self.payload_bytes), *self._precision_lines()]
        if isinstance(self.topology, TiledTopology):
            lines.append(self.topology.describe())
        return "\n".join(lines)

    def _precision_lines(self) -> list[str]:
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


def _program_key(schedule: Schedule) -> tuple[str, int, int]:
    """What distinguishes the schedules of one topology and network."""
    return schedule.algorithm, schedule.num_chunks, schedule.num_rounds
