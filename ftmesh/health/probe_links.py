"""Look at links: whether they carry patterns both ways, unchanged, and as quickly as others do.

Cables: the links of a mesh, both directions at once, in turns that share no chip.

>>> from ftmesh.topology.topology import Topology
>>> line = Topology.grid("4x1")
>>> turns(cables(line), lambda cable: cable)
((((0, 0), (1, 0)), ((2, 0), (3, 0))), (((1, 0), (2, 0)),))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ftmesh.health.examination import AGAIN, Look, usual
from ftmesh.health.findings import Finding, laggards
from ftmesh.health.probe_programs import Answer, link_program
from ftmesh.topology.notation import Link, format_coord
from ftmesh.topology.topology import Topology

_CONTROLS = 8  # links that do not seem slow, measured beside those that do


class _Carried(NamedTuple):
    """What came to one end of a link: one row of what is told. No seconds: nothing did."""

    which: int  # of the links of its turn
    end: int
    num_wrong: int  # words from the other end
    num_wrong_back: int  # words that had been there
    seconds: float | None


def carry(look: Look, every: Sequence[Link], progress: Callable[[int], None]) -> None:
    """Find the links that carry nothing, or carry it wrongly, or late.

    Each is tried by itself, one at a time in a process, where no process has many; else in a few
    programs, each with many pairs of chips.
    """
    some = [cable for cable in every if not look.silent.intersection(cable)]
    load = Counter(process for cable in some for process in look.processes_of(cable))
    alone = max(load.values(), default=0) <= look.probes.one_by_one
    times: dict[Link, float] = {}
    done = len(every) - len(some)
    for turn in turns(some, look.processes_of if alone else lambda cable: cable):
        progress(done)
        done += len(turn)
        tried = [cable for cable in turn if not look.stuck & look.processes_of(cable)]
        look.untried += [cable for cable in turn if cable not in tried]
        times |= _judged(look, tried, alone) if tried else {}
    _compare(look, times)


def _judged(look: Look, tried: Sequence[Link], alone: bool) -> dict[Link, float]:
    """Try some links; note what is found, and return how long those took that answered."""
    rows = _exchanged(look, tried, alone)
    silent = {tried[row.which] for row in rows if row.seconds is None}
    for cable in sorted(silent):
        is_sure = alone or len(silent) == 1
        words = f"nothing came {look.within}"
        if not is_sure:
            words += f", over this or another of {len(silent)} that were tried together"
        look.found.append(Finding("silent", cable, words, is_sure=is_sure))
        look.stuck |= look.processes_of(cable if alone else look.topology.coords)
    times: dict[Link, float] = {}
    for index, cable in enumerate(tried):
        if cable not in silent:
            own = [row for row in rows if row.which == index]
            times[cable] = max(row.seconds or 0.0 for row in own)
            words = "; ".join(_faults(cable, own))
            if words:
                look.found.append(Finding("wrong", cable, words))
    return times


def _faults(cable: Link, rows: Sequence[_Carried]) -> Iterator[str]:
    """What came wrong over a link, in each direction."""
    for end in (0, 1):
        here, there = format_coord(cable[end]), format_coord(cable[1 - end])
        count = sum(row.num_wrong for row in rows if row.end == end)
        back = sum(row.num_wrong_back for row in rows if row.end == end)
        if count:
            yield f"{count} word{'s' * (count > 1)} wrong from {there} to {here}"
        elif back and not any(row.num_wrong for row in rows):
            yield f"{back} word{'s' * (back > 1)} wrong on the way back to {here}"


def _exchanged(look: Look, tried: Sequence[Link], alone: bool) -> list[_Carried]:
    """Have links carry patterns, each in a program of its own or all in one."""
    rows: list[Any] = []
    for trial in [[cable] for cable in tried] if alone else [tried]:
        chips = chain.from_iterable(trial) if alone else look.topology.coords
        live = [chip for chip in chips if chip not in look.silent]
        devices = tuple(device for chip in live for device in look.devices_of[chip])
        if not any(map(look.is_own, devices)):
            continue
        index = {device: i for i, device in enumerate(devices)}
        pairs = tuple(
            (index[a], index[b])
            for cable in trial
            for a, b in zip(*(look.devices_of[end] for end in cable), strict=True)
        )
        places = tuple(map(look.place, devices))
        program = link_program(look.probes.among(places), devices, places, pairs)
        seen = look.repeated(program, devices)
        for cable in trial:
            for end in (0, 1):
                here, there = look.place(cable[end]), look.place(cable[1 - end])
                for device in filter(look.is_own, look.devices_of[cable[end]]):
                    came = _counted(look, seen.get(device, []), here, there)
                    rows.append([tried.index(cable), end, *came])
    return [_Carried(*row) for row in look.gathered(rows, "what links carry")]


def _counted(look: Look, answers: Sequence[Answer], here: int, there: int) -> list[Any]:
    """The most words that came wrong, and back wrong, of several times; and the usual time."""
    size = look.probes.pattern
    counts = [
        (size, size) if answer.value is None else look.probes.num_wrong(here, there, answer.value)
        for answer in answers
    ]
    there_and_back = [max(each) for each in zip(*counts, strict=True)] or [0, 0]
    return [*there_and_back, usual(answers)]


def _compare(look: Look, times: dict[Link, float]) -> None:
    """Find slow links: what seems slow is measured again, each by itself, beside some others."""
    reach = {cable: len(look.processes_of(cable)) for cable in times}
    options: dict[str, Any] = {"slow": look.slow, "floor": look.probes.floor}
    suspects = laggards(times, reach, **options)
    for _ in range(AGAIN):
        if not suspects or look.stuck:
            break
        others = [cable for cable in times if cable not in suspects]
        some = [*suspects, *others[:: max(1, len(others) // _CONTROLS)]]
        times = {}
        for turn in turns(some, look.processes_of):
            for row in _exchanged(look, turn, alone=True):
                cable = turn[row.which]
                times[cable] = max(times.get(cable, 0.0), row.seconds or look.limit)
        suspects = laggards(times, reach, among=suspects, **options)
    for cable, usual_seconds in suspects.items():
        look.found.append(Finding.slow(cable, times[cable], usual_seconds))


def cables(topology: Topology) -> tuple[Link, ...]:
    """Every cable between live chips once, its lower end first: by axis, even ones before odd."""

    def order(cable: Link) -> tuple[int, int, Link]:
        low, high = cable
        axis = next(i for i in range(len(low)) if low[i] != high[i])
        is_beside = high[axis] == low[axis] + 1
        start = low[axis] if is_beside else high[axis]  # of one over the edge
        return axis, start % 2, cable

    return tuple(sorted({(min(a, b), max(a, b)) for a, b in topology.links}, key=order))


def turns(
    some: Iterable[Link], needs: Callable[[Link], Iterable[Hashable]]
) -> tuple[tuple[Link, ...], ...]:
    """The cables in turns; those of a turn need nothing in common. Each goes into the first it can.

    Where a cable needs its two chips, a mesh whose sides are even takes two turns for each axis.
    """
    found: list[list[Link]] = []
    taken: list[set[Hashable]] = []
    for cable in some:
        own = set(needs(cable))
        turn = next((i for i, others in enumerate(taken) if not own & others), len(found))
        if turn == len(found):
            found.append([])
            taken.append(set())
        found[turn].append(cable)
        taken[turn] |= own
    return tuple(map(tuple, found))
