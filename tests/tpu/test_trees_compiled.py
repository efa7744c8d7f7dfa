"""Trees compiled for damaged TPU slices."""

from importlib.metadata import version

import pytest

from ftmesh.tpu import compiler
from tests.support.more import more, more_case
from tests.support.reporting import run_json

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not compiler.has_libtpu(), reason="libtpu, the TPU compiler, exists for x86_64 Linux only"
    ),
]
HOLE = ("--failed", "2x2@2,2")
CHIPS_AND_LINKS = (
    "--failed", "1x1@3,3;1x1@9,12;1x1@14,2", "--failed-links", "5,5-6,5;10,10-10,11"
)  # fmt: skip


def compiled(name, algorithm, *options):
    """The report of the command for 100 MB, from a process of its own."""
    report = run_json("-m", "ftmesh", "compile", name, "--algorithm", algorithm, "--json", *options)
    assert report["accepted"], report["refusal"]
    return report


def libtpu_version():
    """As a tuple; before 0.0.51 what is sent from a v5p is copied too."""
    return tuple(map(int, version("libtpu").split(".")[:3]))


def all_cycles(report):
    """The cycles of rounds and of packing."""
    return report["cycles"] + report["packing"]["exposed"] + report["packing"]["hidden"]


@pytest.mark.parametrize(
    ("name", "options", "devices", "links"),
    [
        ("v6e:16x16", CHIPS_AND_LINKS, 253, 4),
        ("v4:4x4x8", ("--failed", "2x2x1@0,0,0"), 248, 6),
        ("v5p:4x4x8", ("--failed", "2x2x1@0,0,0"), 124, 6),
    ],
)
def test_all_links_of_a_chip_at_once(name, options, devices, links):
    report = compiled(name, "tree", *options)
    (trees,) = (loop for loop in report["loops"] if loop["name"] == "packed trees")
    assert report["num_devices"] == devices
    assert trees["in_flight"] == links
    assert trees["permutations"] == links
    assert not trees["synchronous"]
    assert report["temporary_ratio"] <= (1.1 if libtpu_version() >= (0, 0, 51) else 1.2)
    assert report["compile_seconds"] < 30


@pytest.mark.parametrize(
    ("name", "options"),
    [("v6e:16x16", HOLE), pytest.param("v3:32x32", ("--failed", "4x2@14,14"), marks=more)],
)
def test_programs_are_little_larger_than_those_of_rings(name, options):
    tree, row_pair = (compiled(name, algorithm, *options) for algorithm in ("tree", "row_pair"))
    assert tree["program_bytes"] <= 1.2 * row_pair["program_bytes"]
    assert tree["temporary_ratio"] <= row_pair["temporary_ratio"]
    assert all_cycles(tree) <= all_cycles(row_pair)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("v6e:16x16", CHIPS_AND_LINKS),
        more_case("v4:4x4x8", ("--failed", "2x2x1@0,0,0")),
        ("v5p:4x4x8", ("--failed", "2x2x1@0,0,0")),
    ],
)
def test_in_a_kernel(name, options):
    report = compiled(name, "tree", *options, "--executor", "pallas")
    assert report["loops"] == []  # of permutations
    assert report["temporary_ratio"] <= 1.1
    assert report["program_bytes"] < 2_500_000
