"""An examination in progress: the mesh, the probes, and the findings so far.

All processes of a group test at the same time, share what they observed with `gather`, and draw
the same conclusions from it, so that they agree on what to test next.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from ftmesh.distributed.process_group import ProcessGroup
from ftmesh.health.findings import Finding
from ftmesh.health.probe_programs import DeviceResult, Probes, run_program
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import Coord, Link
from ftmesh.topology.topology import Topology

K = TypeVar("K", bound=Hashable)
Progress = Callable[[int, int, str], None]

NUM_RETESTS = 2  # how often what seems slow is measured again
_MIN_PEERS = 2  # to compare a time with


@dataclass
class Examination:
    """What one process works with, and the findings all processes agree on."""

    topology: Topology
    group: ProcessGroup
    probes: Probes
    timeout: float
    slow: float
    findings: list[Finding] = field(default_factory=list)
    untried: list[Link] = field(default_factory=list)
    silent: set[Coord] = field(default_factory=set)
    blocked: set[int] = field(default_factory=set)  # processes with a program that never ends

    @cached_property
    def chip_of(self) -> dict[Any, Coord]:
        """The chip of each device."""
        coords, per_chip = self.topology.coords, self.topology.devices_per_chip
        return {device: coords[i // per_chip] for i, device in enumerate(self.topology.devices)}

    @cached_property
    def devices_of(self) -> dict[Coord, list[Any]]:
        """The devices of each chip."""
        devices: dict[Coord, list[Any]] = {}
        for device, coord in self.chip_of.items():
            devices.setdefault(coord, []).append(device)
        return devices

    @cached_property
    def coord_at(self) -> dict[int, Coord]:
        """The chip at each grid index; processes exchange indices."""
        return {self.topology.grid_index(coord): coord for coord in self.topology.coords}

    def device_index(self, device: Any) -> int:
        """The grid index of a device's chip."""
        return self.topology.grid_index(self.chip_of[device])

    def is_local(self, device: Any) -> bool:
        """True if the device belongs to this process."""
        return self.group.is_single_process or process_of(device) == self.group.process

    def processes_of(self, chips: Iterable[Coord]) -> set[int]:
        """The processes that own these chips."""
        if self.group.is_single_process:
            return {self.group.process}
        return {process_of(device) for chip in chips for device in self.devices_of[chip]}

    def run_repeatedly(
        self, program: Callable[[], Any], devices: Sequence[Any]
    ) -> dict[Any, list[DeviceResult]]:
        """Run a program several times, or until not all devices of this process finish."""
        num_local = sum(map(self.is_local, devices))
        results: dict[Any, list[DeviceResult]] = {}
        for _ in range(1 + self.probes.repeats):
            run = run_program(program, self.timeout)
            for device, result in run.items():
                results.setdefault(device, []).append(result)
            if len(run) < num_local:
                break
        return results

    def gather(self, rows: list[Any], what: str) -> list[Any]:
        """Return the rows of all processes, in the same order everywhere."""
        timeout = self.group.timeout + (self.probes.repeats + 2) * self.timeout
        rows_by_process = self.group.gather(rows, what, timeout=timeout)
        return [row for process in sorted(rows_by_process) for row in rows_by_process[process]]

    def add_silent(self, coord: Coord, detail: str) -> None:
        """Record a silent chip, once, and leave it out of later tests."""
        if coord not in self.silent:
            self.silent.add(coord)
            self.findings.append(Finding("silent", (coord,), detail))


def find_slow(
    seconds: Mapping[K, float],
    kinds: Mapping[K, Hashable],
    *,
    slow: float,
    margin: float,
    among: Iterable[K] | None = None,
) -> dict[K, float]:
    """Return the keys that took much longer than their peers, with the median of those peers.

    The peers of a key are the other keys of its kind that are not in `among`, if that is given:
    then only its keys are judged. A key with fewer than two peers is not judged. A slow one takes
    more than `slow` times the median of its peers, and at least `margin` seconds more.

    >>> find_slow({"a": 1.0, "b": 1.1, "c": 4.0}, dict.fromkeys("abc"), slow=3, margin=0.1)
    {'c': 1.05}
    """
    judged = set(seconds if among is None else among)
    outliers = {}
    for key in judged & set(seconds):
        others = [other for other in seconds if other != key and kinds[other] == kinds[key]]
        peers = [seconds[other] for other in others if among is None or other not in judged]
        if len(peers) >= _MIN_PEERS:
            usual = statistics.median(peers)
            if seconds[key] > max(slow * usual, usual + margin):
                outliers[key] = usual
    return outliers
