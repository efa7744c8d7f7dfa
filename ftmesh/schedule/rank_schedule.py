"""What is proved: phases over ranks, and the sums they must produce.

The ranks of a schedule are the chips of its topology. The ranks of a lowered program are devices,
of which some may be idle. Both are proved as a `RankSchedule`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import Ints, Transfers


class PhaseLike(Protocol):
    """The part of `Phase` that proofs read."""

    @property
    def name(self) -> str: ...

    @property
    def num_rounds(self) -> int: ...

    def rounds(self) -> Iterator[Transfers]: ...

    def transfers_of_chunk(self, chunk: int) -> Transfers: ...


P = TypeVar("P", bound=PhaseLike, covariant=True)


@dataclass(frozen=True, eq=False)
class RankSchedule(Generic[P]):
    """Phases over ranks, and what they must achieve.

    Every chunk of every rank must end as the sum of what the `contributors` start with. If there is
    a reduce-scatter, that sum is at the chunk's `owner` when it ends.
    """

    num_chunks: int
    phases: tuple[P, ...]
    names: tuple[str, ...]  # of the ranks, in messages
    contributors: Ints
    num_reduce_scatter_phases: int = 0
    owner: Ints | None = None

    @staticmethod
    def from_schedule(schedule: Schedule) -> RankSchedule[Phase]:
        """Return the phases of `schedule` over its live chips."""
        topology = schedule.topology
        names = tuple(f"{topology.noun} {coord}" for coord in topology.coords)
        everyone = np.arange(len(names), dtype=np.int32)
        ranks = RankSchedule(schedule.num_chunks, schedule.phases, names, everyone)
        if not isinstance(schedule, SplitSchedule):
            return ranks
        num_phases = len(schedule.reduce_scatter)
        return replace(ranks, num_reduce_scatter_phases=num_phases, owner=schedule.owner)

    @property
    def num_ranks(self) -> int:
        return len(self.names)

    @property
    def reduce_scatter(self) -> tuple[P, ...]:
        return self.phases[: self.num_reduce_scatter_phases]

    @property
    def all_gather(self) -> tuple[P, ...]:
        """The phases of the all-gather; all phases if there is no reduce-scatter."""
        return self.phases[self.num_reduce_scatter_phases :]

    @property
    def rounds_in_reduce_scatter(self) -> int:
        return sum(phase.num_rounds for phase in self.reduce_scatter)

    def describe_round(self, index: int) -> str:
        """Return ``"round 3 (name of its phase)"``."""
        start = 0
        for phase in self.phases:
            if index < start + phase.num_rounds:
                return f"round {index} ({phase.name})"
            start += phase.num_rounds
        return f"round {index}"

    def rounds_of_chunk(self, chunk: int) -> Iterator[tuple[int, Transfers]]:
        """Yield the rounds that move `chunk`: the index, and the transfers that move it."""
        start = 0
        for phase in self.phases:
            transfers = phase.transfers_of_chunk(chunk)
            for index in np.unique(transfers.round).tolist():
                yield start + index, transfers.take(transfers.round == index)
            start += phase.num_rounds


AnyRankSchedule = RankSchedule[Any]  # for functions that only read rounds
