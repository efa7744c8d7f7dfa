"""RankSchedule: phases and who plays them, whoever that is: what proofs are about.

The players of a schedule are the chips of its topology; those of a lowered program are devices, of
which some may be idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.transfers import Transfers, Ints


class Rounds(Protocol):
    """Consecutive rounds: a `Phase`, or what says the same of itself."""

    @property
    def name(self) -> str:
        """What they are for."""

    @property
    def num_rounds(self) -> int:
        """How many there are."""

    def rounds(self) -> Iterator[Transfers]:
        """The transfers of each round in turn."""

    def transfers_of_chunk(self, chunk: int) -> Transfers:
        """The transfers that move `chunk`, in a row each."""


R = TypeVar("R", bound=Rounds, covariant=True)


@dataclass(frozen=True, eq=False)
class RankSchedule(Generic[R]):
    """Phases over ranks, and what they are to achieve.

    Every chunk of every rank is to end as the sum of what the `contributors` begin with. Where
    there are halves, that sum is at the chunk's `owner` after the first `num_reduce_scatter_phases` phases.
    """

    num_chunks: int
    phases: tuple[R, ...]
    names: tuple[str, ...]  # of the ranks, as errors call them
    contributors: Ints
    num_reduce_scatter_phases: int = 0
    owner: Ints | None = None

    @staticmethod
    def from_schedule(schedule: Schedule) -> RankSchedule[Phase]:
        """The script of a schedule, played by its live chips."""
        topology = schedule.topology
        names = tuple(f"{topology.noun} {coord}" for coord in topology.coords)
        everyone = np.arange(len(names), dtype=np.int32)
        bare = RankSchedule(schedule.num_chunks, schedule.phases, names, everyone)
        if not isinstance(schedule, SplitSchedule):
            return bare
        return replace(bare, num_reduce_scatter_phases=len(schedule.reduce_scatter), owner=schedule.owner)

    @property
    def num_ranks(self) -> int:
        """Players."""
        return len(self.names)

    @property
    def reduce_scatter(self) -> tuple[R, ...]:
        """The phases of the first half; none where there are no halves."""
        return self.phases[: self.num_reduce_scatter_phases]

    @property
    def all_gather(self) -> tuple[R, ...]:
        """The phases of the second half, or all."""
        return self.phases[self.num_reduce_scatter_phases :]

    @property
    def rounds_in_reduce_scatter(self) -> int:
        """Rounds of the first half."""
        return sum(phase.num_rounds for phase in self.reduce_scatter)

    def place_of(self, now: int) -> str:
        """A round and its phase, in words."""
        start = 0
        for phase in self.phases:
            if now < start + phase.num_rounds:
                return f"round {now} ({phase.name})"
            start += phase.num_rounds
        return f"round {now}"

    def transfers_of_chunk(self, chunk: int) -> Iterator[tuple[int, Transfers]]:
        """The rounds in which `chunk` moves, and what moves it."""
        start = 0
        for phase in self.phases:
            c = phase.transfers_of_chunk(chunk)
            for now in np.unique(c.round).tolist():
                yield start + now, c.take(c.round == now)
            start += phase.num_rounds


AnyRankSchedule = RankSchedule[Any]  # for those who only look at rounds
