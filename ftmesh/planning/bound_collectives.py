"""The collectives that are bound to a plan, as its methods.

Each is imported by the method that needs it, so that planning works without JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

from ftmesh.execute.types import AxisName, DTypeLike, PlanLike, PyTree, Specs

if TYPE_CHECKING:
    import optax
    from jax.sharding import Mesh

    from ftmesh.collectives.value_and_grad import LossCheck
    from ftmesh.optim.sharded import ShardedOptimizer

BUCKET_BYTES = 256 * 2**20  # of leaves that are summed together


class BoundCollectives:
    """What a plan does in a training step."""

    @property
    def _plan(self) -> PlanLike:
        return cast(PlanLike, self)

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
            x, axis_name, plan=self._plan, wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype,
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
            x, axis_name, plan=self._plan, wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype,
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
            x, axis_name, scatter_dimension=scatter_dimension, tiled=tiled, plan=self._plan,
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

        return all_gather(x, axis_name, axis=axis, tiled=tiled, plan=self._plan, specs=specs)

    def pmax(self, x: PyTree, axis_name: AxisName) -> PyTree:
        """Take the maximum of `x` over the live chips; see `ftmesh.collectives.pmax`."""
        from ftmesh.collectives.exchange import pmax

        return pmax(x, axis_name, plan=self._plan)

    def pmin(self, x: PyTree, axis_name: AxisName) -> PyTree:
        """Take the minimum of `x` over the live chips; see `ftmesh.collectives.pmin`."""
        from ftmesh.collectives.exchange import pmin

        return pmin(x, axis_name, plan=self._plan)

    def all_to_all(
        self,
        x: PyTree,
        axis_name: AxisName,
        split_axis: int,
        concat_axis: int,
        *,
        tiled: bool = False,
    ) -> PyTree:
        """Send a block of `x` to each rank; see `ftmesh.collectives.all_to_all`."""
        from ftmesh.collectives.exchange import all_to_all

        return all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled, plan=self._plan)

    def ppermute(self, x: PyTree, axis_name: AxisName, perm: Sequence[tuple[int, int]]) -> PyTree:
        """Send `x` from rank to rank; see `ftmesh.collectives.ppermute`."""
        from ftmesh.collectives.exchange import ppermute

        return ppermute(x, axis_name, perm, plan=self._plan)

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
            loss, argnums, has_aux, plan=self._plan, axis_name=axis_name, weighted=weighted,
            per_rank=per_rank, replicated=replicated, specs=specs, mesh=mesh, reduce_aux=reduce_aux,
            wire_dtype=wire_dtype, accumulate_dtype=accumulate_dtype, bucket_bytes=bucket_bytes,
        )  # fmt: skip

    def check(
        self,
        loss: Callable[..., Any],
        *args: PyTree,
        tolerance: float = 1e-5,
        argnums: int | Sequence[int] = 0,
        has_aux: bool = False,
        axis_name: AxisName = "data",
        weighted: bool = False,
        per_rank: bool = False,
        replicated: int | Sequence[int] = (),
        specs: Specs = None,
        mesh: Mesh | None = None,
        reduce_aux: Callable[[PyTree], PyTree] | None = None,
    ) -> LossCheck:
        """Compare `value_and_grad` with JAX's own; see `check_loss`."""
        from ftmesh.collectives.value_and_grad import check_loss

        return check_loss(
            loss, args, plan=self._plan, tolerance=tolerance, argnums=argnums, has_aux=has_aux,
            axis_name=axis_name, weighted=weighted, per_rank=per_rank, replicated=replicated,
            specs=specs, mesh=mesh, reduce_aux=reduce_aux,
        )  # fmt: skip

    def shard(
        self,
        transformation: optax.GradientTransformation,
        axis_name: AxisName = "data",
        *,
        wire_dtype: DTypeLike | None = None,
        accumulate_dtype: DTypeLike | None = None,
        bucket_bytes: int | None = None,
        reduce: Literal["mean", "sum", "none"] = "mean",
        norm_plan: PlanLike | None = None,
        overlap: bool = False,
        order: Sequence[int] | None = None,
        specs: Specs = None,
        mesh: Mesh | None = None,
        min_size: int = 0,
    ) -> ShardedOptimizer:
        """Return `transformation` with its state sharded over the live chips. Needs optax.

        See `ftmesh.optim.ShardedOptimizer` for the arguments.
        """
        from ftmesh.optim.sharded import ShardedOptimizer

        return ShardedOptimizer(
            transformation, self._plan, axis_name, wire_dtype=wire_dtype,
            accumulate_dtype=accumulate_dtype, bucket_bytes=bucket_bytes, reduce=reduce,
            norm_plan=norm_plan, overlap=overlap, order=order, specs=specs, mesh=mesh,
            min_size=min_size,
        )  # fmt: skip
