"""Groups: sums over small groups of neighbouring chips, as batch normalization wants them.

JAX's own groups must be of one size, which groups on a mesh with failed chips are not. Here ranks
swap what they have in pairs, and all groups do so at once, in a few constant permutations: as many
ranks of a group as make a power of two add up by halves; the others give theirs to one of those
before, and get the sum after. All ranks of a group get the same bits.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError, CollectiveError, TopologyError
from ftmesh.execute import _compat
from ftmesh.schedule.transfers import Ints
from ftmesh.topology.ranks import PlanLike, Ranks
from ftmesh.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class Exchange:
    """Ranks in pairs swap what they have; some add what they get, some take it instead."""

    partner: Ints  # rank -> rank; itself where it has none
    adds: NDArray[np.bool_]
    takes: NDArray[np.bool_]


Turn = list[tuple[int, int, bool]]  # a rank, whom it gets from, and whether it adds that


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups of ranks of one axis. A rank in none of them is alone."""

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
    def of(on: PlanLike | Topology, chips: int) -> Groups:
        """Groups of `chips` neighbouring chips, with all their devices, of a plan or a topology.

        A failed chip leaves its group smaller. See `Topology.groups` for the numbers that fit.
        """
        ranks = Ranks.of(on)
        devices = ranks.live.reshape(ranks.topology.num_live, -1)
        return Groups(
            tuple(
                tuple(int(rank) for chip in group for rank in devices[chip])
                for group in ranks.topology.groups(chips)
            ),
            ranks.num_ranks,
        )

    @staticmethod
    def of_examples(on: PlanLike | Topology, examples: int, global_batch: int) -> Groups:
        """The smallest groups in which full ones have at least so many `examples` of a batch."""
        topology = Ranks.of(on).topology
        for chips in range(1, topology.num_chips + 1):
            if chips * global_batch < examples * topology.num_live:
                continue
            try:
                return Groups.of(on, chips)
            except TopologyError:
                continue
        raise ArgumentError(
            f"a batch of {global_batch} has no groups of {examples} examples, over which batches "
            f"are normalised: take a batch of {examples} or more"
        )

    @cached_property
    def exchanges(self) -> tuple[Exchange, ...]:
        """What it takes for every rank to have the sum of its group."""
        rounds = []
        for turns in itertools.zip_longest(*map(_turns, self.ranks), fillvalue=()):
            partner = np.arange(self.num_ranks, dtype=np.int32)
            adds, takes = np.zeros((2, self.num_ranks), np.bool_)
            for rank, other, is_sum in itertools.chain(*turns):
                partner[rank], partner[other] = other, rank
                (adds if is_sum else takes)[rank] = True
            rounds.append(Exchange(partner, adds, takes))
        return tuple(rounds)

    def sum(self, x: Any, axis_name: Any) -> jax.Array:
        """The sum of an array over the ranks of this rank's group."""
        if lax.axis_size(axis_name) != self.num_ranks:
            raise CollectiveError(
                f"axis {axis_name!r} has {lax.axis_size(axis_name)} ranks, and the groups are made "
                f"for {self.num_ranks}"
            )
        rank = lax.axis_index(axis_name)
        for exchange in self.exchanges:
            pairs = list(enumerate(exchange.partner.tolist()))
            with _compat.own_scope("group_sum"):
                other = lax.ppermute(x, axis_name, pairs)
            adds, takes = (jnp.asarray(who)[rank] for who in (exchange.adds, exchange.takes))
            x = jnp.where(adds, x + other, jnp.where(takes, other, x))
        return x


def _turns(group: tuple[int, ...]) -> list[Turn]:
    """The exchanges of one group, one after the other."""
    halvings = len(group).bit_length() - 1
    inner, outer = group[: 1 << halvings], group[1 << halvings :]
    turns = [
        [(rank, inner[i ^ 1 << n], True) for i, rank in enumerate(inner)] for n in range(halvings)
    ]
    if outer:
        pairs = list(zip(inner, outer, strict=False))
        turns.insert(0, [(a, b, True) for a, b in pairs])
        turns.append([(b, a, False) for a, b in pairs])
    return turns
