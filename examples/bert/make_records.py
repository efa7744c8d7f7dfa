"""Make records to train on from plain text.

    python -m examples.bert.make_records book.txt letters.txt --out records --preset base

A text has a sentence on each line, and an empty line between documents. The records have the seven
keys, and the sizes, of MLPerf's; beside them the vocabulary is written, as vocab.txt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from examples.bert.config import PRESETS
from examples.bert.sequences import Document, encode_documents, make_sequences
from examples.bert.wordpiece import Vocabulary
from ftmesh.errors import DataError, FtmeshError
from ftmesh.train.arguments import positive
from ftmesh.train.records import make_example, write_records


def main(argv: Sequence[str] | None = None) -> int:
    """Make records from the command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.bert.make_records",
        description="Make records to train BERT on from plain text: a sentence on each line, and an"
        " empty line between documents.",
    )
    parser.add_argument("text", nargs="+", help="files of text")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="write the records there")
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        default="tiny",
        help="whose lengths, predictions and size of vocabulary to take (tiny)",
    )
    parser.add_argument(
        "--vocab", metavar="FILE", help="word pieces, one a line (default: learned from the text)"
    )
    parser.add_argument(
        "--passes",
        type=positive,
        default=5,
        metavar="N",
        help="over the text, masked anew in each (5)",
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=10,
        metavar="N",
        help="documents to one of validation (10)",
    )
    parser.add_argument(
        "--shards", type=positive, default=4, metavar="N", help="files to train on (4)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(0)")
    args = parser.parse_args(argv)
    try:
        print(make_records(args))
    except FtmeshError as error:
        print(f"make_records: {error}", file=sys.stderr)
        return 2
    return 0


def make_records(args: argparse.Namespace) -> str:
    """Write records and vocabulary; what was written, in words."""
    config, folder = PRESETS[args.preset], Path(args.out)
    documents = [document for path in args.text for document in read_documents(path)]
    if len(documents) < args.every:
        raise DataError(
            f"the text has {len(documents)} documents, with empty lines between them; to keep one "
            f"in {args.every} for validation takes as many at least"
        )
    if args.vocab:
        vocabulary = Vocabulary.read(args.vocab)
    else:
        lines = (line for document in documents for line in document)
        vocabulary = Vocabulary.trained(lines, config.vocabulary)
    if len(vocabulary) > config.vocabulary:
        raise DataError(
            f"{args.vocab} has {len(vocabulary)} pieces; the preset {args.preset} has room for "
            f"{config.vocabulary}"
        )
    encoded = encode_documents(documents, vocabulary)
    rng = np.random.default_rng(args.seed)

    def records(part: Sequence[Document], passes: int) -> Iterator[bytes]:
        for _ in range(passes):
            for features in make_sequences(
                part, vocabulary, length=config.length, predictions=config.predictions, rng=rng
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
        f"{folder}: {len(train)} sequences to train on and {len(validation)} for validation, of "
        f"{config.length} tokens, with {len(vocabulary)} word pieces"
    )


def read_documents(path: str | Path) -> list[list[str]]:
    """The documents of a text, as lists of lines."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no text in UTF-8: {error}") from error
    return [list(group) for full, group in groupby(lines, key=bool) if full]


def write_shards(folder: Path, split: str, records: Sequence[bytes], number: int) -> None:
    """Records dealt out to so many files."""
    for shard in range(number):
        dealt: Iterable[bytes] = records[shard::number]
        write_records(folder / f"{split}-{shard:05}-of-{number:05}", dealt)


if __name__ == "__main__":
    sys.exit(main())
