"""The loop: steps, evaluations, checkpoints and logs, the same for every trainer.

A trainer describes what there is to train as a `Job`, and `run` trains it. Between two steps the
host waits for nothing that the device has yet to compute: the loss of a step is looked at when the
next one is under way. A checkpoint or an evaluation does wait, and looks at the loss first.
"""

from __future__ import annotations

import argparse
import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax

from examples.common.mllog import MLLog
from examples.common.reader import Batches, Reader
from examples.common.report import Report
from examples.common.restore import begin
from examples.common.sdc_check import with_faults
from examples.common.step_commit import Transactions
from examples.common.trainer import State, Trainer
from ftmesh.checkpoint.checkpoints import Checkpoints
from ftmesh.command_line import say
from ftmesh.distributed.consensus import agree_on_program
from ftmesh.distributed.consensus import compile_ahead as compile_program_ahead
from ftmesh.distributed.process_group import ALONE, Cluster
from ftmesh.elastic.peer_checkpoint import Memory, memory_on_line
from ftmesh.elastic.precompile import SECONDS, prepare
from ftmesh.errors import CheckpointError
from ftmesh.testing import fault_injection
from ftmesh.topology.devices import process_of
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

Data = TypeVar("Data", bound=Sized)
OPEN_LIMIT = 3600.0  # seconds: where there is no index of the data, one process reads all of it
SAVE_LIMIT = 3600.0  # for the last checkpoint of the slowest
STEP = "the program of a step"
SEE_LIMIT = 10.0  # for a file to be seen by all
SEE_INTERVAL = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """What there is to train, from which state, and on which data."""

    benchmark: str  # as MLPerf calls it
    settings: Mapping[str, Any]  # what MLPerf asks about them, by its keys
    steps_per_eval: int
    target: float  # the accuracy at which the run has reached its end

    trainer: Trainer
    first: Callable[[], State]  # what a run begins with
    train: Batches[Any]  # one for each step
    validation: Batches[Any]
    finished: Callable[[State], None] = lambda state: None  # is given the last state
    remake: Callable[..., Trainer] | None = None  # topology, cluster=... -> the trainer on it

    @property
    def total_steps(self) -> int:
        """Steps, where the target is not reached before."""
        return len(self.train)

    def epoch(self, step: int) -> int:
        """The epoch that `step`, counted from 1, belongs to; the first is 1."""
        return (step - 1) * self.train.batch // self.train.num_examples + 1


def start_log(args: argparse.Namespace, cluster: Cluster = ALONE) -> MLLog:
    """The log of a run that begins: one process writes it, where `add_run` asks for one."""
    append = args.resume or cluster.epoch > 1
    log = MLLog(args.mllog if cluster.speaks else None, append=append)
    log.event("cache_clear", True)
    log.start("init")
    return log


def open_data(
    cluster: Cluster, train: Callable[[], Data], validation: Callable[[], Data]
) -> tuple[Data, Data]:
    """The data for training and that for validation, of which all processes have as much.

    One process opens it first, and leaves an index of it to the others.
    """
    found = cluster.first(lambda: (train(), validation()), "open the data", limit=OPEN_LIMIT)
    sizes = {"examples for training": len(found[0]), "examples for validation": len(found[1])}
    cluster.agree(sizes, limit=OPEN_LIMIT)  # the others may have to read all of it, too
    return found


def run(job: Job, args: argparse.Namespace, log: MLLog) -> Report:
    """Train `job` as the arguments of `examples.common.arguments.add_run` say."""
    trainer, cluster = job.trainer, job.trainer.parallel.cluster
    resumes = args.resume or cluster.epoch > 1
    job.train.check_room()
    cluster.at("compile")
    fault_injection.reach("compile")
    topology = trainer.parallel.ranks.topology
    train_step = agree_on_program(cluster, STEP, trainer.step, trainer.inputs, topology)
    with ExitStack() as stack:
        cluster.at("restore")
        checkpoints = _open_checkpoints(cluster, args, stack) if args.checkpoint_dir else None
        memory = _open_memory(cluster, stack)
        transactions = Transactions(
            trainer,
            memory,
            checkpoints,
            copy_every=args.copy_every,
            check_every=args.check_every,
            two_states=args.two_states,
            is_saved=partial(_is_saved, job, args),
        )
        _say_if_without_copies(trainer, args)
        if cluster.epoch > 1:
            fault_injection.reach("recovery")
        done, state, source = begin(trainer, job.first, memory, checkpoints, resumes=resumes)
        if done >= job.total_steps and cluster.epoch == 1:
            raise CheckpointError(
                f"the checkpoint is of step {done}, and the run ends at {job.total_steps}: there "
                "is nothing left to do; more --steps would go on"
            )
        log.submission(
            job.benchmark,
            platform=trainer.parallel.sums_on,
            settings=job.settings,
            train_samples=job.train.num_examples,
            eval_samples=job.validation.num_examples,
        )
        log.stop("init")
        log.start("run")
        report = stack.enter_context(
            Report(
                args.out if cluster.speaks else None,
                total_steps=job.total_steps,
                first_step=done,
                unit=job.train.unit,
                title=_title(job),
                resume=resumes,
                show=cluster.speaks,
                eager=cluster.line is not None,
            )
        )
        if cluster.epoch > 1:
            live = trainer.parallel.ranks.topology.num_live
            report.epoch(done, cluster.epoch, live=live, source=source)
        batches = stack.enter_context(
            Reader(job.train, first_step=done, max_damaged=args.max_damaged)
        )
        transactions.begin(done, state, source, partial(_count, job, report))
        if cluster.line is not None:
            _prepare(job, topology, compile_ahead=args.compile_ahead)
        block = done + 1  # the first step since the last evaluation
        reached = False
        if cluster.epoch > 1 and done:  # what follows a step may have been cut off
            if checkpoints and _is_saved(job, args, done):
                _save(trainer, checkpoints, done, state)
            if _is_evaluated(job, done):
                reached = _evaluate(job, state, done, report, log)
        for step in range(done + 1, job.total_steps + 1) if not reached else ():
            if step == block:
                log.start("block", first_epoch_num=job.epoch(step), epoch_count=_epochs(job, step))
            cluster.at("read", step)
            batch = trainer.parallel.feed(next(batches))
            fault_injection.reach("step", step)
            cluster.at("step", step)
            after, loss = train_step(state, batch)
            fault_injection.reach("collective", step)
            after = with_faults(step, after)
            transactions.add(step, after, loss)
            state = after
            if checkpoints and _is_saved(job, args, step):
                transactions.settle()
                report.settle()  # a state that comes with a bad loss is not worth keeping
                _save(trainer, checkpoints, step, state)
            if _is_evaluated(job, step):
                transactions.settle()
                log.stop("block", first_epoch_num=job.epoch(block))
                block = step + 1
                reached = _evaluate(job, state, step, report, log)
            if reached:
                break
        log.stop("run", status="success" if reached else "aborted")
        job.finished(state)
    cluster.at("agree")
    cluster.barrier("the end of the run", limit=SAVE_LIMIT)
    if cluster.speaks:
        print(_summary(job, report))
    return report


def _count(job: Job, report: Report, step: int, loss: Any) -> None:
    """Report a step, which counts."""
    parallel, rate = job.trainer.parallel, job.trainer.lr_schedule(step - 1)
    report.step(step, parallel.local(loss), examples=job.train.batch, lr=rate)


def _prepare(job: Job, topology: Topology, *, compile_ahead: bool) -> None:
    """In the background, plan for the loss of each host, and compile where asked.

    One that will speak needs the plans: the first process, or the second. Nothing is agreed on.
    """
    cluster, remake = job.trainer.parallel.cluster, job.remake
    if remake is None or not (compile_ahead or cluster.process in cluster.members[:2]):
        return

    def do(left: Topology) -> None:
        trainer = remake(left, cluster=replace(cluster, board=None))
        if compile_ahead and cluster.process in {process_of(device) for device in left.devices}:
            compile_program_ahead(STEP, trainer.step, trainer.inputs, left)

    prepare(topology, do, seconds=math.inf if compile_ahead else SECONDS)


def _say_if_without_copies(trainer: Trainer, args: argparse.Namespace) -> None:
    """A sharded state that has no copies is lost with a host, and that should surprise nobody."""
    parallel = trainer.parallel
    wants = parallel.cluster.line is not None and trainer.layouts and not args.no_copies
    if wants and parallel.partners is None and parallel.cluster.speaks:
        say(
            "what a host owns of the optimizer's state has no copy on another: there are no such "
            "chips for all of it; if a host is lost, the run goes back to host memory "
            "(--copy-every) or to a checkpoint"
        )


def _say_nothing(line: str) -> None:
    pass


def _check_shared(cluster: Cluster, checkpoints: Checkpoints) -> None:
    """Refuse a folder that not all processes see: each would have a part of every checkpoint."""
    if cluster.is_alone:
        return
    mark, token = checkpoints.folder / ".seen", uuid.uuid4().hex
    if cluster.speaks:
        mark.write_text(token)
    token = cluster.broadcast(token, "the folder of checkpoints")
    until = time.monotonic() + SEE_LIMIT
    while not (sees := mark.exists() and mark.read_text() == token) and time.monotonic() < until:
        time.sleep(SEE_INTERVAL)  # a file system of many hosts may show new files late
    own = f"that of process {cluster.speaker}" if sees else "another"
    cluster.agree({"the folder of checkpoints": own})
    if cluster.speaks:
        mark.unlink()


def _open_checkpoints(cluster: Cluster, args: argparse.Namespace, stack: ExitStack) -> Checkpoints:
    """The folder of checkpoints, which all processes see."""
    checkpoints = stack.enter_context(
        Checkpoints(
            args.checkpoint_dir,
            keep=args.keep,
            resume=args.resume or cluster.epoch > 1,
            process=cluster.process,
            say=say if cluster.speaks else _say_nothing,
        )
    )
    cluster.before_leaving(checkpoints.finish)
    _check_shared(cluster, checkpoints)
    return checkpoints


def _is_saved(job: Job, args: argparse.Namespace, step: int) -> bool:
    """Whether there is to be a checkpoint after a step, where there are any."""
    return step == job.total_steps or step % args.checkpoint_every == 0


def _is_evaluated(job: Job, step: int) -> bool:
    """Whether there is to be an evaluation after a step."""
    return step == job.total_steps or step % job.steps_per_eval == 0


def _open_memory(cluster: Cluster, stack: ExitStack) -> Memory | None:
    """The memory of hosts, where there are keepers."""
    if cluster.line is None:
        return None
    memory = memory_on_line(cluster.process, cluster.epoch, say)
    if memory is not None:
        stack.enter_context(memory)
        cluster.before_leaving(memory.finish)
    return memory


def _save(trainer: Trainer, checkpoints: Checkpoints, step: int, state: State) -> None:
    """Begin to write a checkpoint. A run that survives failures survives a full disk, too."""
    cluster = trainer.parallel.cluster
    cluster.at("save", step)
    if cluster.line is not None and checkpoints.latest_step == step:
        return  # in an epoch before
    try:
        trainer.save(checkpoints, step, state)
    except CheckpointError as error:
        if cluster.line is None:
            raise
        say(f"process {cluster.process}: {error}; the run goes on without this checkpoint")


def _evaluate(job: Job, state: State, step: int, report: Report, log: MLLog) -> bool:
    """Whether the target is reached."""
    report.settle()
    job.trainer.parallel.cluster.at("evaluate", step)
    fault_injection.reach("evaluate", step)
    epoch = job.epoch(step)
    with log.interval("eval", epoch_num=epoch):
        found = _accuracy(job, state)
        accuracy: float = job.trainer.parallel.cluster.broadcast(found, "the accuracy")
        log.event("eval_accuracy", accuracy, epoch_num=epoch)
    report.evaluation(step, accuracy=accuracy)
    return accuracy >= job.target


def _accuracy(job: Job, state: State) -> float | None:
    """How many answers are right on the validation data, of all; None without a live device."""
    right = seen = 0.0
    for counts in _one_late(_counts(job, state)):
        number, total = map(job.trainer.parallel.local, counts)
        if number is not None and total is not None:
            right, seen = right + float(number), seen + float(total)
    return right / seen if seen else None


def _counts(job: Job, state: State) -> Iterator[tuple[jax.Array, jax.Array]]:
    """How many answers are right, and how many there are, batch by batch."""
    trainer = job.trainer
    stats = trainer.mean_stats(state.stats)
    with Reader(job.validation) as reader:
        for batch in reader:
            yield trainer.evaluate(state.params, stats, trainer.parallel.feed(batch))


def _one_late(values: Iterator[Any]) -> Iterator[Any]:
    """The same values, each when the next is under way."""
    waiting: list[Any] = []
    for value in values:
        yield from waiting
        waiting = [value]
    yield from waiting


def _epochs(job: Job, step: int) -> int:
    """How many epochs the steps from `step` to the next evaluation belong to."""
    last = min(step + job.steps_per_eval - 1, job.total_steps)
    return job.epoch(last) - job.epoch(step) + 1


def _title(job: Job) -> str:
    """What is trained, and on which mesh."""
    parallel = job.trainer.parallel
    on = f"{'at last ' if parallel.cluster.epoch > 1 else ''}on {parallel.ranks.topology}"
    return f"{job.benchmark}, batches of {job.train.batch} {job.train.unit}, {on}"


def _summary(job: Job, report: Report) -> str:
    """What was learned, and on which sums."""
    step, found = max(report.evaluations.items())
    took = format_time(report.seconds)
    parallel, rounds = job.trainer.parallel, ""
    if (plan := parallel.gradients_plan) is not None:
        rounds = f", {plan.schedule.num_rounds} rounds an all-reduce"
    return (
        f"{job.benchmark}: accuracy {found['accuracy']:.4f} after {step} steps of "
        f"{job.train.batch} {job.train.unit}, in {took}; gradients summed by "
        f"{parallel.sums_on}{rounds}"
    )
