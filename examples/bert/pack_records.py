"""Pack records: put several short sequences into one row, so that less of it is padding.

    python -m examples.bert.pack_records records --out packed --preset base --most 3
    python -m examples.bert.train --preset base --data packed --packed 3

Each shard is packed by itself, and its rows are shuffled.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import track

from examples.bert.config import PRESETS
from examples.bert.data import RecordSequences
from examples.bert.joining import join, pack
from examples.common.arguments import positive
from examples.common.records import check_shard_count, make_example, write_records
from ftmesh.command_line import MAX_SEED, Parser, run_command, whole_number
from ftmesh.errors import DataError, RecordError
from ftmesh.files import check_output_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Pack records from the command line; the exit status."""
    parser = Parser(
        prog="python -m examples.bert.pack_records",
        description="Put several short sequences into one row, so that less of it is padding.",
    )
    parser.add_argument("records", help="a folder of TFRecords, of one sequence each")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="write the rows there")
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="tiny",
        help="whose lengths, predictions and size of vocabulary they have (tiny)",
    )
    parser.add_argument(
        "--most", type=positive, default=3, metavar="N", help="sequences in a row, at most (3)"
    )
    parser.add_argument(
        "--seed", type=whole_number(0, MAX_SEED), default=0, metavar="N", help="(0)"
    )
    args = parser.parse_args(argv)
    return run_command("pack_records", lambda: print(pack_records(args)))


def pack_records(args: argparse.Namespace) -> str:
    """Write the rows; what was written, in words."""
    config, source, target = PRESETS[args.preset], Path(args.records), Path(args.out)
    if target.resolve() == source.resolve():
        raise DataError(f"{target} is where the records are: give another folder to write to")
    check_output_folder(target)
    before = after = damaged = 0
    for split in ("train", "validation"):
        sequences = RecordSequences(
            source,
            split,
            length=config.length,
            predictions=config.predictions,
            vocabulary=config.vocabulary,
            packed=1,
            show=True,
        )
        target.mkdir(parents=True, exist_ok=True)
        check_shard_count(target, split, len(sequences.shards()))
        for path, members in track(sequences.shards(), f"packing {split}", transient=True):
            sizes = sizes_of(sequences, members)
            rows = pack(
                [length for _, length, _ in sizes],
                [masked for _, _, masked in sizes],
                length=config.length,
                most_predictions=config.predictions,
                most=args.most,
            )
            np.random.default_rng(args.seed).shuffle(rows)
            write_records(
                target / path.name,
                (make_example(join([sequences.read(sizes[i][0]) for i in row])) for row in rows),
            )
            before, after = before + len(sizes), after + len(rows)
            damaged += len(members) - len(sizes)
    without = f", without {damaged} damaged ones" if damaged else ""
    return f"{target}: {before} sequences in {after} rows of {config.length} tokens{without}"


def sizes_of(sequences: RecordSequences, members: range) -> list[tuple[int, int, int]]:
    """The number of each sequence that can be read, its tokens, and the words masked in it."""
    found = []
    for i in members:
        try:
            features = sequences.read(i)
        except RecordError:
            continue
        masked = np.count_nonzero(features["masked_lm_weights"])
        found.append((i, int(features["input_mask"].sum()), int(masked)))
    return found


if __name__ == "__main__":
    sys.exit(main())
