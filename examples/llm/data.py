"""Rows of packed documents, read in the background by grain.

A row is `length` tokens in the order of the file, plus the next one; documents may begin and end
anywhere. The rows of a step depend only on the step, not on chips or processes.

    rows = Rows(tokens, length=1024)
    for tokens, mask in batches(rows, config, sharding, first_step=0, steps=9, seed=0): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding
from numpy.typing import NDArray

from examples.bert.text import synthetic_documents
from examples.llm.config import Config
from examples.llm.tokens import encode_documents, make_encoder, read_tokens
from ftmesh.elastic import StepSampler
from ftmesh.errors import DataError

THREADS, BUFFERED = 4, 8  # steps that are read at once, and ahead


class Rows:
    """The rows of an array of token ids."""

    def __init__(self, tokens: NDArray[Any], length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return ``[rows, length + 1]`` ids: the last token of a row is the first of the next."""
        span = np.arange(self._length + 1)
        tokens: NDArray[Any] = self._tokens[rows[:, None] * self._length + span]
        return tokens.astype(np.int32)


def open_rows(path: str | Path | None, tokenizer: str | Path | None, config: Config) -> Rows:
    """Open the data of a run, or make some text.

    Raises:
        DataError: There are too few tokens for a step, or ids outside the model's vocabulary.
    """
    encode, kinds = make_encoder(tokenizer)
    if path is None:
        documents = ("\n".join(sentences) for sentences in synthetic_documents())
        tokens: NDArray[Any] = encode_documents(documents, encode)
    else:
        tokens = read_tokens(path, encode)
    rows = Rows(tokens, config.length)
    if len(rows) < config.batch:
        raise DataError(
            f"{len(tokens):,} tokens are {max(len(rows), 0):,} rows of {config.length}, and a step "
            f"takes {config.batch}: give more text, or --set batch=N"
        )
    largest = int(max(part.max() for part in np.array_split(tokens, 64) if len(part)))
    if max(largest + 1, kinds if tokenizer else 0) > config.vocabulary:
        raise DataError(
            f"the data has token {largest}, and the model {config.vocabulary:,}: give --set "
            f"vocabulary={max(largest + 1, kinds)}"
        )
    return rows


def batches(
    rows: Rows, config: Config, sharding: NamedSharding, *, first_step: int, steps: int, seed: int
) -> Iterator[list[jax.Array]]:
    """Yield the rows of each step and the mask of those that are not padding, by `sharding`.

    Hosts with failed chips have fewer rows than others.
    """
    epochs = -(-steps * config.batch // len(rows))
    sampler = StepSampler(len(rows), config.batch, num_epochs=epochs, seed=seed)
    sampler = sampler.for_sharding(sharding, microbatches=config.microbatches)
    dataset: Any = grain.MapDataset.source(sampler)[first_step:steps].map(rows.read)
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=BUFFERED)
    for tokens in dataset.to_iter_dataset(options):
        own = tokens, sampler.mask
        yield [
            jax.make_array_from_process_local_data(sharding, x, (sampler.num_rows, *x.shape[1:]))
            for x in own
        ]
