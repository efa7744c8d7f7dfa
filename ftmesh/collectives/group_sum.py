"""Sums over small groups of neighbouring chips, as batch normalization needs them.

The groups of `jax.lax.psum` must have one size, which groups on a mesh with failed chips do not.
Here pairs of ranks exchange values, in all groups at once, in a few constant permutations. The
first 2**k ranks of a group use recursive doubling; each of the others sends its value to one of
them before, and gets the sum after. All ranks of a group get the same bits.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError, CollectiveError, TopologyError
from ftmesh.execute import _compat
from ftmesh.execute.types import AxisName
from ftmesh.schedule.transfers import Ints
from ftmesh.topology.ranks import HasTopology, Ranks
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class ChipGroups:
    """Groups of ranks along one axis. A rank in none of them is a group of its own."""

    ranks: tuple[tuple[int, ...], ...]
    num_ranks: int

    def __post_init__(self) -> None:
        named = [rank for group in self.ranks for rank in group]
        if len(set(named)) < len(named) or not set(named) <= set(range(self.num_ranks)):
            raise ArgumentError(
                f"groups must name ranks from 0 to {self.num_ranks - 1}, each at most once: "
                f"{self.ranks}"
            )

    @staticmethod
    def of_size(plan: HasTopology | Topology, chips: int) -> ChipGroups:
        """Make groups of `chips` neighbours, with all their devices; see `Topology.groups`.

        Failed chips leave groups smaller.
        """
        ranks = Ranks.from_plan(plan)
        devices = ranks.of_chips.tolist()
        groups = ranks.topology.groups(chips)
        members = (tuple(rank for chip in group for rank in devices[chip]) for group in groups)
        return ChipGroups(tuple(members), ranks.num_ranks)

    @staticmethod
    def for_examples(plan: HasTopology | Topology, examples: int, global_batch: int) -> ChipGroups:
        """Make the smallest groups that have `examples` examples of a batch, if no chip failed."""
        topology = Ranks.from_plan(plan).topology
        for chips in range(1, topology.num_chips + 1):
            with suppress(TopologyError):  # not every size is possible
                if chips * global_batch >= examples * topology.num_live:
                    return ChipGroups.of_size(plan, chips)
        raise ArgumentError(
            f"a batch of {global_batch} has no groups of {examples} examples to normalise over: "
            f"use a batch of {examples} or more"
        )

    def sum(self, x: jax.Array, axis_name: AxisName) -> jax.Array:
        """Sum an array over the ranks of this rank's group."""
        if lax.axis_size(axis_name) != self.num_ranks:
            raise CollectiveError(
                f"axis {axis_name!r} has {lax.axis_size(axis_name)} ranks, and the groups are for "
                f"{self.num_ranks}"
            )
        rank = lax.axis_index(axis_name)
        for partner, adds, replaces in self.exchanges:
            with _compat.plan_scope("group_sum"):
                received = lax.ppermute(x, axis_name, list(enumerate(partner.tolist())))
            replaced = jnp.where(jnp.asarray(replaces)[rank], received, x)
            x = jnp.where(jnp.asarray(adds)[rank], x + received, replaced)
        return x

    @cached_property
    def exchanges(self) -> tuple[tuple[Ints, NDArray[np.bool_], NDArray[np.bool_]], ...]:
        """The exchanges after which every rank has the sum of its group.

        Each rank's partner, or itself; whether it adds what it receives; and whether it keeps that.
        """
        exchanges = []
        for steps in itertools.zip_longest(*map(_steps, self.ranks), fillvalue=()):
            partner = np.arange(self.num_ranks, dtype=np.int32)
            adds, replaces = np.zeros((2, self.num_ranks), np.bool_)
            for rank, other, is_sum in itertools.chain(*steps):
                partner[rank], partner[other] = other, rank
                (adds if is_sum else replaces)[rank] = True
            exchanges.append((partner, adds, replaces))
        return tuple(exchanges)


def _steps(group: tuple[int, ...]) -> list[list[tuple[int, int, bool]]]:
    """For each exchange of a group: ranks, their partners, and whether they add what they get."""
    doublings = len(group).bit_length() - 1
    inner, outer = group[: 1 << doublings], group[1 << doublings :]
    steps = [
        [(rank, inner[i ^ 1 << n], True) for i, rank in enumerate(inner)] for n in range(doublings)
    ]
    if outer:
        pairs = list(zip(inner, outer, strict=False))
        steps.insert(0, [(a, b, True) for a, b in pairs])
        steps.append([(b, a, False) for a, b in pairs])
    return steps
