"""Throughput of interleaved programs, and GPU memory left to PyTorch."""

import argparse
import subprocess
import sys

import numpy as np
import pytest

from examples.common.measure import measure, read_arguments, trainer_steps
from ftmesh import Topology
from ftmesh.errors import TrainingError
from tests.support.linear import PointBatches, first, linear_trainer
from tests.support.more import more


def test_the_best_repeat_counts(monkeypatch):
    clock = iter(np.cumsum([0, 4, 0, 2, 0, 8, 0, 1]))  # durations of the repeats
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    done = []
    programs = {"a": lambda steps: done.append(("a", steps)), "b": lambda steps: done.append("b")}
    assert measure(programs, batch=10, steps=2, repeats=2) == {"a": 5.0, "b": 20.0}
    assert done == [("a", 5), "b", ("a", 2), "b", ("a", 2), "b"]


def test_steps_of_a_trainer_continue():
    trainer = linear_trainer(Topology.grid("1x1"))
    state = trainer.first(*first())
    trainer_steps(trainer, state, PointBatches(batch=24, num_steps=1)[0][0])(2)
    assert state.params["w"].is_deleted()  # the step has taken it over
    bad = PointBatches(batch=24, num_steps=1, nan_at=1)[0][0]
    with pytest.raises(TrainingError, match="the loss is nan"):
        trainer_steps(trainer, trainer.first(*first()), bad)(1)


@more
@pytest.mark.parametrize("example", ["bert", "resnet50"])
@pytest.mark.slow
def test_with_torch_jax_does_not_preallocate(example):
    """The option must be set before JAX looks at its devices."""
    code = f"""if True:
        import os, sys
        from jax._src import xla_bridge
        from examples.{example} import bench_step
        def stop(*args):
            print(os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE"))
            print(xla_bridge.backends_are_initialized())
            sys.exit()
        bench_step.our_steps = stop
        bench_step.main(sys.argv[1:])
    """
    for argv, output in ((["--torch"], "false\nFalse\n"), ([], "None\nFalse\n")):
        command = [sys.executable, "-c", code, *argv]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == output


def test_default_arguments():
    args = read_arguments(argparse.ArgumentParser(), [], ["a", "b"], preset="b", batch=3, steps=4)
    assert (args.preset, args.batch, args.steps, args.torch, args.json) == ("b", 3, 4, False, False)
