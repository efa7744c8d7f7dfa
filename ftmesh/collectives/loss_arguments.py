"""Which arguments of a loss are weights, which are the batch, and which all ranks get whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ftmesh.errors import ArgumentError
from ftmesh.execute.types import PyTree


@dataclass(frozen=True)
class ArgumentRoles:
    """Which arguments of a loss are weights, which are replicated, and which are the batch."""

    weights: tuple[int, ...]
    replicated: tuple[int, ...]
    batch: tuple[int, ...]

    @staticmethod
    def assign(num_args: int, weights: Sequence[int], replicated: Sequence[int]) -> ArgumentRoles:
        """Resolve negative positions; arguments that are not named are the batch."""
        wrong = [i for i in (*weights, *replicated) if not -num_args <= i < num_args]
        if wrong:
            raise ArgumentError(
                f"the loss was given {num_args} arguments, and argnums or replicated name {wrong}"
            )
        weights, replicated = ([i % num_args for i in some] for some in (weights, replicated))
        if both := set(weights) & set(replicated):
            raise ArgumentError(f"arguments {sorted(both)} are both in argnums and in replicated")
        batch = (i for i in range(num_args) if i not in {*weights, *replicated})
        return ArgumentRoles(tuple(weights), tuple(replicated), tuple(batch))

    def batch_size(self, args: Sequence[PyTree], *, numbers_are_replicated: bool) -> int:
        """The number of examples in the arrays of the batch."""
        sizes = set()
        for i in self.batch:
            for leaf in jax.tree.leaves(args[i]):
                if jnp.ndim(leaf) if is_array(leaf) else 0:
                    sizes.add(leaf.shape[0])
                elif not numbers_are_replicated:
                    raise ArgumentError(
                        f"argument {i} of the loss is taken as part of the batch, and contains a "
                        "single number: if all ranks should have it, such as a random key, give "
                        f"replicated={i}"
                    )
        if not sizes:
            raise ArgumentError(
                "the loss has no arguments that could be the batch: pass its arrays as arguments, "
                "since arrays that a function closes over go whole to every rank"
            )
        if len(sizes) > 1:
            raise ArgumentError(
                f"arrays of the batch have first dimensions of {sorted(sizes)}, and must have one "
                "entry for each example: name in replicated= the arguments that are not the batch"
            )
        return int(sizes.pop())


def is_array(leaf: Any) -> bool:
    """True for arrays of any kind, also traced ones; False for numbers of Python and others."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def check_keywords(kwargs: dict[str, Any], batch_size: int) -> None:
    """Reject keyword arguments that look like a batch: every rank gets them whole."""
    for name, arg in kwargs.items():
        if any(
            jnp.shape(leaf)[:1] == (batch_size,) for leaf in jax.tree.leaves(arg) if is_array(leaf)
        ):
            raise ArgumentError(
                f"argument {name!r} of the loss has an array with {batch_size} entries, as many as "
                "the batch has examples, and keyword arguments go whole to every rank: pass it by "
                "position, and if it is not the batch, name the position in replicated="
            )
