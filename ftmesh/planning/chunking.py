"""Cutting: into how many chunks a payload is cut by an algorithm that may choose.

More chunks take more rounds, and each of them costs its latency; fewer leave links idle while the
first chunks spread and the last ones gather. Along trees, k chunks take about ``a + b k`` rounds: b
is the limit of the mesh (`ftmesh.cost.lower_bounds`), and a goes with its diameter. That times what a
round costs is least where ``k`` is the root of ``a / b`` times the payload, in units of the bytes
that travel while a round takes for nothing. It is flat there, and one number of chunks, or one way
to balance links, may be luckier than the next, so some are planned where that takes little time.

Several chunks a message are better still: finer ones leave less idle, and rounds take no longer for
it. In an executor they do, so that is for the wires alone, and for what is planned in little time;
on tori it helps small payloads only.

In dataflow nothing waits for a round to end, and links go on while what they carried is under way.
Chunks are then so small that a link is done with two of them in the time of a hop, and trees are
planned with that lag.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ftmesh.algorithms import registry, tree
from ftmesh.cost.device_model import DeviceModel, Sends
from ftmesh.cost.links import Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.round_bounds import RoundBound, any_bound
from ftmesh.cost.simulate import DATAFLOW, SYNCHRONOUS, Simulator
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.graph import Graph
from ftmesh.topology.topology import Topology

FILLING = 0.95  # rounds for nothing, for each hop of the diameter, as plans show
HINDERED = 0.85  # how few links for each join count, of those there would be without a bottleneck
LEAST_BYTES = 512  # of a chunk
MOST_CHUNKS = 2048
STEPS = 8  # numbers of chunks between a power of two and the next, so that few are planned
FEW_CHIPS = 32  # up to which the balance alone is tried
TRYING, MOST_TRIES = 180_000, 6  # ranks times chunks, of all tries together, and how many
WIDE, WIDE_SMALL = 2, 3  # chunks a message, and for payloads that are cut into few messages
FEW, SMALL = 12, 96  # messages up to which one chunk each may do as well; and up to which are few
HOP_CHUNKS = 2  # in dataflow, those that a link carries in the time of a hop
FLOWING = 500_000  # chips times chunks up to which trees are planned for dataflow
KERNEL = 130_000  # and for a kernel, whose tables are to stay small
SOON = 700_000  # and up to which ``auto`` looks at them for a device model: some 15 s


@dataclass(frozen=True)
class Chunking:
    """A way to cut a payload: into so many chunks, up to `width` of them in a message."""

    num_chunks: int
    width: int
    balance: float  # see `ftmesh.algorithms.spanning_trees`


def schedule_for(
    topology: Topology,
    algorithm: str,
    payload_bytes: int,
    on: Network,
    mode: str = SYNCHRONOUS,
    *,
    most: int = FLOWING,
) -> Schedule:
    """The schedule of `algorithm` for a payload; a `PlanError` says why not and which one can.

    The `mode` is the clock by which it will run; in dataflow trees are planned for at most so many
    chips times chunks. What took long to plan is remembered.
    """
    if algorithm not in registry.CUT_BY_SIZE:
        return registry.schedule(topology, algorithm)
    registry.check_whole(topology)
    bare = topology.without_devices()
    if mode == DATAFLOW and on.device_model is None:
        return replace(_flowing(bare, payload_bytes, on, most), topology=topology)
    return replace(_fastest(bare, payload_bytes, on), topology=topology)


@lru_cache(maxsize=16)
def _fastest(topology: Topology, payload_bytes: int, on: Network) -> Schedule:
    """The best of some plans along trees, on the clock of synchronous rounds."""
    each, per_byte = on.overhead + on.latency, 1 / on.bandwidth
    lanes = _num_lanes(topology.without_devices())
    sends = Sends(lanes, lanes, most=1, is_mixed=_is_mixed(topology))

    def planned(by: Chunking) -> tuple[float, Schedule]:
        found = tree.plan(topology, by.num_chunks, width=by.width, balance=by.balance)
        fullest = np.zeros(found.num_rounds)  # messages of a round have this many chunks, and one
        np.maximum.at(fullest, found.columns.round, found.columns.lane % by.width)
        chunks = found.num_rounds + fullest.sum()
        chunk_bytes = payload_bytes / by.num_chunks
        seconds = found.num_rounds * each + chunks * chunk_bytes * per_byte
        if on.device_model:
            part = chunk_bytes / on.device_model.devices
            beside = on.device_model.exposed_seconds(sends, part, on.bandwidth)
            seconds += found.num_rounds * beside
        return seconds, found

    tried = map(planned, chunkings(topology, payload_bytes, on))
    return min(tried, key=lambda pair: pair[0])[1]


def chunkings(topology: Topology, payload_bytes: int, on: Network) -> list[Chunking]:
    """What is planned for a payload, so that the best can be taken."""
    work = 0
    found: list[Chunking] = []
    for chunking in dict.fromkeys(_worth_trying(topology, payload_bytes, on)):
        work += topology.num_live * chunking.num_chunks
        if found and work > TRYING:
            break
        found.append(chunking)
    return found[:MOST_TRIES]


def _worth_trying(topology: Topology, payload_bytes: int, on: Network) -> Iterator[Chunking]:
    """The most promising first."""
    best = num_chunks(topology, payload_bytes, on)
    step, most = max(1, round(_step(best))), _most(payload_bytes)
    balances = tree.BALANCES[::-1] if any(topology.wrap) else tree.BALANCES
    if topology.num_live <= FEW_CHIPS:
        yield from (Chunking(best, 1, balance) for balance in balances)
        return
    width = WIDE_SMALL if best <= SMALL else WIDE if not any(topology.wrap) else 1
    if on.device_model or width * best > min(most, TRYING // topology.num_live):
        width = 1
    if best <= FEW:
        yield Chunking(best, 1, balances[0])
    for balance in balances:
        for number in (best, best + step, best - step):
            if number >= 1 and width * number <= most:
                yield Chunking(width * number, width, balance)


@lru_cache(maxsize=16)
def _flowing(topology: Topology, payload_bytes: int, on: Network, most: int) -> Schedule:
    """A plan along trees on the clock of dataflow."""
    number, lag = flowing(topology, payload_bytes, on, most)
    tried = _fastest(topology, payload_bytes, on), tree.plan(topology, number, lag=lag)
    return min(tried, key=lambda found: Simulator(found).seconds(payload_bytes, on, DATAFLOW))


def flowing(
    topology: Topology, payload_bytes: int, on: Network, most: int = FLOWING
) -> tuple[int, int]:
    """How many chunks are good for trees in dataflow, and the rounds of lag that hops take then.

    >>> from ftmesh.cost.links import DEFAULT
    >>> topology = Topology.grid("16x16", failed="4x2@4,4")
    >>> [flowing(topology, size, DEFAULT) for size in (4_000, 1_000_000, 100_000_000)]
    [(3, 2), (80, 2), (2016, 1)]
    """
    hop, payload = on.overhead + on.latency, payload_bytes / on.bandwidth  # seconds
    most = min(_most(payload_bytes), most // topology.num_live)
    number = most if hop * most <= HOP_CHUNKS * payload else int(HOP_CHUNKS * payload / hop)
    number = max(number, num_chunks(topology, payload_bytes, on))
    # A link has no more to carry meanwhile than the other chunks.
    return number, min(number - 1, math.ceil(hop * number / payload))


def num_chunks(topology: Topology, payload_bytes: int, on: Network) -> int:
    """About how many chunks are best for trees.

    >>> from ftmesh.cost.links import DEFAULT
    >>> topology = Topology.grid("16x16", failed="4x2@4,4")
    >>> [num_chunks(topology, size, DEFAULT) for size in (4_000, 1_000_000, 100_000_000)]
    [3, 44, 448]
    """
    filling, per_chunk = _rounds(topology.without_devices())
    each, per_byte = _round_cost(topology, on)
    most = _most(payload_bytes)
    seconds = filling / per_chunk * payload_bytes * per_byte  # times the best number, squared
    return most if each * most**2 <= seconds else min(most, _rounded(math.sqrt(seconds / each)))


def is_soon(topology: Topology, payload_bytes: int, on: Network) -> bool:
    """Whether trees for a payload are planned in seconds, and their tables are of some size."""
    return topology.num_live * num_chunks(topology, payload_bytes, on) <= SOON


def least_seconds(topology: Topology, payload_bytes: int, on: Network) -> float:
    """What no plan along trees can be faster than; found without one.

    Tiles are taken as chips, so theirs is lower than it need be.
    """
    each, per_byte = _round_cost(topology, on, least=True)
    whole = payload_bytes * per_byte
    bound = _bound(topology.without_devices())
    number = min(bound.best_number(each, whole), _most(payload_bytes))
    around = on.device_model.around_seconds(payload_bytes) if on.device_model else 0.0
    return bound.rounds(number) * (each + whole / number) + around


@lru_cache(maxsize=256)
def _bound(topology: Topology) -> RoundBound:
    return any_bound(limits(_as_chips(topology)))


@lru_cache(maxsize=256)
def _rounds(topology: Topology) -> tuple[float, float]:
    """Rounds for nothing, and for each chunk.

    The former are fewer where damage makes a bottleneck, for which links elsewhere wait anyway.
    """
    found = limits(_as_chips(topology))
    per_chunk = float(found.all_reduce)
    unhindered = (found.live - 1) / found.links
    return FILLING * found.diameter * max(HINDERED, unhindered / per_chunk) ** 2, per_chunk


def _as_chips(topology: Topology) -> Topology:
    """Tiles as if each were a chip, which they are to rounds."""
    return Topology(topology.shape, topology.wrap, topology.failed, topology.failed_links)


def _round_cost(topology: Topology, on: Network, *, least: bool = False) -> tuple[float, float]:
    """What a round takes for nothing, and for every byte of a chunk, in seconds.

    At `least`, if all that can be is hidden and costs nothing.
    """
    each, per_byte = on.overhead + on.latency, 1 / on.bandwidth
    if on.device_model:
        lanes = _num_lanes(topology.without_devices())
        each += on.device_model.round_seconds(lanes=lanes, num_bytes=0)
        hidden = _hidden(topology, on.device_model) if least else 0.0
        cycles = lanes * (1 - hidden) * on.device_model.per_byte
        per_byte += cycles / on.device_model.clock / on.device_model.devices
    return each, per_byte


def _hidden(topology: Topology, device_model: DeviceModel) -> float:
    """The share of what bytes cost along trees that two streams hide, at most."""
    return device_model.hidden_mixed if _is_mixed(topology) else device_model.hidden


def _is_mixed(topology: Topology) -> bool:
    """Whether lanes of trees have sums and results: two chips add what they exchange."""
    return topology.num_live > 2


@lru_cache(maxsize=256)
def _num_lanes(topology: Topology) -> int:
    """The directions in which there are links."""
    return len(np.unique(Graph.of(topology).lane))


def _most(payload_bytes: int) -> int:
    return min(MOST_CHUNKS, max(1, payload_bytes // LEAST_BYTES))


def _step(number: float) -> float:
    return 2.0 ** math.floor(math.log2(number)) / STEPS


def _rounded(number: float) -> int:
    """A number of chunks near this one: a few of them stand for all."""
    step = _step(max(1.0, number))
    return max(1, round(round(number / step) * step))
