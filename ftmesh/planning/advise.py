"""Advise: what to do about failed boards, by playing failures and repairs many times over.

The paper's introduction names four answers to a failure on a mesh: wait for the repair, go on with
the largest whole sub-mesh, keep spare boards, or route around the hole. Each is played against the
same failures. *Goodput* is the training done, as a share of what the full mesh would do if nothing
ever failed. `ftmesh.planning.job_model` has the machine, and `ftmesh.planning.advise` the answers.

The model, which `ASSUMPTIONS` puts into words: a board is a 2x2 block of chips at even coordinates,
fails at random, and is repaired after a fixed time. A failure in use throws away what was done
since the last checkpoint and costs a restart; going back to more chips costs a restart. The global
batch is constant, so fewer chips compute longer; all-reduces are simulated on the damaged mesh.

Answers: what can be done about failed boards, and how a job runs by each.

>>> from ftmesh.topology.topology import Topology
>>> site = Site(Topology.grid("4x4"), mtbf=8e6, repair=3e4, checkpoint=3600.0, step=0.02)
>>> sorted(SubMesh(site).setting(frozenset({3})).boards)
[0, 2]
>>> sorted(RouteAround(site).setting(frozenset({3})).boards)
[0, 1, 2]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from ftmesh.errors import ArgumentError, PlanError
from ftmesh.planning.job_model import BOARD as BOARD
from ftmesh.planning.job_model import Boards, box_alone
from ftmesh.planning.job_model import Site as Site
from ftmesh.planning.leaf_chips import Ways, ways
from ftmesh.topology.notation import Coord
from ftmesh.topology.topology import Topology

SAMPLES, FEW = 4, 2  # damages priced for each number of failed boards up to a few; then one


@dataclass(frozen=True)
class Setting:
    """How a job runs: how fast, and on which boards."""

    speed: float
    boards: Boards


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
            whole = box_alone(self.site.topology, box)
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

Progress = Callable[[int, int], None]


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
        (SubMesh, box_alone(damaged, box)),
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
