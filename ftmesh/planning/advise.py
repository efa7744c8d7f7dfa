"""What to do about failed boards, by simulating failures and repairs many times over.

The paper's introduction names four strategies for a failure on a mesh: wait for the repair, go on
with the largest whole sub-mesh, keep spare boards, or route around the hole. Each is simulated
against the same failures. *Goodput* is the training done, as a share of what the full mesh would do
without failures. The model is that of `ASSUMPTIONS`; `ftmesh.planning.job_model` has the machine.

Leaf chips have one link, which all of their data crosses, so no all-reduce with them can take less
than a link takes for the payload. *Along the trees*, like any other chip, they come near that.
*Fed* before and after, they take that time twice. *Idle*, they cost what they would have computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from ftmesh.algorithms import tree
from ftmesh.algorithms.tree import LeafChips
from ftmesh.cost.links import Network
from ftmesh.cost.simulate import SYNCHRONOUS, Simulator
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.planning.chunking import candidate_chunkings
from ftmesh.planning.job_model import BOARD as BOARD
from ftmesh.planning.job_model import Boards, box_topology
from ftmesh.planning.job_model import TrainingJob as TrainingJob
from ftmesh.planning.plan_cache import cached_schedule
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.notation import Coord, format_failed
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

SAMPLES, FEW = 4, 2  # damages simulated for each number of failed boards up to a few; then one
MAX_FAILURES = 100_000  # simulated in all

ASSUMPTIONS = (
    "Boards of 2x2 chips fail independently, and take the same time to repair. A failure loses the "
    "work since the last checkpoint and costs a restart; so does a return to more chips, without "
    "the loss.",
    "XLA sums, over all axes of the full mesh, and along a ring on damaged ones and sub-meshes, "
    "unless an algorithm in permutations is faster: two_dim or, on tori, multi_ring; row_pair or "
    "ring on damaged meshes; flood on meshes of three axes and damaged tori, and where no other "
    "serves; chain on a line. All in synchronous rounds as simulated, with the device model if the "
    "network has one. The global batch stays the same.",
    f"For one and for two failed boards {SAMPLES} random damages each are planned and simulated, "
    "for more of them one; further damages count like one of these.",
    "Spare boards replace failed ones wherever these are, and are paid for.",
)

Progress = Callable[[int, int], None]


# Strategies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunMode:
    """How a job runs: its relative speed, and the boards that it uses."""

    speed: float
    boards: Boards


class WaitForRepair:
    """Wait for the repair."""

    name = "wait for repair"

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.num_boards = len(job.boards)

    def run_mode(self, failed: Boards) -> RunMode:
        """How the job runs with `failed` boards."""
        return RunMode(0.0 if failed else 1.0, frozenset(range(self.num_boards)))


class LargestSubMesh(WaitForRepair):
    """Go on with the largest rectangle that has no failed board."""

    name = "largest sub-mesh"

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        self._speeds: dict[Coord, float] = {}  # by the size of the rectangle

    def run_mode(self, failed: Boards) -> RunMode:
        if not failed:
            return super().run_mode(failed)
        if len(failed) == self.num_boards:
            return RunMode(0.0, frozenset())
        box, boards = self.job.largest_box(failed)
        if box.size not in self._speeds:
            self._speeds[box.size] = self.job.relative_speed(box_topology(self.job.topology, box))
        return RunMode(self._speeds[box.size], boards)


class HotSpares(WaitForRepair):
    """Replace failed boards by spare ones; wait if there are too few."""

    name = "hot spares"

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        self.num_boards += job.num_spares

    def run_mode(self, failed: Boards) -> RunMode:  # spares have the last numbers
        live = [board for board in range(self.num_boards) if board not in failed]
        used = frozenset(live[: len(self.job.boards)])
        return RunMode(1.0 if len(used) == len(self.job.boards) else 0.0, used)


class RouteAround(LargestSubMesh):
    """Go on with every live chip, on a schedule that goes around the failed ones."""

    name = "fault-tolerant"

    def __init__(self, job: TrainingJob) -> None:
        super().__init__(job)
        self._samples: dict[tuple[int, int], float] = {}

    def run_mode(self, failed: Boards) -> RunMode:
        if not failed or len(failed) == self.num_boards:
            return super().run_mode(failed)
        number = len(failed)
        sample = (number, sum(failed) % SAMPLES) if number <= FEW else (_round_up(number), 0)
        if sample not in self._samples:
            self._samples[sample] = _speed_or_zero(self.job, self.job.without_boards(failed))
        sub_mesh = super().run_mode(failed)
        if self._samples[sample] <= sub_mesh.speed:
            return sub_mesh
        return RunMode(self._samples[sample], frozenset(range(self.num_boards)) - failed)


STRATEGIES = (WaitForRepair, LargestSubMesh, HotSpares, RouteAround)


def _speed_or_zero(job: TrainingJob, topology: Topology) -> float:
    try:
        return job.relative_speed(topology)
    except PlanError:
        return 0.0


def _round_up(number: int) -> int:
    """Keep two leading bits, so that few numbers of failed boards are simulated."""
    step = 1 << max(0, number.bit_length() - 2)
    return -(-number // step) * step


# Simulation -------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Where the time went, as shares of all of it; `trained` is the goodput."""

    trained: float = 0.0
    slower: float = 0.0  # lost to running on fewer chips
    thrown_away: float = 0.0  # trained, and lost with a failure
    restarting: float = 0.0
    waiting: float = 0.0
    paid: float = 1.0  # boards paid for, as a multiple of those of the mesh

    @property
    def per_chip(self) -> float:
        """Goodput per chip that is paid for."""
        return self.trained / self.paid


def simulate_strategies(
    job: TrainingJob, *, horizon: float, runs: int, seed: int = 0, progress: Progress | None = None
) -> dict[str, list[Outcome]]:
    """Simulate every strategy over the same histories of failures.

    Args:
        job: The machine and the job. Without spares, `HotSpares` is left out.
        horizon: Seconds of a history, in which there are at most `MAX_FAILURES` over all runs.
        progress: Called with the work done and the work in all.

    Returns:
        The outcomes of all runs, by the name of the strategy.
    """
    if runs < 1 or horizon <= 0:
        raise ArgumentError("runs must be 1 or more, and horizon above 0 seconds")
    expected = runs * len(job.boards) * horizon / (job.mtbf + job.repair_time)
    if expected > MAX_FAILURES:
        raise ArgumentError(
            f"that is {expected:.2g} failures in all, and at most {MAX_FAILURES:,} are simulated: "
            "use a shorter horizon or fewer runs"
        )
    strategies = [kind(job) for kind in STRATEGIES if job.num_spares or kind is not HotSpares]
    outcomes: dict[str, list[Outcome]] = {strategy.name: [] for strategy in strategies}
    work = list(itertools.product(range(runs), strategies))
    for done, (run, strategy) in enumerate(work):
        outcomes[strategy.name].append(simulate_strategy(strategy, horizon, seed + run))
        if progress:
            progress(done + 1, len(work))
    return outcomes


def simulate_strategy(strategy: WaitForRepair, horizon: float, seed: int) -> Outcome:
    """Simulate one strategy over one history of failures."""
    job = strategy.job
    outcome = Outcome(paid=strategy.num_boards / len(job.boards))
    failed: Boards = frozenset()
    mode = strategy.run_mode(failed)
    now, running_since = 0.0, 0.0  # the job runs, or will, from `running_since` on
    events = failure_events(strategy.num_boards, job, horizon, seed)
    for event_time, board, fails in [*events, (horizon, -1, False)]:
        event_time = min(event_time, horizon)
        _account(outcome, mode, now, running_since, event_time)
        now = event_time
        if board < 0:
            break
        failed = failed | {board} if fails else failed - {board}
        if fails and board in mode.boards:
            if mode.speed and now > running_since:
                lost = mode.speed * ((now - running_since) % job.checkpoint_interval)
                outcome.trained -= lost
                outcome.thrown_away += lost
            mode = strategy.run_mode(failed)
            running_since = now + job.restart_time
        elif not fails:
            repaired = strategy.run_mode(failed)
            if repaired.speed > mode.speed:
                mode, running_since = repaired, now + job.restart_time
    for field in fields(outcome):
        if field.name != "paid":
            setattr(outcome, field.name, getattr(outcome, field.name) / horizon)
    return outcome


def failure_events(
    num_boards: int, job: TrainingJob, horizon: float, seed: int
) -> list[tuple[float, int, bool]]:
    """When which board fails (True) and is repaired (False), in order.

    Each board has its own random numbers, so that strategies with and without spares see the same
    failures.
    """
    events = []
    for board in range(num_boards):
        rng = np.random.default_rng([seed, board])
        now = rng.exponential(job.mtbf)
        while now < horizon:
            events += [(now, board, True), (now + job.repair_time, board, False)]
            now += job.repair_time + rng.exponential(job.mtbf)
    return sorted(events)


def _account(outcome: Outcome, mode: RunMode, start: float, running: float, end: float) -> None:
    """Account for the time from `start` to `end`, of which the job runs from `running` on."""
    if not mode.speed:
        outcome.waiting += end - start
        return
    begin = min(max(start, running), end)
    outcome.restarting += begin - start
    outcome.trained += mode.speed * (end - begin)
    outcome.slower += (1 - mode.speed) * (end - begin)


# One damage -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DamageComparison:
    """What each strategy makes of one damage until its repair, by the name of the strategy."""

    topology: Topology
    repair_time: float
    speeds: dict[str, float]  # relative to the full mesh
    done: dict[str, float]  # training until the repair, in seconds of the full mesh

    @property
    def best(self) -> str:
        """The strategy that gets most done."""
        return max(self.done, key=lambda name: self.done[name])


def compare_for_damage(job: TrainingJob, damaged: Topology) -> DamageComparison:
    """Compare the strategies without spares for the damage of `damaged` alone.

    Going on costs a restart now; the restart that returns to the full mesh is due in any case.
    """
    sub_mesh = box_topology(damaged, damaged.largest_rectangle())
    speeds = {
        WaitForRepair.name: 0.0,
        LargestSubMesh.name: _speed_or_zero(job, sub_mesh),
        RouteAround.name: _speed_or_zero(job, damaged),
    }
    running = max(job.repair_time - job.restart_time, 0.0)
    done = {name: speed * running for name, speed in speeds.items()}
    return DamageComparison(damaged, job.repair_time, speeds, done)


# Leaf chips -------------------------------------------------------------------------------------

IN_TREES, FED, IDLE = "along the trees", "fed before and after", "idle"


@dataclass(frozen=True)
class LeafChipCosts:
    """The times in seconds of an all-reduce with leaf chips `IN_TREES`, `FED` and `IDLE`."""

    topology: Topology
    leaf_chips: tuple[Coord, ...]
    seconds: dict[str, float]

    @property
    def idle_topology(self) -> Topology:
        """The mesh in which the leaf chips are idle."""
        return self.topology.with_failed(self.leaf_chips)

    def step_seconds(self, compute: float) -> dict[str, float]:
        """The time of a training step in each case, if it computes for `compute` on all chips."""
        more = self.topology.num_live / self.idle_topology.num_live
        return {
            name: compute * (more if name == IDLE else 1.0) + seconds
            for name, seconds in self.seconds.items()
        }

    def best(self, compute: float) -> str:
        """The case with the shortest step."""
        steps = self.step_seconds(compute)
        return min(steps, key=lambda name: steps[name])

    def __str__(self) -> str:
        verb = "has" if len(self.leaf_chips) == 1 else "have"
        costs = ", ".join(f"{format_time(time)} {name}" for name, time in self.seconds.items())
        return f"{format_failed(self.leaf_chips)} {verb} one link; an all-reduce takes {costs}"


def leaf_chip_costs(
    topology: Topology, payload_bytes: int, network: Network, mode: str = SYNCHRONOUS
) -> LeafChipCosts | None:
    """Simulate the cases; None if there are no leaf chips, or if all chips are."""
    if isinstance(topology, TiledTopology) or len(topology.components()) > 1:
        return None
    leaves = LeafChips.from_graph(LinkGraph.from_topology(topology))
    if not len(leaves.rank) or len(leaves.core_ranks) == 1:
        return None
    leaf_chips = tuple(topology.coords[rank] for rank in sorted(leaves.rank.tolist()))
    without = topology.with_failed(leaf_chips)
    by, *_ = candidate_chunkings(without, payload_bytes, network)
    schedules = {
        IN_TREES: cached_schedule(topology, "tree", payload_bytes, network, mode),
        FED: tree.build_schedule(
            topology, by.num_chunks, width=by.width, balance=by.balance, leaves_apart=True
        ),
        IDLE: cached_schedule(without, "tree", payload_bytes, network, mode),
    }
    seconds = {
        name: Simulator(schedule).seconds(payload_bytes, network, mode)
        for name, schedule in schedules.items()
    }
    return LeafChipCosts(topology, leaf_chips, seconds)


def compare_leaf_chips(job: TrainingJob, damaged: Topology) -> tuple[LeafChipCosts, float] | None:
    """The costs of leaf chips of `damaged`, if any, and the compute time of a step in seconds."""
    costs = leaf_chip_costs(damaged, job.payload_bytes, job.network)
    compute = job.step_time - job.full_all_reduce_seconds
    compute *= damaged.num_chips / damaged.num_live
    return (costs, compute) if costs else None
