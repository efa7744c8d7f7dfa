"""Advice: what to do about a collective that is not the plan's, by what it was made of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ftmesh.execute.hlo_text import Frame

ADVICE = {
    "psum": "call plan.psum or plan.pmean in place of jax.lax's",
    "psum2": "call plan.psum or plan.pmean in place of jax.lax's",
    "psum_invariant": "call plan.psum or plan.pmean in place of jax.lax's",
    "reduce_scatter": "call plan.psum_scatter in place of jax.lax's",
    "all_gather": "call plan.all_gather in place of jax.lax's",
    "all_gather_invariant": "call plan.all_gather in place of jax.lax's",
    "pmax": "no plan has maxima: take the maximum of plan.all_gather(x, {axis!r})",
    "pmin": "no plan has minima: take the minimum of plan.all_gather(x, {axis!r})",
    "all_to_all": "no plan has this: exchange along another axis of the mesh",
    "ragged_all_to_all": "no plan has this: exchange along another axis of the mesh",
    "ppermute": "no plan is behind this permutation: whether it crosses failed chips is not known",
}
OF_REPLICATED = (
    "JAX sums the gradient of what is the same everywhere, mostly parameters: take "
    "plan.value_and_grad(loss), or differentiate with respect to jax.lax.pcast(params, {axis!r}, "
    "to='varying') and plan.pmean the gradients"
)
OF_BATCH_NORM = (
    "a batch norm of Flax's takes its statistics along {axis!r}: use ftmesh.train.GroupBatchNorm, "
    "or ftmesh.train.NnxGroupBatchNorm, or no axis_name"
)
OF_PARTITIONER = (
    "the compiler put it in to keep arrays sharded as they are: take plan.value_and_grad(loss), or "
    "write the step in jax.shard_map and plan.pmean the gradients"
)
OF_RESHARDING = (
    "the compiler put it in because an array is wanted in another sharding than it has: give both "
    "the same, or call plan.all_gather or plan.psum_scatter in jax.shard_map"
)


def advice_for(kind: str, op_name: str, frames: Sequence[Frame], axis_name: str) -> str:
    """What to do about a collective of a `kind` that was made as `op_name` in `frames`."""
    operation = op_name.rpartition("/")[2]
    if any(_is_batch_norm(frame) for frame in frames):
        said = OF_BATCH_NORM
    elif operation == "psum_invariant" and "transpose(" in op_name:
        said = OF_REPLICATED
    elif operation in ADVICE:
        said = ADVICE[operation]
    else:
        said = OF_PARTITIONER if kind in ("all-reduce", "reduce-scatter") else OF_RESHARDING
    return said.format(axis=axis_name)


def _is_batch_norm(frame: Frame) -> bool:
    path = Path(frame.file)
    return path.name == "normalization.py" and "flax" in path.parts
