"""What it costs to be ready for failures: steps of the tiny BERT, as they are and as transactions.

Run by ``scripts/bench transactions``, which starts an emulated pod of four hosts. All kinds of
steps take turns in one run, there and back, so that what else the machine does falls on all of them
alike. Each turn of a kind is compared with the steps "as it is" of the same round; those run a
second time as "the same again", which shows what of the differences is chance.
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
from ftmesh.distributed.initialize import join
from ftmesh.distributed.process_group import Cluster
from ftmesh.elastic.peer_checkpoint import memory_on_line
from ftmesh.health.replica_check import check_replicas
from ftmesh.topology.topology import Topology

AS_IT_IS, AGAIN, KEEPS = "as it is", "the same again", "the state before it kept"
TWO_STATES, WITH_COPIES = "two states, not three", "copies of shards, too"
KINDS = {
    AS_IT_IS: StepOptions(keeps_state=False, copies=False),
    AGAIN: StepOptions(keeps_state=False, copies=False),
    KEEPS: StepOptions(copies=False),
    "a transaction": StepOptions(copies=False),
    TWO_STATES: StepOptions(copies=False),
    WITH_COPIES: StepOptions(),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table; the exit status."""
    parser = Parser(prog="scripts/bench transactions", description=__doc__)
    parser.add_argument(
        "--turns", type=whole_number(1), default=20, metavar="N", help="of each kind (20)"
    )
    parser.add_argument(
        "--steps", type=whole_number(1), default=5, metavar="N", help="of a turn (5)"
    )
    args = parser.parse_args(argv)
    with join(name="bench") as cluster:
        topology = Topology.from_devices(jax.devices())
        cluster = cluster.on(topology)
        if cluster.line is None:
            print("bench: run it by 'ftmesh launch --failures 1'", file=sys.stderr)
            return 2
        with jax.default_device(cluster.default_device):
            measure(topology, cluster, turns=args.turns, steps=args.steps)
    return 0


def measure(topology: Topology, cluster: Cluster, *, turns: int, steps: int) -> None:
    """All kinds of steps in turns, then what is done only now and then."""
    kinds = {
        name: Steps(
            topology,
            cluster,
            options,
            commits=name not in (AS_IT_IS, AGAIN, KEEPS),
            runs_ahead=name != TWO_STATES,
        )
        for name, options in KINDS.items()
    }
    for kind in kinds.values():
        kind.compile()
    assert cluster.line is not None
    cluster.line.joined(0, source="start", live=topology.num_live, less="")
    took: dict[str, list[float]] = {name: [] for name in kinds}
    done = 0
    for turn in range(turns + 1):
        for name, kind in list(kinds.items())[:: -1 if turn % 2 else 1]:
            cluster.barrier("a turn")
            start = time.perf_counter()
            for _ in range(steps):
                done += 1
                kind.step(done)
            kind.settle()
            if turn:  # the first compiles
                took[name].append((time.perf_counter() - start) / steps)
    rare: dict[str, list[float]] = {"compare parameters": [], "copy to host memory": []}
    last = kinds[WITH_COPIES]
    memory = memory_on_line(cluster.process, cluster.epoch, lambda line: None)
    assert memory is not None
    with memory:
        for turn in range(turns + 1):
            for name, times in rare.items():
                cluster.barrier("a turn")
                start = time.perf_counter()
                if name == "compare parameters":
                    assert not check_replicas(last.state.params, topology, cluster=cluster)
                else:
                    last.trainer.save(memory, turn + 1, last.state)
                if turn:
                    times.append(time.perf_counter() - start)
                memory.finish()
    if cluster.speaks:
        _print(took, rare, last.state)


class Steps:
    """Steps of one kind, all on the same batch."""

    def __init__(
        self,
        topology: Topology,
        cluster: Cluster,
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
        self._cluster = cluster
        self.trainer = bert_trainer(config, topology, options, cluster=cluster)
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
        """Have it compiled: the first step takes long."""
        self.state, loss = self.trainer.step(self.state, self._batch)
        loss.block_until_ready()

    def step(self, number: int) -> None:
        """As the loop does it, with a transaction where the state before is kept."""
        if self._commits:
            self._cluster.at("read", number)
            self._cluster.at("step", number)
        after, loss = self.trainer.step(self.state, self._batch)
        self.settle()
        self.state, self._waiting = after, (number, loss)
        if not self._runs_ahead:
            self.settle()

    def settle(self) -> None:
        """Wait for the last step, and commit it."""
        if self._waiting is None:
            return
        number, loss = self._waiting
        self._waiting = None
        loss.block_until_ready()
        if self._commits:
            assert self._cluster.line is not None
            self._cluster.line.commit(number)


def _print(took: dict[str, list[float]], rare: dict[str, list[float]], state: State) -> None:
    plain = took[AS_IT_IS]
    print(f"{'a step of the tiny BERT':28} {'median':>9} {'more':>8} {'middle half':>17}")
    for name, times in {**took, **rare}.items():
        line = f"{name:28} {statistics.median(times) * 1000:6.2f} ms"
        if name != AS_IT_IS:
            more = [
                each / beside - (name in took) for each, beside in zip(times, plain, strict=True)
            ]
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
    whole = sum(sizes.values()) - sizes["copies"]
    print(
        f"bytes of a device: state {whole:,}; kept a second time {whole + sizes['copies']:,}; "
        f"copies of a share {sizes['copies']:,} ({sizes['copies'] / whole:.1%})"
    )


if __name__ == "__main__":
    sys.exit(main())
