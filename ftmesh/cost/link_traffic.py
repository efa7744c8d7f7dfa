"""Traffic: the transfers of phases on the wires, by the two clocks of `ftmesh.cost.simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftmesh.cost.links import Network
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Columns, row_key

Floats = NDArray[np.float64]
Index = NDArray[np.intp]
LinkIds = Callable[[int, int], list[int]]  # the links of the route between two chips, numbered


class Wires:
    """The links: until when each is taken."""

    def __init__(self, on: Network, num_links: int, queue: bool) -> None:
        self.on = on
        self.queue = queue
        self.free = np.zeros(num_links)

    def send(
        self, ready: Floats, busy: Floats, waves: list[tuple[Index | slice, Index]]
    ) -> tuple[Floats, Floats]:
        """When transfers that are `ready` have left their sources, and when they have arrived.

        `busy` is how long each keeps a link; `waves` lists, in order of service, transfers and the
        links they take next, no link twice in a wave.
        """
        head = ready + self.on.overhead
        left = np.zeros_like(head)  # 0 until a transfer has taken its first link
        for who, link in waves:
            start = np.maximum(head[who], self.free[link]) if self.queue else head[who]
            end = start + busy[who]
            self.free[link] = end
            left[who] = np.where(left[who], left[who], end)
            head[who] = start + self.on.latency
        return left, head + busy


class Traffic:
    """A phase as the wires see it.

    Rounds of rings in lockstep are alike to them: one is looked at, and counts so many `times`.
    """

    def __init__(self, link_ids: LinkIds, phase: Phase, *, alike: bool) -> None:
        is_rule = alike and not isinstance(phase.what, Columns)
        self.num_rounds = phase.num_rounds
        self.times = phase.num_rounds if is_rule else 1
        self.columns = phase.first_round if is_rule else phase.columns
        self.bounds = np.array([0, len(self.columns)]) if is_rule else phase.bounds
        paths = [link_ids(*pair) for pair in phase.pairs]
        hops = np.array([len(path) for path in paths])
        self._path = np.full((len(paths), hops.max()), -1)
        for i, path in enumerate(paths):
            self._path[i, : len(path)] = path
        key = row_key(self.columns.src, self.columns.dst)
        self._pair = np.unique(key, return_inverse=True)[1]

    @cached_property
    def waves(self) -> list[list[tuple[Index | slice, Index]]]:
        """For every round, the waves that `Wires.send` takes."""
        links = self._path[self._pair]
        if links.shape[1] == 1 and not self._shares(links[:, 0]):
            return [[(slice(None), links[a:b, 0])] for a, b in pairwise(self.bounds)]
        waves: list[list[tuple[Index | slice, Index]]] = []
        for a, b in pairwise(self.bounds):
            waves.append([])
            for hop in links[a:b].T:
                left = np.flatnonzero(hop >= 0)
                while len(left):  # the first on each link now, the others in later waves
                    _, first = np.unique(hop[left], return_index=True)
                    waves[-1].append((left[first], hop[left[first]]))
                    left = np.delete(left, first)
        return waves

    def _shares(self, link: Index) -> bool:
        """Whether some link is used twice in a round."""
        key = np.sort(row_key(self.columns.round, link))
        return bool((key[1:] == key[:-1]).any())

    def rounds(self, per_chunk: float) -> Iterator[tuple[slice, Floats, Any]]:
        """For each round: its transfers, how long each keeps a link, and its waves."""
        busy = self.columns.count.astype(np.float64) * per_chunk
        for (a, b), waves in zip(pairwise(self.bounds), self.waves, strict=True):
            if b > a:
                yield slice(a, b), busy[a:b], waves


def synchronous(
    traffic: list[Traffic], wires: Wires, per_chunk: float, beside: list[float] | None
) -> list[tuple[float, float]]:
    """Each round on idle wires, and then in the executor; phases follow one another."""
    lengths = []
    for number, phase in enumerate(traffic):
        ends = []
        for _, busy, waves in phase.rounds(per_chunk):
            wires.free[:] = 0.0
            _, arrived = wires.send(np.zeros_like(busy), busy, waves)
            ends.append(float(arrived.max()))
        lengths.append(phase.times * math.fsum(ends))
        if beside is not None:
            lengths[-1] += phase.num_rounds * beside[number]
    ends = [math.fsum(lengths[:i]) for i in range(len(lengths) + 1)]
    return list(pairwise(ends))


def dataflow(
    schedule: Schedule,
    traffic: list[Traffic],
    wires: Wires,
    per_chunk: float,
    beside: list[float] | None,
) -> list[tuple[float, float]]:
    """Each transfer when its data and its links are ready, and its chip's executor is."""
    size = schedule.topology.num_live * schedule.num_chunks
    written = np.zeros(size)  # when each rank's copy of each chunk was last written
    read = np.zeros(size)  # and last read
    done = np.zeros(schedule.topology.num_live)  # when each rank was done with its last round
    spans = []
    for number, phase in enumerate(traffic):
        row, chunk = phase.columns.expanded()
        sources = phase.columns.src[row].astype(np.intp) * schedule.num_chunks + chunk
        targets = phase.columns.dst[row].astype(np.intp) * schedule.num_chunks + chunk
        first = np.cumsum(phase.columns.count) - phase.columns.count
        begin, end, last = math.inf, 0.0, -1
        for rows, busy, waves in phase.rounds(per_chunk):
            starts = first[rows]
            stop = starts[-1] + phase.columns.count[rows][-1]
            source, target = sources[starts[0] : stop], targets[starts[0] : stop]
            starts, owner = starts - starts[0], row[starts[0] : stop] - rows.start
            ready = np.maximum.reduceat(written[source], starts)
            if beside is not None:
                now = int(phase.columns.round[rows.start])
                done += (now - last - 1) * beside[number]  # rounds without a transfer
                last = now
                ready = np.maximum(ready, done[phase.columns.src[rows]])
            left, arrived = wires.send(ready, busy, waves)
            np.maximum.at(read, source, left[owner])
            landed = np.maximum(arrived[owner], read[target])
            if beside is not None:
                receivers = phase.columns.dst[rows][owner]
                np.maximum.at(done, receivers, landed)
                done += beside[number]
                landed = done[receivers]
            np.maximum.at(written, target, landed)
            begin = min(begin, float(ready.min()))
            end = max(end, float(landed.max()), float(done.max()))
        spans.append((begin, end))
    return spans
