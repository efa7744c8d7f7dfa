"""Train by Ray's JaxTrainer, with an agent in each of its workers.

    python jax_trainer.py --hosts 4 --run-dir /shared/run -- python train.py

Ray ends all workers when a node is lost, and starts all again: the state comes from checkpoints.
With driver.py the other nodes continue.
"""

import argparse
import os
import secrets
import shlex
import subprocess
from typing import Any

import ray
import ray.train.collective
from ray import train
from ray.train.v2.jax import JaxTrainer

from ftmesh.command_line import whole_number

FINAL = {0, 1, 2, 65, 66, 69, 77, 124, 130, 143}  # of a run that would end the same way again
PORT = 25500


def worker(config: dict[str, Any]) -> None:
    """Run the agent of a worker; raise if all are to be started again."""
    index, hosts = train.get_context().get_world_rank(), train.get_context().get_world_size()
    address = ray.util.get_node_ip_address()
    first = ray.train.collective.broadcast_from_rank_zero(address)
    words = ["ftmesh", "run", "--join", f"{first}:{PORT}", "--hosts", str(hosts)]
    words += ["--host-index", str(index), "--node-name", address, "--run-dir", config["run_dir"]]
    words += [*shlex.split(os.environ.get("FTMESH_OPTIONS", "")), "--", *config["command"]]
    env = {**os.environ, "FTMESH_SECRET": config["secret"]}
    status = subprocess.run(words, env=env, check=False).returncode
    if status not in FINAL:
        raise RuntimeError(f"host {index} ended with status {status}")
    train.report({"status": status})


def main() -> int:
    """Train; return the status of the run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=whole_number(1), required=True)
    parser.add_argument("--run-dir", required=True, help="a folder that all nodes see")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    ray.init(address="auto")
    config = {"run_dir": args.run_dir, "secret": secrets.token_hex(32), "command": args.command[1:]}
    run_config = train.RunConfig(
        name="train",
        storage_path=f"{args.run_dir}/ray",
        failure_config=train.FailureConfig(max_failures=20),
    )
    scaling = train.ScalingConfig(num_workers=args.hosts, placement_strategy="STRICT_SPREAD")
    trainer = JaxTrainer(
        worker, train_loop_config=config, scaling_config=scaling, run_config=run_config
    )
    return int(trainer.fit().metrics["status"])


if __name__ == "__main__":
    raise SystemExit(main())
