"""Memory: states kept in the memory of hosts, to go on from when some of the hosts are gone.

    memory = Memory(keepers, host=1, secret=secret, process=1, epoch=2)
    found = memory.restore(state, layouts=layouts)  # (step, state), or None
    ...
    memory.save(step, state, layouts=layouts)
    memory.close()

Each process gives its part of a checkpoint to the keeper of its own host and to those of `copies`
hosts after it: so many may be lost at once, and more unless they are neighbours. A blob is called
``state/EPOCH/STEP/FILE``: what one epoch has left incomplete is never completed by another. A host
holds ``(1 + copies) * (keep + 1)`` parts, and one more while it is given.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ftmesh import command_line
from ftmesh.checkpoint.manifest import Index
from ftmesh.checkpoint.reader import Saved
from ftmesh.checkpoint.restore import newest_sound
from ftmesh.checkpoint.snapshot import Copier, Snapshot, finite_snapshot
from ftmesh.checkpoint.writer import INDEX, file_names, load, part_of
from ftmesh.elastic.peer_stores import Holders, Keepers
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.layout.owned_buckets import Owned
from ftmesh.topology.devices import process_of

LIMIT_SECONDS = 10.0


class Moment(NamedTuple):
    """When a state was kept; of two, the later step is the newer, whichever epoch did it."""

    step: int
    epoch: int

    @property
    def prefix(self) -> str:
        """How the names of its blobs begin."""
        return f"state/{self.epoch}/{self.step}/"

    @staticmethod
    def of(name: str) -> Moment:
        """That of a blob."""
        _, epoch, step, _ = name.split("/")
        return Moment(int(step), int(epoch))

    def __str__(self) -> str:
        return f"{self.step} of epoch {self.epoch}"


class Memory:
    """The part that one process has in keeping states; `keepers` has their addresses by host.

    A keeper has `limit` seconds to answer in; where one does not, another host has its copies. What
    goes wrong with keepers is told to `say`, and training goes on.
    """

    def __init__(
        self,
        keepers: Mapping[int, str],
        *,
        host: int,
        secret: str,
        process: int,
        epoch: int = 1,
        copies: int = 1,
        keep: int = 2,
        limit: float = LIMIT_SECONDS,
        process_of: Callable[[Any], int] = process_of,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.host, self.process, self.epoch = host, process, epoch
        self.copies, self.keep = copies, keep
        self._process_of, self._say = process_of, say or command_line.say
        self.keepers = Keepers(keepers, host=host, secret=secret, limit=limit, say=self._say)
        self._last_step = -1
        self._giving: Future[int] | None = None
        self._thread = ThreadPoolExecutor(1, "memory")

    def save(
        self,
        step: int,
        state: Any,
        *,
        layouts: Sequence[Owned] = (),
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Begin to keep `state`, as it is after `step`; the arguments are those of checkpoints.

        Waits for the state and for the one before it, not for the keepers.
        """
        self.finish()
        if step <= self._last_step:
            raise CheckpointError(
                f"step {step} is not after step {self._last_step}, which epoch {self.epoch} has "
                "kept: go back in a new epoch"
            )
        copier = Copier(self.process, self._process_of, devices, layouts)
        snapshot = finite_snapshot(copier, step, state)
        self._last_step = step
        self._giving = self._thread.submit(self._give, snapshot)

    def restore(
        self,
        like: Any,
        *,
        layouts: Sequence[Owned] = (),
        agree: Callable[[str], None] = lambda found: None,
    ) -> tuple[int, Any] | None:
        """The newest state that is whole among the keepers: its step, and it, lying as `like` does.

        What is later, of epochs before this one, is dropped when all processes `agree` on what was
        found: nobody is to go on from it. None where nothing is whole.
        """
        self.finish()
        holders, moments = self._moments()
        found = newest_sound(
            moments,
            lambda moment: Saved(self._files(moment, self._names(moment, holders), holders)),
            like,
            layouts=layouts,
            where="the memory of hosts",
            say=self._say,
            agree=agree,
        )
        newest = found[0] if found else Moment(-1, 0)
        for moment in moments:
            if moment > newest and moment.epoch < self.epoch:
                self.keepers.drop(moment.prefix)
        return (newest.step, found[1]) if found else None

    @property
    def latest_step(self) -> int | None:
        """The step of the newest state that is whole, if there is one."""
        self.finish()
        holders, moments = self._moments()
        return next((m.step for m in moments if self._is_whole(m, holders)), None)

    def finish(self) -> int:
        """Wait until the keepers have everything; how many hosts have taken the last part.

        That is as many as should, where this process has no part.
        """
        giving, self._giving = self._giving, None
        return 1 + self.copies if giving is None else giving.result()

    def close(self) -> None:
        """Wait for that, and keep no more."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            self.keepers.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _give(self, snapshot: Snapshot) -> int:
        """In a thread: this process's part; the first process also drops what is too old."""
        index = snapshot.index
        moment = Moment(index.step, self.epoch)
        number = wanted = min(1 + self.copies, len(self.keepers.hosts))
        if self.process in index.processes:
            part = part_of(index, self.process, snapshot.pieces)
            blobs = {moment.prefix + name: b"".join(content) for name, content in part}
            number = self.keepers.give(blobs, wanted)
            if number < wanted:
                self._say(
                    f"process {self.process} has its part of step {moment} in the memory of "
                    f"{number} hosts, and not of {wanted}"
                )
        if self.process == index.processes[0]:
            self._drop_old()
        return number

    def _drop_old(self) -> None:
        """Drop all that is older than the last few which are whole."""
        holders, moments = self._moments()
        whole = 0
        for moment in moments:
            if whole < self.keep:
                whole += self._is_whole(moment, holders)
            else:
                self.keepers.drop(moment.prefix)

    def _moments(self) -> tuple[Holders, list[Moment]]:
        """Who holds what, and of when that is, the newest first."""
        holders = self.keepers.holders("state/")
        return holders, sorted({Moment.of(name) for name in holders}, reverse=True)

    def _is_whole(self, moment: Moment, holders: Holders) -> bool:
        try:
            return all(moment.prefix + name in holders for name in self._names(moment, holders))
        except DamagedCheckpointError:
            return False

    def _names(self, moment: Moment, holders: Holders) -> list[str]:
        """Those of all files of a state, as its index has them."""
        index = Index.from_json(load(self._files(moment, [INDEX], holders)[INDEX], INDEX))
        return [INDEX, *(name for each in index.processes for name in file_names(each))]

    def _files(self, moment: Moment, names: Sequence[str], holders: Holders) -> dict[str, bytes]:
        """Files of a state, from whoever has them."""
        for name in names:
            if moment.prefix + name not in holders:
                raise DamagedCheckpointError(f"it has no {name}")
        blobs = self.keepers.get([moment.prefix + name for name in names], holders)
        files = {}
        for name, blob in zip(names, blobs, strict=True):
            if blob is None:
                raise DamagedCheckpointError(f"no host gives its {name}")
            files[name] = blob
        return files


def memory_on_line(process: int, epoch: int, say: Callable[[str], None]) -> Memory | None:
    """As ``ftmesh launch`` has it for this process; None where there are no keepers."""
    told = os.environ.get("FTMESH_KEEPERS")
    if not told:
        return None
    keepers = dict(each.split("=", 1) for each in told.split(","))
    return Memory(
        {int(host): address for host, address in keepers.items()},
        host=int(os.environ["FTMESH_HOST"]),
        secret=os.environ["FTMESH_SECRET"],
        process=process,
        epoch=epoch,
        say=say,
    )
