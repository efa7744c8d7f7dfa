"""Tests chips: do they respond, compute the right results, and take no longer than others?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ftmesh.health.examination import NUM_RETESTS, Examination, find_slow
from ftmesh.health.findings import Finding
from ftmesh.health.probe_programs import (
    DTYPES,
    DeviceResult,
    call_all,
    compute_program,
    median_seconds,
    response_program,
)
from ftmesh.health.replica_check import find_outliers
from ftmesh.topology.devices import platform_of

_INTEGERS = "integers"
_PARTS = (*(dtype.__name__ for dtype in DTYPES), _INTEGERS)  # of what `Probes.compute` returns


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
    slow = _find_slow(exam, rows)
    for _ in range(NUM_RETESTS):
        if slow and not exam.blocked:
            again = _find_slow(exam, _compute(exam))
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


def _find_slow(
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
