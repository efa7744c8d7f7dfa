"""Sequences to train on: two passages of text, some words masked, as in the BERT paper.

Half of the second passages follow the first in their document, and half are from elsewhere. Of all
words 15 % are to be predicted; of these, 80 % are masked, 10 % replaced and 10 % left.

    for features in make_sequences(documents, vocabulary, length=128, predictions=20, rng=rng):
        record = make_example(features)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.bert.wordpiece import BETWEEN, FIRST, MASK, Vocabulary

Sentence = list[int]  # numbers of word pieces
Document = list[Sentence]
Features = dict[str, NDArray[Any]]  # by MLPerf's seven keys

MASKED_SHARE = 0.15
SHORT_SHARE = 0.1  # sequences that are shorter than they could be, so that short ones are known too


def encode_documents(documents: Sequence[list[str]], vocabulary: Vocabulary) -> list[Document]:
    """Documents in numbers, without sentences and documents that have nothing in them."""
    encoded = [[vocabulary.encode(sentence) for sentence in document] for document in documents]
    kept = [[sentence for sentence in document if sentence] for document in encoded]
    return [document for document in kept if document]


def make_sequences(
    documents: Sequence[Document],
    vocabulary: Vocabulary,
    *,
    length: int,
    predictions: int,
    rng: np.random.Generator,
) -> Iterator[Features]:
    """Sequences of `length` tokens, or shorter and padded, with every sentence in one of them."""
    for which, document in enumerate(documents):
        start = 0
        while start < len(document):
            features, start = make_sequence(
                documents, which, start, vocabulary, length=length, predictions=predictions, rng=rng
            )
            yield features


def make_sequence(
    documents: Sequence[Document],
    which: int,
    start: int,
    vocabulary: Vocabulary,
    *,
    length: int,
    predictions: int,
    rng: np.random.Generator,
) -> tuple[Features, int]:
    """One sequence, that begins with a sentence of a document; and the sentence to go on with."""
    room = length - 3  # without the tokens before, between and behind
    if rng.random() < SHORT_SHARE:
        room = int(rng.integers(2, room + 1))
    sentences = _sentences(documents[which], start, room)
    cut = int(rng.integers(1, len(sentences))) if len(sentences) > 1 else 1
    is_random = len(sentences) == 1 or rng.random() < 0.5
    first, second = sentences[:cut], sentences[cut:]
    if is_random:
        other = documents[(which + int(rng.integers(1, max(len(documents), 2)))) % len(documents)]
        left = room - sum(map(len, first))
        second = _sentences(other, int(rng.integers(len(other))), max(left, 1))
    used = cut if is_random else len(sentences)
    passages = _fitted(list(chain(*first)), list(chain(*second)), room, rng)
    features = _masked(*passages, vocabulary, length, predictions, rng)
    return {**features, "next_sentence_labels": np.array([int(is_random)])}, start + used


def _sentences(document: Document, start: int, room: int) -> list[Sentence]:
    """As many sentences as it takes to fill the room, or as there are."""
    taken: list[Sentence] = []
    for sentence in document[start:]:
        taken.append(sentence)
        room -= len(sentence)
        if room <= 0:
            break
    return taken


def _fitted(
    first: Sentence, second: Sentence, room: int, rng: np.random.Generator
) -> tuple[Sentence, Sentence]:
    """Two passages that fit, the longer one cut short at one of its ends, token by token."""
    while len(first) + len(second) > room:
        longer = first if len(first) > len(second) else second
        longer.pop(-1 if rng.random() < 0.5 else 0)
    return first, second


def _masked(
    first: Sentence,
    second: Sentence,
    vocabulary: Vocabulary,
    length: int,
    predictions: int,
    rng: np.random.Generator,
) -> Features:
    """All features but one, of two passages."""
    before, between, mask = (vocabulary.number(piece) for piece in (FIRST, BETWEEN, MASK))
    row = np.array([before, *first, between, *second, between])
    plain = np.flatnonzero((row != before) & (row != between))
    number = min(predictions, max(1, round(MASKED_SHARE * len(plain))))
    positions = np.sort(rng.permutation(plain)[:number])
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
