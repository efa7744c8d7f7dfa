"""A year of a large TPU machine on paper: how much of it trains, by what a failure idles.

One job trains on the whole machine, data-parallel. Hosts and cables fail at random and are repaired
days later. All strategies see the same failures:

- *drop the cube*: a cube with a failed host or copper cable is left out, and optical switches join
  the others, whatever their number, to a torus.
- *spare cubes*: the same on a machine with more cubes, of which the job uses at most the original
  number. All are paid for.
- *replicas*: groups of cubes hold a replica of the model each, and sum over the data-centre
  network. Where a cube fails, its replica alone stops; it takes another free cube, or waits. The
  other replicas lose a step.
- *ftmesh*: only the failed host's chips are left out. Cables are routed around.

Nothing of this has been measured on such a machine; docs/fleet.md has the sources.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from ftmesh.errors import ArgumentError

DAY = 86_400.0
HOSTS, CHIPS = 16, 4  # in a cube, and of a host
COPPER, OPTICAL = 144, 48  # cables within a cube of 4x4x4, and on its faces, shared by two
MAX_EVENTS = 2_000_000  # simulated in all
HOST, CABLE = 0, 1


@dataclass(frozen=True)
class Fleet:
    """A machine and a job.

    Attributes:
        cubes: Cubes of 4x4x4 chips that the job was bought for.
        host_failures: Share of hosts that fail in a day.
        cable_failures: Share of cables that fail in a day.
        repair: Least and greatest days of a repair; uniform between.
        restart: Seconds until all processes train again after a failure, or with repaired chips.
        lost: Seconds of training that a failure throws away.
        sums: Share of a step that sums gradients on the undamaged machine.
        slowdown: How much longer sums take around holes.
        spares: Cubes more, for *spare cubes*.
        replica: Cubes of a replica, for *replicas*.
        network: Share of a step's time left to replicas by sums over the data-centre network.
        quorum: Seconds that the other replicas lose when one fails or returns.
        batch: Seconds for which *ftmesh* waits for more repairs, or the next failure, before it
            takes chips back.
    """

    cubes: int = 144
    host_failures: float = 0.0008
    cable_failures: float = 0.00005
    repair: tuple[float, float] = (3.0, 14.0)
    restart: float = 120.0
    lost: float = 60.0
    sums: float = 0.05
    slowdown: float = 2.0
    spares: int = 16
    replica: int = 8
    network: float = 0.97
    quorum: float = 10.0
    batch: float = 6 * 3600.0

    def __post_init__(self) -> None:
        if not 0 < self.repair[0] <= self.repair[1]:
            raise ArgumentError(f"a repair takes from A to B days, 0 < A <= B: {self.repair}")
        if self.replica > self.cubes:
            raise ArgumentError(
                f"a replica of {self.replica} cubes does not fit {self.cubes} cubes"
            )
        for name in ("host_failures", "cable_failures", "sums", "network"):
            if not 0 <= getattr(self, name) <= 1:
                raise ArgumentError(f"{name} is a share from 0 to 1, not {getattr(self, name)}")


class Event(NamedTuple):
    """A failure or its repair."""

    time: float
    cube: int
    kind: int  # `HOST` or `CABLE`
    is_optical: bool
    change: int  # 1: it fails, -1: it works again


@dataclass
class Outcome:
    """Where the time of the machine went, as shares of all of it; `trained` is the goodput."""

    trained: float = 0.0
    idle: float = 0.0  # chips that are left out
    slower: float = 0.0  # sums that take longer than on the undamaged machine
    restarting: float = 0.0
    thrown_away: float = 0.0
    paid: float = 1.0  # chips paid for, as a multiple of those that the job was bought for

    @property
    def per_chip(self) -> float:
        """Goodput per chip that is paid for."""
        return self.trained / self.paid


def draw_events(fleet: Fleet, num_cubes: int, days: float, seed: int) -> list[Event]:
    """Draw failures and repairs, in order. Each cube has random numbers of its own."""
    events = []
    horizon = days * DAY
    kinds = [
        (HOST, False, HOSTS * fleet.host_failures),
        (CABLE, False, COPPER * fleet.cable_failures),
        (CABLE, True, OPTICAL * fleet.cable_failures),
    ]
    for cube in range(num_cubes):
        rng = np.random.default_rng([seed, cube])
        for kind, is_optical, per_day in kinds:
            for at in rng.uniform(0, horizon, rng.poisson(per_day * days)):
                end = at + rng.uniform(*fleet.repair) * DAY
                events.append(Event(float(at), cube, kind, is_optical, 1))
                events.append(Event(float(end), cube, kind, is_optical, -1))
    return sorted(event for event in events if event.time < horizon)


class State:
    """What has failed, cube by cube."""

    def __init__(self, num_cubes: int) -> None:
        self.hosts = np.zeros(num_cubes, np.intp)
        self.copper = np.zeros(num_cubes, np.intp)

    def apply(self, event: Event) -> None:
        """Count a failure or a repair."""
        if event.kind == HOST:
            self.hosts[event.cube] += event.change
        elif not event.is_optical:
            self.copper[event.cube] += event.change

    @property
    def whole(self) -> NDArray[np.bool_]:
        """Which cubes have nothing failed inside."""
        is_whole: NDArray[np.bool_] = (self.hosts == 0) & (self.copper == 0)
        return is_whole

    @property
    def live_chips(self) -> int:
        """The number of chips whose hosts work."""
        return int(CHIPS * np.maximum(HOSTS - self.hosts, 0).sum())


class DropCubes:
    """Use the cubes in which nothing has failed."""

    name = "drop the cube"
    num_spares = 0

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.num_cubes = fleet.cubes + self.num_spares
        self.used = frozenset(range(fleet.cubes))

    def use(self, state: State) -> tuple[float, bool]:
        """Return the share of the job's chips in use now, and whether all processes restart."""
        before = self.used
        whole = np.flatnonzero(state.whole).tolist()
        kept = [cube for cube in whole if cube in before]
        new = [cube for cube in whole if cube not in before]
        self.used = frozenset((kept + new)[: self.fleet.cubes])
        return len(self.used) / self.fleet.cubes, self.used != before

    def speed(self, share: float) -> float:
        """Return the speed on a share of the chips, relative to all of them."""
        return share

    def wait(self) -> float:
        """Return for how long repaired chips wait until they are taken back."""
        return 0.0


class SpareCubes(DropCubes):
    """Replace cubes by spare ones."""

    name = "spare cubes"

    def __init__(self, fleet: Fleet) -> None:
        self.num_spares = fleet.spares
        super().__init__(fleet)


class Replicas(DropCubes):
    """Each replica trains on some cubes, and stops alone."""

    name = "replicas"

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.number = fleet.cubes // fleet.replica

    def use(self, state: State) -> tuple[float, bool]:
        whole = int(state.whole.sum())
        running = min(self.number, whole // self.fleet.replica)
        before, self.used = self.used, frozenset(np.flatnonzero(state.whole).tolist())
        return running * self.fleet.replica / self.fleet.cubes, self.used != before

    def speed(self, share: float) -> float:
        return share * self.fleet.network


class LeaveOutHosts(DropCubes):
    """Use every chip whose host works, with sums that go around the others."""

    name = "ftmesh"

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.live = fleet.cubes * HOSTS * CHIPS
        self.damage = (0, 0)

    def use(self, state: State) -> tuple[float, bool]:
        damage = int(state.hosts.sum()), int(state.copper.sum())
        changed, self.damage = damage != self.damage, damage
        return state.live_chips / (self.fleet.cubes * HOSTS * CHIPS), changed

    def speed(self, share: float) -> float:
        if self.damage == (0, 0):
            return share
        compute, sums = 1 - self.fleet.sums, self.fleet.sums * self.fleet.slowdown
        return 1 / (compute / share + sums) if share else 0.0

    def wait(self) -> float:
        return self.fleet.batch


STRATEGIES: tuple[Callable[[Fleet], DropCubes], ...] = (
    DropCubes,
    SpareCubes,
    Replicas,
    LeaveOutHosts,
)


def simulate(strategy: DropCubes, events: Sequence[Event], days: float) -> Outcome:
    """Simulate one strategy over one history.

    A failure among the chips in use throws training away and restarts the job; so does taking
    chips back, without the loss. Replicas restart alone, and cost the others a quorum.
    """
    fleet = strategy.fleet
    is_apart = isinstance(strategy, Replicas)
    outcome = Outcome(paid=strategy.num_cubes / fleet.cubes)
    state, horizon = State(strategy.num_cubes), days * DAY
    share, speed = 1.0, 1.0
    now, runs_from = 0.0, 0.0
    queue = [(event.time, number, event) for number, event in enumerate(events)]
    heapq.heapify(queue)
    delayed: list[Event] = []  # repairs that wait to be taken back
    due = np.inf

    def account(until: float) -> None:
        paused = min(max(runs_from, now), until) - now
        outcome.restarting += paused * share
        running = until - now - paused
        outcome.trained += running * speed
        outcome.slower += running * (share - speed)
        outcome.idle += (until - now) * (1 - share)

    while queue or delayed:
        batch: list[Event]
        if queue and queue[0][0] < due:
            event = heapq.heappop(queue)[2]
            if event.change < 0 and strategy.wait():
                delayed.append(event)
                due = min(due, event.time + strategy.wait())
                continue
            at, batch, delayed, due = event.time, [event, *delayed], [], np.inf
        else:
            at, batch = due, delayed
            delayed, due = [], np.inf
        if at >= horizon:
            break
        account(at)
        for event in batch:
            state.apply(event)
        before = share
        share, changes = strategy.use(state)
        fails = batch[0].change > 0
        restarted = changes and (fails or share != before)
        if restarted and not is_apart:
            if fails and at > runs_from:
                lost = min(fleet.lost, at - runs_from) * speed
                outcome.trained -= lost
                outcome.thrown_away += lost
            runs_from = at + fleet.restart
        elif restarted:  # one replica
            cost = fleet.quorum * before + fleet.restart * min(fleet.replica / fleet.cubes, share)
            outcome.trained -= cost * fleet.network
            outcome.restarting += cost
            outcome.slower -= cost * (1 - fleet.network)
        speed, now = strategy.speed(share), at
    account(horizon)
    for field in fields(outcome):
        if field.name != "paid":
            setattr(outcome, field.name, getattr(outcome, field.name) / horizon)
    return outcome


def compare(
    fleet: Fleet, *, days: float, runs: int, seed: int = 0, progress: Progress | None = None
) -> dict[str, Outcome]:
    """Return the mean outcome of every strategy over `runs` histories."""
    per_day = (HOSTS * fleet.host_failures + (COPPER + OPTICAL) * fleet.cable_failures) * days
    expected = 2 * runs * (fleet.cubes + fleet.spares) * per_day
    if expected > MAX_EVENTS:
        raise ArgumentError(
            f"that is {expected:.2g} failures and repairs in all, and at most {MAX_EVENTS:,} are "
            "simulated: use fewer runs or days"
        )
    task = progress.add_task("years", total=runs * len(STRATEGIES)) if progress else None
    outcomes: dict[str, list[Outcome]] = {}
    for run in range(runs):
        history = draw_events(fleet, fleet.cubes + fleet.spares, days, seed + run)
        for kind in STRATEGIES:
            strategy = kind(fleet)
            events = [event for event in history if event.cube < strategy.num_cubes]
            outcomes.setdefault(strategy.name, []).append(simulate(strategy, events, days))
            if progress and task is not None:
                progress.advance(task)
    return {name: _mean(some) for name, some in outcomes.items()}


def _mean(outcomes: Sequence[Outcome]) -> Outcome:
    values = {
        f.name: float(np.mean([getattr(o, f.name) for o in outcomes])) for f in fields(Outcome)
    }
    return Outcome(**values)


# What decides -----------------------------------------------------------------------------------

#: Each assumption, halved and doubled; a repair takes half or twice as long.
VARIED = (
    "host_failures", "cable_failures", "repair", "restart", "lost", "sums", "slowdown", "spares",
    "replica", "quorum", "batch",
)  # fmt: skip


def vary(fleet: Fleet, name: str, factor: float) -> Fleet:
    """Return the fleet with one assumption times `factor`."""
    value = getattr(fleet, name)
    if name == "repair":
        return replace(fleet, repair=(value[0] * factor, value[1] * factor))
    if name == "slowdown":  # what is above 1
        return replace(fleet, slowdown=1 + (value - 1) * factor)
    changed = max(1, round(value * factor)) if isinstance(value, int) else value * factor
    arguments: dict[str, Any] = {name: changed}
    return replace(fleet, **arguments)
