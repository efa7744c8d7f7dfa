"""Others: what published software takes on some of our meshes, as found with it, for comparison.

TACOS (Won et al., "TACOS: Topology-Aware Collective Algorithm Synthesizer for Distributed Machine
Learning", MICRO 2024) matches links and chunks greedily, round by round. Its public release makes
all-gathers; an all-reduce is a reduce-scatter, the same backwards, and then an all-gather, so it is
put at twice that. Figures are what the release says of itself, on links of 50 GB/s each way and 0.5
us a hop, where a link carries one chunk a round. ftmesh does not run it.

>>> tacos_seconds(Topology.grid("16x32", failed="4x2@6,14"), 100_000_000, DEFAULT)
0.002252
"""

from __future__ import annotations

from dataclasses import replace

from ftmesh.cost.network import DEFAULT, Network
from ftmesh.topology.topology import Topology

TACOS = "TACOS x2"
SOURCE = f"{TACOS}: twice the all-gather of its public release (Won et al., MICRO 2024)"

_MB, _GB = 10**6, 10**9
_MICROSECONDS = {
    ("8x8", 100 * _MB): 2032,
    ("8x8 less 2x2@2,2", _MB): 50,
    ("8x8 less 2x2@2,2", 100 * _MB): 2030,
    ("16x16 less 4x2@4,4", 100 * _MB): 2124,
    ("16x32 less 4x2@6,14", _MB): 272,
    ("16x32 less 4x2@6,14", 100 * _MB): 2252,
    ("16x32 less 4x2@6,14", _GB): 20252,
    ("16x32 less 4x2@2,2", 100 * _MB): 2252,
    ("32x32 less 4x2@14,14", 100 * _MB): 2508,
}


def tacos_seconds(topology: Topology, payload_bytes: int, on: Network) -> float | None:
    """The time of an all-reduce, where there is a figure for just this."""
    if replace(on.wires, source=DEFAULT.source) != DEFAULT:
        return None
    microseconds = _MICROSECONDS.get((str(topology), payload_bytes))
    return None if microseconds is None else microseconds / 1e6
