"""Data parallelism over the devices of a run, with sums on a plan or by `lax.psum`.

    parallel = DataParallel.create(topology, "auto", payload_bytes=102_228_128)
    step = parallel.jit(step, in_specs=(P(), P("data")), out_specs=P())

A trainer written against `DataParallel` is the same program on a damaged mesh, on a full mesh with
``lax.psum`` and on a single device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from examples.common.device_arrays import AXIS, SHARDED, DeviceArrays
from ftmesh.collectives.all_reduce import ChipGroups
from ftmesh.collectives.gradients import (
    BUCKET_BYTES,
    backward_order,
    with_mean_gradients,
)
from ftmesh.distributed.consensus import agreed_plan
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup
from ftmesh.elastic.precompile import cached_plan
from ftmesh.errors import ArgumentError, CollectiveError
from ftmesh.execute.lowering import PALLAS, PPERMUTE, XLA
from ftmesh.layout.batch_shares import BatchShares
from ftmesh.optim.optimizers import ReplicatedOptimizer
from ftmesh.optim.sharded import ShardedOptimizer
from ftmesh.planning.make_plan import plan
from ftmesh.planning.plan import Plan
from ftmesh.planning.selection import AUTO
from ftmesh.testing import shard_map_on_one_device
from ftmesh.topology.devices import platform_of
from ftmesh.topology.ranks import Ranks, jax_mesh
from ftmesh.topology.topology import Topology
from ftmesh.tpu.compiler import compiler_options

PSUM = "psum"  # in place of an algorithm: lax.psum, which needs no plan
_EXECUTORS = {PALLAS: " in a Pallas kernel", XLA: " by XLA"}
SMALL_BYTES = 4096  # losses, counts, norms: their cost is the number of rounds


@dataclass(frozen=True)
class DataParallel(DeviceArrays):
    """The devices along one mesh axis, and how sums go over them. Build it with `create`."""

    plan: Plan | None = None  # None: lax.psum
    small_plan: Plan | None = None  # for sums of a few numbers
    overlap: bool = False  # sum gradients during the backward pass
    reduce_scatter: bool = False  # gradients go to owners
    bucket_bytes: int = BUCKET_BYTES
    keeps_state: bool = False  # a step does not donate the state before it

    def __post_init__(self) -> None:
        if self.overlap and self.plan is None:
            single = self.ranks.num_live == 1
            why = "a single device has nothing to sum" if single else "lax.psum does not"
            raise CollectiveError(f"only sums on a plan overlap the backward pass; {why}")
        if self.bucket_bytes < 1:
            raise ArgumentError(f"a bucket of {self.bucket_bytes} bytes holds no gradients")

    @staticmethod
    def create(
        topology: Topology,
        algorithm: str = "auto",
        *,
        payload_bytes: int = 100_000_000,
        wire_dtype: Any = jnp.float32,
        axis_name: str = AXIS,
        with_idle: bool = False,
        overlap: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        group: ElasticGroup = SINGLE_PROCESS,
        keeps_state: bool = True,
        reduce_scatter: bool = False,
        executor: str = AUTO,
    ) -> DataParallel:
        """Plan sums over the live devices of `topology`.

        The ranks of a topology without devices are emulated on one device. A single chip needs no
        plan. One process of `group` plans for all.

        Args:
            topology: The mesh, with or without devices.
            algorithm: As for `ftmesh.plan`, or "psum" for `lax.psum`.
            payload_bytes: Size of all gradients in `wire_dtype`.
            wire_dtype: What gradients are sent in.
            axis_name: Name of the mesh axis.
            with_idle: Keep the devices of failed chips in the program, idle.
            overlap: Sum gradients during the backward pass, `bucket_bytes` at a time.
            bucket_bytes: Size of a bucket with `overlap`.
            group: The processes that own the devices.
            keeps_state: If hosts may be lost, do not donate the state to a step.
            reduce_scatter: Gradients go to owners, so a plan must have a reduce-scatter; so it must
                with `overlap`.
            executor: As for `ftmesh.plan`.
        """
        group = group.for_topology(topology, with_idle=with_idle)
        ranks = Ranks(topology, with_idle)
        gradient_plan = small_plan = None
        if algorithm != PSUM and topology.num_live > 1:
            size = max(1, min(payload_bytes, bucket_bytes)) if overlap else payload_bytes
            gradient_plan = agreed_plan(
                group,
                topology,
                algorithm,
                payload_bytes=size,
                wire_dtype=jnp.dtype(wire_dtype).name,
                with_idle=with_idle,
                reduce_scatter=reduce_scatter
                or overlap,  # so that trees are not planned for nothing
                executor=PPERMUTE if overlap and executor == AUTO else executor,
                planner=cached_plan,
            )
            small_plan = _small_plan(gradient_plan)
        mesh = jax_mesh(topology, axis_name, with_idle=with_idle) if topology.devices else None
        return DataParallel(
            ranks,
            mesh,
            axis_name,
            group,
            plan=gradient_plan,
            small_plan=small_plan,
            overlap=overlap,
            reduce_scatter=reduce_scatter,
            bucket_bytes=bucket_bytes,
            keeps_state=group.controller is not None and keeps_state,
        )

    @property
    def platform(self) -> str:
        """The devices' platform: "cpu", "gpu" or a kind of TPU."""
        return platform_of(self.mesh.devices.flat[0] if self.mesh else jax.devices()[0])

    @property
    def gradients_plan(self) -> Plan | None:
        """The plan for gradients: `plan`, or its variant with a reduce-scatter."""
        if self.plan is None or not (self.overlap or self.reduce_scatter):
            return self.plan
        return self.plan.with_reduce_scatter

    @property
    def sums_description(self) -> str:
        """How and where gradients are summed, for messages."""
        if self.ranks.num_live == 1:
            return "a single device"
        plan = self.gradients_plan
        algorithm = "lax.psum" if plan is None else plan.algorithm
        executor = _EXECUTORS.get(plan.executor, "") if plan is not None else ""
        idle = " with idle devices" if self.ranks.with_idle else ""
        emulated = "" if self.mesh else ", emulated on one device"
        return f"{algorithm}{executor} on {self.ranks.topology}{idle}{emulated}"

    # Inside a step ----------------------------------------------------------------------------

    def sum(self, tree: Any) -> Any:
        """Sum a few numbers, such as counts, over the live ranks."""
        if self.small_plan is None:
            return lax.psum(self._zero_if_idle(tree), self.axis_name)
        return self.small_plan.psum(tree, self.axis_name)

    def mean(self, tree: Any) -> Any:
        """Average a few numbers, such as losses, over the live ranks."""
        return jax.tree.map(lambda total: total / self.ranks.num_live, self.sum(tree))

    def _zero_if_idle(self, tree: Any) -> Any:
        if not self.ranks.with_idle:
            return tree
        is_live = jnp.isin(lax.axis_index(self.axis_name), self.ranks.live)
        return jax.tree.map(lambda leaf: jnp.where(is_live, leaf, jnp.zeros_like(leaf)), tree)

    def _mean_gradients(self, grads: Any, wire_dtype: Any) -> Any:
        if self.plan is None:
            return self.mean(grads)
        return self.plan.pmean(grads, self.axis_name, wire_dtype=wire_dtype)

    def _with_mean_gradients(self, params: Any, **options: Any) -> Any:
        assert self.plan is not None
        return with_mean_gradients(
            params,
            self.axis_name,
            plan=self.plan.unrolled_variant,  # XLA overlaps nothing with a loop
            bucket_bytes=self.bucket_bytes,
            **options,
        )

    # Around a step ----------------------------------------------------------------------------

    def backward_order(self, loss: Callable[..., Any], *types: Any) -> tuple[int, ...] | None:
        """Return the order in which the backward pass computes gradients; None without `overlap`.

        `types` are the types of a rank's arguments to `loss`, which returns auxiliary outputs.
        """
        if not self.overlap:
            return None
        orders: list[tuple[int, ...]] = []

        def trace(x: jax.Array) -> jax.Array:
            orders.append(backward_order(loss, *types, has_aux=True))
            return x

        run = self.jit(trace, in_specs=(SHARDED,), out_specs=SHARDED)
        jax.eval_shape(run, jax.ShapeDtypeStruct((self.num_ranks,), jnp.int32))
        return orders[0]

    def jit(
        self,
        function: Callable[..., Any],
        *,
        in_specs: Any,
        out_specs: Any,
        donate_argnums: tuple[int, ...] = (),
    ) -> Any:
        """Map `function` over the ranks and jit it with the compiler options that plans need."""
        options = compiler_options(self.platform, overlap=self.overlap)
        if self.mesh is None:
            emulated = shard_map_on_one_device(
                function,
                num_ranks=self.num_ranks,
                axis_name=self.axis_name,
                in_specs=in_specs,
                out_specs=out_specs,
            )
            return jax.jit(emulated, donate_argnums=donate_argnums)
        mapped = jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donate_argnums, compiler_options=options or None)

    def shares(self, global_batch: int) -> BatchShares:
        """Divide a batch among the ranks; idle ranks get padding only."""
        return BatchShares.for_ranks(self.ranks, global_batch)

    def groups(self, examples: int, global_batch: int) -> ChipGroups | None:
        """Group neighbouring chips that together have `examples` examples; None on one device."""
        if self.num_ranks == 1:
            return None
        return ChipGroups.for_examples(self.ranks, examples, global_batch)

    def optimizer(
        self,
        transformation: optax.GradientTransformation,
        *,
        sharded: bool = True,
        wire_dtype: Any = None,
        order: Sequence[int] | None = None,
        bucket_bytes: int | None = None,
        min_size: int = 0,
    ) -> ShardedOptimizer | ReplicatedOptimizer:
        """Wrap an optax transformation for gradients that differ from rank to rank.

        Args:
            transformation: Any optax transformation.
            sharded: Shard the optimizer's state over the chips. Without a plan it is replicated.
            wire_dtype: What gradients are sent in.
            order: With `overlap`, the order of `backward_order`.
            bucket_bytes: Size of a bucket without `overlap`.
            min_size: Tensors with fewer elements are replicated.
        """
        if self.plan is not None and sharded:
            return ShardedOptimizer(
                transformation,
                self.plan,
                self.axis_name,
                wire_dtype=wire_dtype,
                norm_plan=self.small_plan,
                overlap=self.overlap,
                bucket_bytes=self.bucket_bytes if self.overlap else bucket_bytes,
                order=order if self.overlap else None,
                min_size=min_size,
            )
        return ReplicatedOptimizer(
            transformation,
            mean=partial(self._mean_gradients, wire_dtype=wire_dtype),
            axis_name=self.axis_name,
            mark=partial(self._with_mean_gradients, wire_dtype=wire_dtype, order=order)
            if self.overlap
            else None,
        )


def _small_plan(large: Plan) -> Plan:
    """Return the fastest plan for a few numbers on the same ranks, whatever `large` is."""
    if large.is_auto:
        return large.for_payload(SMALL_BYTES)
    small = plan(
        large.topology,
        payload_bytes=SMALL_BYTES,
        with_idle=large.with_idle,
        executor=large.executor,
    )
    return large if small.algorithm == large.algorithm else small
