"""The loop: steps, evaluations, checkpoints and logs, the same for every trainer.

A trainer describes what there is to train as a `Job`, and `run` trains it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import jax

from ftmesh.errors import CheckpointError
from ftmesh.train.checkpoints import Checkpoints
from ftmesh.train.mllog import MLLog
from ftmesh.train.programs import Programs
from ftmesh.train.report import Report
from ftmesh.units import format_time


@dataclass(frozen=True, kw_only=True)
class Job:
    """What there is to train. `state` is a pytree of the trainer's own; so is a batch."""

    benchmark: str  # as MLPerf calls it
    unit: str  # what a batch is made of: images, sequences
    batch: int  # of all chips together
    total_steps: int
    steps_per_eval: int
    epoch_examples: int
    eval_examples: int
    target: float  # the accuracy at which the run has reached its end
    settings: Mapping[str, Any]  # what MLPerf asks about them, by its keys

    programs: Programs
    state: Any
    batches: Callable[[int], AbstractContextManager[Iterator[Any]]]  # from a step on
    evaluate: Callable[[Any], float]  # the accuracy

    def epoch(self, step: int) -> int:
        """The epoch that `step`, counted from 1, belongs to; the first is 1."""
        return (step - 1) * self.batch // self.epoch_examples + 1


def run(job: Job, args: argparse.Namespace, log: MLLog) -> Report:
    """Train `job` as the arguments of `ftmesh.train.arguments.add_run` say."""
    first, programs = jax.process_index() == 0, job.programs
    with ExitStack() as stack:
        checkpoints, done, state = None, 0, job.state
        if args.checkpoint_dir:
            checkpoints = stack.enter_context(
                Checkpoints(args.checkpoint_dir, keep=args.keep, resume=args.resume)
            )
            done, whole = checkpoints.restore(programs.to_checkpoint(state))
            if args.resume and not done:
                raise CheckpointError(f"{args.checkpoint_dir} has no checkpoint to go on from")
            state = programs.from_checkpoint(whole) if done else state
        if done >= job.total_steps:
            raise CheckpointError(
                f"the checkpoint is of step {done}, and the run ends at {job.total_steps}: there "
                "is nothing left to do; more --steps would go on"
            )
        log.submission(
            job.benchmark,
            platform=programs.parallel.sums_on,
            settings=job.settings,
            train_samples=job.epoch_examples,
            eval_samples=job.eval_examples,
        )
        log.stop("init")
        log.start("run")
        report = stack.enter_context(
            Report(
                args.out if first else None,
                total_steps=job.total_steps,
                first_step=done,
                unit=job.unit,
                resume=args.resume,
            )
        )
        batches = stack.enter_context(job.batches(done))
        block = done + 1  # the first step since the last evaluation
        reached = False
        for step in range(done + 1, job.total_steps + 1):
            if step == block:
                log.start("block", first_epoch_num=job.epoch(step), epoch_count=_epochs(job, step))
            state, loss = programs.step(state, next(batches))
            report.step(step, loss, examples=job.batch, lr=float(programs.lr_schedule(step - 1)))
            last = step == job.total_steps
            if checkpoints and (last or step % args.checkpoint_every == 0):
                checkpoints.save(step, programs.to_checkpoint(state))
            if last or step % job.steps_per_eval == 0:
                log.stop("block", first_epoch_num=job.epoch(block))
                block = step + 1
                reached = _evaluate(job, state, step, report, log)
            if reached:
                break
        log.stop("run", status="success" if reached else "aborted")
    if first:
        print(_summary(job, report))
    return report


def _summary(job: Job, report: Report) -> str:
    """What was learned, and on which sums."""
    step, found = max(report.evaluations.items())
    took = format_time(report.seconds)
    parallel, rounds = job.programs.parallel, ""
    if parallel.plan is not None and not parallel.use_psum:
        rounds = f", {parallel.plan.schedule.num_rounds} rounds an all-reduce"
    return (
        f"{job.benchmark}: accuracy {found['accuracy']:.4f} after {step} steps of {job.batch} "
        f"{job.unit}, in {took}; gradients summed by {parallel.sums_on}{rounds}"
    )


def _epochs(job: Job, step: int) -> int:
    """How many epochs the steps from `step` to the next evaluation belong to."""
    last = min(step + job.steps_per_eval - 1, job.total_steps)
    return job.epoch(last) - job.epoch(step) + 1


def _evaluate(job: Job, state: Any, step: int, report: Report, log: MLLog) -> bool:
    """Whether the target is reached."""
    epoch = job.epoch(step)
    with log.interval("eval", epoch_num=epoch):
        accuracy = job.evaluate(state)
        log.event("eval_accuracy", accuracy, epoch_num=epoch)
    report.evaluation(step, accuracy=accuracy)
    return accuracy >= job.target
