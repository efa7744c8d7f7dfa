"""The recipes of ``examples/cluster``, under the real engines where they are installed."""

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from examples.soak.cluster import install_commands
from examples.soak.cluster_faults import agents, send
from examples.soak.ray_cluster import Ray
from examples.soak.slurm import Slurm
from tests.support.checkpointing import flip_bit
from tests.support.hosts import needs_hosts, network
from tests.support.more import more_case

RECIPES = Path(__file__).parent.parent.parent / "examples" / "cluster"
HOSTS, STEPS, TIMEOUT = 2, 400, 300
OPTIONS = "--mesh 2x2 --host-shape 2x1 --devices-per-host 2 --collective-limit 5"
SSHD = """\
Port 22
HostKey {key}
AuthorizedKeysFile {key}.pub
StrictModes no
UsePAM no
PidFile none
SetEnv PATH={path} PYTHONPATH={root} JAX_PLATFORMS=cpu
"""


def needs(*programs):
    missing = [name for name in programs if shutil.which(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def needs_engine(engine):
    missing = engine.missing_programs()
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@pytest.fixture
def hosts():
    with network(HOSTS) as made:
        yield made


@pytest.fixture
def env(tmp_path):
    path = f"{install_commands(tmp_path)}:{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": str(RECIPES.parent.parent), "JAX_PLATFORMS": "cpu"}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    return {**env, "FTMESH_OPTIONS": OPTIONS, "RUN_DIR": str(run_dir), "HOME": str(tmp_path)}


def trainer(run_dir, every=50):
    words = ["python", str(RECIPES / "train.py"), "--steps", str(STEPS), "--every", str(every)]
    return [*words, "--checkpoints", str(run_dir / "checkpoints")]


def wait_for(is_so, poll=lambda: None):
    until = time.monotonic() + TIMEOUT
    while not is_so():
        poll()
        assert time.monotonic() < until
        time.sleep(0.1)


def has_checkpoint(run_dir):
    return any((run_dir / "checkpoints").glob("*/index.json"))


def kill_agent(hosts, host):
    found = agents(hosts, host)
    assert found
    send(found, signal.SIGKILL)


def last_step(run_dir):
    return max(int(file.parent.name) for file in (run_dir / "checkpoints").glob("*/index.json"))


@pytest.mark.slow
@needs_hosts
@needs_engine(Slurm)
@pytest.mark.parametrize("lost", ["an agent", more_case("all agents")])
def test_slurm(hosts, env, tmp_path, lost):
    """The other goes on without it; with none left the job is requeued, and continues."""
    run_dir = tmp_path / "run"
    with Slurm(hosts, tmp_path / "slurm") as slurm:
        slurm.start(run_dir, trainer(run_dir, every=20), env)
        wait_for(lambda: has_checkpoint(run_dir))
        kill_agent(hosts, 1)
        if lost == "all agents":
            kill_agent(hosts, 0)
        wait_for(lambda: slurm.poll() is not None)
        assert slurm.poll() == 0, (run_dir / "node-0.log").read_text()
        assert slurm.job_facts("1")["JobState"] == "COMPLETED"
        assert slurm.job_facts("1")["Restarts"] == ("1" if lost == "all agents" else "0")
    assert last_step(run_dir) == STEPS
    assert (run_dir / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.slow
@needs_hosts
@needs("mpirun")
def test_open_mpi(hosts, env, tmp_path):
    run_dir, remote = tmp_path / "run", tmp_path / "remote"
    # What Open MPI calls to start its daemon on another host: HOST COMMAND ...
    remote.write_text(f"#!/bin/sh\nshift\n{remote_shell(hosts, 1)}\n")
    remote.chmod(0o755)
    env |= {"OMPI_MCA_plm_rsh_agent": str(remote), "OMPI_ALLOW_RUN_AS_ROOT": "1"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = [str(RECIPES / "openmpi" / "train.sh"), "h0,h1", *trainer(run_dir)]
    with (tmp_path / "log").open("wb") as log:
        script = subprocess.Popen(
            hosts.command(0, *words), env={**os.environ, **env}, stdout=log, stderr=log
        )
        try:
            wait_for(lambda: has_checkpoint(run_dir) or script.poll() is not None)
            kill_agent(hosts, 1)
            assert script.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
        finally:
            for host in range(HOSTS):
                hosts.kill_all(host)
    assert last_step(run_dir) == STEPS


def remote_shell(hosts, host):
    *enter, script, name = hosts.command(host)
    return f"exec {' '.join(enter)} '{script}' {name} sh -c \"$*\""


@pytest.mark.slow
@needs_hosts
@needs("ssh", "/usr/sbin/sshd", "ssh-keygen")
def test_ssh(hosts, env, tmp_path):
    """An agent that is killed is started again, and does not come back before the run is over."""
    run_dir, key = tmp_path / "run", tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    values = {"key": key, "path": env["PATH"], "root": env["PYTHONPATH"]}
    (tmp_path / "sshd_config").write_text(SSHD.format(**values))
    Path("/run/sshd").mkdir(exist_ok=True)
    daemons = [
        subprocess.Popen(
            hosts.command(host, "/usr/sbin/sshd", "-D", "-f", str(tmp_path / "sshd_config"))
        )
        for host in range(HOSTS)
    ]
    env |= {"SSH_OPTIONS": f"-i {key} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"}
    words = [str(RECIPES / "ssh" / "train.sh"), "h0,h1", *trainer(run_dir)]
    words[2] = str(tmp_path / "bin" / "python")  # whatever files of a shell add to PATH
    with (tmp_path / "log").open("wb") as log:
        script = subprocess.Popen(
            hosts.command("hub", *words), env={**os.environ, **env}, stdout=log, stderr=log
        )
        try:
            wait_for(lambda: has_checkpoint(run_dir) or script.poll() is not None)
            kill_agent(hosts, 1)
            assert script.wait(TIMEOUT) == 0, (tmp_path / "log").read_text()
        finally:
            for host in (*range(HOSTS), "hub"):
                hosts.kill_all(host)
            for daemon in daemons:
                daemon.wait()
    assert last_step(run_dir) == STEPS


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["connected", "between two starts"])
def test_ssh_ends_with_the_script(tmp_path, signum, moment):
    """A program that is called ssh stands in for the connections."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    wait = "exec sleep 600" if moment == "connected" else "exit 255"
    ssh.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/pids\n{wait}\n")
    ssh.chmod(0o755)
    script = subprocess.Popen(
        [str(RECIPES / "ssh" / "train.sh"), "h0,h1", "true"],
        env={**os.environ, "PATH": f"{ssh.parent}:{os.environ['PATH']}", "RUN_DIR": str(tmp_path)},
        start_new_session=True,
    )
    try:
        pids = tmp_path / "pids"
        wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        time.sleep(0.2)
        begin = time.monotonic()
        script.send_signal(signum)  # jobs in the background ignore that of a terminal
        assert script.wait(TIMEOUT) == 143
        assert time.monotonic() - begin < 4  # it does not wait for the next start
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.read_text().split())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)
        script.wait()


@needs("systemd-analyze")
def test_systemd_unit():
    unit = RECIPES / "ssh" / "ftmesh-agent.service"
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    problems = [line for line in done.stderr.splitlines() if unit.name in line]
    assert [line for line in problems if "is not executable" not in line] == []


@pytest.mark.slow
@needs_hosts
@needs_engine(Ray)
@pytest.mark.parametrize("recipe", ["driver.py", more_case("jax_trainer.py")])
def test_ray(hosts, env, tmp_path, recipe):
    run_dir = tmp_path / "run"
    with Ray(hosts, tmp_path / "ray") as ray:
        ray.start(run_dir, trainer(run_dir, every=20), env, recipe)
        wait_for(lambda: has_checkpoint(run_dir), lambda: ray.poll())
        kill_agent(hosts, 1)
        wait_for(lambda: ray.poll() is not None)
        assert ray.poll() == 0, (tmp_path / "log").read_text()[-3000:]
    assert last_step(run_dir) == STEPS


class TestKubernetes:
    """No server is at hand: fields and types are checked against the schema of JobSet."""

    job_set = yaml.safe_load((RECIPES / "kubernetes" / "jobset.yaml").read_text())

    @pytest.mark.skipif(
        importlib.util.find_spec("kubeflow_trainer_api") is None,
        reason="not installed: kubeflow-trainer-api, which has the schema of JobSet",
    )
    def test_schema(self):
        from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

        parsed = JobsetV1alpha2JobSet.from_dict(self.job_set)
        assert _known(parsed.to_dict(), self.job_set) == []
        wrong = yaml.safe_load((RECIPES / "kubernetes" / "jobset.yaml").read_text())
        wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["completionmode"] = "Indexed"
        parsed = JobsetV1alpha2JobSet.from_dict(wrong)
        assert _known(parsed.to_dict(), wrong) == [
            "spec.replicatedJobs.0.template.spec.completionmode"
        ]

    def test_its_pods_find_each_other(self):
        """The variables are those that ftmesh reads."""
        from ftmesh.distributed.cluster_env import detect

        job = self.job_set["spec"]["replicatedJobs"][0]
        spec = job["template"]["spec"]
        labels = {
            "jobset-name": self.job_set["metadata"]["name"],
            "replicatedjob-name": job["name"],
            "replicatedjob-replicas": str(job["replicas"]),
            "job-index": "0",
        }
        (container,) = spec["template"]["spec"]["containers"]
        environ = {"JOB_COMPLETION_INDEX": "2"}
        for variable in container["env"]:
            source = variable.get("valueFrom", {}).get("fieldRef")
            if source:
                label = source["fieldPath"].removeprefix("metadata.labels['jobset.sigs.k8s.io/")
                environ[variable["name"]] = labels[label.removesuffix("']")]
            elif "value" in variable:
                environ[variable["name"]] = variable["value"]
        placement = detect(environ)
        assert (placement.index, placement.count) == (2, spec["completions"])
        assert placement.first_host == "train-hosts-0-0.train"
        assert int(environ["FTMESH_HOSTS"]) == spec["parallelism"] * job["replicas"]

    def test_mistakes_are_not_repeated(self):
        job = self.job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
        mistakes = job["podFailurePolicy"]["rules"][0]
        assert (mistakes["action"], mistakes["onExitCodes"]["values"]) == (
            "FailJob",
            [2, 65, 66, 69],
        )
        assert self.job_set["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def _known(parsed, given, path=""):
    """The paths of fields that the schema does not have."""
    if isinstance(given, dict):
        if not isinstance(parsed, dict):
            return [path]
        pairs = ((parsed.get(name), value, name) for name, value in given.items())
    elif isinstance(given, list):
        pairs = zip(parsed, given, range(len(given)), strict=True)
    else:
        return [] if parsed == given else [path]
    return [
        unknown
        for inner, value, name in pairs
        for unknown in (
            [f"{path}.{name}".lstrip(".")]
            if inner is None
            else _known(inner, value, f"{path}.{name}".lstrip("."))
        )
    ]


def test_a_step_is_that_of_its_state(tmp_path, monkeypatch, capsys):
    """The newest checkpoint is damaged: the run goes on from the one before."""
    spec = importlib.util.spec_from_file_location("cluster_train", RECIPES / "train.py")
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)

    def lines(folder, steps):
        words = ["--steps", str(steps), "--every", "2", "--checkpoints", str(tmp_path / folder)]
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        train.main()
        return capsys.readouterr().out.splitlines()

    expected = lines("undamaged", 6)
    assert lines("damaged", 4) == expected[:2]
    flip_bit(tmp_path / "damaged" / "4" / "0.bin")
    assert lines("damaged", 6) == expected[1:]
    assert lines("damaged", 6) == []
