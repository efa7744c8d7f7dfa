"""Where a process finds the others; alone only where nothing says that there are any."""

import os

import pytest

from ftmesh.distributed.startup import find_processes, initialize
from ftmesh.errors import ArgumentError, ClusterError
from tests.distributed.test_cluster_env import (
    HYDRA,
    JOBSET,
    MPIRUN,
    POD,
    SBATCH,
    SRUN,
    TORCHRUN,
    TPU,
)

ALONE = (None, None, None)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch):
    prefixes = ("FTMESH", "SLURM", "OMPI", "PMI", "TPU", "JOB", "KUBERNETES", "MEGASCALE")
    for name in list(os.environ):
        if name.startswith(prefixes) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def find(monkeypatch, variables, *given):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return find_processes(*(given or ALONE), 1.0)


@pytest.mark.parametrize(
    ("variables", "host", "count", "index"),
    [
        (SRUN, "node1", 3, 1),
        (MPIRUN, "10.77.0.1", 3, 2),
        (TORCHRUN, "node0", 8, 5),
        (POD, "train-0.train", 4, 3),
        (JOBSET, "train-slice-0-0.train", 6, 5),
        (TPU, "t-0", 2, 1),
    ],
)
def test_engines(monkeypatch, variables, host, count, index):
    address, *numbers = find(monkeypatch, variables)
    assert (address.rpartition(":")[0], numbers) == (host, [count, index])
    assert 20_000 <= int(address.rpartition(":")[2]) < 30_000


def test_what_is_given_wins(monkeypatch):
    assert find(monkeypatch, SRUN, "a:1", None, None) == ("a:1", 3, 1)
    assert find(monkeypatch, {"FTMESH_COORDINATOR": "b:2"}, None, None, 2) == ("b:2", 3, 2)
    full = {"FTMESH_NUM_PROCESSES": "9", "FTMESH_PROCESS_ID": "7"}
    assert find(monkeypatch, full) == ("b:2", 9, 7)


@pytest.mark.parametrize("variables", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}])
def test_alone(monkeypatch, recwarn, variables):
    assert find(monkeypatch, variables) == ALONE
    assert not recwarn.list  # JAX warns in every pod


@pytest.mark.parametrize("variables", [SBATCH, SRUN, {"RANK": "1"}, {"JOB_COMPLETION_INDEX": "0"}])
def test_alone_on_request(monkeypatch, variables):
    assert find(monkeypatch, {**variables, "FTMESH_NUM_PROCESSES": "1"}) == ALONE


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            HYDRA,
            "PMI has started process 1 of 4, and does not say where process 0 runs",
        ),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "torchrun has started process 5 of 8"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is 0, and FTMESH_HOSTS is not set"),
        (SBATCH, "start it with srun, or set FTMESH_NUM_PROCESSES=1 to run alone"),
        ({"FTMESH_COORDINATOR": "a:1"}, "the number of processes is not given, and no engine"),
    ],
)
def test_never_alone_by_mistake(monkeypatch, variables, message):
    """These ran alone, each as if it was the only one."""
    with pytest.raises(ArgumentError, match=message):
        find(monkeypatch, variables)


def test_open_mpi_from_a_head_node(monkeypatch):
    """Its variables have the address of mpirun; process 0, elsewhere, says what to give."""
    for name, value in {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("ftmesh.execute._compat.backends_are_initialized", lambda: False)
    with pytest.raises(ClusterError, match=r"does not have the address 10.77.0.1:\d+: give all pr"):
        initialize(timeout=1)


def test_a_heartbeat_timeout_that_is_none(monkeypatch):
    monkeypatch.setenv("FTMESH_HEARTBEAT_TIMEOUT", "soon")
    monkeypatch.setattr("ftmesh.execute._compat.backends_are_initialized", lambda: False)
    with pytest.raises(ArgumentError, match="FTMESH_HEARTBEAT_TIMEOUT: 'soon' is not a number"):
        initialize("127.0.0.1:2000", 2, 1)
