"""Asking: run a program, and wait for each of its devices only so long.

What does not answer is left behind, in a thread that ends with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)

_SLEEP = 0.0002  # seconds between two looks


class Answer(NamedTuple):
    """What a device gave, or the words of its error, and how long that took."""

    value: NDArray[Any] | None
    seconds: float
    error: str = ""

    @property
    def numbers(self) -> list[Any]:
        """The value, as it can be told others."""
        return [] if self.value is None else list(self.value.tolist())


def ask(program: Callable[[], jax.Array], limit: float) -> dict[Any, Answer]:
    """What each of this process's devices in a program answers; the silent are missing."""
    start = time.perf_counter()
    made = ask_all({"": program}, limit).get("")
    if made is None:
        return {}
    if isinstance(made, Exception):
        raise made
    waiting = {shard.device: shard.data for shard in made.addressable_shards}
    found: dict[Any, Answer] = {}
    while waiting and time.perf_counter() - start < limit:
        for device, data in [*waiting.items()]:
            if data.is_ready():
                found[device] = _read(data, time.perf_counter() - start)
                del waiting[device]
        time.sleep(_SLEEP)
    return found


def ask_all(questions: Mapping[K, Callable[[], Any]], limit: float) -> dict[K, Any]:
    """What each question gives, or its exception; those without an answer are left behind."""
    found: dict[K, Any] = {}

    def put(name: K, question: Callable[[], Any]) -> None:
        try:
            found[name] = question()
        except Exception as error:
            found[name] = error

    threads = [threading.Thread(target=put, args=each, daemon=True) for each in questions.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def _read(data: jax.Array, seconds: float) -> Answer:
    try:
        return Answer(np.asarray(data)[0], seconds)
    except jax.errors.JaxRuntimeError as error:
        return Answer(None, seconds, " ".join(str(error).split())[:200])
