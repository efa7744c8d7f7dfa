"""Sources of sequences, MLPerf's TFRecords or synthetic text, and batches of them.

    sequences = open_sequences(None, "train", length=64, predictions=10, vocabulary=256,
                               num_sequences=4096)
    batches = Batches(sequences, length=64, predictions=10, batch=112, num_steps=300, seed=0)
    with Reader(batches, first_step=100) as reader:
        for batch in reader:
            ...

A source has a length, and `read(index)` returns the features of a row under MLPerf's seven keys.
`input_mask` is 1 for a single sequence and 0 for padding; packed sequences are numbered there
from 1, and `next_sentence_labels` has one entry for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from examples.bert.sequences import encode_documents, make_sequence
from examples.bert.text import synthetic_documents
from examples.bert.wordpiece import Vocabulary
from examples.common import reader
from examples.common.reader import Reader as Reader
from examples.common.records import Records, find_shards
from ftmesh.errors import DataError, RecordError

FILES = {"train": ("train-*", "part-*"), "validation": ("validation-*", "eval*")}
SAMPLE = 10_000  # sequences, for the commonest word


class Batch(NamedTuple):
    """Rows of tokens and what to predict. All arrays are int32.

    A row has one sequence, or several packed one after another. A missing sequence has length 0 and
    `is_random` -1.
    """

    tokens: Any  # rows, length of a row
    segments: Any  # sentence of each token: 0 or 1
    lengths: Any  # rows, sequences: tokens of each; padding follows
    positions: Any  # rows, predictions: positions of the masked words
    targets: Any  # the masked words; -1 is padding
    is_random: Any  # rows, sequences: whether the second sentence is a random one


class Sequences(Protocol):
    """A source of sequences."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the features of a row. Errors name it."""
        ...

    def name(self, index: int) -> str:
        """Name a row in messages."""
        ...


class RecordSequences:
    """Sequences in TFRecords."""

    def __init__(
        self,
        folder: Path,
        split: str,
        *,
        length: int,
        predictions: int,
        vocabulary: int,
        packed: int,
        show: bool = False,
    ) -> None:
        patterns = [p for p in FILES[split] if folder.is_dir() and any(folder.glob(p))]
        self._records = Records(find_shards(folder, (patterns or FILES[split])[0]), show=show)
        self._vocabulary, self._packed = vocabulary, packed
        self._sizes = {
            "input_ids": length,
            "input_mask": length,
            "segment_ids": length,
            "masked_lm_positions": predictions,
            "masked_lm_ids": predictions,
            "masked_lm_weights": predictions,
        }
        if not len(self):
            raise DataError(f"the {split} shards of {folder} hold no records")
        for index in self._records.first_of_shards():
            try:
                self.read(index)
            except RecordError:
                continue  # counted when the reader gets to it

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        """Return the file and record."""
        return self._records.name(index)

    def shards(self) -> list[tuple[Path, range]]:
        """Return each file with the indices of its rows."""
        return self._records.shards()

    def read(self, index: int) -> Mapping[str, Any]:
        """Return the features of a row; raise DataError if they do not fit the model."""
        example = self._records.example(index)
        for key, size in self._sizes.items():
            actual = len(example.get(key, ()))
            if actual != size:
                raise DataError(f"{self.name(index)} has {actual} numbers in {key}, not {size}")
        num_sequences = len(example.get("next_sentence_labels", ()))
        if not 1 <= num_sequences <= self._packed:
            hint = f": give --packed {num_sequences}" if num_sequences else ""
            raise DataError(
                f"{self.name(index)} has {num_sequences} sequences, not 1 to {self._packed}{hint}"
            )
        length, last_word = self._sizes["input_ids"], self._vocabulary - 1
        for key, largest in (
            ("input_ids", last_word), ("masked_lm_ids", last_word), ("input_mask", length),
            ("segment_ids", 1), ("masked_lm_positions", length - 1), ("next_sentence_labels", 1),
        ):  # fmt: skip
            numbers = np.asarray(example[key])
            if not (0 <= numbers.min() <= numbers.max() <= largest):
                raise DataError(
                    f"{self.name(index)} has {numbers.min()} to {numbers.max()} in {key}; the "
                    f"model has 0 to {largest}"
                )
        if not is_numbered(example["input_mask"], num_sequences):
            raise DataError(
                f"{self.name(index)} has an input_mask that does not number its sequences from 1 "
                f"to {num_sequences}, with 0 for padding after them"
            )
        return example


class SyntheticSequences:
    """Any number of sequences from a few hundred kB of synthetic text."""

    def __init__(
        self, split: str, *, length: int, predictions: int, vocabulary: int, num_sequences: int
    ) -> None:
        self._split, self._num_sequences = ("train", "validation").index(split), num_sequences
        self._sizes = {"length": length, "predictions": predictions}
        documents = synthetic_documents(seed=0)
        self._vocabulary = Vocabulary.from_words(
            line for document in documents for line in document
        )
        if len(self._vocabulary) > vocabulary:
            raise DataError(
                f"synthetic text has {len(self._vocabulary)} words; the model has {vocabulary}"
            )
        if self._split:  # validation: the same words, other documents
            documents = synthetic_documents(seed=1)
        self._documents = encode_documents(documents, self._vocabulary)

    def __len__(self) -> int:
        return self._num_sequences

    def name(self, index: int) -> str:
        """Name a row in messages."""
        return f"synthetic sequence {index}"

    def read(self, index: int) -> Mapping[str, Any]:
        """Return a sequence that starts at a random sentence."""
        rng = np.random.default_rng([self._split, index])
        document = int(rng.integers(len(self._documents)))
        start = int(rng.integers(len(self._documents[document])))
        features, _ = make_sequence(
            self._documents, document, start, self._vocabulary, rng=rng, **self._sizes
        )
        return features


def open_sequences(
    folder: str | Path | None,
    split: str,
    *,
    length: int,
    predictions: int,
    vocabulary: int,
    num_sequences: int,
    packed: int = 1,
    show: bool = False,
) -> Sequences:
    """Open the sequences of a split, of the sizes that the model has.

    Args:
        folder: With TFRecord shards ``train-*`` or ``part-*``, and ``validation-*`` or ``eval*``;
            None for `num_sequences` synthetic ones.
        split: "train" or "validation".
        length: Tokens per row.
        predictions: Most masked words per row.
        vocabulary: Size of the model's vocabulary.
        num_sequences: Number of synthetic sequences.
        packed: Most sequences per record.
        show: Show a progress bar while records are indexed, at their first use.
    """
    sizes = {"length": length, "predictions": predictions, "vocabulary": vocabulary}
    if folder is None:
        return SyntheticSequences(split, num_sequences=num_sequences, **sizes)
    return RecordSequences(Path(folder), split, packed=packed, show=show, **sizes)


class Batches(reader.Batches[Batch]):
    """Batches of sequences; `settings` are those of `examples.common.reader.Batches`."""

    unit = "sequences"

    def __init__(
        self,
        sequences: Sequences,
        *,
        length: int,
        predictions: int,
        packed: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(len(sequences), **settings)
        self._sequences, self._packed = sequences, packed
        self._length, self._predictions = length, predictions
        if packed > 1:
            self.unit = "rows"

    def padding(self, num_rows: int) -> Batch:
        """Return rows without a sequence."""
        tokens = np.zeros((num_rows, self._length), np.int32)
        positions = np.zeros((num_rows, self._predictions), np.int32)
        lengths = np.zeros((num_rows, self._packed), np.int32)
        return Batch(tokens, tokens.copy(), lengths, positions, positions - 1, lengths - 1)

    def example(self, index: int, position: int) -> tuple[Any, ...]:
        """Return a row, in the order of `Batch`."""
        features = self._sequences.read(index)
        is_random = features["next_sentence_labels"]
        return (
            features["input_ids"],
            features["segment_ids"],
            np.bincount(features["input_mask"], minlength=self._packed + 1)[1:],
            features["masked_lm_positions"],
            targets_from(features),
            np.pad(is_random, (0, self._packed - len(is_random)), constant_values=-1),
        )

    def name(self, index: int) -> str:
        """Name a row in messages."""
        return self._sequences.name(index)


def is_numbered(mask: Any, num_sequences: int) -> bool:
    """Return True if a mask goes from 1 to `num_sequences`, followed by padding only."""
    (tokens,) = np.nonzero(mask)
    inside = np.asarray(mask)[: len(tokens)]
    return np.array_equal(np.unique(inside), np.arange(1, num_sequences + 1)) and bool(
        (np.diff(inside) >= 0).all()
    )


def targets_from(features: Mapping[str, Any]) -> NDArray[np.int64]:
    """Return the masked words of a row; -1 is padding."""
    return np.where(features["masked_lm_weights"] > 0, features["masked_lm_ids"], -1)


def unigram_accuracy(train: Sequences, validation: Sequences) -> float:
    """Return the accuracy of always predicting the word masked most often in training."""
    commonest = np.argmax(_counts(train))
    counts = _counts(validation)
    return float(counts[commonest] / counts.sum()) if commonest < len(counts) else 0.0


def _counts(sequences: Sequences) -> NDArray[np.int64]:
    """Count how often each word is masked, in a sample."""
    counts = np.zeros(0, np.int64)
    for index in range(min(len(sequences), SAMPLE)):
        try:
            targets = targets_from(sequences.read(index))
        except RecordError:
            continue
        more = np.bincount(targets[targets >= 0], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts
