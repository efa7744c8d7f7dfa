"""Times to compare a simulated all-reduce with: lower bounds, and what others have measured.

`MEASUREMENTS` are clocks of others on TPUs, each next to what the model of `ftmesh.cost.links` says
of the same operation.

TACOS (Won et al., "TACOS: Topology-Aware Collective Algorithm Synthesizer for Distributed Machine
Learning", MICRO 2024) matches links and chunks greedily, round by round. Its public release makes
all-gathers; an all-reduce is a reduce-scatter, the same backwards, and then an all-gather, so it is
counted as twice that. The figures are what the release reports on links of 50 GB/s each way and
0.5 us per hop, with one chunk per link and round. ftmesh does not run it.

>>> from ftmesh import Topology, limits
>>> from ftmesh.cost.links import DEFAULT
>>> bounds = limits(Topology.grid("16x16", failed="4x2@4,4"))
>>> print(reference_times(bounds, 100_000_000, DEFAULT))
  TACOS x2                 2.12 ms     1.96
  in rounds in which a link carries one chunk, at least 1.26 ms; along trees, 1.26 ms
  no all-reduce can take less than 1.08 ms
  ring, two_dim, row_pair: Kumar and Jouppi (2020); others, and bounds: ftmesh
  TACOS x2: twice the all-gather of its public release (Won et al., MICRO 2024)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ftmesh.cost.executors import Operation, native_mesh_seconds
from ftmesh.cost.links import DEFAULT, NETWORKS, Network
from ftmesh.cost.lower_bounds import Limits
from ftmesh.cost.round_bounds import all_reduce_round_bound, tree_round_bound
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

TACOS = "TACOS x2"
TACOS_SOURCE = f"{TACOS}: twice the all-gather of its public release (Won et al., MICRO 2024)"
ALGORITHM_SOURCES = "ring, two_dim, row_pair: Kumar and Jouppi (2020); others, and bounds: ftmesh"

_MB, _GB = 10**6, 10**9
_MARIN = "marin-community/marin, issue 6736"
_IRONWOOD = "tpu-recipes, microbenchmarks/ironwood/collectives"
_TRILLIUM = "tpu-recipes, microbenchmarks/trillium/collectives"
_BOOK = "How to Scale Your Model, chapter 3"
_JETSTREAM = "jetstream-pytorch, pull request 168 (a host's clock)"
_TACOS_MICROSECONDS = {
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


@dataclass(frozen=True)
class Measurement:
    """What someone measured on a slice of a TPU generation.

    Attributes:
        generation: A name of `ftmesh.cost.links.NETWORKS`.
        slice: What was used of which slice, in words.
        topology: The chips that took part, without others of the slice.
        operation: ``"ppermute"`` to a neighbour, or a collective of XLA.
        num_bytes: What a chip sends, or has in the end.
        seconds: The time measured.
        source: Who published it.
    """

    generation: str
    slice: str
    topology: Topology
    operation: str
    num_bytes: int
    seconds: float
    source: str

    def modelled(self, network: Network | None = None) -> float:
        """What the model says, by the network of the generation or by another."""
        network = network or NETWORKS[self.generation]
        if self.operation == "ppermute":
            assert network.device_model is not None
            launch = network.device_model.launch + network.latency
            return launch + self.num_bytes / network.bandwidth
        operation: Operation = "all_gather" if self.operation == "all_gather" else "all_reduce"
        return native_mesh_seconds(self.topology, self.num_bytes, network, operation)


def _measurements() -> Iterator[Measurement]:
    pair, ring4 = Topology.grid("2"), Topology.grid("4", wrap=True)
    for generation, name, times in (
        ("v5p", "2x2x1", {4 << 10: 5e-6, 1 << 20: 16.94e-6, 64 << 20: 781.98e-6}),
        ("v6e", "2x4", {4 << 10: 5.75e-6, 1 << 20: 17.45e-6, 64 << 20: 776.34e-6}),
    ):
        for num_bytes, seconds in times.items():
            yield Measurement(generation, name, pair, "ppermute", num_bytes, seconds, _MARIN)
    # The two devices of a chip gather at once. "Transferred" is what a chip receives: 3/4 of both.
    transferred = (1_572_864, 6_291_456, 25_165_824, 100_663_296, 402_653_184)
    for name, rates in (
        ("2x2x1", (71.770, 129.187, 161.904, 174.765, 178.771)),
        ("2x2x2, four chips", (69.532, 127.395, 162.086, 174.665, 178.759)),
    ):
        for moved, rate in zip(transferred, rates, strict=True):
            seconds = moved / (rate * _GB)
            yield Measurement("v7x", name, ring4, "all_gather", moved * 4 // 3, seconds, _IRONWOOD)
    torus = Topology.grid("16x16", wrap=True)  # 235.76 GB/s are 2 * 255 / 256 payloads a second
    seconds = 2 * 255 / 256 * 606_076_928 / 235.76e9
    yield Measurement("v6e", "16x16", torus, "psum", 606_076_928, seconds, _TRILLIUM)
    axis = Topology.grid("16", wrap=True)  # 95 % of 45 GB/s each way, both ways
    seconds = 10 * _MB / (2 * 0.95 * 45e9)
    yield Measurement("v5e", "8x16, along 16", axis, "all_gather", 10 * _MB, seconds, _BOOK)
    for num_bytes, seconds in ((2048 * 8192 * 2, 680e-6), (256 * 256 * 2, 8e-6)):
        yield Measurement(
            "v5e", "8x4, along 4", Topology.grid("4"), "all_gather", num_bytes, seconds, _BOOK
        )
    for num_bytes, seconds in ((128 << 20, 4.34715e-3), (256 << 20, 8.25386e-3)):
        ring8 = Topology.grid("8", wrap=True)
        yield Measurement("v5e", "2x4, along a ring", ring8, "psum", num_bytes, seconds, _JETSTREAM)


MEASUREMENTS = tuple(_measurements())


@dataclass(frozen=True)
class ReferenceTimes:
    """Reference times in seconds; None where unknown."""

    lower_bound: float  # the least time on the wires of any all-reduce
    rounds_bound: float | None = None  # the same in rounds in which a link carries one chunk
    tree_bound: float | None = None  # the same for sums along trees
    tacos: float | None = None

    def as_json(self) -> dict[str, float | None]:
        """The times in microseconds."""
        seconds = {
            "limit_us": self.lower_bound,
            "all_reduce_rounds_us": self.rounds_bound,
            "all_reduce_trees_us": self.tree_bound,
            "tacos_us": self.tacos,
        }
        return {name: None if time is None else 1e6 * time for name, time in seconds.items()}

    def __str__(self) -> str:
        lines = []
        if self.tacos is not None:
            ratio = self.tacos / self.lower_bound
            lines.append(f"  {TACOS:<19}{format_time(self.tacos):>13}{ratio:>9.2f}")
        if self.rounds_bound is not None:
            bound = self.tree_bound
            trees = "" if bound is None else f"; along trees, {format_time(bound)}"
            lines.append(
                f"  in rounds in which a link carries one chunk, at least "
                f"{format_time(self.rounds_bound)}{trees}"
            )
        lines.append(f"  no all-reduce can take less than {format_time(self.lower_bound)}")
        sources = [f"  {ALGORITHM_SOURCES}", f"  {TACOS_SOURCE}"]
        return "\n".join([*lines, *sources[: 1 if self.tacos is None else 2]])


def reference_times(bounds: Limits, payload_bytes: int, network: Network) -> ReferenceTimes:
    """Return the reference times of a mesh for a payload; for tiles, only the lower bound."""
    lower_bound = bounds.all_reduce_seconds(payload_bytes, network)
    if bounds.topology.num_positions > 1:
        return ReferenceTimes(lower_bound)
    trees = tree_round_bound(bounds)
    return ReferenceTimes(
        lower_bound=lower_bound,
        rounds_bound=all_reduce_round_bound(bounds).seconds(payload_bytes, network),
        tree_bound=None if trees is None else trees.seconds(payload_bytes, network),
        tacos=tacos_seconds(bounds.topology, payload_bytes, network),
    )


def tacos_seconds(topology: Topology, payload_bytes: int, network: Network) -> float | None:
    """The time of an all-reduce by TACOS, if there is a figure for exactly this."""
    if replace(network.wires_only, source=DEFAULT.source) != DEFAULT:
        return None
    microseconds = _TACOS_MICROSECONDS.get((str(topology), payload_bytes))
    return None if microseconds is None else microseconds / 1e6
