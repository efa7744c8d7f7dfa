"""BERT's vocabulary of word pieces.

vocabulary = Vocabulary.read("vocab.txt")
vocabulary.encode("unaffable")  # the ids of un, ##aff and ##able
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ftmesh.errors import DataError, DataNotFoundError
from ftmesh.files import read_bounded, write_text

MAX_BYTES = 2**26
PAD, UNK, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Vocabulary:
    """Word pieces; the id of a piece is its index."""

    pieces: tuple[str, ...]

    def __post_init__(self) -> None:
        missing = [piece for piece in SPECIAL if piece not in self.pieces]
        if missing:
            raise DataError(f"a vocabulary needs {', '.join(SPECIAL)}; this one lacks {missing[0]}")

    @staticmethod
    def read(path: str | Path) -> Vocabulary:
        """Read a file with one piece per line, as the published ones have."""
        try:
            return Vocabulary(tuple(read_bounded(path, MAX_BYTES).decode().splitlines()))
        except FileNotFoundError as error:
            raise DataNotFoundError(f"cannot read {path}: {error.strerror}") from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except (DataError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is not a vocabulary: {error}") from error

    @staticmethod
    def from_words(text: Iterable[str]) -> Vocabulary:
        """Take every word of a text that has few."""
        words = {word for line in text for word in line.split()}
        return Vocabulary((*SPECIAL, *sorted(words)))

    @staticmethod
    def train(text: Iterable[str], size: int) -> Vocabulary:
        """Learn at most `size` pieces from a text."""
        tokenizer = _tokenizer(None)
        tokenizer.train_from_iterator(text, vocab_size=size, min_frequency=2, show_progress=False)
        pieces = set(tokenizer.get_vocab()) - set(SPECIAL)
        return Vocabulary((*SPECIAL, *sorted(pieces)))  # sorted: training may reorder them

    def write(self, path: str | Path) -> None:
        """Write one piece per line."""
        write_text(path, "".join(f"{piece}\n" for piece in self.pieces))

    def __len__(self) -> int:
        return len(self.pieces)

    def number(self, piece: str) -> int:
        """Return the id of a piece."""
        return self._numbers[piece]

    def encode(self, sentence: str) -> list[int]:
        """Return the ids of a sentence's pieces, without special ones."""
        ids: list[int] = self._encoder.encode(sentence, add_special_tokens=False).ids
        return ids

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    @cached_property
    def _encoder(self) -> Any:
        return _tokenizer(self._numbers)


def _tokenizer(vocabulary: dict[str, int] | None) -> Any:
    from tokenizers import BertWordPieceTokenizer

    return BertWordPieceTokenizer(vocabulary, lowercase=True)
