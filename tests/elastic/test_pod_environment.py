"""What the processes of an emulated pod find in their environment."""

import os
import socket

import pytest

from ftmesh.elastic.pod_environment import environments, free_port
from ftmesh.errors import ArgumentError, TopologyError


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in list(os.environ):
        if "_proxy" in name.lower() or name.startswith(
            ("XLA_", "JAX_", "FTMESH_", "TPU_", "PYTHONUNBUFFERED")
        ):
            monkeypatch.delenv(name)


def test_what_is_promised():
    first, second = environments(2, 3, mesh="2x3")
    host, port = first["FTMESH_COORDINATOR"].split(":")
    assert host == "127.0.0.1"
    assert 20_000 <= int(port) < 30_000
    assert {name: value for name, value in second.items() if name not in os.environ} == {
        "FTMESH_COORDINATOR": f"127.0.0.1:{port}",
        "FTMESH_NUM_PROCESSES": "2",
        "FTMESH_PROCESS_ID": "1",
        "FTMESH_MESH": "2x3",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONUNBUFFERED": "1",
    }
    assert first["FTMESH_PROCESS_ID"] == "0"
    assert "FTMESH_MESH" not in environments(1, 1)[0]


def test_other_flags_of_xla_stay(monkeypatch):
    flags = "--xla_a=1 --xla_force_host_platform_device_count=64  --xla_b=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    (env,) = environments(1, 4)
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=4"


def test_flags_in_a_file_are_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "flags.txt")
    with pytest.raises(ArgumentError, match=r"XLA_FLAGS names a file, flags\.txt"):
        environments(1, 4)


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TPU_WORKER_ID", "JAX_NUM_CPU_DEVICES"]
)
def test_the_machine_is_in_no_other_cluster(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    assert name not in environments(1, 1)[0]


def test_loopback_goes_past_proxies(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:80")
    monkeypatch.setenv("NO_PROXY", "intranet")
    (env,) = environments(1, 1)
    assert env["https_proxy"] == "http://proxy:80"
    assert env["no_proxy"] == env["NO_PROXY"] == "intranet,127.0.0.1"


def test_what_is_given_comes_last():
    assert [e["A"] for e in environments(2, 1, env={"A": "1"})] == ["1", "1"]
    ours = environments(2, 1, env=[{"A": "1"}, {"A": "2", "FTMESH_PROCESS_ID": "9"}])
    assert [e["A"] for e in ours] == ["1", "2"]
    assert [e["FTMESH_PROCESS_ID"] for e in ours] == ["0", "9"]
    with pytest.raises(ArgumentError, match="1 environments for 2 hosts"):
        environments(2, 1, env=[{}])


@pytest.mark.parametrize(
    ("hosts", "devices", "mesh", "message"),
    [
        (0, 4, None, "0 hosts of 4 devices make no pod"),
        (4, 0, None, "4 hosts of 0 devices make no pod"),
        (4, 4, "4x5", "mesh 4x5 has 20 chips, and 4 hosts of 4 devices have 16"),
        (4, 4, "4by4", "'4by4' is not a mesh shape"),
    ],
)
def test_what_makes_no_pod(hosts, devices, mesh, message):
    with pytest.raises((ArgumentError, TopologyError), match=message):
        environments(hosts, devices, mesh=mesh)


def test_a_port_in_use_is_not_taken(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        other = free_port()
        monkeypatch.setattr("ftmesh.elastic.pod_environment.PORTS", range(taken, taken + 1))
        with pytest.raises(ArgumentError, match="no port of"):
            free_port()
    assert other != taken
