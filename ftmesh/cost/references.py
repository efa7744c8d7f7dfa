"""Yardsticks: what the price of an all-reduce is set beside, with where each comes from.

>>> from ftmesh import Topology, limits
>>> from ftmesh.cost.links import DEFAULT
>>> found = yardsticks(limits(Topology.grid("16x16", failed="4x2@4,4")), 100_000_000, DEFAULT)
>>> print(found)
  TACOS x2                 2.12 ms                1.96
  in rounds in which a link carries one chunk, at least 1.26 ms; along trees, 1.26 ms
  no all-reduce can take less than 1.08 ms
  ring, two_dim, row_pair: Kumar and Jouppi (2020); others, and bounds: ftmesh
  TACOS x2: twice the all-gather of its public release (Won et al., MICRO 2024)

Others: what published software takes on some of our meshes, as found with it, for comparison.

TACOS (Won et al., "TACOS: Topology-Aware Collective Algorithm Synthesizer for Distributed Machine
Learning", MICRO 2024) matches links and chunks greedily, round by round. Its public release makes
all-gathers; an all-reduce is a reduce-scatter, the same backwards, and then an all-gather, so it is
put at twice that. Figures are what the release says of itself, on links of 50 GB/s each way and 0.5
us a hop, where a link carries one chunk a round. ftmesh does not run it.

>>> tacos_seconds(Topology.grid("16x32", failed="4x2@6,14"), 100_000_000, DEFAULT)
0.002252
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.lower_bounds import Limits
from ftmesh.cost.round_bounds import any_bound, tree_bound
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

OURS = "ring, two_dim, row_pair: Kumar and Jouppi (2020); others, and bounds: ftmesh"


@dataclass(frozen=True)
class Yardsticks:
    """Seconds: the limit of the wires, bounds of rounds, and others' figures, where known."""

    limit: float
    rounds: float | None = None  # any algorithm
    trees: float | None = None  # where chunks are summed along trees
    tacos: float | None = None

    def as_json(self) -> dict[str, float | None]:
        """In microseconds; what is not known, None."""
        seconds = {
            "limit_us": self.limit,
            "all_reduce_rounds_us": self.rounds,
            "all_reduce_trees_us": self.trees,
            "tacos_us": self.tacos,
        }
        return {name: None if each is None else 1e6 * each for name, each in seconds.items()}

    def __str__(self) -> str:
        lines = []
        if self.tacos is not None:
            times = self.tacos / self.limit
            lines.append(f"  {TACOS:<19}{format_time(self.tacos):>13}{times:>20.2f}")
        if self.rounds is not None:
            trees = "" if self.trees is None else f"; along trees, {format_time(self.trees)}"
            lines.append(
                f"  in rounds in which a link carries one chunk, at least "
                f"{format_time(self.rounds)}{trees}"
            )
        lines.append(f"  no all-reduce can take less than {format_time(self.limit)}")
        return "\n".join([*lines, f"  {OURS}", *[f"  {SOURCE}"] * (self.tacos is not None)])


def yardsticks(found: Limits, payload_bytes: int, on: Network) -> Yardsticks:
    """Those of a mesh for a payload; of tiles, whose links are shared, the limit alone."""
    limit = found.all_reduce_seconds(payload_bytes, on)
    if found.topology.num_positions > 1:
        return Yardsticks(limit)
    trees = tree_bound(found)
    return Yardsticks(
        limit=limit,
        rounds=any_bound(found).seconds(payload_bytes, on),
        trees=None if trees is None else trees.seconds(payload_bytes, on),
        tacos=tacos_seconds(found.topology, payload_bytes, on),
    )


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
