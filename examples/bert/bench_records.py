"""Measure the time to index records, to load the index, and to a first batch.

    python -m examples.bert.bench_records
    python -m examples.bert.bench_records --records 1000000 --varied --json

It makes records of 100 bytes in a temporary folder, by default 10 million. Each figure is from a
new process, with the files dropped from the system's cache where it allows that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

from examples.common import reader
from examples.common.arguments import positive
from examples.common.records import Records, find_shards, write_records
from ftmesh.command_line import Parser

RECORD_BYTES, BATCH = 100, 8192
MLPERF = 156_725_653  # sequences of MLPerf's BERT, phase 2


@dataclass(frozen=True)
class Figures:
    """Seconds, and memory in MB, for a number of records."""

    records: int
    build_s: float
    build_mb: float  # peak, above what the process had before
    index_file_mb: float
    load_s: float
    load_mb: float
    load_private_mb: float  # of that, not shared with other processes
    first_batch_s: float  # after the index is loaded: shuffled, read and checked
    second_batch_s: float
    from_start_s: float  # of the process to its first batch, with imports
    from_imports_s: float


class Batch(NamedTuple):
    """Records, as rows of bytes."""

    data: NDArray[np.uint8]


class Batches(reader.Batches[Batch]):
    """Batches of raw records."""

    def __init__(self, records: Records, **settings: Any) -> None:
        super().__init__(len(records), **settings)
        self._records = records

    def padding(self, num_rows: int) -> Batch:
        """Return rows of zeros."""
        return Batch(np.zeros((num_rows, RECORD_BYTES), np.uint8))

    def example(self, index: int, position: int) -> tuple[NDArray[np.uint8]]:
        """Return a record."""
        return (np.frombuffer(self._records[index].ljust(RECORD_BYTES, b"\0"), np.uint8),)

    def name(self, index: int) -> str:
        """Return the file and record."""
        return self._records.name(index)


def measure_records(
    folder: Path, num_records: int, *, shards: int = 8, varied: bool = False
) -> Figures:
    """Make records in `folder`, index them, and read a batch."""
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for shard in bar.track(range(shards), description=f"making {num_records} records"):
            number = len(range(shard, num_records, shards))
            path = folder / f"train-{shard:05}-of-{shards:05}"
            write_records(path, random_records(number, varied=varied))
            an_hour_ago = time.time() - 3600  # the index of a file just written is not trusted
            os.utime(path, (an_hour_ago, an_hour_ago))
    built = _measure_in_process(folder)
    (index,) = folder.glob(".*.ftmesh-index")
    loaded = _measure_in_process(folder)
    return Figures(
        num_records,
        build_s=built["open_s"],
        build_mb=built["peak_mb"],
        index_file_mb=index.stat().st_size / 1e6,
        load_s=loaded["open_s"],
        load_mb=loaded["peak_mb"],
        load_private_mb=loaded["private_mb"],
        **{f.name: loaded[f.name] for f in fields(Figures) if f.name in loaded},
    )


def random_records(number: int, *, varied: bool) -> Iterator[bytes]:
    """Yield random records of 100 bytes, or of 80 to 100."""
    data = np.random.default_rng(0).bytes(1 << 20)
    for i in range(number):
        start = i * 7919 % (len(data) - RECORD_BYTES)
        yield data[start : start + RECORD_BYTES - (i * 31 % 21 if varied else 0)]


def measure_start(folder: Path, started: float) -> dict[str, float]:
    """Measure a process that was started at time `started`, up to its second batch."""
    imported, before = time.time(), _memory()
    records = Records(find_shards(folder, "train-*"))
    opened, after = time.time(), _memory()
    batches = Batches(records, batch=BATCH, num_steps=100)
    batches[0]
    first = time.time()
    batches[1]
    return {
        "open_s": opened - imported,
        "peak_mb": after["VmHWM"] - before["VmRSS"],
        "private_mb": after["RssAnon"] - before["RssAnon"],
        "first_batch_s": first - opened,
        "second_batch_s": time.time() - first,
        "from_start_s": first - started,
        "from_imports_s": first - imported,
    }


def _measure_in_process(folder: Path) -> dict[str, float]:
    for path in folder.iterdir():
        _drop_from_cache(path)
    code = (
        "import json, sys\nfrom pathlib import Path\n"
        "from examples.bert.bench_records import measure_start\n"
        "print(json.dumps(measure_start(Path(sys.argv[1]), float(sys.argv[2]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(time.time())],
        stdout=subprocess.PIPE,
        check=True,
    )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def _drop_from_cache(path: Path) -> None:
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _memory() -> dict[str, float]:
    """Return memory of this process in MB, by Linux's names; NaN on other systems."""
    status = Path("/proc/self/status")
    if not status.exists():
        return dict.fromkeys(("VmHWM", "VmRSS", "RssAnon"), float("nan"))
    lines = [line.split() for line in status.read_text().splitlines() if line.endswith("kB")]
    return {name[:-1]: int(kilobytes) * 1024 / 1e6 for name, kilobytes, _ in lines}


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = Parser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--records", type=positive, default=10_000_000, metavar="N", help="default: 10000000"
    )
    parser.add_argument(
        "--shards", type=positive, default=8, metavar="N", help="files (default: 8)"
    )
    parser.add_argument("--varied", action="store_true", help="records of 80 to 100 bytes")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ftmesh-records-") as folder:
        figures = measure_records(
            Path(folder), args.records, shards=args.shards, varied=args.varied
        )
    if args.json:
        print(json.dumps(asdict(figures)))
        return
    scale = MLPERF / figures.records
    print(
        f"{figures.records} records of {'80 to ' * args.varied}{RECORD_BYTES} bytes in "
        f"{args.shards} files\n"
        f"  built:  {figures.build_s:.2f} s, {figures.build_mb:.0f} MB; index file "
        f"{figures.index_file_mb:.1f} MB\n"
        f"  loaded: {figures.load_s:.3f} s, {figures.load_mb:.1f} MB, "
        f"{figures.load_private_mb:.1f} of it private\n"
        f"  a batch of {BATCH}: {figures.first_batch_s:.2f} s, the next "
        f"{figures.second_batch_s:.2f} s\n"
        f"  from the start of a process to its first batch: {figures.from_start_s:.2f} s, "
        f"{figures.from_imports_s:.2f} without imports\n"
        f"MLPerf's BERT has {MLPERF} records: the index would take {scale:.1f} times as long to "
        f"build,\nor as long as the disk takes to read them, and "
        f"{figures.index_file_mb * scale:.0f} MB to keep; loading takes the same time"
    )


if __name__ == "__main__":
    main()
