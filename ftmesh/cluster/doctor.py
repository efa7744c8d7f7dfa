"""Doctor: have every chip compute and every link carry what is known, and say who does not.

    findings = examine(Topology.from_devices(jax.devices()))
    print(findings)

Chips that do not even answer a single number are left out of what follows. The others compute all
at once. Links are tried each by itself, at most one at a time in a process, where a process has few
of them; else many at once, chips in disjoint pairs. A program that never ends holds its process: the
links that it would have tried next are left untried, and said so.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ftmesh.cluster.cluster import ALONE, Cluster
from ftmesh.cluster.findings import Finding, Findings, laggards, minority
from ftmesh.cluster.probes import (
    DTYPES,
    Answer,
    Probes,
    answer_program,
    ask,
    ask_all,
    link_program,
    work_program,
)
from ftmesh.cluster.sick import Sick
from ftmesh.cluster.words import in_seconds
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.mesh.cables import cables, turns
from ftmesh.mesh.devices import platform_of, process_of
from ftmesh.mesh.notation import Coord, Link, format_coord
from ftmesh.mesh.topology import Topology

Progress = Callable[[int, int, str], None]

_AGAIN = 2  # times that what seems slow is measured again
_CONTROLS = 8  # links that do not seem slow, measured beside those that do
_PARTS = (*(dtype.__name__ for dtype in DTYPES), "whole numbers")


def examine(
    topology: Topology,
    *,
    cluster: Cluster = ALONE,
    limit: float = 60.0,
    slow: float = 3.0,
    probes: Probes | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Findings:
    """Look at every live chip and link of a mesh; the same findings in all processes of `cluster`.

    One that does not answer within `limit` seconds, compiling included, is silent. One is slow if
    it takes more than `slow` times as long as the median of its peers, each time that it is tried.
    """
    topology = topology.wires
    if not topology.devices:
        raise TopologyError(f"{topology} has no devices to look at: use Topology.from_devices")
    if not limit > 0 or not slow > 1:
        raise ArgumentError(
            f"a limit of {limit} seconds and a factor of {slow}: give more than 0, and more than 1"
        )
    start = time.monotonic()
    cluster = cluster.on(topology)
    if probes is None:
        sick = Sick.from_environment(topology)
        probes = Probes.of(platform_of(topology.devices[0]), sick)
    return _Examination(topology, cluster, limit, slow, probes, progress).findings(start)


class _Examination:
    """One examination, as one process takes part in it; all decide by what all have seen."""

    def __init__(
        self,
        topology: Topology,
        cluster: Cluster,
        limit: float,
        slow: float,
        probes: Probes,
        progress: Progress,
    ) -> None:
        self.topology, self.cluster, self.probes = topology, cluster, probes
        self.limit, self.slow, self.progress = limit, slow, progress
        self.patience = cluster.limit + (probes.repeats + 2) * limit
        self.found: list[Finding] = []
        self.untried: list[Link] = []
        self.silent: set[Coord] = set()
        self.stuck: set[int] = set()  # processes that have a program which never ends
        per_chip = topology.devices_per_chip
        self.chip_of = {d: topology.coords[i // per_chip] for i, d in enumerate(topology.devices)}
        self.devices_of: dict[Coord, list[Any]] = {}
        for device, coord in self.chip_of.items():
            self.devices_of.setdefault(coord, []).append(device)
        self.own = [device for device in self.chip_of if self.is_own(device)]

    def is_own(self, device: Any) -> bool:
        return self.cluster.is_alone or process_of(device) == self.cluster.process

    def findings(self, start: float) -> Findings:
        every = cables(self.topology)
        self.progress(0, len(every) + 2, "who answers")
        self.call()
        self.progress(1, len(every) + 2, "what they compute")
        self.compute()
        times = self.carry(every)
        self.compare_links(times)
        self.progress(len(every) + 2, len(every) + 2, "")
        order = sorted(self.found, key=lambda one: (len(one.chips), one.chips, one.kind))
        seconds = time.monotonic() - start
        return Findings(self.topology, tuple(order), len(every), tuple(self.untried), seconds)

    # Chips ------------------------------------------------------------------------------------

    def call(self) -> None:
        """Find the chips that do not answer at all."""
        place = self.topology.place
        questions = {
            device: answer_program(self.probes, device, place(self.chip_of[device]))
            for device in self.own
        }
        answers = ask_all(
            {d: lambda ask=ask: float(ask()) for d, ask in questions.items()}, self.limit
        )  # type: ignore[misc]
        rows = [[place(self.chip_of[d]), str(answers.get(d, ""))] for d in self.own]
        for number, said in self.gathered(rows, "who answers"):
            if said != "9.0":
                self.add_silent(
                    self.coord_at(number), said or f"no answer within {in_seconds(self.limit)}"
                )

    def compute(self) -> None:
        """Find the chips that compute wrongly, or late."""
        rows = self.worked()
        for number, _, _, answers, _ in rows:
            if not answers:
                coord = self.coord_at(number)
                self.add_silent(coord, f"computed nothing within {in_seconds(self.limit)}")
                self.stuck |= self.processes_of([coord])
        self.compare_results([row for row in rows if row[3]])
        suspects = self.late(rows)
        for _ in range(_AGAIN):
            if suspects and not self.stuck:
                again = self.late(self.worked())
                suspects = {who: again[who] for who in suspects.keys() & again.keys()}
        for (number, _), (seconds, usual) in suspects.items():
            self.found.append(Finding.slow((self.coord_at(number),), seconds, usual))

    def worked(self) -> list[Any]:
        """What every device computed: its place, core, kind, results of each time, and seconds."""
        devices = tuple(d for d in self.own if self.chip_of[d] not in self.silent)
        seen: dict[Any, list[Answer]] = {}
        if devices:
            places = tuple(self.topology.place(self.chip_of[d]) for d in devices)
            seen = self.repeated(work_program(self.probes, devices, places), len(devices))
        rows = []
        for device in devices:
            coord, answers = self.chip_of[device], seen.get(device, [])
            results = [a.error or a.value.tolist() for a in answers]  # type: ignore[union-attr]
            core = self.devices_of[coord].index(device)
            row = [self.topology.place(coord), core, platform_of(device), results, _median(answers)]
            rows.append(row)
        return self.gathered(rows, "what chips compute")

    def late(self, rows: Sequence[Any]) -> dict[Any, tuple[float, float]]:
        """The devices that took long, and how long their peers did."""
        seconds = {(number, core): took for number, core, _, _, took in rows if took is not None}
        kinds = {(number, core): kind for number, core, kind, *_ in rows}
        found = laggards(seconds, kinds, slow=self.slow, floor=self.probes.floor)
        return {who: (seconds[who], usual) for who, usual in found.items()}

    def compare_results(self, rows: Sequence[Any]) -> None:
        expected = self.probes.whole_numbers()
        wrong: dict[int, Counter[str]] = {}
        tries = max((len(row[3]) for row in rows), default=0)
        for turn in range(tries):
            results = {(row[0], row[1]): row[3][turn] for row in rows if turn < len(row[3])}
            kinds = {(row[0], row[1]): row[2] for row in rows}
            for part, name in enumerate(_PARTS):
                for kind in set(kinds.values()):
                    said = {
                        who: result if isinstance(result, str) else result[part]
                        for who, result in results.items()
                        if kinds[who] == kind
                    }
                    off = {who for who, one in said.items() if part == 2 and one != expected}
                    for number in {who[0] for who in off.union(minority(said) if part < 2 else ())}:
                        wrong.setdefault(number, Counter())[name] += 1
        for number, parts in wrong.items():
            words = ", ".join(f"{name} {times} of {tries} times" for name, times in parts.items())
            self.found.append(Finding("wrong", (self.coord_at(number),), words))

    def add_silent(self, coord: Coord, detail: str) -> None:
        if coord not in self.silent:
            self.silent.add(coord)
            self.found.append(Finding("silent", (coord,), detail))

    # Links ------------------------------------------------------------------------------------

    def carry(self, every: Sequence[Link]) -> dict[Link, float]:
        """Find the links that carry nothing, or carry it wrongly; how long the others took."""
        some = [cable for cable in every if not self.silent.intersection(cable)]
        load = Counter(process for cable in some for process in self.processes_of(cable))
        alone = max(load.values(), default=0) <= self.probes.one_by_one
        times: dict[Link, float] = {}
        done = len(every) - len(some)
        for turn in turns(some, self.processes_of if alone else lambda cable: cable):
            self.progress(done + 2, len(every) + 2, "links")
            done += len(turn)
            tried = [cable for cable in turn if not self.stuck & self.processes_of(cable)]
            self.untried += [cable for cable in turn if cable not in tried]
            if tried:
                times |= self.judged(tried, alone)
        return times

    def judged(self, tried: Sequence[Link], alone: bool) -> dict[Link, float]:
        """Try some links; note what is found, and return how long those took that answered."""
        rows = self.gathered(self.exchanged(tried, alone), "what links carry")
        times: dict[Link, float] = {}
        for index, cable in enumerate(tried):
            own = [row for row in rows if row[0] == index]
            if any(row[4] is None for row in own):
                words = f"nothing came within {in_seconds(self.limit)}"
                self.found.append(Finding("silent", cable, words))
                self.stuck |= self.processes_of(cable if alone else self.topology.coords)
                continue
            times[cable] = max(row[4] for row in own)
            words = "; ".join(self.faults(cable, own))
            if words:
                self.found.append(Finding("wrong", cable, words))
        return times

    def faults(self, cable: Link, rows: Sequence[Any]) -> Iterable[str]:
        """What came wrong over a link, in each direction."""
        for end in (0, 1):
            count = sum(row[2] for row in rows if row[1] == end)
            back = sum(row[3] for row in rows if row[1] == end)
            way = f"{format_coord(cable[1 - end])} to {format_coord(cable[end])}"
            if count:
                yield f"{count} words came wrong from {way}"
            elif back and not any(row[2] for row in rows):
                yield f"{back} words came back wrong to {format_coord(cable[end])}"

    def exchanged(self, tried: Sequence[Link], alone: bool) -> list[Any]:
        """Of each link and end: words that came wrong, that came back wrong, and seconds."""
        rows: list[Any] = []
        for trial in [[cable] for cable in tried] if alone else [tried]:
            chips = sorted(set(sum(trial, ()))) if alone else [*self.topology.coords]
            chips = [chip for chip in chips if chip not in self.silent]
            devices = tuple(d for chip in chips for d in self.devices_of[chip])
            if not any(map(self.is_own, devices)):
                continue
            index = {device: i for i, device in enumerate(devices)}
            pairs = [
                (index[a], index[b])
                for cable in trial
                for a, b in zip(*(self.devices_of[end] for end in cable), strict=True)
            ]
            places = tuple(self.topology.place(self.chip_of[device]) for device in devices)
            program = link_program(self.probes, devices, places, tuple(pairs))
            seen = self.repeated(program, sum(map(self.is_own, devices)))
            for cable in trial:
                for end, other in ((0, 1), (1, 0)):
                    for device in filter(self.is_own, self.devices_of[cable[end]]):
                        ends = self.topology.place(cable[end]), self.topology.place(cable[other])
                        counts = self.counted(seen.get(device, []), *ends)
                        rows.append([tried.index(cable), end, *counts])
        return rows

    def counted(self, answers: list[Answer], place: int, other: int) -> list[Any]:
        wrong = [
            self.probes.num_wrong(place, other, a.value) if a.value is not None else (1, 1)
            for a in answers
        ]
        return (
            [*(max(each) for each in zip(*wrong, strict=True)), _median(answers)]
            if wrong
            else [0, 0, None]
        )

    def compare_links(self, times: dict[Link, float]) -> None:
        """Find slow links: what seems slow is measured again, each by itself beside some others."""
        reach = {cable: len(self.processes_of(cable)) for cable in times}
        options = {"slow": self.slow, "floor": self.probes.floor}
        suspects = laggards(times, reach, **options)
        for _ in range(_AGAIN):
            if not suspects or self.stuck:
                break
            others = [cable for cable in times if cable not in suspects]
            some = [*suspects, *others[:: max(1, len(others) // _CONTROLS)]]
            times = {}
            for turn in turns(some, self.processes_of):
                rows = self.gathered(self.exchanged(turn, alone=True), "slow links")
                for row in rows:
                    times[turn[row[0]]] = max(row[4] or self.limit, times.get(turn[row[0]], 0.0))
            suspects = laggards(times, reach, among=suspects, **options)
        for cable, usual in suspects.items():
            self.found.append(Finding.slow(cable, times[cable], usual))

    # Both -------------------------------------------------------------------------------------

    def repeated(self, program: Callable[[], Any], number: int) -> dict[Any, list[Answer]]:
        """The answers of a program's own devices, several times; once if not all answer."""
        seen: dict[Any, list[Answer]] = {}
        for _ in range(1 + self.probes.repeats):
            answers = ask(program, self.limit)
            for device, answer in answers.items():
                seen.setdefault(device, []).append(answer)
            if len(answers) < number:
                break
        return seen

    def gathered(self, rows: list[Any], what: str) -> list[Any]:
        told = self.cluster.gather(rows, what, limit=self.patience)
        return [row for process in sorted(told) for row in told[process]]

    def coord_at(self, place: int) -> Coord:
        return next(c for c in self.topology.coords if self.topology.place(c) == place)

    def processes_of(self, chips: Iterable[Coord]) -> set[int]:
        if self.cluster.is_alone:
            return {self.cluster.process}
        return {process_of(device) for chip in chips for device in self.devices_of[chip]}


def _median(answers: Sequence[Answer]) -> float | None:
    """The usual time, the first left out, in which the program was compiled."""
    times = [answer.seconds for answer in answers[1:] or answers]
    return statistics.median(times) if times else None
