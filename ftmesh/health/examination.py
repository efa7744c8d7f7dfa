"""Look: an examination under way: whose chips are looked at, how, and what has been found so far.

All processes of a cluster look at once. What one has seen, `gathered` tells all, and all decide by
that; so they find the same, and try the same next.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ftmesh.distributed.process_group import Cluster
from ftmesh.distributed.wording import in_seconds
from ftmesh.health.findings import Finding
from ftmesh.health.probe_programs import Answer, Probes, ask
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import Coord, Link
from ftmesh.topology.topology import Topology

Progress = Callable[[int, int, str], None]

AGAIN = 2  # times that what seems slow is measured again


@dataclass
class Look:
    """What one process has at hand, and what all of them have found."""

    topology: Topology
    cluster: Cluster
    probes: Probes
    limit: float
    slow: float
    progress: Progress
    found: list[Finding] = field(default_factory=list)
    untried: list[Link] = field(default_factory=list)
    silent: set[Coord] = field(default_factory=set)
    stuck: set[int] = field(default_factory=set)  # processes with a program that never ends

    @property
    def within(self) -> str:
        """The limit in words."""
        return f"within {in_seconds(self.limit)}"

    # Whose ------------------------------------------------------------------------------------

    @cached_property
    def chip_of(self) -> dict[Any, Coord]:
        """The chip of each device."""
        coords, each = self.topology.coords, self.topology.devices_per_chip
        return {device: coords[i // each] for i, device in enumerate(self.topology.devices)}

    @cached_property
    def devices_of(self) -> dict[Coord, list[Any]]:
        """The devices of each chip."""
        found: dict[Coord, list[Any]] = {}
        for device, coord in self.chip_of.items():
            found.setdefault(coord, []).append(device)
        return found

    @cached_property
    def coord_at(self) -> dict[int, Coord]:
        """The chip at each place; places are what processes tell each other."""
        return {self.place(coord): coord for coord in self.topology.coords}

    def place(self, chip: Any) -> int:
        """The place of a chip, or of that of a device."""
        return self.topology.place(self.chip_of.get(chip, chip))

    def is_own(self, device: Any) -> bool:
        """Whether a device is this process's."""
        return self.cluster.is_alone or process_of(device) == self.cluster.process

    def processes_of(self, chips: Iterable[Coord]) -> set[int]:
        """The processes that have some chips."""
        if self.cluster.is_alone:
            return {self.cluster.process}
        return {process_of(device) for chip in chips for device in self.devices_of[chip]}

    # How --------------------------------------------------------------------------------------

    def repeated(
        self, program: Callable[[], Any], devices: Sequence[Any]
    ) -> dict[Any, list[Answer]]:
        """The answers of this process's devices to a program, several times; once if not of all."""
        own = sum(map(self.is_own, devices))
        seen: dict[Any, list[Answer]] = {}
        for _ in range(1 + self.probes.repeats):
            answers = ask(program, self.limit)
            for device, answer in answers.items():
                seen.setdefault(device, []).append(answer)
            if len(answers) < own:
                break
        return seen

    def gathered(self, rows: list[Any], what: str) -> list[Any]:
        """The rows of all processes, in the same order at each."""
        limit = self.cluster.limit + (self.probes.repeats + 2) * self.limit
        told = self.cluster.gather(rows, what, limit=limit)
        return [row for process in sorted(told) for row in told[process]]

    def add_silent(self, coord: Coord, detail: str) -> None:
        """Note that a chip is silent, once, and leave it out of what follows."""
        if coord not in self.silent:
            self.silent.add(coord)
            self.found.append(Finding("silent", (coord,), detail))


def usual(answers: Sequence[Answer]) -> float | None:
    """The median of the times, less the first, in which the program was compiled."""
    times = [answer.seconds for answer in answers[1:] or answers]
    return statistics.median(times) if times else None
