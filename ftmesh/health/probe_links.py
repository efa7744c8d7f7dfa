"""Tests links: do they carry patterns both ways, unchanged, and as fast as other links?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ftmesh.health.examination import NUM_RETESTS, Examination, find_slow
from ftmesh.health.findings import Finding
from ftmesh.health.probe_programs import DeviceResult, link_program, median_seconds
from ftmesh.topology.notation import Link, format_coord
from ftmesh.topology.topology import Topology

_NUM_CONTROLS = 8  # links that do not seem slow, measured again next to those that do


class _Received(NamedTuple):
    """What arrived at one end of a link; processes exchange these."""

    position: int  # of the link among those tested together
    end: int
    num_wrong: int  # words that came from the other end
    num_wrong_back: int  # own words that came back
    seconds: float | None  # None: nothing arrived


def check_links(exam: Examination, links: Sequence[Link], progress: Callable[[int], None]) -> None:
    """Find the links that carry nothing, or carry it wrongly or slowly.

    If no process has many links, each is tested by itself, one at a time in a process. Otherwise a
    few programs test many links each.
    """
    testable = [link for link in links if not exam.silent.intersection(link)]
    load = Counter(process for link in testable for process in exam.processes_of(link))
    one_by_one = max(load.values(), default=0) <= exam.probes.max_single_links
    times: dict[Link, float] = {}
    done = len(links) - len(testable)
    for batch in batches(testable, exam.processes_of if one_by_one else lambda link: link):
        progress(done)
        done += len(batch)
        tested = [link for link in batch if not exam.blocked & exam.processes_of(link)]
        exam.untried += [link for link in batch if link not in tested]
        times |= _test(exam, tested, one_by_one) if tested else {}
    _find_slow(exam, times)


def undirected_links(topology: Topology) -> tuple[Link, ...]:
    """Every link between live chips once, lower end first: by axis, even ones before odd."""

    def order(link: Link) -> tuple[int, int, Link]:
        low, high = link
        axis = next(i for i in range(len(low)) if low[i] != high[i])
        wraps = high[axis] != low[axis] + 1
        start = high[axis] if wraps else low[axis]
        return axis, start % 2, link

    return tuple(sorted({(min(a, b), max(a, b)) for a, b in topology.links}, key=order))


def batches(
    links: Iterable[Link], resources: Callable[[Link], Iterable[Hashable]]
) -> tuple[tuple[Link, ...], ...]:
    """Group links so that no two links of a batch share a resource, each in the first that fits.

    If the resources of a link are its two chips, a mesh with even sides takes two batches per axis.

    >>> batches(undirected_links(Topology.grid("4x1")), lambda link: link)
    ((((0, 0), (1, 0)), ((2, 0), (3, 0))), (((1, 0), (2, 0)),))
    """
    batched: list[list[Link]] = []
    taken: list[set[Hashable]] = []
    for link in links:
        needed = set(resources(link))
        index = next((i for i, used in enumerate(taken) if not needed & used), len(batched))
        if index == len(batched):
            batched.append([])
            taken.append(set())
        batched[index].append(link)
        taken[index] |= needed
    return tuple(map(tuple, batched))


def _test(exam: Examination, links: Sequence[Link], one_by_one: bool) -> dict[Link, float]:
    """Test links, record silent and wrong ones, and return the times of the others."""
    rows = _exchange(exam, links, one_by_one)
    silent = {links[row.position] for row in rows if row.seconds is None}
    for link in sorted(silent):
        is_sure = one_by_one or len(silent) == 1
        detail = f"no data arrived within {exam.timeout:g} s"
        if not is_sure:
            detail += f", over this link or another of the {len(silent)} tested together"
        exam.findings.append(Finding("silent", link, detail, is_sure=is_sure))
        exam.blocked |= exam.processes_of(link if one_by_one else exam.topology.coords)
    times: dict[Link, float] = {}
    for position, link in enumerate(links):
        if link not in silent:
            received = [row for row in rows if row.position == position]
            times[link] = max(row.seconds or 0.0 for row in received)
            detail = "; ".join(_wrong_words(link, received))
            if detail:
                exam.findings.append(Finding("wrong", link, detail))
    return times


def _wrong_words(link: Link, rows: Sequence[_Received]) -> Iterator[str]:
    """Describe what arrived wrong over a link, in each direction."""
    for end in (0, 1):
        here, there = format_coord(link[end]), format_coord(link[1 - end])
        count = sum(row.num_wrong for row in rows if row.end == end)
        back = sum(row.num_wrong_back for row in rows if row.end == end)
        if count:
            yield f"{count} wrong word{'s' * (count > 1)} from {there} to {here}"
        elif back and not any(row.num_wrong for row in rows):
            yield f"{back} wrong word{'s' * (back > 1)} on the way back to {here}"


def _exchange(exam: Examination, links: Sequence[Link], one_by_one: bool) -> list[_Received]:
    """Send patterns over links, in one program for each or one for all."""
    rows: list[Any] = []
    for group in [[link] for link in links] if one_by_one else [links]:
        chips = chain.from_iterable(group) if one_by_one else exam.topology.coords
        live = [chip for chip in chips if chip not in exam.silent]
        devices = tuple(device for chip in live for device in exam.devices_of[chip])
        if not any(map(exam.is_local, devices)):
            continue
        position_of = {device: i for i, device in enumerate(devices)}
        pairs = tuple(
            (position_of[a], position_of[b])
            for link in group
            for a, b in zip(*(exam.devices_of[end] for end in link), strict=True)
        )
        indices = tuple(map(exam.device_index, devices))
        program = link_program(exam.probes.restricted_to(indices), devices, indices, pairs)
        results = exam.run_repeatedly(program, devices)
        for link in group:
            for end in (0, 1):
                here, there = map(exam.topology.grid_index, (link[end], link[1 - end]))
                for device in filter(exam.is_local, exam.devices_of[link[end]]):
                    received = _count_wrong(exam, results.get(device, []), here, there)
                    rows.append([links.index(link), end, *received])
    return [_Received(*row) for row in exam.gather(rows, "what links carry")]


def _count_wrong(
    exam: Examination, results: Sequence[DeviceResult], here: int, there: int
) -> list[Any]:
    """The most words that arrived wrong, and came back wrong, in a run; and the median time."""
    size = exam.probes.pattern_words
    counts = [
        (size, size) if result.value is None else exam.probes.count_wrong(here, there, result.value)
        for result in results
    ]
    most = [max(column) for column in zip(*counts, strict=True)] or [0, 0]
    return [*most, median_seconds(results)]


def _find_slow(exam: Examination, times: dict[Link, float]) -> None:
    """Find slow links: those that seem slow are measured again by themselves, next to others."""
    num_processes = {link: len(exam.processes_of(link)) for link in times}
    find = partial(find_slow, kinds=num_processes, slow=exam.slow, margin=exam.probes.slow_margin)
    suspects = find(times)
    for _ in range(NUM_RETESTS):
        if not suspects or exam.blocked:
            break
        others = [link for link in times if link not in suspects]
        controls = others[:: max(1, len(others) // _NUM_CONTROLS)]
        times = {}
        for batch in batches([*suspects, *controls], exam.processes_of):
            for row in _exchange(exam, batch, one_by_one=True):
                link = batch[row.position]
                times[link] = max(times.get(link, 0.0), row.seconds or exam.timeout)
        suspects = find(times, among=suspects)
    for link, usual in suspects.items():
        exam.findings.append(Finding.slow(link, times[link], usual))
