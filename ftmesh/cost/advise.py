"""Advise: what to do about failed boards, by playing failures and repairs many times over.

The paper's introduction names four answers to a failure on a mesh: wait for the repair, go on with
the largest whole sub-mesh, keep spare boards, or route around the hole. Each is played against the
same failures. *Goodput* is the training done, as a share of what the full mesh would do if nothing
ever failed.

The model, which `ASSUMPTIONS` puts into words: a board is a 2x2 block of chips at even coordinates,
fails at random, and is repaired after a fixed time. A failure in use throws away what was done
since the last checkpoint and costs a restart; going back to more chips costs a restart. The global
batch is constant, so fewer chips compute longer; all-reduces are simulated on the damaged mesh.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ftmesh import planners
from ftmesh.cost.network import DEFAULT, Network
from ftmesh.cost.simulate import Simulator
from ftmesh.cost.ways import Ways, ways
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.mesh.notation import Block, Coord
from ftmesh.mesh.topology import Topology
from ftmesh.schedule.schedule import Schedule

BOARD = 2  # chips along x, and along y, of a board
SIDES = (BOARD, BOARD, 1)  # of a board; on three axes it lies within a layer
SAMPLES, FEW = 4, 2  # damages priced for each number of failed boards up to a few; then one
MAX_FAILURES = 100_000  # played in all

ASSUMPTIONS = (
    "Boards of 2x2 chips fail independently, and take the same time to repair. A failure loses the "
    "work since the last checkpoint and costs a restart; so does a return to more chips, without "
    "the loss.",
    "The full mesh and sub-meshes sum with two_dim, or tori with colours; damaged meshes with "
    "row_pair or ring; meshes of three axes and damaged tori perhaps with flood: whichever is "
    "fastest. Chips in a line sum with line, and all else with flood, in synchronous rounds as "
    "simulated, with what the executor costs where the network has one. The global batch stays the "
    "same.",
    f"For one and for two failed boards {SAMPLES} random damages each are planned and simulated, "
    "for more of them one; further damages count like one of these.",
    "Spare boards stand in for failed ones wherever these are, and are paid for.",
)

Boards = frozenset[int]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Site:
    """A machine and a job on it; times in seconds. `step` is a training step on the full mesh."""

    topology: Topology  # undamaged
    mtbf: float  # mean time between failures of one board
    repair: float
    checkpoint: float  # time between checkpoints
    step: float
    payload_bytes: int = 100_000_000
    restart: float = 600.0
    spares: int = 0
    network: Network = DEFAULT

    def __post_init__(self) -> None:
        for name in ("mtbf", "repair", "checkpoint", "step"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} must be above 0 seconds, not {getattr(self, name)!r}")
        if self.restart < 0 or self.spares < 0:
            raise ArgumentError("restart and spares cannot be below 0")
        if self.topology.failed or self.topology.failed_links:
            raise ArgumentError(f"a site is described undamaged, not as {self.topology}")
        if self.full_sum >= self.step:
            raise ArgumentError(
                f"a step of {self.step:g} s is shorter than its all-reduce, {self.full_sum:g} s"
            )

    @cached_property
    def boards(self) -> list[Block]:
        """The 2x2 blocks at even coordinates, cut off at the edge of a mesh of odd sides.

        On three axes a board lies within a layer: 2x2x1.
        """
        sides = list(zip(self.topology.shape, SIDES, strict=False))
        corners = itertools.product(*(range(0, n, board) for n, board in reversed(sides)))
        return [
            Block(
                tuple(min(board, n - c) for (n, board), c in zip(sides, corner, strict=True)),
                corner,
            )
            for corner in (tuple(reversed(c)) for c in corners)
        ]

    @cached_property
    def boxes(self) -> list[tuple[int, Block]]:
        """Every box of whole boards, the largest first, as `Topology.largest_rectangle` has them.

        Each with its boards, as the bits of a number.
        """
        sides = [
            [(low, min(high, n) - low) for low in range(0, n, side) for high in _ends(low, n, side)]
            for n, side in zip(self.topology.shape, SIDES, strict=False)
        ]
        found = [Block(*reversed([*zip(*each, strict=True)])) for each in itertools.product(*sides)]
        found.sort(key=lambda b: (-math.prod(b.size), max(b.size), b.size, b.corner[::-1]))
        bit = {board.corner: 1 << number for number, board in enumerate(self.boards)}
        return [(sum(bit[corner] for corner in _corners(box)), box) for box in found]

    def sub_mesh(self, failed: Boards) -> tuple[Block, Boards]:
        """The largest box without a failed board, and its boards."""
        bad = sum(1 << board for board in failed)
        bits, box = next(each for each in self.boxes if not each[0] & bad)
        return box, frozenset(n for n in range(len(self.boards)) if bits >> n & 1)

    @cached_property
    def full_sum(self) -> float:
        """The all-reduce on the full mesh."""
        return self.sum_on(self.topology)

    def sum_on(self, topology: Topology) -> float:
        """The fastest all-reduce on `topology`; a `PlanError` where there is none."""
        if topology.num_live == 1:
            return 0.0
        times = []
        for name in _algorithms(topology):
            with contextlib.suppress(PlanError):
                times.append(self._seconds(planners.schedule(topology, name)))
        return min(times) if times else self._seconds(planners.schedule(topology, "flood"))

    def _seconds(self, schedule: Schedule) -> float:
        return Simulator(schedule).seconds(self.payload_bytes, self.network)

    def speed_on(self, topology: Topology) -> float:
        """Training on `topology`, as a share of the full mesh's."""
        compute = (self.step - self.full_sum) * self.topology.num_chips / topology.num_live
        return self.step / (compute + self.sum_on(topology))

    def damaged(self, boards: Boards) -> Topology:
        """The mesh less some boards."""
        failed = [chip for board in sorted(boards) for chip in self.boards[board].coords()]
        return Topology.grid(self.topology.shape, failed=failed, wrap=self.topology.wrap)


def _sub_mesh(topology: Topology, box: Block) -> Topology:
    """A box without damage, as a mesh of its own: it wraps where it spans an axis that does."""
    over_edge = [
        any(abs(a[axis] - b[axis]) > 1 for a, b in topology.failed_links)
        for axis in range(len(box.size))
    ]
    sides = zip(topology.wrap, over_edge, box.size, topology.shape, strict=True)
    wrap = [wraps and not cut and size == whole for wraps, cut, size, whole in sides]
    return Topology.grid(box.size, failed="", wrap=wrap)


def _ends(start: int, length: int, side: int) -> range:
    """Where a row of boards that begins at `start` may end; the last may be cut off."""
    return range(start + side, length + side, side)


def _corners(box: Block) -> Iterator[Coord]:
    """Those of the boards in a box."""
    sides = zip(box.corner, box.size, SIDES, strict=False)
    return itertools.product(*(range(low, low + size, side) for low, size, side in sides))


def _algorithms(topology: Topology) -> tuple[str, ...]:
    """Those worth pricing on `topology`: see `ASSUMPTIONS`."""
    if sum(size > 1 for size in topology.shape) < 2:
        return ("line",)
    is_deep = len(topology.shape) > 2
    if not topology.failed and not topology.failed_links:
        return ("two_dim", "colours", "flood") if is_deep else ("two_dim", "colours")
    return ("row_pair", "ring", "flood") if is_deep or any(topology.wrap) else ("row_pair", "ring")


@dataclass(frozen=True)
class Setting:
    """How a job runs: how fast, and on which boards."""

    speed: float
    boards: Boards


# The four answers -------------------------------------------------------------------------------


class Wait:
    """Wait for the repair."""

    name = "wait for repair"

    def __init__(self, site: Site) -> None:
        self.site = site
        self.num_boards = len(site.boards)

    def setting(self, failed: Boards) -> Setting:
        """How the job runs with `failed` boards."""
        return Setting(0.0 if failed else 1.0, frozenset(range(self.num_boards)))


class SubMesh(Wait):
    """Go on with the largest rectangle that has no failed board."""

    name = "largest sub-mesh"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._by_size: dict[Coord, float] = {}

    def setting(self, failed: Boards) -> Setting:
        """How the job runs with `failed` boards."""
        if not failed:
            return super().setting(failed)
        if len(failed) == self.num_boards:
            return Setting(0.0, frozenset())
        box, used = self.site.sub_mesh(failed)
        if box.size not in self._by_size:
            whole = _sub_mesh(self.site.topology, box)
            self._by_size[box.size] = self.site.speed_on(whole)
        return Setting(self._by_size[box.size], used)


class Spares(Wait):
    """Put spare boards in the place of failed ones; wait where there are too few."""

    name = "hot spares"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self.num_boards += site.spares

    def setting(self, failed: Boards) -> Setting:
        """How the job runs with `failed` boards, spares counted last."""
        live = [board for board in range(self.num_boards) if board not in failed]
        used = frozenset(live[: len(self.site.boards)])
        return Setting(1.0 if len(used) == len(self.site.boards) else 0.0, used)


class RouteAround(SubMesh):
    """Go on with every live chip, on a schedule that goes around the failed ones."""

    name = "fault-tolerant"

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._sampled: dict[tuple[int, int], float] = {}

    def setting(self, failed: Boards) -> Setting:
        """How the job runs with `failed` boards."""
        if not failed or len(failed) == self.num_boards:
            return super().setting(failed)
        number = len(failed)
        sample = (number, sum(failed) % SAMPLES) if number <= FEW else (_rounded(number), 0)
        if sample not in self._sampled:
            try:
                self._sampled[sample] = self.site.speed_on(self.site.damaged(failed))
            except PlanError:
                self._sampled[sample] = 0.0
        sub_mesh = super().setting(failed)
        if self._sampled[sample] <= sub_mesh.speed:
            return sub_mesh
        return Setting(self._sampled[sample], frozenset(range(self.num_boards)) - failed)


def _rounded(number: int) -> int:
    """Up to two leading bits, so that many failed boards are of few kinds."""
    step = 1 << max(0, number.bit_length() - 2)
    return -(-number // step) * step


ANSWERS = (Wait, SubMesh, Spares, RouteAround)


# Playing ----------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Where the time went, as shares of all of it; `trained` is the goodput."""

    trained: float = 0.0
    slower: float = 0.0  # lost to running on fewer chips
    thrown_away: float = 0.0  # trained, and lost with a failure
    restarting: float = 0.0
    waiting: float = 0.0
    paid: float = 1.0  # boards paid for, as a multiple of the mesh's

    @property
    def per_chip(self) -> float:
        """Goodput per chip that is paid for."""
        return self.trained / self.paid


def failures(
    num_boards: int, site: Site, horizon: float, seed: int
) -> list[tuple[float, int, bool]]:
    """When which board fails (True) and is whole again (False), in order.

    Each board has random numbers of its own, so that answers with and without spares see the same
    failures.
    """
    events = []
    for board in range(num_boards):
        rng = np.random.default_rng([seed, board])
        now = rng.exponential(site.mtbf)
        while now < horizon:
            events += [(now, board, True), (now + site.repair, board, False)]
            now += site.repair + rng.exponential(site.mtbf)
    return sorted(events)


def play(answer: Wait, horizon: float, seed: int) -> Outcome:
    """One answer over one history of failures."""
    site = answer.site
    outcome = Outcome(paid=answer.num_boards / len(site.boards))
    failed: Boards = frozenset()
    setting = answer.setting(failed)
    now, running_since = 0.0, 0.0  # the job runs, or will, from `running_since` on
    changes = failures(answer.num_boards, site, horizon, seed)
    for when, board, fails in [*changes, (horizon, -1, False)]:
        when = min(when, horizon)
        _spend(outcome, setting, now, running_since, when)
        now = when
        if board < 0:
            break
        failed = failed | {board} if fails else failed - {board}
        was = setting
        if fails and board in was.boards:
            if was.speed and now > running_since:
                lost = was.speed * ((now - running_since) % site.checkpoint)
                outcome.trained -= lost
                outcome.thrown_away += lost
            setting = answer.setting(failed)
            running_since = now + site.restart
        elif not fails:
            better = answer.setting(failed)
            if better.speed > was.speed:
                setting, running_since = better, now + site.restart
    for field in fields(outcome):
        if field.name != "paid":
            setattr(outcome, field.name, getattr(outcome, field.name) / horizon)
    return outcome


def _spend(outcome: Outcome, setting: Setting, start: float, running: float, end: float) -> None:
    """Account for the time from `start` to `end` under one setting."""
    if not setting.speed:
        outcome.waiting += end - start
        return
    begin = min(max(start, running), end)
    outcome.restarting += begin - start
    outcome.trained += setting.speed * (end - begin)
    outcome.slower += (1 - setting.speed) * (end - begin)


def play_all(
    site: Site, *, horizon: float, runs: int, seed: int = 0, progress: Progress | None = None
) -> dict[str, list[Outcome]]:
    """Every answer over the same `runs` histories; `progress` is called with work done and in all.

    Hot spares are left out where the site has none.
    """
    if runs < 1 or horizon <= 0:
        raise ArgumentError("advice needs one run or more, over a time above 0")
    expected = runs * len(site.boards) * horizon / (site.mtbf + site.repair)
    if expected > MAX_FAILURES:
        raise ArgumentError(
            f"that is {expected:.2g} failures in all, and {MAX_FAILURES:,} are played at most: "
            "take a shorter horizon or fewer runs"
        )
    answers = [answer(site) for answer in ANSWERS if site.spares or answer is not Spares]
    outcomes: dict[str, list[Outcome]] = {answer.name: [] for answer in answers}
    work = list(itertools.product(range(runs), answers))
    for done, (run, answer) in enumerate(work):
        outcomes[answer.name].append(play(answer, horizon, seed + run))
        if progress:
            progress(done + 1, len(work))
    return outcomes


# The damage at hand -----------------------------------------------------------------------------


@dataclass(frozen=True)
class AtHand:
    """What each answer makes of one damage until it is repaired, in seconds of full-mesh work."""

    topology: Topology
    repair: float
    speeds: dict[str, float]
    done: dict[str, float]

    @property
    def best(self) -> str:
        """The answer that gets most done."""
        return max(self.done, key=lambda name: self.done[name])


def at_hand(site: Site, damaged: Topology) -> AtHand:
    """Compare the answers, spares apart, for the damage of `damaged` alone.

    Going on costs a restart now; the one that returns to the full mesh is due in any case.
    """
    box = damaged.largest_rectangle()
    speeds = {Wait.name: 0.0}
    for answer, topology in (
        (SubMesh, _sub_mesh(damaged, box)),
        (RouteAround, damaged),
    ):
        try:
            speeds[answer.name] = site.speed_on(topology)
        except PlanError:
            speeds[answer.name] = 0.0
    done = {name: speed * max(site.repair - site.restart, 0.0) for name, speed in speeds.items()}
    return AtHand(damaged, site.repair, speeds, done)


def with_pendants(site: Site, damaged: Topology) -> tuple[Ways, float] | None:
    """What can be done with chips of `damaged` that hang on one link, and what a step computes.

    None where no chip does.
    """
    found = ways(damaged, site.payload_bytes, site.network)
    compute = (site.step - site.full_sum) * damaged.num_chips / damaged.num_live
    return (found, compute) if found else None
