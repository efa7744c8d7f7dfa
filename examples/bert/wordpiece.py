"""A vocabulary of word pieces, and text cut into them as BERT does.

vocabulary = Vocabulary.read("vocab.txt")
vocabulary.encode("unaffable")  # the numbers of un, ##aff and ##able
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
PAD, UNKNOWN, FIRST, BETWEEN, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Vocabulary:
    """Word pieces; the number of one is its place in the list."""

    pieces: tuple[str, ...]

    def __post_init__(self) -> None:
        missing = [piece for piece in SPECIAL if piece not in self.pieces]
        if missing:
            raise DataError(f"a vocabulary must have {', '.join(SPECIAL)}; this lacks {missing[0]}")

    @staticmethod
    def read(path: str | Path) -> Vocabulary:
        """From a file with a piece on each line, as the published ones are."""
        try:
            return Vocabulary(tuple(read_bounded(path, MAX_BYTES).decode().splitlines()))
        except FileNotFoundError as error:
            raise DataNotFoundError(f"cannot read {path}: {error.strerror}") from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        except (DataError, UnicodeDecodeError) as error:
            raise DataError(f"{path} is no vocabulary: {error}") from error

    @staticmethod
    def of_words(text: Iterable[str]) -> Vocabulary:
        """Every word of some text that has few."""
        words = {word for line in text for word in line.split()}
        return Vocabulary((*SPECIAL, *sorted(words)))

    @staticmethod
    def trained(text: Iterable[str], size: int) -> Vocabulary:
        """At most `size` pieces that make the text short."""
        made = _tokenizer(None)
        made.train_from_iterator(text, vocab_size=size, min_frequency=2, show_progress=False)
        pieces = set(made.get_vocab()) - set(SPECIAL)
        return Vocabulary((*SPECIAL, *sorted(pieces)))  # in one order, however they were found

    def write(self, path: str | Path) -> None:
        """As `read` wants it."""
        write_text(path, "".join(f"{piece}\n" for piece in self.pieces))

    def __len__(self) -> int:
        return len(self.pieces)

    def number(self, piece: str) -> int:
        """Where a piece is in the list."""
        return self._numbers[piece]

    def encode(self, sentence: str) -> list[int]:
        """The numbers of a sentence's pieces, without special ones."""
        found: list[int] = self._encoder.encode(sentence, add_special_tokens=False).ids
        return found

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {piece: number for number, piece in enumerate(self.pieces)}

    @cached_property
    def _encoder(self) -> Any:
        return _tokenizer(self._numbers)


def _tokenizer(vocabulary: dict[str, int] | None) -> Any:
    from tokenizers import BertWordPieceTokenizer

    return BertWordPieceTokenizer(vocabulary, lowercase=True)
