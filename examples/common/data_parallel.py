"""Parallel: the devices of a run and how sums go over them, on a plan or on JAX's own psum.

    parallel = Parallel.on(topology, "auto", payload_bytes=102_228_128)
    step = parallel.jit(step, in_specs=(P(), P("data")), out_specs=P())

A trainer asks this one for means, shares of a batch, groups of chips and an optimizer, and is the
same program on a damaged mesh, on a whole one with ``lax.psum`` and on a single device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from examples.common.device_arrays import AXIS, SPLIT, Placed
from ftmesh.collectives.gradients import (
    BUCKET_BYTES,
    backward_order,
    mean_gradients,
    with_mean_gradients,
)
from ftmesh.collectives.group_sum import Groups
from ftmesh.distributed.consensus import agreed_plan
from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.errors import ArgumentError, CollectiveError
from ftmesh.execute.lowering import PALLAS, PPERMUTE
from ftmesh.layout.batch_shares import Shares
from ftmesh.optim.replicated import WholeOptimizer
from ftmesh.optim.sharded import ShardedOptimizer
from ftmesh.planning.plan import Plan, plan
from ftmesh.testing import shard_map_on_one_device
from ftmesh.topology.devices import platform_of, process_of
from ftmesh.topology.partners import partners
from ftmesh.topology.ranks import Ranks
from ftmesh.topology.topology import Topology
from ftmesh.tpu.compiler_options import compiler_options

PSUM = "psum"  # in place of an algorithm: JAX's own sums, which need no plan
SMALL_BYTES = 4096  # losses, counts, norms: what matters is how many rounds they take


@dataclass(frozen=True)
class Parallel(Placed):
    """The ranks of one axis, and a plan for sums of gradients along it.

    Without a plan sums are JAX's own. Sums of a few numbers go on `small_plan`. With `overlap`
    gradients are summed during the backward pass, in buckets of `bucket_bytes`; with `halved` they
    go to owners. Where a step `keeps_state`, that from before is there after it. `partners` have
    copies of what others own.
    """

    plan: Plan | None = None
    small_plan: Plan | None = None
    overlap: bool = False
    halved: bool = False
    bucket_bytes: int = BUCKET_BYTES
    in_vmem: bool = False
    keeps_state: bool = False
    partners: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.overlap and self.plan is None:
            single = self.ranks.num_live == 1
            why = "a single device has nothing to sum" if single else "these are JAX's own"
            raise CollectiveError(f"only sums on a plan overlap the backward pass; {why}")
        if self.bucket_bytes < 1:
            raise ArgumentError(f"a bucket of {self.bucket_bytes} bytes holds no gradients")

    @staticmethod
    def on(
        topology: Topology,
        algorithm: str = "auto",
        *,
        payload_bytes: int = 100_000_000,
        wire_dtype: Any = jnp.float32,
        axis_name: str = AXIS,
        with_idle: bool = False,
        overlap: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        in_vmem: bool = False,
        cluster: Cluster = ALONE,
        keeps_state: bool = True,
        copies: bool = True,
        halved: bool = False,
        executor: str = PPERMUTE,
    ) -> Parallel:
        """The live devices of `topology`, with a plan made by `algorithm`, or ``"psum"``.

        The plan is for gradients of `payload_bytes` in `wire_dtype`; with `overlap`, for one bucket
        of them at a time. With `with_idle` the devices of failed chips are in the program too, and
        count for nothing. The ranks of a topology without devices are emulated, all on one. A
        single chip needs no plan. Of several processes, in `cluster`, one plans for all; where some
        may be lost, a step `keeps_state`, and shards of it have `copies` on another host. Where
        gradients go by halves, as to owners with `halved` and always with `overlap`, ``"auto"``
        has no trees. The `executor` is as for `ftmesh.plan`, `in_vmem` as for
        `ftmesh.compiler_options`.
        """
        cluster = cluster.on(topology, with_idle=with_idle)
        ranks = Ranks(topology, with_idle)
        made = small = None
        if algorithm != PSUM and topology.num_live > 1:
            size = max(1, min(payload_bytes, bucket_bytes)) if overlap else payload_bytes
            made = agreed_plan(
                cluster,
                topology,
                algorithm,
                payload_bytes=size,
                wire_dtype=jnp.dtype(wire_dtype).name,
                with_idle=with_idle,
                unrolled=overlap,
                halves=halved,  # so that trees are not planned for nothing
                executor=executor,
            )
            made = replace(made, unrolled=False)
            small = _for_small_sums(made)
        mesh = topology.jax_mesh(axis_name, with_idle=with_idle) if topology.devices else None
        is_on_line = cluster.line is not None
        return Parallel(
            ranks,
            mesh,
            axis_name,
            cluster,
            plan=made,
            small_plan=small,
            overlap=overlap,
            halved=halved,
            bucket_bytes=bucket_bytes,
            in_vmem=in_vmem,
            keeps_state=is_on_line and keeps_state,
            partners=_partners(topology) if is_on_line and copies and not with_idle else None,
        )

    @property
    def platform(self) -> str:
        """What the devices are: "cpu", "gpu" or a kind of TPU."""
        return platform_of(self.mesh.devices.flat[0] if self.mesh else jax.devices()[0])

    @property
    def gradients_plan(self) -> Plan | None:
        """The plan that gradients go by: `plan`, or a sibling of it that has halves."""
        if self.plan is None or not (self.overlap or self.halved):
            return self.plan
        return self.plan.with_reduce_scatter

    @property
    def sums_on(self) -> str:
        """What makes the sums, in words."""
        if self.ranks.num_live == 1:
            return "a single device"
        plan = self.gradients_plan
        how = "lax.psum" if plan is None else plan.algorithm
        if plan is not None and plan.executor == PALLAS:
            how = f"{how} in a Pallas kernel"
        idle = ", idle devices among them" if self.ranks.with_idle else ""
        where = "" if self.mesh else ", emulated on one device"
        return f"{how} on {self.ranks.topology}{idle}{where}"

    # Inside a step ----------------------------------------------------------------------------

    def sum(self, tree: Any) -> Any:
        """The sum over all live ranks of a few numbers, such as counts."""
        if self.small_plan is None:
            return lax.psum(self._of_live(tree), self.axis_name)
        return self.small_plan.psum(tree, self.axis_name)

    def mean(self, tree: Any) -> Any:
        """The mean over all live ranks of a few numbers, such as losses."""
        return jax.tree.map(lambda total: total / self.ranks.num_live, self.sum(tree))

    def _of_live(self, tree: Any) -> Any:
        """Nothing in place of what an idle rank has, which may be anything."""
        if not self.ranks.with_idle:
            return tree
        is_live = jnp.isin(lax.axis_index(self.axis_name), self.ranks.live)
        return jax.tree.map(lambda leaf: jnp.where(is_live, leaf, jnp.zeros_like(leaf)), tree)

    def _mean_gradients(self, grads: Any, wire_dtype: Any) -> Any:
        if self.plan is None:
            return self.mean(grads)
        return mean_gradients(grads, self.axis_name, plan=self.plan, wire_dtype=wire_dtype)

    def _with_mean_gradients(self, params: Any, **options: Any) -> Any:
        assert self.plan is not None
        return with_mean_gradients(
            params,
            self.axis_name,
            plan=self.plan.unrolled_variant,  # nothing runs beside a loop
            bucket_bytes=self.bucket_bytes,
            **options,
        )

    def copies(self, tree: Any) -> Any:
        """What the rank whose partner the calling one is has in its place."""
        assert self.partners is not None
        ways = list(enumerate(self.partners))
        return jax.tree.map(lambda leaf: lax.ppermute(leaf, self.axis_name, ways), tree)

    # Around it --------------------------------------------------------------------------------

    def backward_order(self, loss: Callable[..., Any], *types: Any) -> tuple[int, ...] | None:
        """The order in which gradients come to be; None where their sums wait for all of them.

        `types` are those of what a rank gives to `loss`, which has an auxiliary result.
        """
        if not self.overlap:
            return None
        found: list[tuple[int, ...]] = []

        def trace(place: jax.Array) -> jax.Array:
            found.append(backward_order(loss, *types, has_aux=True))
            return place

        run = self.jit(trace, in_specs=(SPLIT,), out_specs=SPLIT)
        jax.eval_shape(run, jax.ShapeDtypeStruct((self.num_ranks,), jnp.int32))
        return found[0]

    def jit(
        self,
        function: Callable[..., Any],
        *,
        in_specs: Any,
        out_specs: Any,
        donate_argnums: tuple[int, ...] = (),
    ) -> Any:
        """`function` as every rank runs it, compiled with the options that a plan wants."""
        options = compiler_options(self.platform, overlap=self.overlap, in_vmem=self.in_vmem)
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

    def shares(self, global_batch: int) -> Shares:
        """Which examples of a batch each rank has; idle ranks have padding alone."""
        return Shares.of(self.ranks, global_batch)

    def groups(self, examples: int, global_batch: int) -> Groups | None:
        """Groups of neighbouring chips with so many examples; none on a single device."""
        if self.num_ranks == 1:
            return None
        return Groups.of_examples(self.ranks, examples, global_batch)

    def optimizer(
        self,
        transformation: optax.GradientTransformation,
        *,
        sharded: bool = True,
        wire_dtype: Any = None,
        order: Sequence[int] | None = None,
        **options: Any,
    ) -> ShardedOptimizer | WholeOptimizer:
        """The optimizer, its state shared out among the chips, or whole at each where told.

        Without a plan it is whole. On a plan gradients travel in `wire_dtype`; with `overlap` they
        do during the backward pass of its `value_and_grad`, in `order`, as `backward_order` finds
        it.
        """
        if self.plan is not None and sharded:
            if self.overlap:
                options = {
                    "overlap": True,
                    "bucket_bytes": self.bucket_bytes,
                    "order": order,
                    **options,
                }
            return ShardedOptimizer(
                transformation,
                self.plan,
                self.axis_name,
                wire_dtype=wire_dtype,
                norm_plan=self.small_plan,
                **options,
            )
        return WholeOptimizer(
            transformation,
            mean=partial(self._mean_gradients, wire_dtype=wire_dtype),
            axis_name=self.axis_name,
            mark=partial(self._with_mean_gradients, wire_dtype=wire_dtype, order=order)
            if self.overlap
            else None,
        )


def _partners(topology: Topology) -> tuple[int, ...] | None:
    """Partners on other hosts, for the live devices of a topology."""
    hosts = [process_of(device) for device in topology.devices]
    found = partners(topology, hosts) if len(set(hosts)) > 1 else None
    return None if found is None else tuple(found.tolist())


def _for_small_sums(made: Plan) -> Plan:
    """The quickest plan for a few numbers on the same ranks, also where `made` was named."""
    if not made.is_auto:
        quick = plan(
            made.topology,
            payload_bytes=SMALL_BYTES,
            with_idle=made.with_idle,
            executor=made.executor,
        )
        return made if quick.algorithm == made.algorithm else quick
    return made.for_payload(SMALL_BYTES)
