"""Where sequences come from, TFRecords as MLPerf has them or nowhere, and batches of them.

    sequences = open_sequences(None, "train", length=64, predictions=10, vocabulary=256,
                               num_sequences=4096)
    batches = Batches(sequences, length=64, predictions=10, batch=112, num_steps=300, seed=0)
    with Reader(batches, first_step=100) as reader:
        for batch in reader:
            ...

A source has a length, and `read(index)` gives the features of a row under MLPerf's seven keys. For
a sequence alone in its row `input_mask` is 1, and 0 behind it; sequences that are packed into a row
are numbered there from 1, and `next_sentence_labels` has a number for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from examples.bert.batch import Batch
from examples.bert.sequences import encode_documents, make_sequence
from examples.bert.text import synthetic_documents
from examples.bert.wordpiece import Vocabulary
from examples.common import reader
from examples.common.reader import Reader as Reader
from examples.common.records import Records, find_shards
from ftmesh.errors import DataError, RecordError

FILES = {"train": ("train-*", "part-*"), "validation": ("validation-*", "eval*")}
SAMPLE = 10_000  # sequences from which the commonest word is found


class Sequences(Protocol):
    """What can be trained or evaluated on."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Mapping[str, Any]:
        """The features of a sequence. Errors name it."""
        ...

    def name(self, index: int) -> str:
        """How to tell a person which sequence this is."""
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
                continue  # to be counted when its turn comes

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        """File and record."""
        return self._records.name(index)

    def shards(self) -> list[tuple[Path, range]]:
        """The files, and the sequences that each has."""
        return self._records.shards()

    def read(self, index: int) -> Mapping[str, Any]:
        """The features, if they are as the model wants them."""
        example = self._records.example(index)
        for key, size in self._sizes.items():
            found = len(example.get(key, ()))
            if found != size:
                raise DataError(f"{self.name(index)} has {found} numbers in {key}, and not {size}")
        number = len(example.get("next_sentence_labels", ()))
        if not 1 <= number <= self._packed:
            hint = f": say --packed {number}" if number else ""
            raise DataError(
                f"{self.name(index)} has {number} sequences, and not 1 to {self._packed}{hint}"
            )
        length, largest = self._sizes["input_ids"], self._vocabulary - 1
        for key, most in (
            ("input_ids", largest), ("masked_lm_ids", largest), ("input_mask", length),
            ("segment_ids", 1), ("masked_lm_positions", length - 1), ("next_sentence_labels", 1),
        ):  # fmt: skip
            numbers = np.asarray(example[key])
            if not (0 <= numbers.min() <= numbers.max() <= most):
                raise DataError(
                    f"{self.name(index)} has {numbers.min()} to {numbers.max()} in {key}; the "
                    f"model has 0 to {most}"
                )
        if not is_numbered(example["input_mask"], number):
            raise DataError(
                f"{self.name(index)} has an input_mask that does not number its sequences from 1 "
                f"to {number}, with 0 for padding behind them"
            )
        return example


class SyntheticSequences:
    """As many sequences as are asked for, from a few hundred kB of text that is made up."""

    def __init__(
        self, split: str, *, length: int, predictions: int, vocabulary: int, num_sequences: int
    ) -> None:
        self._split, self._num_sequences = ("train", "validation").index(split), num_sequences
        self._sizes = {"length": length, "predictions": predictions}
        documents = synthetic_documents(seed=0)
        self._vocabulary = Vocabulary.of_words(line for document in documents for line in document)
        if len(self._vocabulary) > vocabulary:
            raise DataError(
                f"made-up text has {len(self._vocabulary)} words; the model has {vocabulary}"
            )
        if self._split:  # the same village, other days
            documents = synthetic_documents(seed=1)
        self._documents = encode_documents(documents, self._vocabulary)

    def __len__(self) -> int:
        return self._num_sequences

    def name(self, index: int) -> str:
        """The number is all it has."""
        return f"made-up sequence {index}"

    def read(self, index: int) -> Mapping[str, Any]:
        """A sequence that begins anywhere."""
        rng = np.random.default_rng([self._split, index])
        which = int(rng.integers(len(self._documents)))
        start = int(rng.integers(len(self._documents[which])))
        features, _ = make_sequence(
            self._documents, which, start, self._vocabulary, rng=rng, **self._sizes
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
    """The sequences of a split, "train" or "validation", of the sizes that the model has.

    A folder has TFRecord shards: ``train-*`` or ``part-*``, and ``validation-*`` or ``eval*``. A
    record has up to `packed` sequences. Without a folder, `num_sequences` are made up. With `show`
    there is a progress bar where records are indexed, at their first use.
    """
    sizes = {"length": length, "predictions": predictions, "vocabulary": vocabulary}
    if folder is None:
        return SyntheticSequences(split, num_sequences=num_sequences, **sizes)
    return RecordSequences(Path(folder), split, packed=packed, show=show, **sizes)


class Batches(reader.Batches[Batch]):
    """The sequences of every batch; the settings are those of `examples.common.reader.Batches`."""

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
        """Rows of nothing."""
        tokens = np.zeros((num_rows, self._length), np.int32)
        positions = np.zeros((num_rows, self._predictions), np.int32)
        none = np.zeros((num_rows, self._packed), np.int32)
        return Batch(tokens, tokens.copy(), none, positions, positions - 1, none - 1)

    def example(self, index: int, position: int) -> tuple[Any, ...]:
        """A sequence, as a batch has it."""
        features = self._sequences.read(index)
        is_random = features["next_sentence_labels"]
        return (
            features["input_ids"],
            features["segment_ids"],
            np.bincount(features["input_mask"], minlength=self._packed + 1)[1:],
            features["masked_lm_positions"],
            targets_of(features),
            np.pad(is_random, (0, self._packed - len(is_random)), constant_values=-1),
        )

    def name(self, index: int) -> str:
        """The sequence's own name."""
        return self._sequences.name(index)


def is_numbered(mask: Any, number: int) -> bool:
    """Whether a mask goes from 1 to so many sequences, and then has padding alone."""
    (sequences,) = np.nonzero(mask)
    inside = np.asarray(mask)[: len(sequences)]
    return np.array_equal(np.unique(inside), np.arange(1, number + 1)) and bool(
        (np.diff(inside) >= 0).all()
    )


def targets_of(features: Mapping[str, Any]) -> NDArray[np.int64]:
    """The words that are masked in a sequence; -1 stands for padding."""
    return np.where(features["masked_lm_weights"] > 0, features["masked_lm_ids"], -1)


def unigram_accuracy(train: Sequences, validation: Sequences) -> float:
    """The accuracy of always predicting the word that is masked most often in training."""
    commonest = np.argmax(_counts(train))
    counts = _counts(validation)
    return float(counts[commonest] / counts.sum()) if commonest < len(counts) else 0.0


def _counts(sequences: Sequences) -> NDArray[np.int64]:
    """How often each word is masked, in a sample of so many sequences."""
    counts = np.zeros(0, np.int64)
    for index in range(min(len(sequences), SAMPLE)):
        try:
            targets = targets_of(sequences.read(index))
        except RecordError:
            continue
        more = np.bincount(targets[targets >= 0], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts
