"""Answers: what can be done about failed boards, and how a job runs by each.

>>> from ftmesh.topology.topology import Topology
>>> site = Site(Topology.grid("4x4"), mtbf=8e6, repair=3e4, checkpoint=3600.0, step=0.02)
>>> sorted(SubMesh(site).setting(frozenset({3})).boards)
[0, 2]
>>> sorted(RouteAround(site).setting(frozenset({3})).boards)
[0, 1, 2]
"""

from __future__ import annotations

from dataclasses import dataclass

from ftmesh.cost.site import Boards, Site, box_alone
from ftmesh.errors import PlanError
from ftmesh.topology.notation import Coord

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
