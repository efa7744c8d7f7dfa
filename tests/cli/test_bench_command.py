"""Timing the algorithms on emulated devices."""

import json

import pytest

from ftmesh.cli.bench import format_timings, run_benchmark
from ftmesh.cli.main import main
from ftmesh.testing import cpu_grid

pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.mark.slow
def test_times_every_algorithm_that_fits_and_psum():
    seen = []
    topology = cpu_grid("4x4", failed="2x2@0,0")
    timings = run_benchmark(
        topology, [256, 4096], repeats=1, progress=lambda *step: seen.append(step)
    )
    assert [t.algorithm for t in timings] == [
        "lax.psum", "row_pair", "ring", "flood", "tree"
    ] * 2  # fmt: skip
    assert [t.payload_bytes for t in timings] == [256] * 5 + [4096] * 5
    assert all(t.seconds > 0 for t in timings)
    assert timings[0].times_psum == timings[5].times_psum == 1
    assert timings[1].times_psum == pytest.approx(timings[1].seconds / timings[0].seconds)
    assert seen[0] == (0, 10, "lax.psum, 256 B")
    assert seen[-1] == (10, 10, "")
    assert format_timings(timings).splitlines()[1].startswith("256 B")


def test_the_command(capsys):
    assert main(["bench", "2x2", "--payloads", "64B", "--repeats", "1", "--json"]) == 0
    timings = json.loads(capsys.readouterr().out)
    assert [t["algorithm"] for t in timings] == [
        "lax.psum", "two_dim", "row_pair", "ring", "chain", "flood", "tree"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["bench", "--repeats", "0"], "argument --repeats: 0 is not from 1 to 1,000"),
        (["bench", "--payloads", "big"], "'big' is not a size"),
        (["bench", "4x4", "--failed", "9x9@0,0"], "is not inside"),
        (["bench", "64x64"], "on 4096 emulated devices would take about 524.3 GB of memory"),
        (
            ["bench", "64x64", "--payloads", "1kB"],
            "needs 4096 devices, and JAX has already created 64",
        ),
    ],
)
def test_bad_input(argv, says, capsys):
    try:
        status = main(argv)
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    assert says in capsys.readouterr().err
