"""The environment of the processes of an emulated pod, and the blocks of its hosts."""

import os

import pytest

from ftmesh.elastic.child_process import HostLayout, environments
from ftmesh.errors import ArgumentError, TopologyError


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    for name in list(os.environ):
        if "_proxy" in name.lower() or name.startswith(
            ("XLA_", "JAX_", "FTMESH_", "TPU_", "PYTHONUNBUFFERED")
        ):
            monkeypatch.delenv(name)


def test_variables():
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


def test_other_xla_flags_stay(monkeypatch):
    flags = "--xla_a=1 --xla_force_host_platform_device_count=64  --xla_b=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    (env,) = environments(1, 4)
    assert env["XLA_FLAGS"] == "--xla_a=1 --xla_b=2 --xla_force_host_platform_device_count=4"


def test_a_file_of_flags_is_rejected(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "flags.txt")
    with pytest.raises(ArgumentError, match=r"XLA_FLAGS names a file, flags\.txt"):
        environments(1, 4)


@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "TPU_WORKER_ID", "JAX_NUM_CPU_DEVICES"]
)
def test_variables_of_a_real_cluster_are_removed(monkeypatch, name):
    monkeypatch.setenv(name, "7")
    assert name not in environments(1, 1)[0]


def test_loopback_is_excluded_from_proxies(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://proxy:80")
    monkeypatch.setenv("NO_PROXY", "intranet")
    (env,) = environments(1, 1)
    assert env["https_proxy"] == "http://proxy:80"
    assert env["no_proxy"] == env["NO_PROXY"] == "intranet,127.0.0.1"


def test_given_variables_override():
    assert [e["A"] for e in environments(2, 1, env={"A": "1"})] == ["1", "1"]
    envs = environments(2, 1, env=[{"A": "1"}, {"A": "2", "FTMESH_PROCESS_ID": "9"}])
    assert [e["A"] for e in envs] == ["1", "2"]
    assert [e["FTMESH_PROCESS_ID"] for e in envs] == ["0", "9"]
    with pytest.raises(ArgumentError, match="1 environments for 2 hosts"):
        environments(2, 1, env=[{}])


@pytest.mark.parametrize(
    ("hosts", "devices", "mesh", "message"),
    [
        (0, 4, None, "a pod of 0 hosts with 4 devices"),
        (4, 0, None, "a pod of 4 hosts with 0 devices"),
        (4, 4, "4x5", "mesh 4x5 has 20 chips, but 4 hosts with 4 devices have 16"),
        (4, 4, "4by4", "'4by4' is not a mesh shape"),
    ],
)
def test_invalid_pods(hosts, devices, mesh, message):
    with pytest.raises((ArgumentError, TopologyError), match=message):
        environments(hosts, devices, mesh=mesh)


class TestHostLayout:
    @pytest.mark.parametrize(
        ("given", "blocks"),
        [
            (("4x4", "2x2", 4, 4), "2x2@0,0 2x2@2,0 2x2@0,2 2x2@2,2"),
            (("4x4", None, 4, 4), "4x1@0,0 4x1@0,1 4x1@0,2 4x1@0,3"),
            (("4x4", None, 2, 8), "4x2@0,0 4x2@0,2"),
            (
                ("4x4", None, 8, 2),
                "2x1@0,0 2x1@2,0 2x1@0,1 2x1@2,1 2x1@0,2 2x1@2,2 2x1@0,3 2x1@2,3",
            ),
            (("4x2", "1x2", 4, 2), "1x2@0,0 1x2@1,0 1x2@2,0 1x2@3,0"),
            (("2x2x2", "2x2", 2, 4), "2x2x1@0,0,0 2x2x1@0,0,1"),
            (("2x2x2", "1x2x2", 2, 4), "1x2x2@0,0,0 1x2x2@1,0,0"),
            (("4x4", "4x4", 1, 16), "4x4@0,0"),
        ],
    )
    def test_blocks_of_hosts(self, given, blocks):
        assert [str(block) for block in HostLayout.create(*given).blocks] == blocks.split()

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (("4x4", "2x2", 3, 4), "do not fill mesh 4x4, which has 16 chips"),
            (("4x4", "2x2", 4, 8), "4 hosts of 8 devices each do not fill mesh 4x4"),
            (("4x4", "3x1", 4, 3), "do not fill mesh 4x4"),
            (("4x4", None, 4, 3), "do not fill mesh 4x4"),
            (("4x4", None, 2, 6), "do not fill mesh 4x4"),
            (("4x4", "2x1", 4, 4), "--host-shape 2x1 is a block of 2"),
            (("4x4", "8x2", 1, 16), "cannot be cut into blocks of 8x2"),
            (("4x4", "2x2x1", 4, 4), "give a --host-shape of 4 chips whose sides divide"),
            (("8x6", None, 4, 12), "do not fill whole rows of mesh 8x6"),
        ],
    )
    def test_blocks_that_do_not_fill_the_mesh(self, given, says):
        with pytest.raises(ArgumentError, match=says):
            HostLayout.create(*given)

    @pytest.mark.parametrize(
        "given", [("4x4", None, 4, 0), ("4x4", None, 0, 4), ("4x4", "2x2", -1, 4)]
    )
    def test_no_hosts_or_devices(self, given):
        with pytest.raises(ArgumentError, match="both must be 1 or more"):
            HostLayout.create(*given)
