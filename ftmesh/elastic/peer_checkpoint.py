"""PeerCheckpoint: checkpoints in the memory of hosts, which survive the loss of some hosts.

Each process puts its part of a checkpoint into the peer store of its own host and of the `copies`
hosts after it. That many hosts may be lost at once, and more unless they are neighbours. A blob is
named ``state/GENERATION/STEP/FILE``, so that no generation completes a checkpoint of another. A
host holds ``(1 + copies) * (keep + 1)`` parts, and one more while it receives one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from ftmesh import command_line
from ftmesh.checkpoint.manifest import Manifest
from ftmesh.checkpoint.restore import restore_newest
from ftmesh.checkpoint.snapshot import PartnerCopies, Snapshot, Snapshotter
from ftmesh.checkpoint.storage import (
    MANIFEST_FILE,
    CheckpointReader,
    load_json,
    process_file_names,
    process_files,
)
from ftmesh.elastic.peer_store import Holders, PeerStores
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.topology.devices import process_of

STORE_TIMEOUT = 10.0  # seconds for a peer store to answer


class SavedStep(NamedTuple):
    """Identifies a checkpoint. The later step is the newer one, whichever generation saved it."""

    step: int
    generation: int

    @property
    def prefix(self) -> str:
        """Prefix of the names of its blobs."""
        return f"state/{self.generation}/{self.step}/"

    @staticmethod
    def from_blob_name(name: str) -> SavedStep:
        """Return the checkpoint that a blob belongs to."""
        _, generation, step, _ = name.split("/")
        return SavedStep(int(step), int(generation))

    def __str__(self) -> str:
        return f"{self.step} of generation {self.generation}"


class PeerCheckpoint:
    """The in-memory checkpoints of a run, as one process saves and restores them.

    Lost peer stores are reported to `say`, and training continues.

    Args:
        addresses: Address of the peer store of each host.
        host, process: Indices of this host and process.
        secret: The secret of the run.
        generation: The current generation.
        copies: On how many other hosts each part is kept.
        keep: How many complete checkpoints are kept.
        timeout: Seconds for a peer store to answer.
        process_of: Maps a device to its process.
        say: Called with a line for each problem; prints to stderr by default.
    """

    def __init__(
        self,
        addresses: Mapping[int, str],
        *,
        host: int,
        secret: str,
        process: int,
        generation: int = 1,
        copies: int = 1,
        keep: int = 2,
        timeout: float = STORE_TIMEOUT,
        process_of: Callable[[Any], int] = process_of,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.host, self.process, self.generation = host, process, generation
        self.copies, self.keep = copies, keep
        self._process_of, self._say = process_of, say or command_line.say
        self.stores = PeerStores(addresses, host, secret, timeout, self._say)
        self.seconds = 0.0  # that it took to send the last checkpoint
        self._last_step = -1
        self._saving: Future[int] | None = None
        self._thread = ThreadPoolExecutor(1, "peer checkpoint")

    @staticmethod
    def from_environment(
        process: int, generation: int, say: Callable[[str], None]
    ) -> PeerCheckpoint | None:
        """Return a client of the peer stores that the environment names; None without any."""
        text = os.environ.get("FTMESH_KEEPERS")
        if not text:
            return None
        entries = (entry.split("=", 1) for entry in text.split(","))
        return PeerCheckpoint(
            {int(host): address for host, address in entries},
            host=int(os.environ["FTMESH_HOST"]),
            secret=os.environ["FTMESH_SECRET"],
            process=process,
            generation=generation,
            say=say,
        )

    def save(
        self,
        step: int,
        state: Any,
        *,
        full_types: Any = None,
        devices: Sequence[Any] | None = None,
        copies: PartnerCopies | None = None,
    ) -> None:
        """Start to save `state` after `step`. Waits for the previous save, not for this one.

        Args:
            step: Later than the last one of this generation.
            state: A pytree of arrays.
            full_types, devices: As for `ftmesh.checkpoint`.
            copies: Of what devices that are lost had.
        """
        self.finish()
        if step <= self._last_step:
            raise CheckpointError(
                f"step {step} is not after step {self._last_step}, which generation "
                f"{self.generation} has saved: go back in a new generation"
            )
        snapshotter = Snapshotter(self.process, self._process_of, devices, full_types, copies)
        snapshot = snapshotter.snapshot(step, state)
        self._last_step = step
        self._saving = self._thread.submit(self._put, snapshot)

    def restore(
        self,
        like: Any,
        *,
        full_types: Any = None,
        agree: Callable[[str], None] = lambda summary: None,
    ) -> tuple[int, Any] | None:
        """Return step and state of the newest complete checkpoint; None if there is none.

        Drops later checkpoints of earlier generations: no process may continue from them.

        Args:
            like: A state with the shapes, dtypes and shardings to restore to.
            full_types: As for `save`.
            agree: Called with a summary, to check that all processes restore the same.
        """
        self.finish()
        holders, saved_steps = self._saved_steps()
        restored = restore_newest(
            saved_steps,
            lambda s: CheckpointReader(self._files(s, self._names(s, holders), holders)),
            like,
            full_types=full_types,
            location="the memory of hosts",
            log=self._say,
            agree=agree,
        )
        newest = restored[0] if restored else SavedStep(-1, 0)
        for saved in saved_steps:
            if saved > newest and saved.generation < self.generation:
                self.stores.drop(saved.prefix)
        return (newest.step, restored[1]) if restored else None

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, if there is one."""
        self.finish()
        holders, saved_steps = self._saved_steps()
        return next((s.step for s in saved_steps if self._is_complete(s, holders)), None)

    def finish(self) -> int:
        """Wait for the last save; return how many hosts have this process's part of it."""
        saving, self._saving = self._saving, None
        return 1 + self.copies if saving is None else saving.result()

    def close(self) -> None:
        """Wait for the last save and close the connections."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()
            self.stores.close()

    def __enter__(self) -> PeerCheckpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, snapshot: Snapshot) -> int:
        """In a thread: put this process's part. The first process also drops old checkpoints."""
        begin, manifest = time.monotonic(), snapshot.manifest
        saved = SavedStep(manifest.step, self.generation)
        copies = wanted = min(1 + self.copies, len(self.stores.hosts))
        if self.process in manifest.processes:
            part = process_files(manifest, self.process, snapshot.pieces)
            blobs = {saved.prefix + name: b"".join(content) for name, content in part}
            copies = self.stores.put(blobs, wanted)
            if copies < wanted:
                self._say(
                    f"process {self.process} has its part of step {saved} in the memory of "
                    f"{copies} hosts instead of {wanted}"
                )
        if self.process == manifest.processes[0]:
            self._drop_old()
        self.seconds = time.monotonic() - begin
        return copies

    def _drop_old(self) -> None:
        """Drop what is older than the last `keep` complete checkpoints."""
        holders, saved_steps = self._saved_steps()
        complete = 0
        for saved in saved_steps:
            if complete < self.keep:
                complete += self._is_complete(saved, holders)
            else:
                self.stores.drop(saved.prefix)

    def _saved_steps(self) -> tuple[Holders, list[SavedStep]]:
        """Return which stores hold which blobs, and the checkpoints of the blobs, newest first."""
        holders = self.stores.holders("state/")
        return holders, sorted({SavedStep.from_blob_name(name) for name in holders}, reverse=True)

    def _is_complete(self, saved: SavedStep, holders: Holders) -> bool:
        try:
            return all(saved.prefix + name in holders for name in self._names(saved, holders))
        except DamagedCheckpointError:
            return False

    def _names(self, saved: SavedStep, holders: Holders) -> list[str]:
        """Return the names of all files of a checkpoint, from its manifest."""
        data = self._files(saved, [MANIFEST_FILE], holders)[MANIFEST_FILE]
        manifest = Manifest.from_json(load_json(data, MANIFEST_FILE))
        names = (name for process in manifest.processes for name in process_file_names(process))
        return [MANIFEST_FILE, *names]

    def _files(self, saved: SavedStep, names: Sequence[str], holders: Holders) -> dict[str, bytes]:
        for name in names:
            if saved.prefix + name not in holders:
                raise DamagedCheckpointError(f"it has no {name}")
        blobs = self.stores.get([saved.prefix + name for name in names], holders)
        files = {n: blob for n, blob in zip(names, blobs, strict=True) if blob is not None}
        for name in names:
            if name not in files:
                raise DamagedCheckpointError(f"no host returns its {name}")
        return files
