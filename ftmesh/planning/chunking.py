"""How many chunks to cut a payload into, for algorithms that can choose: trees.

More chunks take more rounds, each of which costs its latency; fewer leave links idle while the
first chunks spread and the last ones gather. Along trees, k chunks take about ``a + b k`` rounds: b
is the lower bound of the mesh (`ftmesh.cost.lower_bounds`), and a grows with its diameter. The time
is least where ``k`` is the root of ``a / b`` times the payload, in units of the bytes that travel
in the fixed time of a round. It is flat there, so several numbers of chunks and balances of links
are planned if that takes little time.

On the wires alone several chunks per message do better still: finer chunks leave less idle, and
rounds take no longer. With a device model they do; and on tori it helps small payloads only.

In dataflow nothing waits for a round to end. Chunks are then small enough that a link carries two
of them in the time of a hop, and trees are planned with that lag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ftmesh.algorithms import registry, tree
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.round_bounds import RoundBound, all_reduce_round_bound
from ftmesh.cost.simulate import DATAFLOW, SYNCHRONOUS, Simulator
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.topology import Topology

FILL_ROUNDS = 0.95  # rounds to fill the trees, per hop of the diameter; from plans
BOTTLENECK = 0.85  # least ratio of the strengths of a mesh and one without a bottleneck that counts
MIN_CHUNK_BYTES = 512
MAX_CHUNKS = 2048
STEPS = 8  # numbers of chunks between powers of two, so that few schedules are planned
FEW_CHIPS = 32  # up to which only balances are tried
TRY_WORK, MAX_TRIES = 180_000, 6  # chips times chunks of all tries together, and their number
WIDTH, SMALL_WIDTH = 2, 3  # chunks per message, and for payloads of at most SMALL messages
FEW, SMALL = 12, 96  # messages up to which one chunk each may do as well; and that count as few
CHUNKS_PER_HOP = 2  # in dataflow, those that a link carries in the time of a hop
# Chips times chunks up to which trees are planned:
DATAFLOW_WORK = 500_000  # for dataflow
KERNEL_WORK = 130_000  # for a kernel, whose tables must stay small


@dataclass(frozen=True)
class Chunking:
    """How a payload is cut: into `num_chunks`, up to `width` of them per message."""

    num_chunks: int
    width: int
    balance: float  # see `ftmesh.algorithms.tree`


def schedule_for(
    topology: Topology,
    algorithm: str,
    payload_bytes: int,
    network: Network,
    mode: str = SYNCHRONOUS,
    *,
    max_work: int = DATAFLOW_WORK,
) -> Schedule:
    """Plan the schedule of `algorithm` for a payload. What takes long to plan is cached.

    The network matters to algorithms that choose the number of chunks, and so does the clock by
    which the schedule will run, `mode`; `max_work` is chips times chunks, for dataflow.
    """
    if algorithm not in registry.CHUNKED_BY_PAYLOAD:
        return registry.build_schedule(topology, algorithm)
    registry.check_connected(topology)
    bare = topology.without_devices()
    if mode == DATAFLOW and network.device_model is None:
        schedule = _dataflow_schedule(bare, payload_bytes, network, max_work)
    else:
        schedule = _synchronous_schedule(bare, payload_bytes, network)
    return replace(schedule, topology=topology)


@lru_cache(maxsize=16)
def _synchronous_schedule(topology: Topology, payload_bytes: int, network: Network) -> Schedule:
    """The fastest of several plans along trees, in synchronous rounds."""
    round_seconds, byte_seconds = network.overhead + network.latency, 1 / network.bandwidth
    lanes = _num_lanes(topology)

    def planned(by: Chunking) -> tuple[float, Schedule]:
        schedule = tree.build_schedule(topology, by.num_chunks, width=by.width, balance=by.balance)
        # The longest message of each round has this many chunks, and one.
        longest = np.zeros(schedule.num_rounds)
        np.maximum.at(longest, schedule.transfers.round, schedule.transfers.lane % by.width)
        chunks = schedule.num_rounds + longest.sum()
        chunk_bytes = payload_bytes / by.num_chunks
        seconds = schedule.num_rounds * round_seconds + chunks * chunk_bytes * byte_seconds
        if model := network.device_model:
            sent = lanes * chunk_bytes / model.devices
            of_round = model.round_seconds(lanes=lanes, num_bytes=sent)
            seconds += schedule.num_rounds * (of_round + model.copying_seconds(payload_bytes))
        return seconds, schedule

    tried = map(planned, candidate_chunkings(topology, payload_bytes, network))
    return min(tried, key=lambda pair: pair[0])[1]


def candidate_chunkings(topology: Topology, payload_bytes: int, network: Network) -> list[Chunking]:
    """The chunkings that are planned for a payload, so that the fastest can be taken."""
    work = 0
    chunkings: list[Chunking] = []
    for chunking in dict.fromkeys(_promising_chunkings(topology, payload_bytes, network)):
        work += topology.num_live * chunking.num_chunks
        if chunkings and work > TRY_WORK:
            break
        chunkings.append(chunking)
    return chunkings[:MAX_TRIES]


def _promising_chunkings(
    topology: Topology, payload_bytes: int, network: Network
) -> Iterator[Chunking]:
    """The most promising first."""
    best = best_num_chunks(topology, payload_bytes, network)
    step, most = max(1, round(_step(best))), _max_chunks(payload_bytes)
    balances = tree.BALANCES[::-1] if any(topology.wrap) else tree.BALANCES
    if topology.num_live <= FEW_CHIPS:
        yield from (Chunking(best, 1, balance) for balance in balances)
        return
    width = SMALL_WIDTH if best <= SMALL else WIDTH if not any(topology.wrap) else 1
    if network.device_model or width * best > min(most, TRY_WORK // topology.num_live):
        width = 1
    if best <= FEW:
        yield Chunking(best, 1, balances[0])
    for balance in balances:
        for number in (best, best + step, best - step):
            if number >= 1 and width * number <= most:
                yield Chunking(width * number, width, balance)


@lru_cache(maxsize=16)
def _dataflow_schedule(
    topology: Topology, payload_bytes: int, network: Network, max_work: int
) -> Schedule:
    """The faster in dataflow of a plan for that clock and the plan for synchronous rounds."""
    number, lag = dataflow_num_chunks(topology, payload_bytes, network, max_work)
    tried = (
        _synchronous_schedule(topology, payload_bytes, network),
        tree.build_schedule(topology, number, lag=lag),
    )
    return min(tried, key=lambda s: Simulator(s).seconds(payload_bytes, network, DATAFLOW))


def dataflow_num_chunks(
    topology: Topology, payload_bytes: int, network: Network, max_work: int = DATAFLOW_WORK
) -> tuple[int, int]:
    """A good number of chunks for trees in dataflow, and the lag of a hop in rounds.

    >>> from ftmesh.cost.links import DEFAULT
    >>> topology = Topology.grid("16x16", failed="4x2@4,4")
    >>> [dataflow_num_chunks(topology, size, DEFAULT) for size in (4_000, 1_000_000, 100_000_000)]
    [(3, 2), (80, 2), (2016, 1)]
    """
    hop = network.overhead + network.latency  # seconds, as is the next
    payload = payload_bytes / network.bandwidth
    most = min(_max_chunks(payload_bytes), max_work // topology.num_live)
    number = most if hop * most <= CHUNKS_PER_HOP * payload else int(CHUNKS_PER_HOP * payload / hop)
    number = max(number, best_num_chunks(topology, payload_bytes, network))
    # A link has no more to carry meanwhile than the other chunks.
    return number, min(number - 1, math.ceil(hop * number / payload))


def best_num_chunks(topology: Topology, payload_bytes: int, network: Network) -> int:
    """About the best number of chunks for trees in synchronous rounds.

    >>> from ftmesh.cost.links import DEFAULT
    >>> topology = Topology.grid("16x16", failed="4x2@4,4")
    >>> [best_num_chunks(topology, size, DEFAULT) for size in (4_000, 1_000_000, 100_000_000)]
    [3, 44, 448]
    """
    filling, per_chunk = _expected_rounds(topology.without_devices())
    round_seconds, byte_seconds = _round_cost(topology, payload_bytes, network)
    most = _max_chunks(payload_bytes)
    seconds = filling / per_chunk * payload_bytes * byte_seconds  # times the best number, squared
    if round_seconds * most**2 <= seconds:
        return most
    return min(most, _rounded(math.sqrt(seconds / round_seconds)))


def tree_lower_bound(topology: Topology, payload_bytes: int, network: Network) -> float:
    """The least time of any plan along trees, found without planning; too low for tiles."""
    round_seconds, byte_seconds = _round_cost(topology, payload_bytes, network)
    payload_seconds = payload_bytes * byte_seconds
    bound = _round_bound(topology.without_devices())
    number = min(bound.best_num_chunks(round_seconds, payload_seconds), _max_chunks(payload_bytes))
    setup = network.device_model.setup_seconds(payload_bytes) if network.device_model else 0.0
    return bound.rounds(number) * (round_seconds + payload_seconds / number) + setup


@lru_cache(maxsize=256)
def _round_bound(topology: Topology) -> RoundBound:
    return all_reduce_round_bound(limits(_as_chips(topology)))


@lru_cache(maxsize=256)
def _expected_rounds(topology: Topology) -> tuple[float, float]:
    """Rounds to fill the trees, and rounds for each chunk.

    The former are fewer if damage makes a bottleneck, for which links elsewhere wait anyway.
    """
    bounds = limits(_as_chips(topology))
    per_chunk = float(bounds.all_reduce)
    without_bottleneck = (bounds.live - 1) / bounds.links
    ratio = max(BOTTLENECK, without_bottleneck / per_chunk)
    return FILL_ROUNDS * bounds.diameter * ratio**2, per_chunk


def _as_chips(topology: Topology) -> Topology:
    """Tiles as chips, which makes no difference to rounds."""
    return Topology(topology.shape, topology.wrap, topology.failed, topology.failed_links)


def _round_cost(topology: Topology, payload_bytes: int, network: Network) -> tuple[float, float]:
    """The fixed seconds of a round, and seconds for every byte of a chunk."""
    round_seconds, byte_seconds = network.overhead + network.latency, 1 / network.bandwidth
    if model := network.device_model:
        lanes = _num_lanes(topology.without_devices())
        round_seconds += model.round_seconds(lanes=lanes, num_bytes=0)
        round_seconds += model.copying_seconds(payload_bytes)
        byte_seconds += lanes * model.per_byte / model.clock / model.devices
    return round_seconds, byte_seconds


@lru_cache(maxsize=256)
def _num_lanes(topology: Topology) -> int:
    """The number of directions in which there are links."""
    return len(np.unique(LinkGraph.from_topology(topology).lane))


def _max_chunks(payload_bytes: int) -> int:
    return min(MAX_CHUNKS, max(1, payload_bytes // MIN_CHUNK_BYTES))


def _step(number: float) -> float:
    return 2.0 ** math.floor(math.log2(number)) / STEPS


def _rounded(number: float) -> int:
    """The nearest number of chunks that is considered."""
    step = _step(max(1.0, number))
    return max(1, round(round(number / step) * step))
