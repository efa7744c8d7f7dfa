"""Pack several short sequences into one row, so that less of it is padding.

    python -m examples.bert.pack_records records --out packed --preset base --most 3
    python -m examples.bert.train --preset base --data packed --packed 3

Sequences in a row do not see each other: the model tells them apart by `input_mask`, which numbers
them from 1. A row teaches what its sequences would teach apart. Each shard is packed by itself, and
its rows are shuffled.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from examples.bert.config import PRESETS
from examples.bert.data import RecordSequences
from examples.bert.sequences import Features
from examples.common.arguments import positive
from examples.common.records import check_shard_count, make_example, write_records
from ftmesh.command_line import MAX_SEED, Parser, run_command, whole_number
from ftmesh.errors import DataError, RecordError
from ftmesh.files import check_output_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Pack records from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.bert.pack_records",
        description="Pack several short sequences into one row, so that less of it is padding.",
    )
    parser.add_argument("records", help="folder of TFRecords with one sequence each")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where to write the rows")
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="tiny",
        help="whose length, predictions and vocabulary size they have (default: tiny)",
    )
    parser.add_argument(
        "--most",
        type=positive,
        default=3,
        metavar="N",
        help="maximum number of sequences per row (default: 3)",
    )
    parser.add_argument(
        "--seed", type=whole_number(0, MAX_SEED), default=0, metavar="N", help="default: 0"
    )
    args = parser.parse_args(argv)
    return run_command("pack_records", lambda: print(pack_records(args)))


def pack_records(args: argparse.Namespace) -> str:
    """Write the rows; return a summary."""
    config, source, target = PRESETS[args.preset], Path(args.records), Path(args.out)
    if target.resolve() == source.resolve():
        raise DataError(f"{target} holds the records: give another folder to write to")
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
    """Return index, number of tokens and number of masked words of each readable sequence."""
    sizes = []
    for i in members:
        try:
            features = sequences.read(i)
        except RecordError:
            continue
        masked = np.count_nonzero(features["masked_lm_weights"])
        sizes.append((i, int(features["input_mask"].sum()), int(masked)))
    return sizes


def pack(
    lengths: Sequence[int],
    predictions: Sequence[int],
    *,
    length: int,
    most_predictions: int,
    most: int,
) -> list[list[int]]:
    """Return rows of indices into `lengths`, by best fit.

    The longest sequences go first, each into the fullest row that has room for its tokens and its
    masked words, and that has fewer than `most` sequences.
    """
    rows: list[list[int]] = []
    masked: list[int] = []  # words per row
    by_room: defaultdict[int, dict[int, None]] = defaultdict(dict)  # rows with space
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = (
            (room, row)
            for room in range(lengths[i], length)
            for row in reversed(by_room[room])
            if masked[row] + predictions[i] <= most_predictions
        )
        room, row = next(fitting, (length, len(rows)))
        if row == len(rows):
            rows.append([])
            masked.append(0)
        else:
            del by_room[room][row]
        rows[row].append(i)
        masked[row] += predictions[i]
        if len(rows[row]) < most:
            by_room[room - lengths[i]][row] = None
    return rows


def join(sequences: Sequence[Mapping[str, Any]]) -> Features:
    """Join several sequences into one row, of the sizes of each of them."""
    lengths = [int(np.count_nonzero(features["input_mask"])) for features in sequences]
    counts = [int(np.count_nonzero(features["masked_lm_weights"])) for features in sequences]
    starts = np.cumsum([0, *lengths[:-1]])

    def joined(key: str, sizes: Sequence[int], shifts: Sequence[int] | None = None) -> Any:
        row = np.zeros_like(sequences[0][key])
        parts = [features[key][:size] for features, size in zip(sequences, sizes, strict=True)]
        if shifts is not None:
            parts = [part + shift for part, shift in zip(parts, shifts, strict=True)]
        values = np.concatenate(parts)
        row[: len(values)] = values
        return row

    return {
        "input_ids": joined("input_ids", lengths),
        "input_mask": joined("input_mask", lengths, range(len(sequences))),
        "segment_ids": joined("segment_ids", lengths),
        "masked_lm_positions": joined("masked_lm_positions", counts, starts.tolist()),
        "masked_lm_ids": joined("masked_lm_ids", counts),
        "masked_lm_weights": joined("masked_lm_weights", counts),
        "next_sentence_labels": np.concatenate([f["next_sentence_labels"] for f in sequences]),
    }


if __name__ == "__main__":
    sys.exit(main())
