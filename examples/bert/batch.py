"""A batch of sequences, as the reader makes it and the steps take it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of tokens, and what is to be said of them. All are int32.

    A target is the word that was masked at its position, or -1 for padding. A row without a
    sequence has length 0, no targets, and -1 for `is_random`.
    """

    tokens: Any  # rows, length of a sequence
    segments: Any  # which sentence a token belongs to, 0 or 1
    lengths: Any  # rows: tokens that are no padding
    positions: Any  # rows, predictions: where words are masked
    targets: Any
    is_random: Any  # rows: whether the second sentence is a random one
