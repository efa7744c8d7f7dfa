"""Text as one long array of token ids, document after document, each with `END` after it.

The tokenizer is bytes, or a file of the `tokenizers` package; nothing is downloaded:

    python -m examples.llm.tokens train --vocabulary 32000 text.jsonl --out tokenizer.json
    python -m examples.llm.tokens encode text.jsonl --tokenizer tokenizer.json --out tokens.npy
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.command_line import Parser, run_command, whole_number
from ftmesh.errors import DataError, DataNotFoundError
from ftmesh.files import check_local

END = 0  # the id of the end of a document
BYTES = 1 + 256  # ids of the tokenizer of bytes
_TEXT = (".txt", ".jsonl")

Encode = Callable[[str], list[int]]


def read_documents(path: Path) -> Iterator[str]:
    """Yield the documents of a file.

    Those of ``.jsonl`` are the "text" of each line, those of ``.txt`` end at an empty line.
    """
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, 1):
                try:
                    yield str(json.loads(line)["text"])
                except (ValueError, KeyError, TypeError) as error:
                    raise DataError(f'{path}, line {number}: not an object with "text"') from error
            return
        lines: list[str] = []
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines)
                lines = []
        if lines:
            yield "".join(lines)


def make_encoder(tokenizer: str | Path | None) -> tuple[Encode, int]:
    """Return a function from text to ids, and the number of ids, `END` included."""
    if tokenizer is None:
        return lambda text: [1 + byte for byte in text.encode()], BYTES
    from tokenizers import Tokenizer

    if not Path(tokenizer).exists():
        raise DataNotFoundError(f"no tokenizer at {tokenizer}")
    loaded = Tokenizer.from_file(str(tokenizer))

    def encode(text: str) -> list[int]:
        return [1 + number for number in loaded.encode(text, add_special_tokens=False).ids]

    return encode, 1 + loaded.get_vocab_size()


def train_tokenizer(documents: Iterable[str], vocabulary: int) -> Any:
    """Learn byte-level BPE with at most `vocabulary` ids, `END` included."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode_documents(documents: Iterable[str], encode: Encode) -> NDArray[np.uint32]:
    """Return the ids of all documents, each with `END` after it."""
    parts = [np.array([*encode(document), END], np.uint32) for document in documents]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint32)


def read_tokens(path: str | Path, encode: Encode) -> NDArray[Any]:
    """Return the token ids of a file: ``.npy`` is mapped, ``.txt`` and ``.jsonl`` are encoded.

    Raises:
        DataError: The file is of another kind, or not a list of ids.
    """
    path = Path(path)
    if not path.exists():
        raise DataNotFoundError(f"no data at {path}")
    if path.suffix in _TEXT:
        return encode_documents(read_documents(path), encode)
    if path.suffix != ".npy":
        raise DataError(f"{path} is not .npy (token ids), .jsonl or .txt")
    try:
        tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise DataError(f"{path} has {tokens.dtype} of shape {tokens.shape}: give a list of ids")
    return tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Train a tokenizer, or encode text; return the exit status."""
    parser = Parser(prog="python -m examples.llm.tokens", description="Text to token ids.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = commands.add_parser("train", help="learn byte-level BPE from text")
    size = whole_number(BYTES)
    train.add_argument("--vocabulary", type=size, required=True, metavar="N", help="number of ids")
    encode = commands.add_parser("encode", help="write the ids of text as .npy")
    encode.add_argument("--tokenizer", metavar="FILE", help="of `train` (default: bytes)")
    for command, run in ((train, _train), (encode, _encode)):
        command.add_argument("text", type=Path, metavar="FILE", help=".txt or .jsonl")
        command.add_argument("--out", required=True, metavar="FILE")
        command.set_defaults(run=run)
    args = parser.parse_args(argv)

    def work() -> None:
        for path in (args.text, args.out):
            check_local(path)
        args.run(args)

    return run_command("tokens", work)


def _train(args: argparse.Namespace) -> None:
    train_tokenizer(read_documents(args.text), args.vocabulary).save(args.out)


def _encode(args: argparse.Namespace) -> None:
    encode, vocabulary = make_encoder(args.tokenizer)
    tokens = read_tokens(args.text, encode)
    dtype = np.uint16 if vocabulary <= 2**16 else np.uint32
    np.save(args.out, tokens.astype(dtype))
    print(f"{len(tokens):,} tokens, vocabulary {vocabulary:,}")


if __name__ == "__main__":
    sys.exit(main())
