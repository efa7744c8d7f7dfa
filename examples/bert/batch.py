"""A batch of sequences, as the reader makes it and the steps take it."""

from __future__ import annotations

from typing import Any, NamedTuple


class Batch(NamedTuple):
    """Rows of tokens, and what is to be said of them. All are int32.

    A row has a sequence, or several one behind the other, where they are packed. A target is the
    word that was masked at its position, or -1 for padding. In place of a sequence that is not
    there, lengths have 0, and `is_random` has -1.
    """

    tokens: Any  # rows, length of a row
    segments: Any  # which sentence a token belongs to, 0 or 1
    lengths: Any  # rows, sequences: tokens of each; padding follows
    positions: Any  # rows, predictions: where words are masked
    targets: Any
    is_random: Any  # rows, sequences: whether the second sentence is a random one
