"""Joining: several short sequences in one row, so that less of it is padding.

    for members in pack(lengths, predictions, length=512, most_predictions=76, most=3):
        row = join([features[i] for i in members])

Sequences in a row do not see each other: the model tells them apart by `input_mask`, which numbers
them from 1. What is learned from a row is what would be learned from its sequences apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from examples.bert.sequences import Features


def pack(
    lengths: Sequence[int],
    predictions: Sequence[int],
    *,
    length: int,
    most_predictions: int,
    most: int,
) -> list[list[int]]:
    """Which sequences, by their place in `lengths`, share a row.

    Best fit: the longest go first, each into the fullest row that has room for its tokens and for
    the words masked in it, and that has less than `most` sequences.
    """
    rows: list[list[int]] = []
    masked: list[int] = []  # words in each row
    by_room: defaultdict[int, dict[int, None]] = defaultdict(dict)  # rows that may take more
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
    """One row of several sequences, of the sizes that each of them has."""
    lengths = [int(np.count_nonzero(features["input_mask"])) for features in sequences]
    counts = [int(np.count_nonzero(features["masked_lm_weights"])) for features in sequences]
    starts = np.cumsum([0, *lengths[:-1]])

    def joined(key: str, sizes: Sequence[int], shifts: Sequence[int] | None = None) -> Any:
        whole = np.zeros_like(sequences[0][key])
        parts = [features[key][:size] for features, size in zip(sequences, sizes, strict=True)]
        if shifts is not None:
            parts = [part + shift for part, shift in zip(parts, shifts, strict=True)]
        together = np.concatenate(parts)
        whole[: len(together)] = together
        return whole

    return {
        "input_ids": joined("input_ids", lengths),
        "input_mask": joined("input_mask", lengths, range(len(sequences))),
        "segment_ids": joined("segment_ids", lengths),
        "masked_lm_positions": joined("masked_lm_positions", counts, starts.tolist()),
        "masked_lm_ids": joined("masked_lm_ids", counts),
        "masked_lm_weights": joined("masked_lm_weights", counts),
        "next_sentence_labels": np.concatenate([f["next_sentence_labels"] for f in sequences]),
    }
