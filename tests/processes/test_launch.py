"""``ftmesh launch``: arguments it rejects, and a pod over which JAX sums."""

import os

import pytest

from ftmesh.cli.main import main
from ftmesh.elastic.local_pod import run_pod
from tests.support.launching import LINUX, program

MAPPED = "0000000000000000FFFF0000"  # IPv4 in IPv6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--hosts 0 --devices-per-host 1 -- true", "a pod of 0 hosts with 1 devices"),
        ("--hosts 999999 --devices-per-host 1 -- true", "too many for one machine"),
        ("--hosts 2 --devices-per-host 999999 --failures 1 --mesh 4x4 -- true", "too many for one"),
        ("--hosts 2 --devices-per-host 2 --mesh 3x3 -- true", "mesh 3x3 has 9 chips"),
        ("--hosts 2 --devices-per-host 2 --mesh x -- true", "'x' is not a mesh shape"),
        ("--hosts 2 --devices-per-host 2", "there is no command to run"),
        ("--hosts 2 --devices-per-host 2 --", "there is no command to run"),
        ("--hosts 2 --devices-per-host 2 -- /no/such", "/no/such is not a program"),
        (
            "--hosts 2 --devices-per-host 2 --mesh 2x2 --failures 1 -- /no/such",
            "/no/such is not a program",
        ),
        (
            "--hosts 2 --devices-per-host 2 --mesh 2x2 --failures 1",
            "there is no command to run",
        ),
        (
            "--hosts 2 --devices-per-host 2 --grace -1 true",
            "--grace: '-1' is not a number",
        ),
        (
            "--hosts 2 --devices-per-host 2 --timeout nan true",
            "--timeout: 'nan' is not a number",
        ),
        (
            "--hosts 2 --devices-per-host 2 --failures 1 --collective-limit inf -- true",
            "--collective-limit: 'inf' is not a number from 1 to",
        ),
        ("--hosts two --devices-per-host 2 true", "'two' is not a whole number from 0"),
        ("--hosts 2 --devices-per-host ٢ true", "is not a whole number from 0"),
        ("--hosts 2 --devices-per-host 2 --failures -1 true", "-1 is not from 0"),
        ("--hosts 2 --devices-per-host 2 --failures 1 --strikes 0 true", "0 is not from 1"),
        (
            "--hosts 2 --devices-per-host 2 --mesh 2x2 --failures 1 --limits compile=inf true",
            "'compile=inf' is not a timeout",
        ),
        *(
            (f"--hosts 2 --devices-per-host 2 {option} true", "has no effect without --failures N")
            for option in ("--collective-limit 5", "--strikes 2", "--backoff 0", "--grow-back 0")
        ),
        (
            "--hosts 2 --devices-per-host 2 --mesh 2x2 --failures 1 --grace 5 true",
            "--grace has no effect with --failures N",
        ),
        ("-- true", "required: --hosts, --devices-per-host"),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    try:
        status = main(["launch", *arguments.split()])
    except SystemExit as stop:  # argparse
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_an_invalid_command_leaves_no_file(tmp_path):
    events = tmp_path / "events.jsonl"
    pod = ["--hosts", "2", "--devices-per-host", "2", "--mesh", "2x2", "--failures", "1"]
    assert main(["launch", *pod, "--events", str(events), "--", "/no/such"]) == 2
    assert not events.exists()


@pytest.mark.parametrize(
    ("option", "path", "message"),
    [
        ("--events", "no/such/events.jsonl", "No such file or directory"),
        ("--events", "folder", "Is a directory"),
        ("--events", "pipe", "cannot write pipe"),
        ("--events", "/proc/events", "cannot write /proc/events"),
        ("--events", "x" * 300, "File name too long"),
        ("--run-dir", "file", "cannot write to file"),
        ("--run-dir", "file/in", "cannot write to file/in"),
        ("--run-dir", "/proc/run", "cannot write to /proc/run"),
        ("--run-dir", "x" * 300, "File name too long"),
    ],
)
def test_outputs_that_cannot_be_written(tmp_path, monkeypatch, capsys, option, path, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    pod = "--hosts 2 --devices-per-host 2 --mesh 2x2 --failures 1"
    status = main(["launch", *pod.split(), option, path, "--", "touch", "started"])
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "pipe"]


@pytest.mark.skipif(not LINUX, reason="reads /proc")
def test_jax_sums_over_the_pod_and_listens_on_loopback_only():
    text = """
        import jax
        jax.distributed.initialize(
            os.environ["FTMESH_COORDINATOR"], int(os.environ["FTMESH_NUM_PROCESSES"]), me
        )
        import numpy as np
        from jax.sharding import Mesh, PartitionSpec
        mesh = Mesh(np.array(jax.devices()), "data")
        total = jax.shard_map(
            lambda: jax.lax.psum(1 + jax.lax.axis_index("data"), "data"),
            mesh=mesh, in_specs=(), out_specs=PartitionSpec(),
        )
        total = jax.jit(total)().addressable_data(0)
        print(f"\\nsum {total}\\n", end="")
        port = int(os.environ["FTMESH_COORDINATOR"].split(":")[1])
        for table in ("tcp", "tcp6"):
            for line in open(f"/proc/self/net/{table}").readlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == "0A" and int(local.split(":")[1], 16) == port:
                    print(f"\\nlistens {local}\\n", end="")
        """
    command = [word for word in program(text) if word != "-S"]
    results = run_pod(command, 2, 2, timeout=120)
    assert [result.status for result in results] == [0, 0], results
    for result in results:
        lines = result.stdout.splitlines()
        assert "sum 10" in lines
        (where,) = [line.split()[1] for line in lines if line.startswith("listens")]
        assert where.split(":")[0].removeprefix(MAPPED) == "0100007F"  # 127.0.0.1
