"""Make training sequences as in the BERT paper: two passages of text with masked words.

Half of the second passages follow the first in their document, and half are random. 15 % of the
words are to be predicted; of these, 80 % are masked, 10 % replaced and 10 % kept.

    for features in make_sequences(documents, vocabulary, length=128, predictions=20, rng=rng):
        record = make_example(features)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.bert.wordpiece import CLS, MASK, SEP, Vocabulary

Sentence = list[int]  # ids of word pieces
Document = list[Sentence]
Features = dict[str, NDArray[Any]]  # by MLPerf's seven keys

MASKED_FRACTION = 0.15
SHORT_FRACTION = 0.1  # of sequences that are shorter than they could be, so that short ones occur


def encode_documents(documents: Sequence[list[str]], vocabulary: Vocabulary) -> list[Document]:
    """Encode documents, without empty sentences and documents."""
    encoded = [[vocabulary.encode(sentence) for sentence in document] for document in documents]
    non_empty = [[sentence for sentence in document if sentence] for document in encoded]
    return [document for document in non_empty if document]


def make_sequences(
    documents: Sequence[Document],
    vocabulary: Vocabulary,
    *,
    length: int,
    predictions: int,
    rng: np.random.Generator,
) -> Iterator[Features]:
    """Yield sequences of at most `length` tokens, padded; every sentence is in one of them."""
    for i, document in enumerate(documents):
        start = 0
        while start < len(document):
            features, start = make_sequence(
                documents, i, start, vocabulary, length=length, predictions=predictions, rng=rng
            )
            yield features


def make_sequence(
    documents: Sequence[Document],
    document: int,
    start: int,
    vocabulary: Vocabulary,
    *,
    length: int,
    predictions: int,
    rng: np.random.Generator,
) -> tuple[Features, int]:
    """Make a sequence from sentence `start` of a document; also return the next sentence."""
    room = length - 3  # for [CLS] and two [SEP]
    if rng.random() < SHORT_FRACTION:
        room = int(rng.integers(2, room + 1))
    sentences = _take_sentences(documents[document], start, room)
    cut = int(rng.integers(1, len(sentences))) if len(sentences) > 1 else 1
    is_random = len(sentences) == 1 or rng.random() < 0.5
    first, second = sentences[:cut], sentences[cut:]
    if is_random:
        offset = int(rng.integers(1, max(len(documents), 2)))
        other = documents[(document + offset) % len(documents)]
        left = room - sum(map(len, first))
        second = _take_sentences(other, int(rng.integers(len(other))), max(left, 1))
    used = cut if is_random else len(sentences)
    passages = _truncate(list(chain(*first)), list(chain(*second)), room, rng)
    features = _mask(*passages, vocabulary, length, predictions, rng)
    return {**features, "next_sentence_labels": np.array([int(is_random)])}, start + used


def _take_sentences(document: Document, start: int, room: int) -> list[Sentence]:
    """Return sentences until they fill `room` tokens or the document ends."""
    sentences: list[Sentence] = []
    for sentence in document[start:]:
        sentences.append(sentence)
        room -= len(sentence)
        if room <= 0:
            break
    return sentences


def _truncate(
    first: Sentence, second: Sentence, room: int, rng: np.random.Generator
) -> tuple[Sentence, Sentence]:
    """Cut the longer passage at a random end, token by token, until both fit."""
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        longer.pop(-1 if rng.random() < 0.5 else 0)
    return first, second


def _mask(
    first: Sentence,
    second: Sentence,
    vocabulary: Vocabulary,
    length: int,
    predictions: int,
    rng: np.random.Generator,
) -> Features:
    """Mask words of two passages; return all features but next_sentence_labels."""
    cls, sep, mask = (vocabulary.number(piece) for piece in (CLS, SEP, MASK))
    row = np.array([cls, *first, sep, *second, sep])
    words = np.flatnonzero((row != cls) & (row != sep))
    number = min(predictions, max(1, round(MASKED_FRACTION * len(words))))
    positions = np.sort(rng.permutation(words)[:number])
    targets = row[positions]
    chance = rng.random(len(positions))
    row[positions[chance < 0.8]] = mask
    replaced = positions[chance >= 0.9]
    row[replaced] = rng.integers(len(vocabulary), size=len(replaced))

    def padded(values: NDArray[Any], size: int, dtype: Any = np.int64) -> NDArray[Any]:
        return np.pad(values, (0, size - len(values))).astype(dtype)

    return {
        "input_ids": padded(row, length),
        "input_mask": padded(np.ones(len(row)), length),
        "segment_ids": padded(np.arange(len(row)) >= len(first) + 2, length),
        "masked_lm_positions": padded(positions, predictions),
        "masked_lm_ids": padded(targets, predictions),
        "masked_lm_weights": padded(np.ones(len(positions)), predictions, np.float32),
    }
