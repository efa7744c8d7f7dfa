"""Train on the nodes of a Ray cluster, and start all again when the run asks for it.

    python driver.py --hosts 4 --run-dir /shared/run -- python train.py

Ray starts one agent on each node. They recover from lost nodes by themselves.
"""

import argparse
import ctypes
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ftmesh.command_line import whole_number

FINAL = {0, 1, 2, 65, 66, 69, 77, 124, 130, 143}  # of a run that would end the same way again
LEFT = {130, 143}  # also of a host that left a run which goes on
PORT, MAX_STARTS = 25500, 20


@ray.remote(num_cpus=1, max_retries=0)
def address() -> str:
    """Return the address of a node."""
    return ray.util.get_node_ip_address()


def end_with_parent() -> None:
    """Have this process end with its parent, also if that is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@ray.remote(num_cpus=1, max_retries=0)
def agent(join: str, hosts: int, index: int, run_dir: str, secret: str, command: list[str]) -> int:
    """Run the agent of a node; return its exit status. It ends with this process."""
    words = ["ftmesh", "run", "--join", join, "--hosts", str(hosts), "--host-index", str(index)]
    words += ["--node-name", ray.util.get_node_ip_address(), "--run-dir", run_dir]
    words += [*shlex.split(os.environ.get("FTMESH_OPTIONS", "")), "--", *command]
    env = {**os.environ, "FTMESH_SECRET": secret}
    return subprocess.run(words, env=env, preexec_fn=end_with_parent, check=False).returncode


def run_once(hosts: int, run_dir: str, secret: str, command: list[str]) -> int:
    """Run agents on `hosts` nodes; return the status of the run, or 75 if all were lost."""
    group = placement_group([{"CPU": 1}] * hosts, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    places = [PlacementGroupSchedulingStrategy(group, i) for i in range(hosts)]
    join = f"{ray.get(address.options(scheduling_strategy=places[0]).remote())}:{PORT}"
    tasks = [
        agent.options(scheduling_strategy=place).remote(join, hosts, i, run_dir, secret, command)
        for i, place in enumerate(places)
    ]
    statuses: list[int] = []
    while tasks:
        # Nodes that have not noticed after a minute that the run is over hang.
        is_over = bool(set(statuses) & (FINAL - LEFT))
        ready, tasks = ray.wait(tasks, timeout=60 if is_over else None)
        if not ready:
            break
        try:
            statuses.append(ray.get(ready[0]))
        except ray.exceptions.RayError as error:
            print(f"a node was lost: {type(error).__name__}", flush=True)
    remove_placement_group(group)
    return min(statuses, default=75)  # nodes that are lost have 75 or above 128


def main() -> int:
    """Start agents until the run is over; return its status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=whole_number(1), required=True)
    parser.add_argument("--run-dir", required=True, help="a folder that all nodes see")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    ray.init(address="auto")
    secret = secrets.token_hex(32)
    for _ in range(MAX_STARTS):
        status = run_once(args.hosts, args.run_dir, secret, args.command[1:])
        if status in FINAL:
            break
        print(f"status {status}: starts all again", flush=True)
        time.sleep(5)
    return status


if __name__ == "__main__":
    sys.exit(main())
