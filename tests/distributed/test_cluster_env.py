"""Which of how many processes this is, by the variables that engines really set."""

import pytest

from ftmesh.distributed.cluster_env import PORTS, detect, first_host_in
from ftmesh.errors import ArgumentError

SRUN = {  # of Slurm 22.05, task 1 of `srun -N3`
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_JOB_NODELIST": "node[0-3]",
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURMD_NODENAME": "node2",
}
SBATCH = {  # the shell of `sbatch -N3 -n3`
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "node[0-2]",
    "SLURMD_NODENAME": "node0",
}
MPIRUN = {  # of Open MPI 4.1, rank 2 on three hosts
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "880279552.0;tcp://10.77.0.1,10.78.0.1:35583",
    "PMIX_NAMESPACE": "880279553",
    "PMIX_RANK": "2",
    "PMIX_HOSTNAME": "node2",
}
MPIRUN_5 = {  # of Open MPI 5
    **{name: value for name, value in MPIRUN.items() if name != "OMPI_MCA_orte_hnp_uri"},
    "PMIX_NAMESPACE": "prterun-head-1-4711@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "2", "HOSTNAME": "b"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "HOSTNAME": "node5",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "3",
    "FTMESH_HOSTS": "4",
    "FTMESH_CONTROLLER": "train-0.train",
    "HOSTNAME": "train-3",
}
JOBSET = {
    "JOB_COMPLETION_INDEX": "1",
    "FTMESH_HOSTS": "6",
    "JOBSET_NAME": "train",
    "REPLICATED_JOB_NAME": "slice",
    "REPLICATED_JOB_REPLICAS": "3",
    "JOB_INDEX": "2",
    "HOSTNAME": "train-slice-2-1",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t-0,t-1", "HOSTNAME": "t-1"}
SLICES = {
    **TPU,
    "MEGASCALE_NUM_SLICES": "3",
    "MEGASCALE_SLICE_ID": "2",
    "MEGASCALE_COORDINATOR_ADDRESS": "s-0:8080",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (SRUN, ("Slurm", 1, 3, "node1", "node2")),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("Slurm", 0, 1, "node1")),
        ({**SBATCH, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"}, ("Slurm", 0, 1, None)),
        (MPIRUN, ("Open MPI", 2, 3, "10.77.0.1", "node2")),
        (MPIRUN_5, ("Open MPI", 2, 3, "head-1", "node2")),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, ("Open MPI", 2, 3, "127.0.0.1")),
        (HYDRA, ("PMI", 1, 4, None, "b")),
        ({**HYDRA, "MPI_LOCALNRANKS": "4"}, ("PMI", 1, 4, "127.0.0.1")),
        ({"PMIX_RANK": "1", "FTMESH_NUM_PROCESSES": "3"}, ("PMIx", 1, 3, None)),
        (TORCHRUN, ("torchrun", 5, 8, "node0", "node5")),
        (POD, ("Kubernetes", 3, 4, "train-0.train", "train-3")),
        (JOBSET, ("Kubernetes", 5, 6, "train-slice-0-0.train", "train-slice-2-1")),
        (TPU, ("Cloud TPU", 1, 2, "t-0", "t-1")),
        (SLICES, ("Cloud TPU", 5, 6, "s-0", "t-1")),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, ("Cloud TPU", 0, 1, "localhost")),
    ],
)
def test_engines(environ, expected):
    found = detect(environ)
    assert found is not None
    assert (found.engine, found.index, found.count, found.first_host, found.node)[
        : len(expected)
    ] == expected
    assert found.port in PORTS


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # Ranks of mpirun have the variables of srun, which starts the daemons of Open MPI.
        ({**SRUN, **MPIRUN, "SLURM_PROCID": "0"}, ("Open MPI", 2, 3, "node0")),
        ({**SBATCH, **MPIRUN}, ("Open MPI", 2, 3, "node0")),
        ({**SRUN, **HYDRA, "SLURM_PROCID": "0"}, ("PMI", 1, 4, "node0")),
        ({**SRUN, **TORCHRUN}, ("torchrun", 5, 8, "node0")),
        ({**MPIRUN, **TORCHRUN}, ("torchrun", 5, 8, "node0")),
        # srun --mpi=pmi2 and --mpi=pmix set these for MPI libraries.
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "3"}, ("Slurm", 1, 3, "node1")),
        ({**SRUN, "PMIX_RANK": "1"}, ("Slurm", 1, 3, "node1")),
        # A script of PyTorch users that computes the rank later.
        ({**SRUN, "WORLD_SIZE": "3", "MASTER_ADDR": "x"}, ("Slurm", 1, 3, "node1")),
        ({**POD, **MPIRUN}, ("Open MPI", 2, 3, "10.77.0.1")),
        ({**POD, **TORCHRUN}, ("torchrun", 5, 8, "node0")),
        ({**POD, **TPU}, ("Cloud TPU", 1, 2, "t-0")),
        ({**SRUN, **TPU}, ("Slurm", 1, 3, "node1")),
    ],
)
def test_the_inner_engine_wins(environ, expected):
    found = detect(environ)
    assert found is not None
    assert (found.engine, found.index, found.count, found.first_host) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            SBATCH,
            "this Slurm job has 3 tasks, and this process is not one of them: start it with srun",
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, "has 2 tasks"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID is 'x', not a number"),
        ({"RANK": "1"}, "RANK is 1, and WORLD_SIZE is not set: set it to the number of processes"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, and RANK is not set: set it in each process"),
        ({"FTMESH_HOSTS": "4"}, "FTMESH_HOSTS is 4, and JOB_COMPLETION_INDEX is not set"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK is 4 and WORLD_SIZE is 4: an index is from 0"),
        ({"PMI_RANK": "0"}, "PMI_RANK is 0, and PMI_SIZE is not set"),
        ({"PMIX_RANK": "0"}, "PMIX_RANK is 0, and PMI_SIZE is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is 0, and FTMESH_HOSTS is not set"),
        ({**POD, "JOB_COMPLETION_INDEX": "4"}, "pod 4 of job 0, with FTMESH_HOSTS=4 pods"),
        ({**JOBSET, "FTMESH_HOSTS": "5"}, "FTMESH_HOSTS=5 pods in REPLICATED_JOB_REPLICAS=3 jobs"),
        (
            {**JOBSET, "REPLICATED_JOB_REPLICAS": "1"},
            "JOB_INDEX and REPLICATED_JOB_REPLICAS from the labels",
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID or MEGASCALE_SLICE_ID is not set"),
        ({**SLICES, "MEGASCALE_SLICE_ID": "9" * 5000}, "MEGASCALE_SLICE_ID is '999"),
    ],
)
def test_incomplete_variables(environ, message):
    with pytest.raises(ArgumentError, match=message.replace("(", r"\(")):
        detect(environ)


@pytest.mark.parametrize(
    "environ", [{}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"WORLD_SIZE": "1"}]
)
def test_no_engine(environ):
    assert detect(environ) is None


def test_ports():
    """Two jobs at one host do not meet, and all processes of a job have the same port."""
    first, second = detect(SRUN), detect({**SRUN, "SLURM_PROCID": "2", "SLURMD_NODENAME": "node3"})
    assert first.port == second.port != detect({**SRUN, "SLURM_JOB_ID": "8"}).port
    assert detect({**SRUN, "JAX_COORDINATOR_PORT": "1234"}).port == 1234
    assert detect({**POD, "FTMESH_CONTROLLER": "train-0.train:8476"}).port == 8476


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node[0-2,5]", "node0"),
        ("node[5,0-2],a", "node5"),
        ("node001", "node001"),
        ("a-1,b[0-3]", "a-1"),
        ("r[10-11]n[007-009]-eth,x", "r10n007-eth"),
        ("", ""),
    ],
)
def test_lists_of_nodes(nodelist, host):
    assert first_host_in(nodelist) == host
