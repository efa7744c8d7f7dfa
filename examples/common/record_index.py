"""The index of a set of TFRecord files: built in one pass, kept beside them, and loaded at once.

What is known of a file holds until the file changes; then that file alone is scanned again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from rich.console import Console
from rich.progress import Progress

from examples.common.index_files import index_file, keep_index, load_index
from examples.common.shard_index import ShardIndex, Stamp
from ftmesh.errors import DataError

_THREADS = 32  # each waits for the disk, not for the others


def open_index(paths: Sequence[Path], *, keep: bool = True, show: bool = False) -> list[ShardIndex]:
    """Where the records of each file begin.

    With `keep` what is known is looked for beside the files and kept there. With `show` a scan has
    a progress bar on stderr.
    """
    with ThreadPoolExecutor(_THREADS) as threads:
        stamps = dict(zip(paths, threads.map(Stamp.of, paths), strict=True))
    sets = _by_index_file(stamps) if keep else {}
    known = {path: shard for file in sets for path, shard in _loaded(file).items()}
    shards = {path: known[path] for path in paths if _is_of(known.get(path), stamps[path])}
    new = [path for path in stamps if path not in shards]
    shards |= _scanned(new, num_bytes=sum(stamps[path].size for path in new), show=show)
    for file, members in sets.items():
        if not set(members).isdisjoint(new):
            others = {
                path: shard
                for path, shard in known.items()
                if path.parent == file.parent and path not in shards and _is_unchanged(path, shard)
            }
            mine = {path: shards[path] for path in members}
            keep_index(file, {path.name: shard for path, shard in (others | mine).items()})
            for path, shard in _loaded(file).items():  # to share its memory with other processes
                if path in mine and _is_of(shard, stamps[path]):
                    shards[path] = shard
    return [shards[path] for path in paths]


def _by_index_file(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """The files whose index is kept in a file."""
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        folders.setdefault(path.parent, []).append(path)
    return {
        index_file(folder, [path.name for path in members]): members
        for folder, members in folders.items()
    }


def _loaded(file: Path) -> dict[Path, ShardIndex]:
    return {file.parent / name: shard for name, shard in load_index(file).items()}


def _is_of(shard: ShardIndex | None, stamp: Stamp) -> bool:
    return shard is not None and shard.stamp == stamp


def _is_unchanged(path: Path, shard: ShardIndex) -> bool:
    try:
        return shard.stamp == Stamp.of(path)
    except DataError:
        return False


def _scanned(paths: Sequence[Path], *, num_bytes: int, show: bool) -> dict[Path, ShardIndex]:
    """The index of each file, made by threads; the first error ends them all."""
    if not paths:
        return {}
    stopped = Event()
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not (show and console.is_terminal))
    with bar, ThreadPoolExecutor(_THREADS) as threads:
        task = bar.add_task(f"indexing {len(paths)} files", total=num_bytes)

        def tick(passed: int) -> None:
            if stopped.is_set():
                raise DataError("another file could not be indexed")
            bar.advance(task, passed)

        try:
            made = threads.map(lambda path: ShardIndex.scanned(path, tick), paths)
            return dict(zip(paths, made, strict=True))
        except BaseException:
            stopped.set()
            threads.shutdown(cancel_futures=True)
            raise
