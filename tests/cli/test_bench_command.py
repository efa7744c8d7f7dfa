"""Timing and checking sums on emulated devices."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ftmesh
from ftmesh.cli import bench
from ftmesh.cli.main import main
from ftmesh.distributed.process_group import ProcessGroup
from ftmesh.elastic.local_pod import run_pod
from ftmesh.errors import VerificationError
from ftmesh.selftest.timing import (
    Contender,
    describe_devices,
    find_contenders,
    format_timings,
    rank_values,
    take_turns,
    time_sums,
)
from ftmesh.testing import cpu_grid
from tests.support.more import more

ROOT = Path(__file__).parent.parent.parent
QUICK = ["--payloads", "64B", "--repeats", "1"]
pytestmark = pytest.mark.usefixtures("quick_compiler")


def no_progress(*step):
    pass


@pytest.mark.slow
def test_times_every_algorithm_that_fits_and_psum():
    seen = []
    contenders, left_out = find_contenders(cpu_grid("4x4", failed="2x2@0,0"), (), {}, False)
    timings = time_sums(
        contenders, [256, 4096], repeats=1, progress=lambda *step: seen.append(step)
    )
    assert [(t.contender, t.executor) for t in timings] == [
        ("lax.psum", "xla"), ("lax.psum on the ring", "xla"), ("row_pair", "ppermute"),
        ("ring", "ppermute"), ("flood", "ppermute"), ("tree", "ppermute"),
    ] * 2  # fmt: skip
    assert list(left_out) == ["two_dim", "multi_ring", "chain"]
    assert [t.payload_bytes for t in timings] == [256] * 6 + [4096] * 6
    assert all(0 < t.low_s <= t.median_s <= t.high_s for t in timings)
    assert timings[0].times_psum == timings[6].times_psum == 1
    assert timings[1].times_psum == pytest.approx(timings[1].median_s / timings[0].median_s)
    assert seen[0] == (0, 14, "checking lax.psum, 256 B")
    assert seen[6] == (6, 14, "timing 256 B")
    assert seen[-1] == (14, 14, "")
    assert format_timings(timings).splitlines()[1].startswith("256 B")


def test_json(capsys):
    argv = ["bench", "2x2", "--failed", "1x1@1,1", "--algorithms", "chain,tree", *QUICK, "--json"]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    timings = printed.pop("timings")
    left_out = printed.pop("left_out")
    assert printed == {
        "devices": "3 of 4 emulated CPU devices",
        "device_kind": jax.devices()[0].device_kind,
        "num_devices": 3,
        "num_processes": 1,
        "mesh": "2x2",
        "wrap": [False, False],
        "failed": [[1, 1]],
        "live": 3,
        "jax_version": jax.__version__,
        "repeats": 1,
    }
    assert [t["contender"] for t in timings if "lax" not in t["contender"]] == ["chain", "tree"]
    assert "lax.psum on the ring" in left_out  # whose third step would cross the failed chip
    assert timings[0].keys() == {
        "contender", "executor", "payload_bytes", "sums_per_sample", "median_s", "low_s", "high_s",
        "times_psum",
    }  # fmt: skip


def test_without_a_mesh_and_accelerators_it_emulates(capsys):
    assert main(["bench", "--algorithms", "ring", *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("12 of 16 emulated CPU devices, mesh 4x4 less 2x2@0,0")
    assert [line[17:37].strip() for line in lines[2:5]] == [
        "lax.psum", "lax.psum on the ring", "ring"
    ]  # fmt: skip
    assert lines[-1] == "emulated devices share this machine's cores: compare ratios only"


def test_what_is_emulated_lacks_the_chips_of_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("FTMESH_FAILED", "2x2@2,2")
    assert main(["bench", "--algorithms", "ring", *QUICK]) == 0
    assert ", mesh 4x4 less 2x2@2,2, " in capsys.readouterr().out


def test_one_device_has_nothing_to_exchange_but_runs(capsys):
    assert main(["bench", "1x1", *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 emulated CPU device, mesh 1x1")
    assert lines[2].split()[:4] == ["64", "B", "4", "lax.psum"]
    assert "one device has nothing to exchange: this times a program without a network" in lines


def test_compares_two_saved_schedules(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    topology = ftmesh.Topology.grid("4x2", failed="2x2@0,0")
    for name in ("ring", "tree"):
        ftmesh.save(ftmesh.plan(topology, name).schedule, f"{name}.npz")
    assert main(["bench", "--compare", "ring.npz", "tree.npz", *QUICK]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("4 of 8 emulated CPU devices, mesh 4x2 less 2x2@0,0")
    assert [line[17:37].strip() for line in lines[4:6]] == ["ring.npz", "tree.npz"]
    assert lines[6].startswith("64 B: ring.npz takes ")
    assert lines[6].endswith(" times as long as tree.npz")

    ftmesh.save(ftmesh.plan(ftmesh.Topology.grid("4x2"), "ring").schedule, "other.npz")
    assert main(["bench", "--compare", "ring.npz", "other.npz", *QUICK]) == 2
    assert "the schedule is for 4x2, and not for 4x2 less 2x2@0,0" in capsys.readouterr().err

    tiles = ftmesh.TiledTopology.from_topology(ftmesh.Topology.grid("4x2"), "2x1")
    ftmesh.save(ftmesh.plan(tiles, "tree").schedule, "tiles.npz")
    assert main(["bench", "--compare", "tiles.npz", "ring.npz", *QUICK]) == 2
    assert "tiles.npz is for tiles, which bench does not time" in capsys.readouterr().err


def wrong_at(rank, element, value):
    """A sum that is wrong in one element at one rank."""

    def psum(x, axis_name):
        total = jax.lax.psum(x, axis_name)
        return jnp.where(jax.lax.axis_index(axis_name) == rank, total.at[element].set(value), total)

    return psum


def one_rank_twice(x, axis_name):
    """A sum in which rank 1 counts twice and rank 2 not at all."""
    rank = jax.lax.axis_index(axis_name)
    return jax.lax.psum(x * jnp.where(rank == 1, 2, jnp.where(rank == 2, 0, 1)), axis_name)


@pytest.mark.parametrize(
    ("psum", "says"),
    [
        (wrong_at(3, -1, 7), r"planted summed 64 B wrongly: rank 3 \(.*\) has 7 for \d+ at .* 15,"),
        (wrong_at(0, 4, np.nan), r"planted .*: rank 0 .* nan for \d+ at element 4, and 1 of 16"),
        (one_rank_twice, r"planted .*: rank 0 .* 16 of 16 elements are wrong"),
        (lambda x, axis_name: x + 0, r"planted .*: rank 0 .* 16 of 16 elements are wrong"),
    ],
)  # fmt: skip
def test_a_wrong_sum_is_an_error(psum, says):
    contenders, _ = find_contenders(cpu_grid("2x2"), ["ring"], {}, False)
    planted = replace(contenders[0], name="planted", psum=psum)
    with pytest.raises(VerificationError, match=says):
        time_sums([*contenders, planted], [64], repeats=1, progress=no_progress)


def test_the_command_fails_if_a_sum_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(ftmesh.Plan, "psum", lambda plan, x, axis: wrong_at(2, 0, 7)(x, axis))
    assert main(["bench", "2x2", "--algorithms", "ring", *QUICK]) == 65
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "ftmesh: lax.psum on the ring summed 64 B wrongly: rank 2 " in printed.err


def test_what_ranks_add():
    values = np.stack([rank_values(rank, 12, 1000) for rank in range(12)])
    assert len(np.unique(values)) > 0.99 * values.size
    assert (values == values.astype(np.int64)).all()
    assert values.min() >= 1
    assert values.astype(np.int64).sum(axis=0).max() <= 2**24  # exact in float32


def test_contenders_take_turns():
    ran = []

    def program(x):
        ran.append(int(x))
        return x

    calls = [(program, jnp.int32(i)) for i in range(3)]
    assert len(take_turns(calls)) == 3
    take_turns(calls)
    assert ran == [0, 1, 2, 0, 1, 2]


def accelerators(count, kind, **stats):
    def memory_stats():
        return stats

    return [
        SimpleNamespace(
            id=i, platform="gpu", device_kind=kind, process_index=0, memory_stats=memory_stats
        )
        for i in range(count)
    ]


def test_names_of_devices():
    one = ftmesh.Topology.from_devices(accelerators(1, "NVIDIA H200"))
    assert (one.name, describe_devices(one)) == ("1x1", "1 NVIDIA H200")
    one.devices[0].coords = (0, 0, 0)  # as some versions of JAX give GPUs
    assert ftmesh.Topology.from_devices(one.devices).num_chips == 1
    seven = ftmesh.Topology.from_devices(accelerators(8, "NVIDIA H100"), failed="1x1@0,0")
    assert describe_devices(seven) == "7 of 8 NVIDIA H100"


def real_mesh(payload, **given):
    options = ("payloads", "repeats", "algorithms", "compare", "kernel")
    defaults = {**dict.fromkeys(options), "failed": None, "failed_links": "", "wrap": ""}
    return bench._real_mesh(argparse.Namespace(**defaults | given), ProcessGroup(), payload)


def test_the_mesh_of_real_devices(monkeypatch):
    devices = accelerators(8, "NVIDIA H200", bytes_limit=100e9, bytes_in_use=10e9)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    topology = real_mesh(4096, failed="1x1@0,0", wrap="y")
    assert str(topology) == "2x4 (wrapping in y) less 1x1@0,0"
    assert topology.devices == tuple(devices[1:])
    with pytest.raises(ftmesh.FtmeshError, match="mesh 2x4 has no axis 'z'"):
        real_mesh(4096, wrap="z")
    with pytest.raises(ftmesh.FtmeshError, match=r"100 GB of the memory of .* 90 GB are free"):
        real_mesh(10_000_000_000)


@more
@pytest.mark.slow
def test_the_kernel_interpreted():
    plan = ftmesh.plan(cpu_grid("2x1"), "tree", executor="pallas")
    kernel = Contender("tree, kernel", "pallas", plan.jax_mesh("data"), plan.psum)
    (timing,) = time_sums([kernel], [64], repeats=1, progress=no_progress)
    assert timing.executor == "pallas"


@pytest.mark.slow
def test_several_processes():
    command = [sys.executable, "-m", "ftmesh", "bench", "--algorithms", "chain", *QUICK, "--json"]
    command += ["--failed", "1x1@0,0"]
    results = run_pod(command, 2, 2, "2x2", env={"PYTHONPATH": str(ROOT)}, timeout=120)
    assert [result.status for result in results] == [0, 0], [result.stderr for result in results]
    assert "{" not in results[1].stdout
    printed = json.loads("{" + results[0].stdout.partition("{")[2])  # Gloo's lines come first
    assert (printed["num_processes"], printed["num_devices"]) == (2, 3)
    assert printed["timings"][-1]["contender"] == "chain"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--repeats", "0"], "argument --repeats: 0 is not from 1 to 1,000"),
        (["--payloads", "big"], "'big' is not a size"),
        (["4x4", "--failed", "9x9@0,0"], "is not inside"),
        (["64x64"], "on 4096 emulated devices would take about 655.4 GB of memory"),
        (["64x64", "--payloads", "1kB"], "needs 4096 devices, and JAX has already created 64"),
        (["2x2", "--algorithms", "ring,best"], "there is no 'best'; choose from two_dim, row_pair"),
        (["2x2", "--algorithms", ""], "there is no ''; choose from"),
        (["2x2", "--kernel"], "--kernel needs TPUs, and these are 4 emulated CPU devices"),
        (["2x2", "--num-processes", "2"], "MESH emulates devices in one process"),
        (["--compare", "a.npz"], "argument --compare: expected 2 arguments"),
        (["--compare", "a.npz", "a.npz"], "--compare takes two different files"),
        (["--compare", "a.npz", "./a.npz"], "--compare takes two different files"),
    ],
)
def test_bad_input(argv, says, capsys):
    try:
        status = main(["bench", *argv])
    except SystemExit as stop:  # argparse
        status = stop.code
    assert status == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["3x3", "--algorithms", "multi_ring"], 69, "multi_ring cannot run on 3x3"),
        (["1x1", "--algorithms", "ring"], 69, "there is nothing to sum"),
        (["--compare", "no.npz", "such.npz"], 66, "no.npz: there is no such file"),
    ],
)
def test_what_cannot_be_timed(argv, status, says, capsys):
    assert main(["bench", *argv, *QUICK]) == status
    assert says in capsys.readouterr().err
