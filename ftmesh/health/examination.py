"""An examination: the mesh, the probes, and which chips and links are wrong, silent or slow.

All processes of a group test at the same time, share what they observed with `gather`, and draw
the same conclusions from it, so that they agree on what to test next.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from ftmesh.distributed.process_group import ProcessGroup
from ftmesh.health.probe_programs import DeviceResult, Probes, run_program
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import Coord, Link, format_coord, format_failed
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

K = TypeVar("K", bound=Hashable)
Kind = Literal["wrong", "silent", "slow"]
Progress = Callable[[int, int, str], None]

NUM_RETESTS = 2  # how often what seems slow is measured again
_MIN_PEERS = 2  # to compare a time with


@dataclass(frozen=True)
class Finding:
    """One unhealthy chip, or one unhealthy link between two chips."""

    kind: Kind
    chips: tuple[Coord, ...]  # the chip, or the two ends of the link
    detail: str  # what was observed
    seconds: float | None = None  # how long a slow one took
    usual: float | None = None  # the median time of its peers
    is_sure: bool = True  # False: it could also be another link that was tested with this one

    @staticmethod
    def slow(chips: tuple[Coord, ...], seconds: float, usual: float) -> Finding:
        """Build the finding for a slow chip or link."""
        detail = f"{format_time(seconds)}; others take {format_time(usual)}"
        return Finding("slow", chips, detail, seconds, usual)

    def __str__(self) -> str:
        noun = "chip" if len(self.chips) == 1 else "link"
        return f"{noun} {'-'.join(map(format_coord, self.chips))} is {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Findings:
    """The result of examining a mesh. As text: a line per finding, and ``--failed`` last.

    Attributes:
        entries: One `Finding` per unhealthy chip or link.
        num_links: How many links there are.
        untried: Links that could not be tested.
        seconds: How long the examination took.
    """

    topology: Topology
    entries: tuple[Finding, ...]
    num_links: int
    untried: tuple[Link, ...] = ()
    seconds: float = 0.0

    @property
    def is_healthy(self) -> bool:
        """True if every chip and link was tested and none is unhealthy."""
        return not self.entries and not self.untried

    def chips(self, *kinds: Kind) -> tuple[Coord, ...]:
        """The chips found to be of one of these kinds."""
        return tuple(sorted({entry.chips[0] for entry in self._select(1, kinds)}))

    def links(self, *kinds: Kind) -> tuple[Link, ...]:
        """The links found to be of one of these kinds, lower end first."""
        entries = self._select(2, kinds)
        return tuple(sorted({(entry.chips[0], entry.chips[1]) for entry in entries}))

    def _select(self, num_chips: int, kinds: tuple[Kind, ...]) -> list[Finding]:
        return [e for e in self.entries if len(e.chips) == num_chips and e.kind in kinds]

    @cached_property
    def _bad_links(self) -> set[Link]:
        """The links that are wrong or silent for sure."""
        entries = self._select(2, ("wrong", "silent"))
        return {(entry.chips[0], entry.chips[1]) for entry in entries if entry.is_sure}

    @cached_property
    def quarantined(self) -> frozenset[Coord]:
        """The chips to exclude: wrong or silent ones, and one end of every wrong or silent link.

        Of its two ends, the one with more such links, or else with fewer other links. Slow chips
        and uncertain findings do not exclude anything.
        """
        chips = set(self.chips("wrong", "silent"))
        remaining = {link for link in self._bad_links if not chips.intersection(link)}
        while remaining:
            num_bad = Counter(end for link in remaining for end in link)

            def badness(end: Coord, num_bad: Counter[Coord] = num_bad) -> tuple[int, int, Coord]:
                live = set(self.topology.neighbours(end)) - chips
                return num_bad[end], num_bad[end] - len(live), end

            chips.add(max(num_bad, key=badness))
            remaining = {link for link in remaining if not chips.intersection(link)}
        return frozenset(chips)

    @property
    def failed(self) -> str:
        """All chips to exclude, those excluded before included, as ``--failed`` takes them."""
        return format_failed(self.quarantined | self.topology.failed)

    @property
    def link_exclusions(self) -> dict[str, str] | None:
        """What to exclude instead to keep both ends of bad links; None if no link is bad.

        The keys are ``failed`` and ``failed_links``, as the arguments of `Topology.grid`.
        """
        chips = {*self.chips("wrong", "silent"), *self.topology.failed}
        bad_links = {(a, b) for a, b in self._bad_links if not chips & {a, b}}
        if not bad_links:
            return None
        links = sorted(bad_links | self.topology.failed_links)
        names = (f"{format_coord(a)}-{format_coord(b)}" for a, b in links)
        return {"failed": format_failed(chips), "failed_links": ";".join(names)}

    @property
    def damaged_topology(self) -> Topology:
        """The mesh with all wrong and silent chips and links marked failed, for a drawing."""
        mesh = self.topology.without_devices()
        failed = mesh.failed | set(self.chips("wrong", "silent"))
        if len(failed) == mesh.num_chips:
            return mesh
        links = mesh.failed_links | set(self.links("wrong", "silent"))
        return replace(mesh, failed=failed, failed_links=links)

    def to_json(self) -> dict[str, Any]:
        """Return the findings as values for `json.dumps`."""
        return {
            "mesh": self.topology.name,
            "live": self.topology.num_live,
            "links": self.num_links,
            "well": self.is_healthy,
            "found": [asdict(entry) for entry in self.entries],
            "untried": [[list(a), list(b)] for a, b in self.untried],
            "failed": self.failed,
            "links_alone": self.link_exclusions,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        if self.is_healthy:
            return f"all {self.topology.num_live} chips and {self.num_links} links are healthy"
        lines = [str(entry) for entry in self.entries]
        if self.untried:
            lines.append(
                f"{len(self.untried)} of {self.num_links} links were not tested, because something "
                "silent blocks their process: exclude it and run again"
            )
        if not all(entry.is_sure for entry in self.entries):
            lines.append("to find out which link it is, test each by itself: --one-by-one")
        exclusions = self.link_exclusions
        if exclusions:
            flags = {"failed": "--failed", "failed_links": "--failed-links"}
            options = (f"{flags[key]} {_quote(text)}" for key, text in exclusions.items() if text)
            lines.append(f"to keep both ends of a bad link: {' '.join(options)}; otherwise:")
        if self.quarantined:
            lines.append(f"--failed {_quote(self.failed)}")
        return "\n".join(lines)


def _quote(blocks: str) -> str:
    """Quote blocks for a shell."""
    return f"'{blocks}'" if ";" in blocks else blocks


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
