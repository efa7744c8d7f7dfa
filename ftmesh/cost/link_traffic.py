"""The transfers of phases on the links, under the two clocks of `ftmesh.cost.simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ftmesh.cost.links import Network
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Transfers, row_key

Floats = NDArray[np.float64]
Index = NDArray[np.intp]
Waves = list[tuple[Index | slice, Index]]  # transfers, and the links that they take next
LinkIds = Callable[[int, int], list[int]]  # the links on the route between two ranks


class LinkQueues:
    """Until when each link is busy."""

    def __init__(self, network: Network, num_links: int, queue: bool) -> None:
        self.network = network
        self.queue = queue  # whether transfers wait for busy links
        self.free_at = np.zeros(num_links)

    def send(self, ready: Floats, busy: Floats, waves: Waves) -> tuple[Floats, Floats]:
        """Return when transfers have left their sources, and when they have arrived.

        Each may start at its `ready` time and keeps a link for its `busy` time. Waves are served in
        order; no link occurs twice in one.
        """
        head = ready + self.network.overhead
        left = np.zeros_like(head)  # 0 until a transfer has taken its first link
        for transfers, links in waves:
            start = head[transfers]
            if self.queue:
                start = np.maximum(start, self.free_at[links])
            end = start + busy[transfers]
            self.free_at[links] = end
            left[transfers] = np.where(left[transfers], left[transfers], end)
            head[transfers] = start + self.network.latency
        return left, head + busy


class PhaseTraffic:
    """The transfers of a phase with the links on their routes.

    All rounds of rings in lockstep load the links alike: with `merge_rounds` only the first of them
    is kept, and counts `times` times.
    """

    def __init__(self, link_ids: LinkIds, phase: Phase, *, merge_rounds: bool) -> None:
        is_merged = merge_rounds and not isinstance(phase.content, Transfers)
        self.num_rounds = phase.num_rounds
        self.times = phase.num_rounds if is_merged else 1
        self.transfers = phase.first_round if is_merged else phase.transfers
        self.bounds = np.array([0, len(self.transfers)]) if is_merged else phase.round_bounds
        routes = [link_ids(*pair) for pair in phase.pairs]
        hops = np.array([len(route) for route in routes])
        self._route = np.full((len(routes), hops.max()), -1)
        for i, route in enumerate(routes):
            self._route[i, : len(route)] = route
        key = row_key(self.transfers.src, self.transfers.dst)
        self._pair = np.unique(key, return_inverse=True)[1]

    @cached_property
    def waves(self) -> list[Waves]:
        """The waves of each round, as `LinkQueues.send` takes them."""
        links = self._route[self._pair]
        if links.shape[1] == 1:
            key = np.sort(row_key(self.transfers.round, links[:, 0]))
            if (key[1:] != key[:-1]).all():  # no link is used twice in a round
                return [[(slice(None), links[a:b, 0])] for a, b in pairwise(self.bounds)]
        waves: list[Waves] = []
        for a, b in pairwise(self.bounds):
            waves.append([])
            for hop in links[a:b].T:
                waiting = np.flatnonzero(hop >= 0)
                while len(waiting):  # the first on each link now, the others in later waves
                    _, first = np.unique(hop[waiting], return_index=True)
                    waves[-1].append((waiting[first], hop[waiting[first]]))
                    waiting = np.delete(waiting, first)
        return waves

    def rounds(self, chunk_seconds: float) -> Iterator[tuple[slice, Floats, Waves]]:
        """For each round: its transfers, how long each occupies a link, and its waves."""
        busy = self.transfers.count.astype(np.float64) * chunk_seconds
        for (a, b), waves in zip(pairwise(self.bounds), self.waves, strict=True):
            if b > a:
                yield slice(a, b), busy[a:b], waves


def run_synchronous(
    phases: list[PhaseTraffic],
    queues: LinkQueues,
    chunk_seconds: float,
    round_seconds: list[float] | None,
) -> list[tuple[float, float]]:
    """Run each round on idle links and then on the devices; return the span of each phase.

    A chunk occupies a link for `chunk_seconds`; `round_seconds` is device time per round, by phase.
    """
    durations = []
    for number, phase in enumerate(phases):
        ends = []
        for _, busy, waves in phase.rounds(chunk_seconds):
            queues.free_at[:] = 0.0
            _, arrived = queues.send(np.zeros_like(busy), busy, waves)
            ends.append(float(arrived.max()))
        durations.append(phase.times * math.fsum(ends))
        if round_seconds is not None:
            durations[-1] += phase.num_rounds * round_seconds[number]
    ends = [math.fsum(durations[:i]) for i in range(len(durations) + 1)]
    return list(pairwise(ends))


def run_dataflow(
    schedule: Schedule,
    phases: list[PhaseTraffic],
    queues: LinkQueues,
    chunk_seconds: float,
    round_seconds: list[float] | None,
) -> list[tuple[float, float]]:
    """Start each transfer when its data, its links and its chip are ready; else as above."""
    size = schedule.topology.num_live * schedule.num_chunks
    written = np.zeros(size)  # when each rank's copy of each chunk was last written
    read = np.zeros(size)  # and last read
    done = np.zeros(schedule.topology.num_live)  # when each rank finished its last round
    spans = []
    for number, phase in enumerate(phases):
        row, chunk = phase.transfers.expanded()
        sources = phase.transfers.src[row].astype(np.intp) * schedule.num_chunks + chunk
        targets = phase.transfers.dst[row].astype(np.intp) * schedule.num_chunks + chunk
        first = np.cumsum(phase.transfers.count) - phase.transfers.count
        begin, end, previous = math.inf, 0.0, -1
        for rows, busy, waves in phase.rounds(chunk_seconds):
            starts = first[rows]
            stop = starts[-1] + phase.transfers.count[rows][-1]
            source, target = sources[starts[0] : stop], targets[starts[0] : stop]
            starts, owner = starts - starts[0], row[starts[0] : stop] - rows.start
            ready = np.maximum.reduceat(written[source], starts)
            if round_seconds is not None:
                current = int(phase.transfers.round[rows.start])
                done += (current - previous - 1) * round_seconds[number]  # rounds without transfers
                previous = current
                ready = np.maximum(ready, done[phase.transfers.src[rows]])
            left, arrived = queues.send(ready, busy, waves)
            np.maximum.at(read, source, left[owner])
            landed = np.maximum(arrived[owner], read[target])
            if round_seconds is not None:
                receivers = phase.transfers.dst[rows][owner]
                np.maximum.at(done, receivers, landed)
                done += round_seconds[number]
                landed = done[receivers]
            np.maximum.at(written, target, landed)
            begin = min(begin, float(ready.min()))
            end = max(end, float(landed.max()), float(done.max()))
        spans.append((begin, end))
    return spans
