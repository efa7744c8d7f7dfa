"""Writing: a mesh and a proved schedule as plain JSON, with packed columns.

A schedule has ``num_chunks``; ``src`` and ``dst``, the ranks of each pair that exchanges something;
``route`` and ``hops``, the places that the pairs' messages pass, and how many links each takes; and
``phases``. Each of those has ``starts``, the first row of every round and the end of the last, and
for every row ``pair``, ``chunk``, ``count`` and ``op`` (0 adds, 1 copies). Ranks and places count
from 0 as in `ftmesh.topology.topology`, and columns are packed by `ftmesh.view.encoding`. Beside them
are the ``proof`` in words, and ``busiest_share``: of the payload, by the link that carries most.

Packing: columns of whole numbers as text that the page unpacks.
"""

from __future__ import annotations

import base64
import zlib
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Ints
from ftmesh.schedule.verify import verify
from ftmesh.topology.topology import Topology


def write_mesh(topology: Topology) -> dict[str, Any]:
    """The fields of a mesh."""
    return {
        "name": str(topology),
        "shape": topology.shape,
        "wrap": topology.wrap,
        "failed": sorted(topology.failed),
        "failed_links": sorted(topology.failed_links),
        "devices_per_chip": topology.devices_per_chip,
    }


def write_schedule(schedule: Schedule) -> dict[str, Any]:
    """The fields of a schedule, which is proved right first."""
    proof = verify(schedule)
    topology = schedule.topology
    pairs = sorted(schedule.routes)
    ends = np.array(pairs, np.int32)
    routes = [[topology.place(coord) for coord in schedule.routes[pair]] for pair in pairs]
    loads: Counter[Any] = Counter()
    for phase in schedule.phases:
        loads.update(schedule.link_loads(phase))
    return {
        "num_chunks": schedule.num_chunks,
        "src": pack(ends[:, 0]),
        "dst": pack(ends[:, 1]),
        "route": pack([place for route in routes for place in route]),
        "hops": pack([len(route) - 1 for route in routes]),
        "phases": [_phase(phase, ends) for phase in schedule.phases],
        "busiest_share": max(loads.values()) / schedule.num_chunks,
        "proof": str(proof),
    }


def _phase(phase: Phase, ends: Ints) -> dict[str, Any]:
    rows = phase.columns
    known = (ends.astype(np.int64) * (1 << 32, 1)).sum(axis=1)  # sorted, as the pairs are
    pair = np.searchsorted(known, rows.src.astype(np.int64) * (1 << 32) + rows.dst)
    return {
        "name": phase.name,
        "rounds": phase.num_rounds,
        "starts": pack(phase.bounds),
        "pair": pack(pair),
        "chunk": pack(rows.chunk),
        "count": pack(rows.count),
        "op": pack(rows.op),
    }


def pack(values: ArrayLike) -> str:
    """Whole numbers of 32 bits as base64 of deflated differences, each to the number before it.

    Chunks go round and pairs repeat, so that differences are small and alike: a ring of a thousand
    chips, four million transfers, takes about 200 kB.

    >>> unpack(pack([7, 8, 9, 3])).tolist()
    [7, 8, 9, 3]
    """
    column = np.asarray(values, np.int32).ravel()
    steps = np.diff(column, prepend=np.int32(0)).astype("<i4")
    return base64.b64encode(zlib.compress(steps.tobytes())).decode("ascii")


def unpack(text: str) -> Ints:
    """The inverse of `pack`."""
    steps = np.frombuffer(zlib.decompress(base64.b64decode(text)), "<i4")
    return np.cumsum(steps, dtype=np.int32)
