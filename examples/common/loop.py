"""The training loop: steps, evaluations, checkpoints and logs, shared by all trainers.

A trainer describes its run as a `Job`, and `run` trains it. The host never waits for the device
between two steps: a loss is read while the next step runs. Checkpoints and evaluations do wait, and
read the loss first.
"""

from __future__ import annotations

import argparse
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from examples.common.mllog import MLLog
from examples.common.reader import Batches, Reader
from examples.common.report import Report
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.command_line import say
from ftmesh.elastic.attempt import Attempt
from ftmesh.elastic.elastic_group import SINGLE_PROCESS, ElasticGroup
from ftmesh.errors import CheckpointError, CheckpointNotFoundError
from ftmesh.testing import fault_injection
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

Data = TypeVar("Data", bound=Sized)
OPEN_TIMEOUT = 3600.0  # seconds; without an index, one process scans all of the data
SAVE_TIMEOUT = 3600.0  # for the last checkpoint of the slowest process
SEE_TIMEOUT = 10.0  # for a new file to be visible to all processes
SEE_INTERVAL = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to train, on which data."""

    benchmark: str  # its name in MLPerf
    settings: Mapping[str, Any]  # hyperparameters by MLPerf's keys
    steps_per_eval: int
    target: float  # accuracy at which the run ends

    trainer: Trainer
    first: Callable[[], State]  # the initial state
    train: Batches[Any]  # one per step
    validation: Batches[Any]
    finished: Callable[[State], None] = lambda state: None  # called with the last state
    remake: Callable[..., Trainer] | None = None  # topology, group=... -> a trainer on it

    @property
    def total_steps(self) -> int:
        """Steps of the run, unless the target is reached earlier."""
        return len(self.train)

    def epoch(self, step: int) -> int:
        """Return the epoch of `step`; both count from 1."""
        return (step - 1) * self.train.batch // self.train.num_examples + 1


def start_log(args: argparse.Namespace, group: ElasticGroup = SINGLE_PROCESS) -> MLLog:
    """Start the MLPerf log that `add_run` asks for; only the primary process writes it."""
    append = args.resume or group.generation > 1
    log = MLLog(args.mllog if group.is_primary else None, append=append)
    log.event("cache_clear", True)
    log.start("init")
    return log


def open_data(
    group: ElasticGroup, train: Callable[[], Data], validation: Callable[[], Data]
) -> tuple[Data, Data]:
    """Open the training and validation data, and check that all processes have the same sizes.

    One process opens it first and writes an index for the others.
    """
    data = group.primary_first(
        lambda: (train(), validation()), "open the data", timeout=OPEN_TIMEOUT
    )
    sizes = {"examples for training": len(data[0]), "examples for validation": len(data[1])}
    group.agree(sizes, timeout=OPEN_TIMEOUT)  # on separate disks all of them scan
    return data


def run(job: Job, attempt: Attempt, args: argparse.Namespace, log: MLLog) -> Report:
    """Train `job` with the arguments of `examples.common.arguments.add_run`."""
    trainer, group = job.trainer, attempt.group
    resumes = args.resume or group.generation > 1
    job.train.check_memory()
    group.report_phase("compile")
    fault_injection.inject("compile")
    rebuild = None if job.remake is None else partial(_rebuild, job.remake)
    train_step = attempt.compile(
        trainer.step, trainer.inputs, rebuild=rebuild, ahead=args.compile_ahead
    )
    with ExitStack() as stack:
        group.report_phase("restore")
        checkpoints = _open_checkpoints(group, args, stack) if args.checkpoint_dir else None
        if checkpoints and args.resume and checkpoints.latest_step is None:
            raise CheckpointNotFoundError(f"{checkpoints.folder} has no checkpoint to resume from")
        done, saved = attempt.restore(
            trainer.saved,
            init=lambda: trainer.to_saved(job.first()),
            full_types=trainer.full_types,
            checkpoints=checkpoints,
        )
        state = trainer.from_saved(saved)
        if done >= job.total_steps and group.generation == 1:
            raise CheckpointError(
                f"the checkpoint is of step {done}, and the run ends at step {job.total_steps}: "
                "nothing is left to do; give more --steps to continue"
            )
        log.submission(
            job.benchmark,
            platform=trainer.parallel.sums_description,
            settings=job.settings,
            train_samples=job.train.num_examples,
            eval_samples=job.validation.num_examples,
        )
        log.stop("init")
        log.start("run")
        report = stack.enter_context(
            Report(
                args.out if group.is_primary else None,
                total_steps=job.total_steps,
                first_step=done,
                unit=job.train.unit,
                title=_title(job, group),
                resume=resumes,
                show=group.is_primary,
                eager=group.controller is not None,
            )
        )
        if group.generation > 1:
            live = attempt.topology.num_live
            report.generation(done, group.generation, live=live, source=attempt.source)
        batches = stack.enter_context(
            Reader(job.train, first_step=done, max_damaged=args.max_damaged)
        )
        block = done + 1  # first step since the last evaluation
        reached = False
        if group.generation > 1 and done:  # the failure may have come before the step's checkpoint
            if checkpoints and _is_saved(job, args, done):
                _save(attempt, checkpoints, done, saved)
            if _is_evaluated(job, done):
                reached = _evaluate(job, attempt, state, done, report, log)
        waiting: list[tuple[int, Any]] = []  # steps that are not reported yet, with their losses
        for step in range(done + 1, job.total_steps + 1) if not reached else ():
            if step == block:
                log.start("block", first_epoch_num=job.epoch(step), epoch_count=_epochs(job, step))
            group.report_phase("read", step)
            batch = trainer.parallel.feed(next(batches))
            group.report_phase("step", step)
            state, loss = train_step(state, batch)
            state = _with_faults(step, state)
            is_saved = checkpoints is not None and _is_saved(job, args, step)
            pauses = is_saved or _is_evaluated(job, step)
            phase = "evaluate" if pauses else "read"
            if is_saved or group.controller is not None:
                saved = trainer.to_saved(state)
            is_ending = attempt.commit(step, saved, loss=loss, wait=pauses, phase=phase)
            waiting.append((step, loss))
            is_last_committed = pauses or is_ending or group.controller is None
            while len(waiting) > (not is_last_committed):  # the step before is committed
                _report_step(job, report, *waiting.pop(0))
            if checkpoints and (is_saved or is_ending):
                report.settle()  # a state with a bad loss must not be saved
                _save(attempt, checkpoints, step, trainer.to_saved(state))
            if _is_evaluated(job, step):
                log.stop("block", first_epoch_num=job.epoch(block))
                block = step + 1
                reached = _evaluate(job, attempt, state, step, report, log)
            if reached:
                break
        log.stop("run", status="success" if reached else "aborted")
        job.finished(state)
    group.report_phase("agree")
    group.barrier("the end of the run", timeout=SAVE_TIMEOUT)
    if group.is_primary:
        print(_summary(job, report))
    return report


def _rebuild(
    remake: Callable[..., Trainer], topology: Topology, group: ElasticGroup
) -> tuple[Any, Sequence[Any]]:
    trainer = remake(topology, group=group)
    return trainer.step, trainer.inputs


def _with_faults(step: int, state: State) -> State:
    """Corrupt the parameters on this process's first chip if fault injection asks for it."""
    if not fault_injection.corrupts_gradient(step):
        return state
    unhealthy = jax.local_devices()[0]

    def corrupt(leaf: jax.Array) -> jax.Array:
        shards = [
            jax.device_put(np.asarray(shard.data) * 1.001, unhealthy)
            if shard.device == unhealthy
            else shard.data
            for shard in leaf.addressable_shards
        ]
        return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)

    return state._replace(params=jax.tree.map(corrupt, state.params))


def _report_step(job: Job, report: Report, step: int, loss: Any) -> None:
    parallel, lr = job.trainer.parallel, job.trainer.lr_schedule(step - 1)
    report.step(step, parallel.local(loss), examples=job.train.batch, lr=lr)


def _check_shared(group: ElasticGroup, checkpoints: Checkpoints) -> None:
    """Raise unless all processes see the same folder: each writes a part of every checkpoint."""
    if group.is_single_process:
        return
    mark, token = checkpoints.folder / ".seen", uuid.uuid4().hex
    if group.is_primary:
        mark.write_text(token)
    token = group.broadcast(token, "the folder of checkpoints")
    until = time.monotonic() + SEE_TIMEOUT
    while not (sees := mark.exists() and mark.read_text() == token) and time.monotonic() < until:
        time.sleep(SEE_INTERVAL)  # network file systems may show new files late
    own = f"that of process {group.primary}" if sees else "another"
    group.agree({"the folder of checkpoints": own})
    if group.is_primary:
        mark.unlink()


def _open_checkpoints(
    group: ElasticGroup, args: argparse.Namespace, stack: ExitStack
) -> Checkpoints:
    """Open the folder of checkpoints and check that all processes see it."""
    checkpoints = stack.enter_context(
        Checkpoints(
            args.checkpoint_dir,
            keep=args.keep,
            resume=args.resume or group.generation > 1,
            process=group.process,
            log=say if group.is_primary else lambda line: None,
        )
    )
    group.before_exit(checkpoints.finish)
    _check_shared(group, checkpoints)
    return checkpoints


def _is_saved(job: Job, args: argparse.Namespace, step: int) -> bool:
    """True if a checkpoint follows the step, in a run with checkpoints."""
    return step == job.total_steps or step % args.checkpoint_every == 0


def _is_evaluated(job: Job, step: int) -> bool:
    """True if an evaluation follows the step."""
    return step == job.total_steps or step % job.steps_per_eval == 0


def _save(attempt: Attempt, checkpoints: Checkpoints, step: int, state: State) -> None:
    """Start to write a checkpoint. A run under a controller survives a full disk."""
    try:
        attempt.save(checkpoints, step, state)
    except CheckpointError as error:
        if attempt.group.controller is None:
            raise
        say(f"process {attempt.group.process}: {error}; continuing without this checkpoint")


def _evaluate(
    job: Job, attempt: Attempt, state: State, step: int, report: Report, log: MLLog
) -> bool:
    """Evaluate and report; return True if the target is reached."""
    report.settle()
    attempt.group.report_phase("evaluate", step)
    fault_injection.inject("evaluate", step)
    epoch = job.epoch(step)
    with log.interval("eval", epoch_num=epoch):
        local = _accuracy(job, state)
        accuracy: float = attempt.group.broadcast(local, "the accuracy")
        log.event("eval_accuracy", accuracy, epoch_num=epoch)
    report.evaluation(step, accuracy=accuracy)
    return accuracy >= job.target


def _accuracy(job: Job, state: State) -> float | None:
    """Return the accuracy on the validation data; None in a process without a live device."""
    num_right = num_answers = 0.0
    for counts in _delayed(_counts(job, state)):
        right, answers = map(job.trainer.parallel.local, counts)
        if right is not None and answers is not None:
            num_right, num_answers = num_right + float(right), num_answers + float(answers)
    return num_right / num_answers if num_answers else None


def _counts(job: Job, state: State) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield the number of right answers and of all answers, by batch."""
    trainer = job.trainer
    stats = trainer.mean_stats(state.stats)
    with Reader(job.validation) as reader:
        for batch in reader:
            yield trainer.evaluate(state.params, stats, trainer.parallel.feed(batch))


def _delayed(values: Iterator[Any]) -> Iterator[Any]:
    """Yield each value once the next one has been requested."""
    waiting: list[Any] = []
    for value in values:
        yield from waiting
        waiting = [value]
    yield from waiting


def _epochs(job: Job, step: int) -> int:
    """Count the epochs from `step` to the next evaluation."""
    last = min(step + job.steps_per_eval - 1, job.total_steps)
    return job.epoch(last) - job.epoch(step) + 1


def _title(job: Job, group: ElasticGroup) -> str:
    on = f"{'at last ' if group.generation > 1 else ''}on {job.trainer.parallel.ranks.topology}"
    return f"{job.benchmark}, batches of {job.train.batch} {job.train.unit}, {on}"


def _summary(job: Job, report: Report) -> str:
    step, numbers = max(report.evaluations.items())
    parallel, rounds = job.trainer.parallel, ""
    if (plan := parallel.gradients_plan) is not None:
        rounds = f", {plan.schedule.num_rounds} rounds per all-reduce"
    return (
        f"{job.benchmark}: accuracy {numbers['accuracy']:.4f} after {step} steps of "
        f"{job.train.batch} {job.train.unit} in {format_time(report.seconds)}; gradients summed by "
        f"{parallel.sums_description}{rounds}"
    )
