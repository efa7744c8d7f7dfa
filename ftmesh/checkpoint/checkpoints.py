"""Checkpoints: written beside the training, whole or not at all, the last few kept.

    checkpoints = Checkpoints("run1/checkpoints", keep=3, resume=resume)
    layouts = [optimizer.layout(params)]  # of a sharded optimizer; none of a whole one
    first_step, state = checkpoints.restore(state, layouts=layouts) if resume else (0, state)
    ...
    checkpoints.save(step, state, layouts=layouts)
    checkpoints.close()

Each process writes what it owns, and waits for no other; `ftmesh.checkpoint.manifest` has the format. A run
may go on with more chips or fewer, on another plan, and with the optimizer whole or sharded. One of
another model is refused, and one that is torn or damaged is passed over for the one before it. A
state with numbers that are not finite is never written.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from ftmesh import command_line
from ftmesh.checkpoint.reader import Saved
from ftmesh.checkpoint.restore import newest_sound
from ftmesh.checkpoint.snapshot import Copier, Snapshot, finite_snapshot
from ftmesh.checkpoint.writer import INDEX, file_names, write_part
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.layout.owned_buckets import Owned
from ftmesh.testing import fault_injection
from ftmesh.topology.devices import process_of
from ftmesh.units import format_bytes

_OF_ORBAX = ("_CHECKPOINT_METADATA", "state")  # what older checkpoints had in their folders


class Checkpoints:
    """The checkpoints of one run, in one folder, that all its processes see.

    A folder that has some already is refused unless `resume` is set: nothing is ever overwritten.
    `process` is the number of this one, and `process_of` tells which has a device. What is passed
    over is told to `say`.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        resume: bool = False,
        process: int | None = None,
        process_of: Callable[[Any], int] = process_of,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.keep = Path(folder).resolve(), keep
        self.process = process_of(jax.local_devices()[0]) if process is None else process
        self._process_of, self._say = process_of, say or self._print
        self._writing: Future[None] | None = None
        _check_writable(self.folder)
        for step in self._steps():
            if any((self._at(step) / name).exists() for name in _OF_ORBAX):
                raise CheckpointError(
                    f"{folder} has checkpoints of an older format, which this version does not "
                    "read: give another folder"
                )
        if not resume:
            if self.latest_step is not None:
                raise CheckpointError(
                    f"{folder} has checkpoints, the last of step {self.latest_step}: go on from "
                    "them with --resume, or give another folder"
                )
            self.forget(after=-1)
        self._thread = ThreadPoolExecutor(1, "checkpoints")

    @property
    def latest_step(self) -> int | None:
        """The step of the last complete checkpoint, if there is one."""
        return next(filter(self._is_complete, self._steps()), None)

    def save(
        self,
        step: int,
        state: Any,
        *,
        layouts: Sequence[Owned] = (),
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Begin to write `state`, a pytree of arrays, as it is after `step`.

        `layouts` are those of sharded states in it, as ``optimizer.layout(params)``; `devices` are
        those whose numbers count, where some are idle. Waits for the state and for the checkpoint
        before, not for the disk. A state that no run could go on from is refused.
        """
        self.finish()
        own = self._at(step) / file_names(self.process)[1]
        if own.exists() and self._is_complete(step):  # without a part here, others may be ahead
            raise CheckpointError(f"{self._at(step)} is there already, and is not written over")
        copier = Copier(self.process, self._process_of, devices, layouts)
        snapshot = finite_snapshot(copier, step, state)
        free = shutil.disk_usage(self.folder).free
        if snapshot.num_bytes > free:
            raise CheckpointError(
                f"cannot write {self._at(step)}: it takes {format_bytes(snapshot.num_bytes)}, and "
                f"{format_bytes(free)} are free; keep fewer, or give another folder"
            )
        self._writing = self._thread.submit(self._write, snapshot)

    def restore(
        self,
        like: Any,
        *,
        layouts: Sequence[Owned] = (),
        agree: Callable[[str], None] = lambda found: None,
    ) -> tuple[int, Any]:
        """The last sound checkpoint: its step, and its state, that lies on devices as `like` does.

        `like` may be of arrays or of their types, and `layouts` are those of sharded states in it.
        Where there is no checkpoint, step 0 and `like` itself. What is not sound is taken away when
        all processes `agree` on what was found.
        """
        self.finish()
        found = newest_sound(
            self._steps(),
            lambda step: Saved(self._at(step)),
            like,
            layouts=layouts,
            where=self.folder,
            say=self._say,
            agree=agree,
        )
        self.forget(after=found[0] if found else -1)
        return found or (0, like)

    def close(self) -> None:
        """Wait until everything is written, and write no more."""
        try:
            self.finish()
        finally:
            self._thread.shutdown()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self.close()
        except CheckpointError as other:
            if error is None:
                raise
            self._say(str(other))  # and what ended the run goes on its way

    # The folder -------------------------------------------------------------------------------

    def _at(self, step: int) -> Path:
        return self.folder / str(step)

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, whole or not, the last one first."""
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        numbers = [int(name) for name in names if name.isdecimal()]
        return sorted((step for step in numbers if str(step) in names), reverse=True)

    def _is_complete(self, step: int) -> bool:
        try:
            Saved(self._at(step))
        except DamagedCheckpointError:
            return False
        return True

    def _write(self, snapshot: Snapshot) -> None:
        """In a thread: this process's part; the first process also takes away what is too old."""
        index = snapshot.index
        if self.process in index.processes:
            fault_injection.reach("checkpoint", index.step)
            file = self._at(index.step) / file_names(self.process)[0]
            pieces = fault_injection.writing(index.step, snapshot.pieces, file)
            write_part(self._at(index.step), index, self.process, pieces)
            fault_injection.written(index.step, file)
        if self.process == index.processes[0]:
            kept = list(filter(self._is_complete, self._steps()))[: self.keep]
            for step in self._steps():
                if kept and step < kept[-1]:
                    _take_away(self._at(step) / INDEX)  # first: then it is none
                    shutil.rmtree(self._at(step), ignore_errors=True)

    def finish(self) -> None:
        """Wait until everything is written."""
        writing = self._writing
        if writing is None:
            return
        try:
            writing.result()  # also for a second thread that waits
        except OSError as error:
            raise CheckpointError(
                f"cannot write {error.filename or self.folder}: {error.strerror}"
            ) from error
        finally:
            self._writing = None

    def forget(self, after: int) -> None:
        """Take away what this process has left in folders of later steps, which are not sound.

        When they are written again, nothing of old may stand in for a part that is missing.
        """
        for step in self._steps():
            if step > after:
                for name in (INDEX, *file_names(self.process)):
                    _take_away(self._at(step) / name)

    def _print(self, line: str) -> None:
        if self.process == 0:
            command_line.say(line)


def _take_away(path: Path) -> None:
    """A file, or what is there under its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _check_writable(folder: Path) -> None:
    """Makes the folder, and refuses one that nothing can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"checkpoint")
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {folder}: {error.strerror}; give another folder"
        ) from error
