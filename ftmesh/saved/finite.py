"""Finite: whether a state is one that a run could go on from."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import TrainingError
from ftmesh.saved.index import Index, Piece, Tensor
from ftmesh.saved.snapshot import Copier, Snapshot


def finite_snapshot(copier: Copier, step: int, state: Any) -> Snapshot:
    """The state as it is after `step`; refused where it has numbers that are not finite."""
    snapshot = copier.snapshot(step, state)
    wrong = first_not_finite(snapshot)
    if wrong is not None:
        raise TrainingError(
            f"the state after step {step} has numbers that are not finite, in {wrong}, and is "
            "not saved: the run has stopped there; try a lower learning rate or a longer "
            "warm-up, or go back to a checkpoint before it"
        )
    return snapshot


def first_not_finite(snapshot: Snapshot) -> str | None:
    """The name of a tensor that has numbers which are not finite, if there is one.

    A single number may be infinite: optimizers keep such, as the best loss before the first. What
    is in padding does not matter.
    """
    index = snapshot.index
    for piece, array in snapshot.pieces:
        if not jnp.issubdtype(array.dtype, np.inexact):
            continue
        numbers = array.reshape(-1)
        bad = np.flatnonzero(~np.isfinite(numbers))
        if bad.size == 0:
            continue
        if piece.of == "tensor":
            tensor = index.tensors[piece.number]
            if _are_wrong(tensor, numbers):
                return tensor.name
            continue
        places = _buffer_positions(index, piece, bad)
        for tensor in index.tensors:
            if tensor.buffer == piece.number:
                is_of = (places >= tensor.start) & (places < tensor.start + tensor.size)
                if is_of.any() and _are_wrong(tensor, numbers[bad[is_of]]):
                    return tensor.name
    return None


def _are_wrong(tensor: Tensor, numbers: NDArray[Any]) -> bool:
    """Whether numbers that are not all finite are wrong in this tensor."""
    return tensor.size > 1 or bool(np.isnan(numbers).any())


def _buffer_positions(index: Index, piece: Piece, elements: NDArray[np.intp]) -> NDArray[np.intp]:
    """Where elements of a piece are in its buffer."""
    buffer = index.buffers[piece.number]
    mine = np.flatnonzero(np.array(buffer.owner) == piece.rank)
    places: NDArray[np.intp] = mine[elements // buffer.chunk_size] * buffer.chunk_size
    return places + elements % buffer.chunk_size
