"""Processes with different numbers of devices write their parts and do not wait for each other."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.elastic.rpc import free_port
from tests.support.known_state import assert_same_bits, make_params, storing_optimizer

HERE = Path(__file__).parent
FLAG = "--xla_force_host_platform_device_count"


@pytest.mark.slow
def test_three_processes_write_and_one_reads(tmp_path):
    port = free_port()
    paths = os.pathsep.join([str(HERE.parent), str(HERE.parent.parent)])
    running = [
        subprocess.Popen(
            [sys.executable, HERE / "one_process.py", str(port), str(process), "3", tmp_path],
            env={**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": f"{FLAG}={devices}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process, devices in enumerate((4, 2, 2))
    ]
    try:
        outputs = [process.communicate(timeout=180)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for number, text in enumerate(outputs):
        assert f"process {number} has restored step 3" in text, text
    sizes = [(tmp_path / "3" / f"{number}.bin").stat().st_size for number in range(3)]
    assert sizes[0] > sizes[1] == sizes[2] > 0
    lists = [json.loads((tmp_path / "3" / f"{number}.json").read_text()) for number in range(3)]
    ranks = [{entry["rank"] for entry in own["pieces"] if "rank" in entry} for own in lists]
    assert ranks == [{0, 1, 2, 3}, {6, 7}, {4, 5}]  # along the ring through 4x2 chips
    params = make_params()
    with Checkpoints(tmp_path, resume=True) as checkpoints:
        _, restored = checkpoints.restore(jax.eval_shape(storing_optimizer().init, params))
    assert_same_bits(restored.same, params)
