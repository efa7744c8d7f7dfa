"""Checkpoints that are written while training goes on, atomically, with the last few kept.

    checkpoints = Checkpoints("run1/checkpoints", keep=3, resume=resume)
    full = {"params": None, "optimizer": optimizer.full_types(params)}  # if it is sharded
    first_step, state = checkpoints.restore(state, full_types=full) if resume else (0, state)
    ...
    checkpoints.save(step, state, full_types=full)
    checkpoints.close()

Each process writes what it owns and waits for no other; `ftmesh.checkpoint.manifest` has the
format. A run may continue with more chips or fewer, on another plan, and with the optimizer
replicated or sharded. A checkpoint of another model is an error; one that is incomplete or damaged
is skipped for the one before it. A state with values that are not finite is never written.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax

from ftmesh import command_line
from ftmesh.checkpoint.restore import restore_newest
from ftmesh.checkpoint.snapshot import Snapshot, Snapshotter
from ftmesh.checkpoint.storage import (
    MANIFEST_FILE,
    CheckpointReader,
    process_file_names,
    write_part,
)
from ftmesh.errors import CheckpointError, DamagedCheckpointError
from ftmesh.files import check_local
from ftmesh.testing import fault_injection
from ftmesh.topology.devices import process_of
from ftmesh.units import format_bytes

USE_ORBAX = (
    "states are ordinary arrays, so save them with orbax.checkpoint.CheckpointManager, which takes "
    "URLs; or give a folder that all processes see"
)
_ORBAX_FILES = ("_CHECKPOINT_METADATA", "state")  # in the folders of older checkpoints


class Checkpoints:
    """The checkpoints of one run, in one folder that all its processes see.

    Args:
        folder: Where to write; each checkpoint is a folder in it, named after its step.
        keep: How many complete checkpoints to keep.
        resume: Whether `folder` may have checkpoints already. Nothing is ever overwritten.
        process: The number of this process; by default that of its first device.
        process_of: Returns the process of a device.
        log: Called with a line for every checkpoint that is skipped; by default the first process
            prints it.

    Raises:
        ArgumentError: `folder` is a URL, as ``gs://bucket/run``: save such states with Orbax.
        CheckpointError: `folder` cannot be written, or has checkpoints and `resume` is off.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int = 3,
        resume: bool = False,
        process: int | None = None,
        process_of: Callable[[Any], int] = process_of,
        log: Callable[[str], None] | None = None,
    ) -> None:
        check_local(folder, USE_ORBAX)
        self.folder, self.keep = Path(folder).resolve(), keep
        self.process = process_of(jax.local_devices()[0]) if process is None else process
        self._process_of, self._log = process_of, log or self._print
        self._writing: Future[None] | None = None
        _check_writable(self.folder)
        for step in self._steps():
            if any((self._step_folder(step) / name).exists() for name in _ORBAX_FILES):
                raise CheckpointError(
                    f"{folder} has checkpoints of an older format, which this version does not "
                    "read: give another folder"
                )
        if not resume:
            if self.latest_step is not None:
                raise CheckpointError(
                    f"{folder} has checkpoints, the last of step {self.latest_step}: continue "
                    "from them with --resume, or give another folder"
                )
            self.discard_after(-1)
        self._thread = ThreadPoolExecutor(1, "checkpoints")

    @property
    def latest_step(self) -> int | None:
        """The step of the last complete checkpoint, or None."""
        return next(filter(self.is_complete, self._steps()), None)

    def is_complete(self, step: int) -> bool:
        """True if all processes have written their parts of the checkpoint of `step`."""
        try:
            CheckpointReader(self._step_folder(step))
        except DamagedCheckpointError:
            return False
        return True

    def save(
        self,
        step: int,
        state: Any,
        *,
        full_types: Any = None,
        devices: Sequence[Any] | None = None,
    ) -> None:
        """Start to write `state`, and return once it is copied to the host.

        Waits for the state to be computed and for the checkpoint before, not for the disk.

        Args:
            step: The step that `state` is the result of.
            state: A pytree of arrays.
            full_types: For tensors that are stored flat, as in the state of a sharded optimizer,
                their types in full: ``optimizer.full_types(params)``, at the place of that state
                in a pytree like `state`. None elsewhere.
            devices: The devices whose values count, if some are idle.

        Raises:
            CheckpointError: The step is saved already, or the disk is full.
            TrainingError: The state has values that are not finite.
        """
        self.finish()
        folder = self._step_folder(step)
        own_list = folder / process_file_names(self.process)[1]
        if own_list.exists() and self.is_complete(step):  # otherwise others may be ahead
            raise CheckpointError(f"{folder} exists already, and is not overwritten")
        snapshotter = Snapshotter(self.process, self._process_of, devices, full_types)
        snapshot = snapshotter.finite_snapshot(step, state)
        free = shutil.disk_usage(self.folder).free
        if snapshot.num_bytes > free:
            raise CheckpointError(
                f"cannot write {folder}: it needs {format_bytes(snapshot.num_bytes)}, and "
                f"{format_bytes(free)} are free; keep fewer, or give another folder"
            )
        self._writing = self._thread.submit(self._write, snapshot)

    def restore(
        self,
        like: Any,
        *,
        full_types: Any = None,
        agree: Callable[[str], None] = lambda result: None,
    ) -> tuple[int, Any]:
        """Restore the last complete checkpoint, and discard what is newer.

        Args:
            like: A state of arrays or types; the result has its tree, dtypes and shardings.
            full_types: As for `save`.
            agree: Called with what was found, before anything is discarded. It raises unless all
                processes found the same.

        Returns:
            The step and the state; 0 and `like` itself if there is no checkpoint.

        Raises:
            CheckpointError: The checkpoint is of another model or optimizer.
            DamagedCheckpointError: There are checkpoints, and all are damaged. None is discarded.
        """
        self.finish()
        restored = restore_newest(
            self._steps(),
            lambda step: CheckpointReader(self._step_folder(step)),
            like,
            full_types=full_types,
            location=self.folder,
            log=self._log,
            agree=agree,
        )
        if restored is None and (latest := self.latest_step) is not None:
            raise DamagedCheckpointError(
                f"all checkpoints in {self.folder} are damaged, the last of step {latest}: give "
                "another folder to begin again"
            )
        self.discard_after(restored[0] if restored else -1)
        return restored or (0, like)

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

    def wait(self) -> None:
        """Wait until everything is written. An error is left for `finish` and the next `save`."""
        if self._writing is not None:
            wait([self._writing])

    def discard_incomplete(self, first_step: int) -> None:
        """Delete the files of all processes of incomplete checkpoints from `first_step` on.

        One process does that while none writes: no old file may pass for a part that is missing
        when those steps are written again.
        """
        for step in self._steps():
            if step >= first_step and not self.is_complete(step):
                folder = self._step_folder(step)
                numbered = [path for path in folder.iterdir() if _is_part(path)]
                for path in (folder / MANIFEST_FILE, *numbered):
                    _delete(path)

    def discard_after(self, last_step: int) -> None:
        """Delete this process's files of later steps, which are incomplete or damaged.

        When those steps are written again, no old file may pass for a part that is missing.
        """
        for step in self._steps():
            if step > last_step:
                for name in (MANIFEST_FILE, *process_file_names(self.process)):
                    _delete(self._step_folder(step) / name)

    def close(self) -> None:
        """Wait until everything is written, and accept no more."""
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
            self._log(str(other))  # the error that ended the run propagates

    def _step_folder(self, step: int) -> Path:
        return self.folder / str(step)

    def _steps(self) -> list[int]:
        """Return the steps of all checkpoints, complete or not, the last one first."""
        names = [path.name for path in self.folder.iterdir() if path.is_dir()]
        numbers = [int(name) for name in names if name.isdecimal()]
        return sorted((step for step in numbers if str(step) in names), reverse=True)

    def _write(self, snapshot: Snapshot) -> None:
        """Write this process's part; the first process also deletes what is too old."""
        manifest = snapshot.manifest
        if self.process in manifest.processes:
            fault_injection.inject("checkpoint", manifest.step)
            folder = self._step_folder(manifest.step)
            file = folder / process_file_names(self.process)[0]
            pieces = fault_injection.limit_writes(manifest.step, snapshot.pieces, file)
            write_part(folder, manifest, self.process, pieces)
            fault_injection.after_write(manifest.step, file)
        if self.process == manifest.processes[0]:
            kept = list(filter(self.is_complete, self._steps()))[: self.keep]
            for step in self._steps():
                if kept and step < kept[-1]:
                    _delete(self._step_folder(step) / MANIFEST_FILE)  # first: then it is incomplete
                    shutil.rmtree(self._step_folder(step), ignore_errors=True)

    def _print(self, line: str) -> None:
        if self.process == 0:
            command_line.say(line)


def _is_part(path: Path) -> bool:
    return path.stem.isdecimal() and path.name in process_file_names(int(path.stem))


def _delete(path: Path) -> None:
    """Delete a file, or the folder that has its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"checkpoint")
    except OSError as error:
        raise CheckpointError(
            f"cannot write checkpoints to {folder}: {error.strerror}; give another folder"
        ) from error
