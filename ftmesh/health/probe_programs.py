"""Probes: what chips and links are asked, as programs.

A chip computes what is known: chains of products of matrices in the dtypes of training, and whole
numbers in a few MB of memory, of which a digest comes back. A link carries a pattern there and
back.

Asking: run a program, and wait for each of its devices only so long.

What does not answer is left behind, in a thread that ends with the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from ftmesh.health.replica_check import digest, digest_of_words
from ftmesh.testing.unhealthy import WELL, Sick

DTYPES = (jnp.float32, jnp.bfloat16)
_AXIS = "chips"
_SEED = np.uint32(7)
_STIRS = 4  # of all words, also by the host


@dataclass(frozen=True)
class Probes:
    """How much is asked, how often, and, of those who try the doctor, what is `sick`.

    The sizes are for emulated chips; `of` has those for real ones, which are quicker than their
    hosts: there a program must take so long that what the host adds does not count.
    """

    side: int = 128  # of the matrices
    chain: int = 4  # products, one after another
    words: int = 1 << 19  # of memory, 4 bytes each
    pattern: int = 1 << 14  # words that a link carries
    trips: int = 1  # there and back
    repeats: int = 5
    floor: float = 0.05  # seconds: what is less behind its peers is not slow
    one_by_one: int = 128  # links of a process that are tried each by itself
    sick: Sick = WELL

    @staticmethod
    def of(platform: str, sick: Sick = WELL) -> Probes:
        """The probes for devices of a platform."""
        if platform == "cpu":
            return Probes(sick=sick)
        return Probes(2048, 256, 1 << 24, 1 << 20, 64, floor=0.005, sick=sick)

    def among(self, places: Iterable[int]) -> Probes:
        """The same for a program of some chips, without a trace of what is sick elsewhere."""
        return replace(self, sick=self.sick.among(places))

    # In the program of a device -----------------------------------------------------------------

    def work(self, place: Any, seed: Any) -> jax.Array:
        """Digests of what is computed: a float chain of each of `DTYPES`, and whole numbers.

        The compiler does not know `seed`, or might compute all this in the chip's place.
        """
        start = (jnp.arange(self.side**2, dtype=jnp.uint32) + seed) * np.uint32(2654435761) >> 24
        first = (start.astype(jnp.float32) / 256 - 0.5).reshape(self.side, self.side)

        def product(_: Any, x: Any) -> Any:
            y = lax.dot(x, first.astype(x.dtype))
            return y - jnp.round(y)  # all bits of it matter to the next

        chains = [lax.fori_loop(0, self.chain, product, first.astype(d)) for d in DTYPES]
        words = jnp.arange(self.words, dtype=jnp.uint32) + seed
        words = lax.fori_loop(0, _STIRS, lambda _, words: _stirred(words), words)
        digests = jnp.stack([digest(self.sick.computed(x, place)) for x in (*chains, words)])
        return self.sick.delayed(digests, place)

    def whole_numbers(self) -> int:
        """The last of those digests, as NumPy computes it."""
        words = np.arange(self.words, dtype=np.uint32) + _SEED
        for _ in range(_STIRS):
            words = _stirred(words)
        return int(digest_of_words(words))

    def exchange(self, x: Any, ends: Any, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """What came over the link for `x`, which is the other's, and what came back of `x`.

        `ends` are the places of this chip and of the other, or -1; `pairs` are indices along the
        axis.
        """

        def carry(x: Any) -> Any:
            return self.sick.carried(lax.ppermute(x, _AXIS, [*pairs]), ends[1], ends[0])

        there = carry(x)
        back = carry(there)
        if self.trips > 1:
            back = lax.fori_loop(1, self.trips, lambda _, x: carry(carry(x)), back)
        return jnp.stack([there, back])

    def num_wrong(self, place: int, other: int, came: NDArray[Any]) -> tuple[int, int]:
        """How many words came wrong from the other, and how many of one's own came back wrong."""
        there, back = came
        return (
            int(np.count_nonzero(there != self.words_of(other))),
            int(np.count_nonzero(back != self.words_of(place))),
        )

    def words_of(self, place: int) -> NDArray[np.uint32]:
        """The pattern that a chip sends, and no other does."""
        own = np.arange(self.pattern, dtype=np.uint32) + np.uint32((40503 * place + 1) % 2**32)
        return own * np.uint32(2654435761)


def _stirred(words: Any) -> Any:
    """Words after a step of arithmetic, last first; the same in NumPy and in JAX."""
    return ((words * np.uint32(1664525) + np.uint32(1013904223)) ^ (words >> np.uint32(13)))[::-1]


# Programs ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def answer_program(probes: Probes, device: Any, place: int) -> Callable[[], float]:
    """Has one device square a number; whatever becomes of it holds up no other."""
    here = SingleDeviceSharding(device)
    run = jax.jit(lambda x: probes.sick.answer(x * x, place))
    compiled = run.lower(jax.ShapeDtypeStruct((), np.float32, sharding=here)).compile()
    return lambda: float(compiled(jax.device_put(np.float32(3), here)))


@lru_cache(maxsize=64)
def work_program(
    probes: Probes, devices: tuple[Any, ...], places: tuple[int, ...]
) -> Callable[[], jax.Array]:
    """Has each device compute `Probes.work`; none waits for another."""
    seeds = np.full(len(places), _SEED)
    return _on(devices, probes.work, np.array(places, np.int32), seeds)


@lru_cache(maxsize=4096)
def link_program(
    probes: Probes,
    devices: tuple[Any, ...],
    places: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
) -> Callable[[], jax.Array]:
    """Has pairs of `devices`, by their indices there, do `Probes.exchange` all at once."""
    both = [*pairs, *((b, a) for a, b in pairs)]
    ends = np.array([[place, -1] for place in places], np.int32)
    for a, b in both:
        ends[a, 1] = places[b]
    sent = np.stack([probes.words_of(place) for place in places])
    return _on(devices, lambda x, ends: probes.exchange(x, ends, both), sent, ends)


def _on(
    devices: Sequence[Any], each: Callable[..., jax.Array], *host: NDArray[Any]
) -> Callable[[], jax.Array]:
    """The program in which every device does `each` with its row of what the host has.

    It is compiled now, and rows are placed when it is first run: only that can take for ever.
    """
    mesh = Mesh(np.array(devices), (_AXIS,))
    split = NamedSharding(mesh, PartitionSpec(_AXIS))

    def own(*rows: Any) -> jax.Array:
        return each(*(row[0] for row in rows))[None]

    mapped = jax.shard_map(
        own, mesh=mesh, in_specs=split.spec, out_specs=split.spec, check_vma=False
    )
    types = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in host)
    compiled = jax.jit(mapped).lower(*types).compile()

    @cache
    def placed() -> list[jax.Array]:
        return [jax.make_array_from_callback(x.shape, split, x.__getitem__) for x in host]

    return lambda: compiled(*placed())


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
