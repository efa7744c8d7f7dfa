"""The programs that test chips and links, and running them with a timeout.

A chip returns digests of chains of matrix products, in the dtypes of training, and of integers over
a few MB of memory. A link carries a pattern there and back.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from numpy.typing import NDArray

from ftmesh.health.replica_check import digest, digest_words
from ftmesh.testing.emulation import HEALTHY, UnhealthySpec
from ftmesh.topology.devices import platform_of
from ftmesh.topology.topology import Topology

K = TypeVar("K", bound=Hashable)

DTYPES = (jnp.float32, jnp.bfloat16)
_AXIS = "chips"
_SEED = np.uint32(7)
_NUM_MIXES = 4
_POLL_SECONDS = 0.0002


@dataclass(frozen=True)
class Probes:
    """How much the tests compute and transfer, and how often.

    The defaults suit emulated chips. `for_topology` has larger sizes for real ones: there a program
    must run long enough that the time the host adds does not matter.
    """

    matrix_size: int = 128  # rows and columns
    num_products: int = 4  # of matrices, in a chain
    num_words: int = 1 << 19  # memory that the integer test fills, in words of 4 bytes
    pattern_words: int = 1 << 14  # that a link carries
    round_trips: int = 1  # how often they go there and back
    repeats: int = 5  # runs after the first
    slow_margin: float = 0.05  # seconds by which a chip or link must exceed its peers to be slow
    max_single_links: int = 128  # if no process has more links, they are tested one by one
    unhealthy: UnhealthySpec = HEALTHY  # faults to emulate, for tests of the doctor

    @staticmethod
    def for_topology(topology: Topology) -> Probes:
        """The probes for the devices of a mesh, with the emulated faults of ``FTMESH_SICK``."""
        unhealthy = UnhealthySpec.from_environment(topology)
        if platform_of(topology.devices[0]) == "cpu":
            return Probes(unhealthy=unhealthy)
        return Probes(2048, 256, 1 << 24, 1 << 20, 64, slow_margin=0.005, unhealthy=unhealthy)

    def restricted_to(self, indices: Iterable[int]) -> Probes:
        """The probes for a program of these chips, without the emulated faults of others."""
        return replace(self, unhealthy=self.unhealthy.restricted_to(indices))

    def compute(self, index: Any, seed: Any) -> jax.Array:
        """Compute, on a device, a digest for each of `DTYPES` and one for integers."""
        # The seed is an argument so that the compiler cannot compute the results in advance.
        size = self.matrix_size
        start = (jnp.arange(size**2, dtype=jnp.uint32) + seed) * np.uint32(2654435761) >> 24
        first = (start.astype(jnp.float32) / 256 - 0.5).reshape(size, size)

        def product(_: Any, x: Any) -> Any:
            y = lax.dot(x, first.astype(x.dtype))
            return y - jnp.round(y)  # so that every bit affects the next product

        chains = [lax.fori_loop(0, self.num_products, product, first.astype(d)) for d in DTYPES]
        words = jnp.arange(self.num_words, dtype=jnp.uint32) + seed
        words = lax.fori_loop(0, _NUM_MIXES, lambda _, words: _mix(words), words)
        digests = [digest(self.unhealthy.corrupt(x, index)) for x in (*chains, words)]
        return self.unhealthy.delay(jnp.stack(digests), index)

    def expected_integers(self) -> int:
        """The last digest of `compute`, by NumPy."""
        words = np.arange(self.num_words, dtype=np.uint32) + _SEED
        for _ in range(_NUM_MIXES):
            words = _mix(words)
        return int(digest_words(words))

    def exchange(self, x: Any, ends: Any, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """Send this chip's pattern `x` over a link and back, on a device.

        `ends` are the grid indices of this chip and of the other end, -1 if there is none; `pairs`
        are positions along the mesh axis. Returns the other chip's pattern, and this chip's own
        after it came back.
        """

        def send(x: Any) -> Any:
            arrived = lax.ppermute(x, _AXIS, [*pairs])
            return self.unhealthy.apply_to_link(arrived, ends[1], ends[0])

        there = send(x)
        back = send(there)
        if self.round_trips > 1:
            back = lax.fori_loop(1, self.round_trips, lambda _, x: send(send(x)), back)
        return jnp.stack([there, back])

    def count_wrong(self, index: int, other: int, received: NDArray[Any]) -> tuple[int, int]:
        """Count the words of the other chip, and own words that came back, that are wrong."""
        there, back = received
        num_wrong = np.count_nonzero(there != self.pattern(other))
        return int(num_wrong), int(np.count_nonzero(back != self.pattern(index)))

    def pattern(self, index: int) -> NDArray[np.uint32]:
        """The pattern that this chip sends, different for every chip."""
        words = np.arange(self.pattern_words, dtype=np.uint32)
        return (words + np.uint32((40503 * index + 1) % 2**32)) * np.uint32(2654435761)


def _mix(words: Any) -> Any:
    """Mix and reverse words; the same in NumPy and JAX."""
    return ((words * np.uint32(1664525) + np.uint32(1013904223)) ^ (words >> np.uint32(13)))[::-1]


# Programs, compiled when they are built ----------------------------------------------------------


@lru_cache(maxsize=4096)
def response_program(probes: Probes, device: Any, index: int) -> Callable[[], float]:
    """Build a program in which one device squares the number 3."""
    sharding = SingleDeviceSharding(device)
    run = jax.jit(lambda x: probes.unhealthy.silence(x * x, index))
    compiled = run.lower(jax.ShapeDtypeStruct((), np.float32, sharding=sharding)).compile()
    return lambda: float(compiled(jax.device_put(np.float32(3), sharding)))


@lru_cache(maxsize=64)
def compute_program(
    probes: Probes, devices: tuple[Any, ...], indices: tuple[int, ...]
) -> Callable[[], jax.Array]:
    """Build a program in which every device runs `Probes.compute` independently."""
    seeds = np.full(len(indices), _SEED)
    return _map_over_devices(devices, probes.compute, np.array(indices, np.int32), seeds)


@lru_cache(maxsize=4096)
def link_program(
    probes: Probes,
    devices: tuple[Any, ...],
    indices: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
) -> Callable[[], jax.Array]:
    """Build a program in which pairs of devices, by position, exchange patterns at once."""
    permutation = [*pairs, *((b, a) for a, b in pairs)]
    ends = np.array([[index, -1] for index in indices], np.int32)
    for a, b in permutation:
        ends[a, 1] = indices[b]
    patterns = np.stack([probes.pattern(index) for index in indices])
    exchange = partial(probes.exchange, pairs=permutation)
    return _map_over_devices(devices, exchange, patterns, ends)


def _map_over_devices(
    devices: Sequence[Any], function: Callable[..., jax.Array], *arrays: NDArray[Any]
) -> Callable[[], jax.Array]:
    """Build a program in which every device calls `function` with its row of the arrays.

    The rows are put on the devices when the program first runs, since that may block forever.
    """
    mesh = Mesh(np.array(devices), (_AXIS,))
    sharding = NamedSharding(mesh, PartitionSpec(_AXIS))

    def per_device(*rows: Any) -> jax.Array:
        return function(*(row[0] for row in rows))[None]

    mapped = jax.shard_map(
        per_device, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec, check_vma=False
    )
    types = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays)
    compiled = jax.jit(mapped).lower(*types).compile()

    @cache
    def inputs() -> list[jax.Array]:
        return [jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in arrays]

    return lambda: compiled(*inputs())


# Running with a timeout --------------------------------------------------------------------------


class DeviceResult(NamedTuple):
    """What a device returned, or its error message, and how long that took."""

    value: NDArray[Any] | None
    seconds: float
    error: str = ""


def run_program(program: Callable[[], jax.Array], timeout: float) -> dict[Any, DeviceResult]:
    """Run a program; return the results of this process's devices that finish in time."""
    start = time.perf_counter()
    output = call_all({"": program}, timeout).get("")
    if output is None:
        return {}
    if isinstance(output, Exception):
        raise output
    pending = {shard.device: shard.data for shard in output.addressable_shards}
    results: dict[Any, DeviceResult] = {}
    while pending and time.perf_counter() - start < timeout:
        for device, data in [*pending.items()]:
            if data.is_ready():
                del pending[device]
                seconds = time.perf_counter() - start
                try:
                    results[device] = DeviceResult(np.asarray(data)[0], seconds)
                except jax.errors.JaxRuntimeError as error:
                    message = " ".join(str(error).split())[:200]
                    results[device] = DeviceResult(None, seconds, message)
        time.sleep(_POLL_SECONDS)
    return results


def call_all(functions: Mapping[K, Callable[[], Any]], timeout: float) -> dict[K, Any]:
    """Call functions in threads; return what those that finish in time return or raise."""
    results: dict[K, Any] = {}

    def call(name: K, function: Callable[[], Any]) -> None:
        try:
            results[name] = function()
        except Exception as error:
            results[name] = error

    threads = [threading.Thread(target=call, args=item, daemon=True) for item in functions.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(results)


def median_seconds(results: Sequence[DeviceResult]) -> float | None:
    """The median time, without the first run, which transfers the inputs."""
    times = [result.seconds for result in results[1:] or results]
    return statistics.median(times) if times else None
