"""Measure what fault tolerance costs a step of the tiny BERT.

Run by ``scripts/bench transactions``, which starts an emulated pod of four hosts. All variants of a
step alternate in one run, in both orders, so that other load on the machine affects them alike.
Each is compared with the plain steps of the same repeat; those run a second time as "plain, again",
which shows how much of the differences is noise.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from examples.bert.config import PRESETS
from examples.bert.data import Batches, open_sequences
from examples.bert.trainer import bert_trainer, first_state
from examples.common.trainer import StepOptions
from ftmesh.command_line import Parser, whole_number
from ftmesh.elastic.attempt import Attempt, attempts
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.elastic.step_commit import HeldStep, Options, StepCommit
from ftmesh.health.replica_check import check_replicas

PLAIN, AGAIN = "plain", "plain, again"
WITH_COPIES = "commits, with copies"
VARIANTS = {
    PLAIN: None,
    AGAIN: None,
    "keeps the previous state": Options(),  # and commits nothing
    "commits": Options(shard_copies=False),
    "commits, --two-states": Options(shard_copies=False, two_states=True),
    WITH_COPIES: Options(),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table; return the exit status."""
    parser = Parser(prog="scripts/bench transactions", description=__doc__)
    parser.add_argument(
        "--turns",
        type=whole_number(1),
        default=20,
        metavar="N",
        help="repeats of each variant (default: 20)",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1),
        default=5,
        metavar="N",
        help="steps per repeat (default: 5)",
    )
    args = parser.parse_args(argv)
    for attempt in attempts():
        with attempt:
            if attempt.group.controller is None:
                print("bench: run it under 'ftmesh launch --failures 1'", file=sys.stderr)
                return 2
            measure(attempt, turns=args.turns, steps=args.steps)
    return 0


def measure(attempt: Attempt, *, turns: int, steps: int) -> None:
    """Measure all variants of a step, then what is done only now and then."""
    group, topology = attempt.group, attempt.topology
    variants = {name: Steps(attempt, name, options) for name, options in VARIANTS.items()}
    assert group.controller is not None
    group.controller.report_joined(0, source="start", live=topology.num_live)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    done = 0
    for turn in range(turns + 1):
        for name, variant in list(variants.items())[:: -1 if turn % 2 else 1]:
            group.barrier("a repeat")
            start = time.perf_counter()
            for _ in range(steps):
                done += 1
                variant.step(done)
            variant.settle()
            if turn:  # the first compiles
                seconds[name].append((time.perf_counter() - start) / steps)
    rare: dict[str, list[float]] = {"compare parameters": [], "copy to host memory": []}
    last = variants[WITH_COPIES]
    peers = PeerCheckpoint.from_environment(group.process, group.generation, lambda line: None)
    assert peers is not None
    with peers:
        for turn in range(turns + 1):
            for name, times in rare.items():
                group.barrier("a repeat")
                start = time.perf_counter()
                if name == "compare parameters":
                    assert not check_replicas(last.state.params, topology, group=group)
                else:
                    HeldStep(turn + 1, last.state, last.full_types).save(peers, topology)
                if turn:
                    times.append(time.perf_counter() - start)
                peers.finish()
    if group.is_primary:
        _print(seconds, rare)


class Steps:
    """Steps of one variant, all on the same batch."""

    def __init__(self, attempt: Attempt, name: str, options: Options | None) -> None:
        config, group = PRESETS["tiny"], attempt.group
        sizes = {
            "length": config.length,
            "predictions": config.predictions,
            "packed": config.packed,
        }
        self._group = group
        self._loss: Any = None
        step_options = StepOptions(keeps_state=options is not None)
        trainer = bert_trainer(config, attempt.topology, step_options, group=group)
        self._train_step, self.full_types = trainer.step, trainer.full_types
        self.state = first_state(config, trainer, seed=0)
        sequences = open_sequences(
            None, "train", num_sequences=1000, vocabulary=config.vocabulary, show=False, **sizes
        )
        rows = trainer.parallel.local_rows(trainer.shares)
        data = Batches(sequences, batch=config.batch, rows=rows, num_steps=1, **sizes)
        self._batch = trainer.parallel.feed(data[0][0])
        self.state, loss = self._train_step(self.state, self._batch)  # compiles it
        loss.block_until_ready()
        self._commits: StepCommit | None = None
        if options is not None and "commits" in name:
            self._commits = StepCommit(
                group, attempt.topology, self.full_types, options, None, threading.Event()
            )
            self._commits.begin(0, self.state)

    def step(self, number: int) -> None:
        """Run a step as the loop does; the one before it is settled on return."""
        if self._commits is not None:
            self._group.report_phase("step", number)
        self.state, loss = self._train_step(self.state, self._batch)
        if self._commits is not None:
            self._commits.add(number, self.state, loss, copy=False, wait=False, phase="read")
        else:
            self.settle()
        self._loss = loss

    def settle(self) -> None:
        """Wait for the last step, and commit it if this variant commits."""
        if self._commits is not None:
            self._commits.settle()
        elif self._loss is not None:
            self._loss.block_until_ready()


def _print(seconds: dict[str, list[float]], rare: dict[str, list[float]]) -> None:
    plain = seconds[PLAIN]
    print(f"{'a step of the tiny BERT':28} {'median':>9} {'more':>8} {'quartiles':>17}")
    for name, times in {**seconds, **rare}.items():
        line = f"{name:28} {statistics.median(times) * 1000:6.2f} ms"
        if name != PLAIN:
            more = [x / base - (name in seconds) for x, base in zip(times, plain, strict=True)]
            low, middle, high = statistics.quantiles(more, n=4, method="inclusive")
            line += f" {middle:8.1%} {low:8.1%} {high:8.1%}"
        print(line)


if __name__ == "__main__":
    sys.exit(main())
