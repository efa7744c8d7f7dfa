"""docs/errors.md agrees with the source."""

import re
from pathlib import Path

from examples.bert import make_records
from examples.common.arguments import MAX_BATCH
from examples.common.reader import MAX_DAMAGED, MIN_SKIPPED
from examples.fuzz import running
from examples.resnet50 import augment, images
from ftmesh.algorithms import registry
from ftmesh.command_line import EXIT_STATUS_HELP
from ftmesh.cost import profile
from ftmesh.elastic import child_process
from ftmesh.planning import advise
from ftmesh.schedule.files import MAX_BYTES
from ftmesh.units import MAX_PAYLOAD_BYTES, format_bytes

TEXT = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()


def test_statuses_match_the_help():
    documented = dict(re.findall(r"^\| (\d+) \| (.*) \|$", TEXT, re.MULTILINE))
    assert {*documented} == {*re.findall(r"^  (\d+) ", EXIT_STATUS_HELP, re.MULTILINE)}
    for status, words in re.findall(r"^  (\d+) +(.*)$", EXIT_STATUS_HELP, re.MULTILINE):
        plain = documented[status].replace("`ftmesh doctor`, `ftmesh selftest`", "doctor, selftest")
        assert words in plain, status


def test_bounds():
    rows = dict(re.findall(r"^\| ([a-z].*) \| (.*) \|$", TEXT.split("## Bounds")[1], re.MULTILINE))
    del rows["what"]
    expected = {
        "chips in a plan": (f"{registry.MAX_RANKS:,}",),
        "a schedule file, unpacked": (format_bytes(round(MAX_BYTES, -8)),),
        "a payload": (f"{MAX_PAYLOAD_BYTES / 1e15:.0f} PB",),
        "a batch": (f"{MAX_BATCH:,}",),
        "damaged examples": (f"{MAX_DAMAGED:.0%}".replace("%", " %"), {10: "ten"}[MIN_SKIPPED]),
        "an image": (f"{augment.MAX_PIXELS // 10**6}", f"{images.MAX_FILE_BYTES // 10**6} MB"),
        "text for records": (
            f"{make_records.MAX_LINE:,}",
            f"{make_records.MAX_WORD:,}",
            format_bytes(round(make_records.MAX_TEXT_BYTES, -7)),
        ),
        "failures in `ftmesh advise`": (f"{advise.MAX_FAILURES:,}",),
        "an emulated pod": (f"{child_process.MAX_HOSTS}", f"{child_process.MAX_DEVICES:,}"),
        "a profile": (format_bytes(profile.MAX_FILE_BYTES), f"{profile.MAX_SUMS:,}"),
    }
    assert rows.keys() == expected.keys()
    for what, numbers in expected.items():
        for number in numbers:
            assert number in rows[what], (what, number)


def test_limits_of_the_fuzzer():
    limits = f"{running.CPU_SECONDS} s of a core, {running.WALL_SECONDS} s and 2.1 GB"
    assert limits in " ".join(TEXT.split())
    assert round(running.MAX_BYTES / 1e9, 1) == 2.1
