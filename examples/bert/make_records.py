"""Make training records from plain text.

    python -m examples.bert.make_records book.txt letters.txt --out records --preset base

A text has one sentence per line, and an empty line between documents. The records have MLPerf's
seven keys and sizes; the vocabulary is written next to them, as vocab.txt.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from examples.bert.config import PRESETS
from examples.bert.sequences import Document, encode_documents, make_sequences
from examples.bert.wordpiece import Vocabulary
from examples.common.arguments import positive
from examples.common.records import check_shard_count, make_example, write_records
from ftmesh.command_line import MAX_SEED, Parser, run_command, whole_number
from ftmesh.errors import DataError, DataNotFoundError
from ftmesh.files import check_output_folder, read_bounded

MAX_TEXT_BYTES = 2**30
MAX_LINE, MAX_WORD = 20_000, 1_000  # characters; long words are slow to tokenize
_LONG_WORD = re.compile(rf"[!-~]{{{MAX_WORD + 1}}}")


def main(argv: Sequence[str] | None = None) -> int:
    """Make records from the command line; return the exit status."""
    parser = Parser(
        prog="python -m examples.bert.make_records",
        description="Make training records for BERT from plain text: one sentence per line, and an "
        "empty line between documents.",
    )
    parser.add_argument("text", nargs="+", help="text files")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where to write the records")
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="tiny",
        help="whose length, predictions and vocabulary size to use (default: tiny)",
    )
    parser.add_argument(
        "--vocab", metavar="FILE", help="word pieces, one per line (default: learned from the text)"
    )
    parser.add_argument(
        "--passes",
        type=whole_number(1, 1000),
        default=5,
        metavar="N",
        help="passes over the text, each with other masks (default: 5)",
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=10,
        metavar="N",
        help="every Nth document is for validation (default: 10)",
    )
    parser.add_argument(
        "--shards",
        type=whole_number(1, 99_999),
        default=4,
        metavar="N",
        help="training files (default: 4)",
    )
    parser.add_argument(
        "--seed", type=whole_number(0, MAX_SEED), default=0, metavar="N", help="default: 0"
    )
    args = parser.parse_args(argv)
    return run_command("make_records", lambda: print(make_records(args)))


def make_records(args: argparse.Namespace) -> str:
    """Write records and vocabulary; return a summary."""
    config, folder = PRESETS[args.preset], Path(args.out)
    check_output_folder(folder)
    check_shard_count(folder, "train", args.shards)
    check_shard_count(folder, "validation", 1)
    documents = [document for path in args.text for document in read_documents(path)]
    if len(documents) < args.every:
        raise DataError(
            f"the text has {len(documents)} documents, separated by empty lines; --every "
            f"{args.every} needs at least {args.every}"
        )
    if args.vocab:
        vocabulary = Vocabulary.read(args.vocab)
    else:
        lines = (line for document in documents for line in document)
        vocabulary = Vocabulary.train(lines, config.vocabulary)
    if len(vocabulary) > config.vocabulary:
        raise DataError(
            f"{args.vocab} has {len(vocabulary)} pieces; the preset {args.preset} allows "
            f"{config.vocabulary}"
        )
    encoded = encode_documents(documents, vocabulary)
    rng = np.random.default_rng(args.seed)

    def records(documents: Sequence[Document], passes: int) -> Iterator[bytes]:
        for _ in range(passes):
            for features in make_sequences(
                documents, vocabulary, length=config.length, predictions=config.predictions, rng=rng
            ):
                yield make_example(features)

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary.write(folder / "vocab.txt")
    validation = list(records(encoded[:: args.every], 1))
    del encoded[:: args.every]
    train = list(records(encoded, args.passes))
    rng.shuffle(train)
    write_shards(folder, "train", train, args.shards)
    write_shards(folder, "validation", validation, 1)
    return (
        f"{folder}: {len(train)} sequences for training and {len(validation)} for validation, of "
        f"{config.length} tokens, with {len(vocabulary)} word pieces"
    )


def read_documents(path: str | Path) -> list[list[str]]:
    """Return the documents of a text, as lists of lines."""
    try:
        text = read_bounded(path, MAX_TEXT_BYTES).decode()
    except FileNotFoundError as error:
        raise DataNotFoundError(f"cannot read {path}: {error.strerror}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        word = _LONG_WORD.search(line)
        if len(line) > MAX_LINE or word:
            what = f"a word of more than {MAX_WORD}" if word else f"{len(line):,}"
            raise DataError(
                f"line {number} of {path} has {what} characters: a line is one sentence of at most "
                f"{MAX_LINE:,} characters, and words have at most {MAX_WORD:,}"
            )
    return [list(group) for full, group in groupby(lines, key=bool) if full]


def write_shards(folder: Path, split: str, records: Sequence[bytes], num_shards: int) -> None:
    """Distribute records over `num_shards` files."""
    for shard in range(num_shards):
        name = f"{split}-{shard:05}-of-{num_shards:05}"
        write_records(folder / name, records[shard::num_shards])


if __name__ == "__main__":
    sys.exit(main())
