"""Examines a mesh: every chip computes a known result, every link carries a known pattern.

Chips that do not respond at all are left out of the later tests. A program that never ends blocks
its process; the links that process would have tested next are reported as untried.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ftmesh.distributed.process_group import SINGLE_PROCESS, ProcessGroup
from ftmesh.errors import ArgumentError, TopologyError
from ftmesh.health.examination import (
    NUM_RETESTS,
    Examination,
    Finding,
    Findings,
    Progress,
    find_slow,
)
from ftmesh.health.probe_programs import (
    DTYPES,
    DeviceResult,
    Probes,
    call_all,
    compute_program,
    link_program,
    median_seconds,
    response_program,
)
from ftmesh.health.replica_check import find_outliers
from ftmesh.topology.devices import platform_of
from ftmesh.topology.notation import Link, format_coord
from ftmesh.topology.topology import Topology

TIMEOUT = 60.0  # seconds for a chip or a link to respond
_NUM_CONTROLS = 8  # links that do not seem slow, measured again next to those that do
_INTEGERS = "integers"
_PARTS = (*(dtype.__name__ for dtype in DTYPES), _INTEGERS)  # of what `Probes.compute` returns


def examine(
    topology: Topology,
    *,
    group: ProcessGroup = SINGLE_PROCESS,
    timeout: float = TIMEOUT,
    slow: float = 3.0,
    probes: Probes | None = None,
    progress: Progress = lambda done, total, what: None,
) -> Findings:
    """Test every live chip and link of a mesh with devices.

    Args:
        topology: The mesh.
        group: The processes that take part. All must call this, and all get the same findings.
        timeout: What does not respond within this many seconds, compilation excluded, is silent.
        slow: What takes more than `slow` times the median of its peers, in every repetition, is
            slow.
        probes: How much to compute and transfer; by default what suits the platform.
        progress: Called with the steps done, the total, and what comes next.

    Raises:
        TopologyError: The topology has no devices.
        ArgumentError: `timeout` is not positive, or `slow` is not more than 1.
    """
    topology = topology.physical
    if not topology.devices:
        raise TopologyError(f"{topology} has no devices to test: use Topology.from_devices")
    if not timeout > 0 or not slow > 1:
        rule = "give a timeout of more than 0 seconds and a factor of more than 1"
        raise ArgumentError(f"timeout={timeout:g} and slow={slow:g}: {rule}")
    start = time.monotonic()
    if probes is None:
        probes = Probes.for_topology(topology)
    exam = Examination(topology, group.for_topology(topology), probes, timeout, slow)
    links = undirected_links(topology)
    num_steps = len(links) + 2
    progress(0, num_steps, "testing which chips respond")
    check_responses(exam)
    progress(1, num_steps, "testing what chips compute")
    check_results(exam)
    check_links(exam, links, lambda done: progress(done + 2, num_steps, "testing links"))
    progress(num_steps, num_steps, "")
    entries = sorted(exam.findings, key=lambda entry: (len(entry.chips), entry.chips, entry.kind))
    seconds = time.monotonic() - start
    return Findings(topology, tuple(entries), len(links), tuple(exam.untried), seconds)


# Chips: do they respond, compute the right results, and take no longer than others? -------------


class _Computed(NamedTuple):
    """What a device computed in every run, or its error messages; processes exchange these."""

    chip_index: int  # in the grid
    core: int
    platform: str
    results: list[Any]
    seconds: float | None

    @property
    def device(self) -> tuple[int, int]:
        return self.chip_index, self.core


def check_responses(exam: Examination) -> None:
    """Find the chips that do not respond at all, with a program of its own for every device."""
    programs = {
        device: response_program(exam.probes.restricted_to([index]), device, index)
        for device in filter(exam.is_local, exam.chip_of)
        for index in [exam.device_index(device)]
    }
    responses = call_all(programs, exam.timeout)
    rows = [[exam.device_index(device), _problem(responses.get(device))] for device in programs]
    for index, problem in exam.gather(rows, "which chips respond"):
        if problem is not None:
            exam.add_silent(exam.coord_at[index], problem or f"no answer within {exam.timeout:g} s")


def _problem(response: Any) -> str | None:
    """None if the response is right, "" if there is none, else what it was."""
    if response is None:
        return ""
    return None if response == 9.0 else f"answers 3 x 3 with {response}"


def check_results(exam: Examination) -> None:
    """Find the chips that compute wrong results, or compute slowly."""
    rows = _compute(exam)
    for row in rows:
        if not row.results:
            coord = exam.coord_at[row.chip_index]
            exam.add_silent(coord, f"responds, but computed nothing within {exam.timeout:g} s")
            exam.blocked |= exam.processes_of([coord])
    _find_wrong(exam, [row for row in rows if row.results])
    slow = _slow_devices(exam, rows)
    for _ in range(NUM_RETESTS):
        if slow and not exam.blocked:
            again = _slow_devices(exam, _compute(exam))
            slow = {device: again[device] for device in slow.keys() & again.keys()}
    for index, times in {index: times for (index, _), times in slow.items()}.items():
        exam.findings.append(Finding.slow((exam.coord_at[index],), *times))


def _compute(exam: Examination) -> list[_Computed]:
    responsive = (device for device, chip in exam.chip_of.items() if chip not in exam.silent)
    devices = tuple(filter(exam.is_local, responsive))
    indices = tuple(map(exam.device_index, devices))
    results: dict[Any, list[DeviceResult]] = {}
    if devices:
        program = compute_program(exam.probes.restricted_to(indices), devices, indices)
        results = exam.run_repeatedly(program, devices)
    rows = []
    for device, index in zip(devices, indices, strict=True):
        runs = results.get(device, [])
        values = [run.error if run.value is None else run.value.tolist() for run in runs]
        core = exam.devices_of[exam.chip_of[device]].index(device)
        rows.append([index, core, platform_of(device), values, median_seconds(runs)])
    return [_Computed(*row) for row in exam.gather(rows, "what chips compute")]


def _slow_devices(
    exam: Examination, rows: Sequence[_Computed]
) -> dict[tuple[int, int], tuple[float, float]]:
    """The slow devices, with their time and the median of their peers."""
    seconds = {row.device: row.seconds for row in rows if row.seconds is not None}
    platforms = {row.device: row.platform for row in rows}
    slow = find_slow(seconds, platforms, slow=exam.slow, margin=exam.probes.slow_margin)
    return {device: (seconds[device], usual) for device, usual in slow.items()}


def _find_wrong(exam: Examination, rows: Sequence[_Computed]) -> None:
    """Find the chips whose results differ from most of their kind, or from NumPy's."""
    wrong: dict[int, Counter[str]] = {}
    for index, part in _differences(exam, rows):
        wrong.setdefault(index, Counter())[part] += 1
    num_runs = max((len(row.results) for row in rows), default=0)
    for index, parts in wrong.items():
        detail = ", ".join(f"{part} in {n} of {num_runs} runs" for part, n in parts.items())
        exam.findings.append(Finding("wrong", (exam.coord_at[index],), detail))


def _differences(exam: Examination, rows: Sequence[_Computed]) -> Iterator[tuple[int, str]]:
    """The chips and the parts of their results that are wrong, once per run."""
    expected = exam.probes.expected_integers()
    for run in range(max((len(row.results) for row in rows), default=0)):
        present = [row for row in rows if run < len(row.results)]
        for position, part in enumerate(_PARTS):
            values = {
                row.device: row.results[run]
                if isinstance(row.results[run], str)
                else row.results[run][position]
                for row in present
            }
            if part == _INTEGERS:
                wrong = [device for device, value in values.items() if value != expected]
            else:
                wrong = []
                for platform in dict.fromkeys(row.platform for row in present):
                    peers = [row.device for row in present if row.platform == platform]
                    wrong += find_outliers({device: values[device] for device in peers})
            yield from ((index, part) for index in dict.fromkeys(index for index, _ in wrong))


# Links: do they carry patterns both ways, unchanged, and as fast as other links? ----------------


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
    _find_slow_links(exam, times)


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


def _find_slow_links(exam: Examination, times: dict[Link, float]) -> None:
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
