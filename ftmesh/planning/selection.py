"""Selection: cost every algorithm on a topology, and take the cheapest for the payload.

Trees serve every mesh but take a second or more to plan on hundreds of chips. A lower bound tells
beforehand where they cannot win; where they can, they are planned, and kept in the plan cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from ftmesh.algorithms import registry
from ftmesh.algorithms.flood import GROUPED_CHIPS
from ftmesh.cost.executors import (
    LAX_PSUM,
    NativeSum,
    kernel_seconds,
    lax_psum_peers,
    lax_psum_seconds,
)
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import Simulator
from ftmesh.cost.wire_precision import (
    FLOAT_FORMATS,
    accumulation_dtype,
    wire_dtype_name,
)
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.execute.lowering import PALLAS, XLA
from ftmesh.planning.candidates import (
    Candidate,
    carried_bytes,
    cost_kernels,
    cost_native,
    cost_permutations,
    ranked,
    shard_seconds,
)
from ftmesh.planning.chunking import tree_lower_bound
from ftmesh.planning.plan_cache import Facts, cached_schedule, kernel_schedule, load_or_choose
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.topology import Topology
from ftmesh.units import check_bytes, format_bytes, format_time

AUTO = "auto"
ALGORITHMS = (AUTO, *registry.ALGORITHMS)

Trees = Literal["if_cheapest", "always", "never"]


@dataclass(frozen=True)
class Selection:
    """Every algorithm on one topology for one payload, the cheapest first; prints as a table."""

    topology: Topology
    payload_bytes: int
    network: Network
    candidates: tuple[Candidate, ...]
    wire_dtype: str = "float32"

    @property
    def algorithm(self) -> str:
        """The cheapest algorithm."""
        return self.best.algorithm

    @property
    def best(self) -> Candidate:
        """The cheapest candidate."""
        return self.candidates[0]

    def with_schedule(self, schedule: Schedule) -> Selection:
        """Return the same comparison with `schedule` as what its algorithm makes."""
        own = cost_permutations(
            Simulator(schedule), self.payload_bytes, self.network, self.wire_dtype
        )
        others = (other for other in self.candidates if other.name != own.name)
        return replace(self, candidates=ranked([own, *others]))

    @cached_property
    def lax_psum(self) -> NativeSum | None:
        """What `lax.psum` takes on these devices without ftmesh; None for tiles."""
        peers = lax_psum_peers(self.topology, self._added_bytes, self.network)
        return peers[0] if peers else None

    @cached_property
    def kernel(self) -> Candidate | None:
        """The fastest of these schedules in the Pallas kernel, which is taken only on request.

        None where it was measured: then it is among the candidates.
        """
        network = self.network
        if not (network.has_kernel and network.device_model) or network.kernel:
            return None
        schedules = [one.schedule for one in self.candidates if one.schedule is not None]
        for name in registry.CHUNKED_BY_PAYLOAD:
            carried = carried_bytes(name, self.payload_bytes, self.wire_dtype)
            schedules.append(kernel_schedule(self.topology, name, carried, self.network))
        timed = [
            (kernel_seconds(one, self.payload_bytes, self.network, self.wire_dtype), one)
            for one in schedules
        ]
        seconds, best = min(timed, key=lambda pair: pair[0])
        return Candidate(best.algorithm, best.num_rounds, seconds, executor=PALLAS, schedule=best)

    @property
    def _added_bytes(self) -> int:
        """The bytes of the payload in the dtype in which XLA adds it."""
        added = FLOAT_FORMATS[accumulation_dtype(self.wire_dtype)].num_bytes
        return self.payload_bytes * added // FLOAT_FORMATS[self.wire_dtype].num_bytes

    def seconds_range(self, candidate: Candidate) -> tuple[float, float]:
        """The time of a candidate by the most and the least favourable figures of the network."""
        ends = self.network.fastest, self.network.slowest
        size, wire = self.payload_bytes, self.wire_dtype
        schedule = candidate.schedule

        def seconds(end: Network) -> float:
            if candidate.executor == XLA:
                return cost_native(self.topology, size, end, wire, False).seconds
            if schedule is None:
                return candidate.seconds
            if candidate.executor == PALLAS:
                return kernel_seconds(schedule, size, end, wire)
            return Simulator(schedule).wire_dtype_seconds(size, end, wire)

        return seconds(ends[0]), seconds(ends[1])

    def __str__(self) -> str:
        least = limits(self.topology).all_reduce_seconds(self.payload_bytes, self.network)
        is_narrow = self.wire_dtype != "float32"
        has_range, device_model = self.network.spread is not None, self.network.device_model
        psum, kernel = self.lax_psum, self.kernel
        dtype = f" of {self.wire_dtype}" if is_narrow else ""
        lines = [
            f"{format_bytes(self.payload_bytes)}{dtype} on {self.topology}, {self.network}",
            f"  {'algorithm':<15}{'rounds':>7}{'simulated':>12}"
            + f"{'range':>22}" * has_range
            + f"{'x limit':>9}"
            + f"{'x lax.psum':>12}" * (psum is not None)
            + f"{'wires alone':>13}" * bool(device_model)
            + "  partial sums travel as" * is_narrow,
        ]

        def row(name: str, rounds: int, seconds: float, ends: tuple[float, float]) -> str:
            text = f"  {name:<15}{rounds or '':>7}{format_time(seconds):>12}"
            if has_range:
                text += f"{' to '.join(map(format_time, ends)):>22}"
            text += f"{seconds / least:>9.2f}"
            return text if psum is None else f"{text}{seconds / psum.seconds:>12.2f}"

        for one in self.candidates:
            if one.rejection:
                lines.append(f"  {one.name:<15}cannot: {one.rejection}")
                continue
            wires = one.wires_seconds
            lines.append(
                row(one.name, one.rounds, one.seconds, self.seconds_range(one))
                + ("" if wires is None else f"{format_time(wires):>13}")
                + f"  {one.partial_sum_dtype}" * is_narrow
            )
        if kernel is not None:
            text = row(kernel.name, kernel.rounds, kernel.seconds, self.seconds_range(kernel))
            lines.append(f"{text}  only on request: not measured")
        if psum is not None:
            ends = tuple(
                lax_psum_seconds(self.topology, self._added_bytes, end)
                for end in (self.network.fastest, self.network.slowest)
            )
            lines.append(f"{row(LAX_PSUM, 0, psum.seconds, (ends[0], ends[1]))}  {psum.note}")
        if device_model:
            lines.append(f"  devices: {device_model}")
        return "\n".join([*lines, f"  no all-reduce can take less than {format_time(least)}"])


def select_algorithm(
    topology: Topology,
    payload_bytes: int,
    network: Network = DEFAULT,
    wire_dtype: str = "float32",
    *,
    reduce_scatter: bool = False,
    trees: Trees = "if_cheapest",
    with_native: bool = False,
    with_kernel: bool = False,
) -> Selection:
    """Cost the algorithms that can serve `topology`, in synchronous rounds; remember the result.

    Args:
        payload_bytes: Bytes in `wire_dtype`. Where partial sums may not travel in that dtype (see
            `ftmesh.cost.wire_precision`), the reduce-scatter carries more and costs more.
        reduce_scatter: Compare only algorithms whose reduce-scatter leaves every rank an equal part
            of the sum, for a sharded optimizer, and count the order of its state too.
        trees: Whether to plan trees: where they may be the cheapest, always, to show their cost, or
            never.
        with_native: Compare with XLA's own ring too.
        with_kernel: Compare with the Pallas kernel too, for the algorithms for which the network
            has a measured one.

    Raises:
        PlanError: No algorithm can serve the topology; the message has every reason.
    """
    wire_dtype_name(wire_dtype)
    payload_bytes = check_bytes(payload_bytes)
    bare = topology.without_devices()
    trees = "never" if reduce_scatter else trees
    options = reduce_scatter, trees, with_native, with_kernel
    return _select(bare, payload_bytes, network, wire_dtype, *options)


@lru_cache(maxsize=256)
def compare_costs(
    topology: Topology,
    payload_bytes: int,
    network: Network,
    wire_dtype: str,
    *,
    reduce_scatter: bool = False,
    trees: Trees = "if_cheapest",
    with_native: bool = False,
    with_kernel: bool = False,
) -> tuple[Candidate, ...]:
    """Return the candidates of `select_algorithm` without their schedules, the cheapest first.

    What took long to compare is kept in the plan cache.
    """
    arguments = payload_bytes, network, wire_dtype

    def choose() -> Facts:
        selection = select_algorithm(
            topology,
            *arguments,
            reduce_scatter=reduce_scatter,
            trees=trees,
            with_native=with_native,
            with_kernel=with_kernel,
        )
        return [one.facts for one in selection.candidates]

    options = reduce_scatter, trees, with_native, with_kernel
    facts = load_or_choose(choose, topology, network, payload_bytes, wire_dtype, options)
    try:
        candidates = tuple(Candidate.from_facts(one) for one in facts)
    except ValueError:  # a file that is damaged, or not ours
        candidates = ()
    return candidates or tuple(Candidate.from_facts(one) for one in choose())


@lru_cache(maxsize=256)
def _select(
    topology: Topology,
    payload_bytes: int,
    network: Network,
    wire_dtype: str,
    reduce_scatter: bool,
    trees: Trees,
    with_native: bool,
    with_kernel: bool,
) -> Selection:
    candidates: list[Candidate] = []
    sharding = shard_seconds(payload_bytes, network) if reduce_scatter else {}
    # On many chips a flood takes long to plan, and trees of whole sums take less time.
    fallbacks = reduce_scatter or trees == "never" or topology.num_live <= GROUPED_CHIPS
    for name, outcome in _simulators(topology, fallbacks).items():
        if isinstance(outcome, str):
            candidates.append(Candidate(name, rejection=outcome))
        elif reduce_scatter and not outcome.schedule.owns_evenly:
            why = f"its reduce-scatter leaves some {topology.noun}s more of the sum than others"
            candidates.append(Candidate(name, rejection=why))
        else:
            one = cost_permutations(outcome, payload_bytes, network, wire_dtype)
            seconds = one.seconds + sharding.get(name, 0.0)
            candidates.append(replace(one, seconds=seconds))
    if with_native:
        candidates.append(cost_native(topology, payload_bytes, network, wire_dtype, reduce_scatter))
    if trees != "never":
        fastest = min(other.seconds for other in candidates)
        fastest = math.inf if trees == "always" else fastest
        for name in registry.CHUNKED_BY_PAYLOAD:
            carried = carried_bytes(name, payload_bytes, wire_dtype)
            least = tree_lower_bound(topology, carried, network)
            if least < fastest:
                schedule = cached_schedule(topology, name, carried, network)
                candidates.append(
                    cost_permutations(Simulator(schedule), payload_bytes, network, wire_dtype)
                )
            else:
                why = f"it could not take less than {format_time(least)}"
                candidates.append(Candidate(name, rejection=why))
    if with_kernel and network.kernel and topology.num_positions == 1:
        kernels = cost_kernels(
            topology, payload_bytes, network, wire_dtype, candidates, with_trees=trees != "never"
        )
        for one in kernels:
            seconds = one.seconds + sharding.get(one.algorithm, 0.0)
            candidates.append(replace(one, seconds=seconds))
    in_order = ranked(candidates)
    if in_order[0].rejection:
        reasons = [f"{one.name} cannot run on {topology}: {one.rejection}" for one in in_order]
        rest = f"the largest whole sub-mesh is {topology.largest_rectangle()}"
        raise PlanError("; ".join([*reasons, rest]))
    return Selection(topology, payload_bytes, network, in_order, wire_dtype)


@lru_cache(maxsize=4)
def _simulators(topology: Topology, fallbacks: bool) -> dict[str, Simulator | str]:
    """Each algorithm ready to be simulated, or the reason why it cannot serve."""
    outcomes = registry.try_algorithms(topology, fallbacks=False)
    if fallbacks and registry.needs_fallbacks(topology, outcomes):
        for name in registry.FALLBACKS:
            try:
                outcomes[name] = cached_schedule(topology, name, 1, DEFAULT)
            except PlanError as error:
                outcomes[name] = error
    return {
        name: str(outcome) if isinstance(outcome, PlanError) else Simulator(outcome)
        for name, outcome in outcomes.items()
    }


def check_executor(executor: str, known: Sequence[str]) -> None:
    """Raise ArgumentError unless `executor` is one of `known`."""
    if executor not in known:
        raise ArgumentError(f"executor must be one of {', '.join(known)}, not {executor!r}")


def round_up_payload(num_bytes: Any) -> int:
    """Round a number of bytes up to a power of two, so that few payloads are looked at."""
    if not hasattr(num_bytes, "__index__") or isinstance(num_bytes, bool) or num_bytes < 0:
        raise ArgumentError(f"a payload has a whole number of bytes, not {num_bytes!r}")
    number = check_bytes(num_bytes, name="a payload's bytes") if num_bytes else 1
    return 1 << (number - 1).bit_length()
