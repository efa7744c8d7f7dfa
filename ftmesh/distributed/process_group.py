"""Cluster: the processes of a run, what they agree on, and who speaks for all of them.

    with join() as cluster:
        topology = Topology.from_devices(jax.devices(), failed="2x2@2,2")
        cluster = cluster.on(topology)
        cluster.agree({"learning rate": 0.1})
        if cluster.speaks:
            print("one line, whatever the number of processes")

Everything goes over JAX's coordination service, or by way of a steward where processes may be lost,
not over the chips, and has a limit in seconds. One process alone is the simplest case: it agrees
with itself and waits for nobody.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from ftmesh.distributed.kv_client import Board
from ftmesh.distributed.shutdown import Ending
from ftmesh.distributed.wording import difference, in_seconds, processes
from ftmesh.elastic.controller_client import Line
from ftmesh.elastic.controller_kv import LineBoard
from ftmesh.errors import ClusterError
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import parse_blocks
from ftmesh.topology.topology import Topology

T = TypeVar("T")

LIMIT = 300.0  # seconds to wait for other processes, unless told otherwise


@dataclass(frozen=True)
class Cluster:
    """The processes of a run, as one of them sees it.

    `members` take part: all processes, or those that have devices in the program once it is known
    `on` which topology that runs. `speaker` is the first of them that has a live device, and speaks
    for all. `live_devices` are this process's own. Waits take `limit` seconds at most.
    """

    process: int = 0
    num_processes: int = 1
    limit: float = LIMIT
    members: tuple[int, ...] = (0,)
    speaker: int = 0
    live_devices: tuple[Any, ...] | None = None  # None: not known yet, or emulated
    board: Board | None = None  # None of one that is alone
    ending: Ending | None = None
    line: Line | None = None  # to a steward, where processes may be lost

    @property
    def is_alone(self) -> bool:
        """Whether there is one process only."""
        return self.board is None

    @property
    def speaks(self) -> bool:
        """Whether this process speaks for all."""
        return self.process == self.speaker

    @property
    def takes_part(self) -> bool:
        """Whether this process has devices in the program."""
        return self.process in self.members

    @property
    def default_device(self) -> Any:
        """Where this process computes what is not shared out; None of one without live devices."""
        return self.live_devices[0] if self.live_devices else None

    def on(self, topology: Topology, *, with_idle: bool = False) -> Cluster:
        """The same processes, knowing which of them `topology` needs.

        Its live devices are in the program, and with `with_idle` those of failed chips too.
        """
        if not topology.devices:
            return self
        live = topology.devices
        own = tuple(device for device in live if process_of(device) == self.process)
        if self.is_alone:
            return replace(self, live_devices=own)
        used = topology.all_devices if with_idle else live
        return replace(
            self,
            members=tuple(sorted({process_of(device) for device in used})),
            speaker=min(process_of(device) for device in live),
            live_devices=own,
        )

    # With a steward ---------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """How often who takes part has changed, counted from 1."""
        return 1 if self.line is None else self.line.news.epoch

    def at(self, phase: str, step: int = 0) -> None:
        """Say what this process is doing from now on; `ftmesh.elastic.heartbeats` has the words."""
        if self.line is not None:
            self.line.at(phase, step)

    def in_next_epoch(self) -> Cluster:
        """Those who are left, when some are lost."""
        assert self.line is not None
        members = self.line.next_epoch().members
        board = LineBoard(self.line)
        return replace(self, members=members, speaker=members[0], live_devices=None, board=board)

    def living(self, topology: Topology) -> Topology:
        """What is left of a mesh: less chips of processes that are lost, and less sick ones.

        Where that is in parts, the largest of them: no sum goes from one to another.
        """
        if self.line is None:
            return topology
        here = self.line.news.members
        gone = {topology.coord_of(d) for d in topology.devices if process_of(d) not in here}
        sick = {coord for block in parse_blocks(self.line.news.masked) for coord in block.coords()}
        left = topology.less(gone | sick)
        return left.less(coord for part in left.components()[1:] for coord in part)

    # Together ---------------------------------------------------------------------------------

    def barrier(self, what: str, *, limit: float | None = None) -> None:
        """Wait until all members are at the same place, which is called `what`."""
        if self.board is not None:
            self._meet(self.board, self._key(self.board, f"barrier/{what}"), b"", what, limit)

    def agree(self, facts: Mapping[str, Any], *, limit: float | None = None) -> None:
        """An error in every member, which shows who differs, unless all have the same `facts`.

        These are by name, and are compared as text.
        """
        if self.board is None:
            return
        key = self._key(self.board, "agree")
        own = {name: str(value) for name, value in facts.items()}
        what = f"agree on {_some(own)}"
        self._meet(self.board, key, json.dumps(own).encode(), what, limit)
        if self.process == self.members[0]:
            told = self.board.of_processes(key)
            found = difference({process: json.loads(note) for process, note in told.items()})
            self.board.put(f"{key}-found", json.dumps(found).encode())
        found = json.loads(self._told(self.board, f"{key}-found", self.members[0], what, limit))
        if found is not None:
            raise ClusterError(f"the processes do not agree on {found}: all of them need the same")

    def broadcast(self, value: Any, what: str, *, limit: float | None = None) -> Any:
        """The speaker's value, at every member; of the others it does not matter.

        It is bytes, or can be written as JSON.
        """
        if self.board is None:
            return value
        key = self._key(self.board, f"broadcast/{what}")
        if self.speaks:
            is_raw = isinstance(value, bytes)
            self.board.put(key, b"b" + value if is_raw else b"j" + json.dumps(value).encode())
            return value
        note = self._told(self.board, key, self.speaker, what, limit)
        return note[1:] if note[:1] == b"b" else json.loads(note[1:])

    def gather(self, value: Any, what: str, *, limit: float | None = None) -> dict[int, Any]:
        """The value of every member, by its number, at all of them; it can be written as JSON."""
        if self.board is None:
            return {self.process: value}
        key = self._key(self.board, f"gather/{what}")
        self._meet(self.board, key, json.dumps(value).encode(), f"gather {what}", limit)
        told = self.board.of_processes(key)
        return {process: json.loads(told[process]) for process in self.members}

    def first(self, make: Callable[[], T], what: str, *, limit: float | None = None) -> T:
        """What `make` gives: the speaker makes it first, and the others when that is done.

        For what leaves something behind that the next one finds, such as an index of data.
        """
        if self.speaks:
            made = make()
            self.barrier(what, limit=limit)
            return made
        self.barrier(what, limit=limit)
        return make()

    def _key(self, board: Board, name: str) -> str:
        """A key that no two uses of a name among these members have in common."""
        if not self.takes_part:
            raise ClusterError(
                f"process {self.process} has no device in the program, and takes no part in what "
                "the others agree on: leave the block of join, which waits for them"
            )
        whose = zlib.crc32(json.dumps(self.members).encode())
        return board.turn(f"{name}/{whose:08x}")

    def _meet(self, board: Board, key: str, note: bytes, what: str, limit: float | None) -> None:
        """Put up a note and wait for those of all members."""
        limit = self.limit if limit is None else limit
        board.put(f"{key}/{self.process}", note)
        if not board.meet(f"{key}-meet", self.members, limit):
            missing = set(self.members) - set(board.of_processes(key))
            who = f"{processes(missing)} did not come" if missing else "not all processes came"
            raise ClusterError(f"{who} to {what} within {in_seconds(limit)}")

    def _told(self, board: Board, key: str, by: int, what: str, limit: float | None) -> bytes:
        """The note of another process."""
        limit = self.limit if limit is None else limit
        note = board.get(key, limit)
        if note is None:
            raise ClusterError(f"process {by} did not tell {what} within {in_seconds(limit)}")
        return note

    # The end ----------------------------------------------------------------------------------

    def before_leaving(self, finish: Callable[[], Any]) -> None:
        """Have `finish` done also where this process ends because another has failed."""
        if self.ending is not None:
            self.ending.before_leaving(finish)

    def abort(self, reason: str, *, status: int = 1) -> NoReturn:
        """End this process and all others, which say the reason within seconds."""
        if self.ending is None:
            raise ClusterError(reason)
        self.ending.abort(reason, status)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.ending is None:
            return
        if error is None:
            self.ending.leave()
        else:
            self.ending.fail(error)


def _some(names: Iterable[str]) -> str:
    """A few of them.

    >>> _some(["seed", "mesh", "rate", "steps"])
    'seed, mesh and 2 more'
    """
    found = list(names)
    if len(found) <= 3:
        return ", ".join(found)
    return f"{', '.join(found[:2])} and {len(found) - 2} more"


ALONE = Cluster()
