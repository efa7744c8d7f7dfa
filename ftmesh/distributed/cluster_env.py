"""Reads this process's index and the number of processes from the variables of its cluster engine.

If several engines have set variables, the inner one wins. They are tried in this order:
torchrun and similar, Open MPI, MPICH and Intel MPI (PMI), PRRTE (PMIx), Slurm, Cloud TPU,
Kubernetes. So mpirun or torchrun inside a Slurm job counts, not the job; variables that srun sets
for MPI libraries are Slurm's. Ray sets none: pass its ranks to `initialize`.
"""

from __future__ import annotations

import platform
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from ftmesh.errors import ArgumentError

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 30_000)  # below those that systems give to outgoing connections
_ALONE = "or set FTMESH_NUM_PROCESSES=1 to run alone"
Environ = Mapping[str, str]


@dataclass(frozen=True)
class Placement:
    """Where an engine has placed this process.

    Attributes:
        engine: The engine's name.
        index: Index of this process.
        count: How many processes the engine has started.
        first_host: Host of process 0; None if no variable has it.
        node: This host, as the engine calls it.
        port: A port for process 0 that other jobs of the engine are unlikely to use.
    """

    engine: str
    index: int
    count: int
    first_host: str | None
    node: str
    port: int = PORTS[0]


def detect(environ: Environ) -> Placement | None:
    """Return where an engine has placed this process; None if no engine has started it.

    Args:
        environ: Environment variables, such as ``os.environ``.

    Raises:
        ArgumentError: Variables say that there are several processes, but not the index of this
            one, or a variable is not a number.
    """
    for find in (_torchrun, _open_mpi, _pmi, _slurm, _cloud_tpu, _kubernetes):
        placement = find(environ)
        if placement is not None:
            return placement
    for count, index in (("WORLD_SIZE", "RANK"), ("FTMESH_HOSTS", "JOB_COMPLETION_INDEX")):
        if _number(environ, count) not in (None, 0, 1):
            raise ArgumentError(
                f"{count} is {environ[count]}, and {index} is not set: set it in each process, "
                f"{_ALONE}"
            )
    return None


def _torchrun(environ: Environ) -> Placement | None:
    if "RANK" not in environ:
        return None
    index, count = _index_and_count(environ, "RANK", "WORLD_SIZE")
    job = f"{environ.get('TORCHELASTIC_RUN_ID')}/{environ.get('MASTER_PORT')}"
    return _placement(environ, "torchrun", index, count, environ.get("MASTER_ADDR"), job)


def _open_mpi(environ: Environ) -> Placement | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    index, count = _index_and_count(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    # Version 4 has the address of mpirun, version 5 its host in the name of the job. Process 0 may
    # run elsewhere: then it cannot listen there, and says so.
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    launcher = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri) or re.match(
        r"prterun-(.+)-[0-9]+@[0-9]+$", environ.get("PMIX_NAMESPACE", "")
    )
    first_host = launcher and next(filter(None, launcher.groups()))
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(count):
        first_host = LOOPBACK
    elif "SLURM_JOB_NODELIST" in environ:
        first_host = first_host_in(environ["SLURM_JOB_NODELIST"])
    job = environ.get("PMIX_NAMESPACE", "")
    return _placement(environ, "Open MPI", index, count, first_host, job)


def _pmi(environ: Environ) -> Placement | None:
    name = next((name for name in ("PMI_RANK", "PMIX_RANK") if name in environ), None)
    if name is None:
        return None
    size = environ.get("PMI_SIZE")
    if environ[name] == environ.get("SLURM_PROCID") and (
        size in (None, environ.get("SLURM_STEP_NUM_TASKS"), environ.get("SLURM_NTASKS"))
    ):
        return None  # set by srun, which also says where process 0 runs
    index, count = _index_and_count(environ, name, "PMI_SIZE")
    first_host = None
    if environ.get("MPI_LOCALNRANKS") == str(count):
        first_host = LOOPBACK
    elif "SLURM_JOB_NODELIST" in environ:
        first_host = first_host_in(environ["SLURM_JOB_NODELIST"])
    job = environ.get("PMIX_NAMESPACE") or environ.get("SLURM_JOB_ID", "")
    engine = "PMI" if name == "PMI_RANK" else "PMIx"
    return _placement(environ, engine, index, count, first_host, job)


def _slurm(environ: Environ) -> Placement | None:
    if "SLURM_JOB_ID" not in environ and "SLURM_PROCID" not in environ:
        return None
    in_step = any(f"SLURM_STEP_{name}" in environ for name in ("ID", "NUM_TASKS", "NODELIST"))
    if not in_step:  # the shell of sbatch or salloc
        names = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "SLURM_NNODES")
        tasks = max(_number(environ, name) or 1 for name in names)
        if tasks > 1:
            raise ArgumentError(
                f"this Slurm job has {tasks} tasks, and this process is not one of them: start it "
                f"with srun, {_ALONE}"
            )
        return _placement(environ, "Slurm", 0, 1, None, "")
    count_names = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    index, count = _index_and_count(environ, "SLURM_PROCID", *count_names)
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    job = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    first_host = first_host_in(nodes) if nodes else None
    return _placement(environ, "Slurm", index, count, first_host, job)


def _cloud_tpu(environ: Environ) -> Placement | None:
    listed = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not listed:
        return None
    hosts = [host.strip().partition(":")[0] for host in listed.split(",")]
    slices = _number(environ, "MEGASCALE_NUM_SLICES") or 1
    index, first_host = _number(environ, "TPU_WORKER_ID"), hosts[0]
    if slices > 1:
        slice_id = _number(environ, "MEGASCALE_SLICE_ID")
        index = None if index is None or slice_id is None else slice_id * len(hosts) + index
        first_host = environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").partition(":")[0]
    count = slices * len(hosts)
    if count > 1 and index is None:
        raise ArgumentError(
            f"TPU_WORKER_HOSTNAMES has {len(hosts)} hosts in each of {slices} slices, and "
            f"TPU_WORKER_ID or MEGASCALE_SLICE_ID is not set: set them, {_ALONE}"
        )
    return _placement(environ, "Cloud TPU", index or 0, count, first_host, hosts[0])


def _kubernetes(environ: Environ) -> Placement | None:
    """Find the pod of an Indexed Job, or of a JobSet, by variables that docs/commands.md lists."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    pod, count = _index_and_count(environ, "JOB_COMPLETION_INDEX", "FTMESH_HOSTS", bounded=False)
    job, jobs = _number(environ, "JOB_INDEX"), _number(environ, "REPLICATED_JOB_REPLICAS") or 1
    if count % jobs or (job or 0) >= jobs or pod >= count // jobs:
        raise ArgumentError(
            f"pod {pod} of job {job or 0}, with FTMESH_HOSTS={count} pods in "
            f"REPLICATED_JOB_REPLICAS={jobs} jobs: set FTMESH_HOSTS to the pods of all jobs, and "
            "JOB_INDEX and REPLICATED_JOB_REPLICAS from the labels of the JobSet"
        )
    name, replicated = environ.get("JOBSET_NAME"), environ.get("REPLICATED_JOB_NAME")
    first_host = f"{name}-{replicated}-0-0.{name}" if name and replicated else None
    given, _, port = environ.get("FTMESH_CONTROLLER", "").partition(":")
    index = (job or 0) * (count // jobs) + pod
    first_host = given or first_host
    placement = _placement(environ, "Kubernetes", index, count, first_host, first_host or "")
    if not port:
        return placement
    number = _number({"FTMESH_CONTROLLER": port}, "FTMESH_CONTROLLER") or 0
    return Placement(**{**vars(placement), "port": number})


def first_host_in(nodelist: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> first_host_in("node[02-04,7],login"), first_host_in("rack[1-2]n[0,3]"), first_host_in("a,b")
    ('node02', 'rack1n0', 'a')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0] if first else "")


def _placement(
    environ: Environ, engine: str, index: int, count: int, first_host: str | None, job: str
) -> Placement:
    names = ("SLURMD_NODENAME", "PMIX_HOSTNAME", "HOSTNAME")
    node = next((environ[name] for name in names if environ.get(name)), platform.node())
    port = _number(environ, "JAX_COORDINATOR_PORT")
    port = port or PORTS[zlib.crc32(f"{engine}/{job}".encode()) % len(PORTS)]
    return Placement(engine, index, count, first_host or None, node, port)


def _index_and_count(
    environ: Environ, index_name: str, *count_names: str, bounded: bool = True
) -> tuple[int, int]:
    """Return this process's index and the number of processes, by the first name that is set."""
    names = [*count_names, "FTMESH_NUM_PROCESSES"]
    count_name = next((name for name in names if name in environ), count_names[0])
    index, count = _number(environ, index_name), _number(environ, count_name)
    if index is None or count is None:
        is_set, missing = index_name, count_name
        if index is None:
            is_set, missing = missing, is_set
        raise ArgumentError(
            f"{is_set} is {environ.get(is_set)}, and {missing} is not set: set it to the "
            f"{'number of processes' if count is None else 'index of this one'}, {_ALONE}"
        )
    if count < 1 or (bounded and index >= count):
        raise ArgumentError(
            f"{index_name} is {index} and {count_name} is {count}: an index is from 0 to the "
            "number of processes less 1"
        )
    return index, count


def _number(environ: Environ, name: str) -> int | None:
    text = environ.get(name)
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", text.strip(), re.ASCII):
        raise ArgumentError(f"{name} is {text!r:.40}, not a number")
    return int(text)
