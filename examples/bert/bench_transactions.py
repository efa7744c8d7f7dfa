"""Measure what fault tolerance costs a step of the tiny BERT.

Run by ``scripts/bench transactions``, which starts an emulated pod of four hosts. All variants of a
step alternate in one run, in both orders, so that other load on the machine affects them alike.
Each is compared with the plain steps of the same repeat; those run a second time as "plain, again",
which shows how much of the differences is noise.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import jax

from examples.bert.config import PRESETS
from examples.bert.data import Batches, open_sequences
from examples.bert.trainer import bert_trainer, first_state
from examples.common.trainer import State, StepOptions
from ftmesh.command_line import Parser, whole_number
from ftmesh.elastic.elastic_group import ElasticGroup, initialize
from ftmesh.elastic.peer_checkpoint import PeerCheckpoint
from ftmesh.health.replica_check import check_replicas
from ftmesh.topology.topology import Topology

PLAIN, AGAIN, KEEPS = "plain", "plain, again", "keeps the previous state"
TWO_STATES, WITH_COPIES = "and commits, --two-states", "and commits, with copies"
VARIANTS = {
    PLAIN: StepOptions(keeps_state=False, copies=False),
    AGAIN: StepOptions(keeps_state=False, copies=False),
    KEEPS: StepOptions(copies=False),
    "and commits": StepOptions(copies=False),
    TWO_STATES: StepOptions(copies=False),
    WITH_COPIES: StepOptions(),
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
    with initialize(name="bench") as group:
        topology = Topology.from_devices(jax.devices())
        group = group.for_topology(topology)
        if group.controller is None:
            print("bench: run it under 'ftmesh launch --failures 1'", file=sys.stderr)
            return 2
        with jax.default_device(group.default_device):
            measure(topology, group, turns=args.turns, steps=args.steps)
    return 0


def measure(topology: Topology, group: ElasticGroup, *, turns: int, steps: int) -> None:
    """Measure all variants of a step, then what is done only now and then."""
    variants = {
        name: Steps(
            topology,
            group,
            options,
            commits=name not in (PLAIN, AGAIN, KEEPS),
            runs_ahead=name != TWO_STATES,
        )
        for name, options in VARIANTS.items()
    }
    for variant in variants.values():
        variant.compile()
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
    peer_checkpoint = PeerCheckpoint.from_environment(
        group.process, group.generation, lambda line: None
    )
    assert peer_checkpoint is not None
    with peer_checkpoint:
        for turn in range(turns + 1):
            for name, times in rare.items():
                group.barrier("a repeat")
                start = time.perf_counter()
                if name == "compare parameters":
                    assert not check_replicas(last.state.params, topology, group=group)
                else:
                    last.trainer.save(peer_checkpoint, turn + 1, last.state)
                if turn:
                    times.append(time.perf_counter() - start)
                peer_checkpoint.finish()
    if group.is_primary:
        _print(seconds, rare, last.state)


class Steps:
    """Steps of one variant, all on the same batch."""

    def __init__(
        self,
        topology: Topology,
        group: ElasticGroup,
        options: StepOptions,
        *,
        commits: bool,
        runs_ahead: bool,
    ) -> None:
        config = PRESETS["tiny"]
        sizes = {
            "length": config.length,
            "predictions": config.predictions,
            "packed": config.packed,
        }
        self._group = group
        self.trainer = bert_trainer(config, topology, options, group=group)
        self.state = first_state(config, self.trainer, seed=0)
        sequences = open_sequences(
            None, "train", num_sequences=1000, vocabulary=config.vocabulary, show=False, **sizes
        )
        rows = self.trainer.parallel.local_rows(self.trainer.shares)
        data = Batches(sequences, batch=config.batch, rows=rows, num_steps=1, **sizes)
        self._batch = self.trainer.parallel.feed(data[0][0])
        self._commits, self._runs_ahead = commits, runs_ahead
        self._waiting: tuple[int, jax.Array] | None = None

    def compile(self) -> None:
        """Compile the step by running it once."""
        self.state, loss = self.trainer.step(self.state, self._batch)
        loss.block_until_ready()

    def step(self, number: int) -> None:
        """Run a step as the loop does; the one before it is settled on return."""
        if self._commits:
            self._group.report_phase("read", number)
            self._group.report_phase("step", number)
        after, loss = self.trainer.step(self.state, self._batch)
        self.settle()
        self.state, self._waiting = after, (number, loss)
        if not self._runs_ahead:
            self.settle()

    def settle(self) -> None:
        """Wait for the last step, and commit it if this variant commits."""
        if self._waiting is None:
            return
        number, loss = self._waiting
        self._waiting = None
        loss.block_until_ready()
        if self._commits:
            assert self._group.controller is not None
            self._group.controller.commit(number)


def _print(seconds: dict[str, list[float]], rare: dict[str, list[float]], state: State) -> None:
    plain = seconds[PLAIN]
    print(f"{'a step of the tiny BERT':28} {'median':>9} {'more':>8} {'quartiles':>17}")
    for name, times in {**seconds, **rare}.items():
        line = f"{name:28} {statistics.median(times) * 1000:6.2f} ms"
        if name != PLAIN:
            more = [x / base - (name in seconds) for x, base in zip(times, plain, strict=True)]
            low, middle, high = statistics.quantiles(more, n=4, method="inclusive")
            line += f" {middle:8.1%} {low:8.1%} {high:8.1%}"
        print(line)
    sizes = {
        name: sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(part)
            for shard in leaf.addressable_shards[:1]
        )
        for name, part in state._asdict().items()
    }
    total = sum(sizes.values()) - sizes["copies"]
    print(
        f"bytes per device: state {total:,}; previous state {total + sizes['copies']:,}; "
        f"copies of a shard {sizes['copies']:,} ({sizes['copies'] / total:.1%})"
    )


if __name__ == "__main__":
    sys.exit(main())
