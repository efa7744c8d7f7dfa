"""Look at chips: whether they answer, compute what the others do, and take no longer over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ftmesh.health.examination import AGAIN, Look, usual
from ftmesh.health.findings import Finding, laggards, minority
from ftmesh.health.probe_programs import DTYPES, Answer, answer_program, ask_all, work_program
from ftmesh.topology.devices import platform_of

_WHOLE = "whole numbers"
_PARTS = (*(dtype.__name__ for dtype in DTYPES), _WHOLE)  # of `Probes.work`


class _Worked(NamedTuple):
    """What a device computed, each time, or the words of its error; one row of what is told."""

    place: int
    core: int
    kind: str
    results: list[Any]
    seconds: float | None

    @property
    def who(self) -> tuple[int, int]:
        return self.place, self.core


def call(look: Look) -> None:
    """Find the chips that do not answer at all, each by a program of its own."""
    programs = {
        device: answer_program(look.probes.among([place]), device, place)
        for device in filter(look.is_own, look.chip_of)
        for place in [look.place(device)]
    }
    answers = ask_all(programs, look.limit)
    rows = [[look.place(device), _words(answers.get(device))] for device in programs]
    for place, error in look.gathered(rows, "who answers"):
        if error is not None:
            look.add_silent(look.coord_at[place], error or f"no answer {look.within}")


def _words(answer: Any) -> str | None:
    """None of an answer that is right, and the words of an error."""
    if answer is None:
        return ""
    return None if answer == 9.0 else f"answers 3 x 3 with {answer}"


def compute(look: Look) -> None:
    """Find the chips that compute wrongly, or late."""
    rows = _worked(look)
    for row in rows:
        if not row.results:
            coord = look.coord_at[row.place]
            look.add_silent(coord, f"answers, and computed nothing {look.within}")
            look.stuck |= look.processes_of([coord])
    _compare(look, [row for row in rows if row.results])
    late = _late(look, rows)
    for _ in range(AGAIN):
        if late and not look.stuck:
            again = _late(look, _worked(look))
            late = {who: again[who] for who in late.keys() & again.keys()}
    for place, took in {place: took for (place, _), took in late.items()}.items():
        look.found.append(Finding.slow((look.coord_at[place],), *took))


def _worked(look: Look) -> list[_Worked]:
    """Have every device compute."""
    own = filter(look.is_own, look.chip_of)
    devices = tuple(device for device in own if look.chip_of[device] not in look.silent)
    places = tuple(map(look.place, devices))
    seen: dict[Any, list[Answer]] = {}
    if devices:
        seen = look.repeated(work_program(look.probes.among(places), devices, places), devices)
    rows = []
    for device, place in zip(devices, places, strict=True):
        answers = seen.get(device, [])
        results = [answer.error or answer.numbers for answer in answers]
        core = look.devices_of[look.chip_of[device]].index(device)
        rows.append([place, core, platform_of(device), results, usual(answers)])
    return [_Worked(*row) for row in look.gathered(rows, "what chips compute")]


def _late(look: Look, rows: Sequence[_Worked]) -> dict[tuple[int, int], tuple[float, float]]:
    """The devices that took long, how long, and how long their peers did."""
    seconds = {row.who: row.seconds for row in rows if row.seconds is not None}
    kinds = {row.who: row.kind for row in rows}
    found = laggards(seconds, kinds, slow=look.slow, floor=look.probes.floor)
    return {who: (seconds[who], usual) for who, usual in found.items()}


def _compare(look: Look, rows: Sequence[_Worked]) -> None:
    """Find the chips whose results are not those of most of their kind, or not NumPy's."""
    wrong: dict[int, Counter[str]] = {}
    for place, part in _differences(look, rows):
        wrong.setdefault(place, Counter())[part] += 1
    tries = max((len(row.results) for row in rows), default=0)
    for place, parts in wrong.items():
        words = ", ".join(f"{part} {count} of {tries} times" for part, count in parts.items())
        look.found.append(Finding("wrong", (look.coord_at[place],), words))


def _differences(look: Look, rows: Sequence[_Worked]) -> Iterator[tuple[int, str]]:
    """The places and parts of results that differ, each as often as it does."""
    expected = look.probes.whole_numbers()
    for turn in range(max((len(row.results) for row in rows), default=0)):
        given = [row for row in rows if turn < len(row.results)]
        for index, part in enumerate(_PARTS):
            said = {
                row.who: row.results[turn]
                if isinstance(row.results[turn], str)
                else row.results[turn][index]
                for row in given
            }
            if part == _WHOLE:
                off = [who for who, number in said.items() if number != expected]
            else:
                kinds = dict.fromkeys(row.kind for row in given)
                alike = [[row.who for row in given if row.kind == kind] for kind in kinds]
                off = [who for some in alike for who in minority({who: said[who] for who in some})]
            yield from ((place, part) for place in dict.fromkeys(place for place, _ in off))
