"""Positions: what is to be proved of a schedule, one script for each position of a tile.

The script of a position is read off the transfers of chips, and not off those of tiles: a transfer
that leads to another position, or to a chip of none, is found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ftmesh.errors import VerificationError
from ftmesh.schedule.columns import Columns, Ints
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule, SplitSchedule
from ftmesh.schedule.script import AnyScript, Script
from ftmesh.topology.tiles import TiledTopology


def scripts(schedule: Schedule) -> Iterator[AnyScript]:
    """The script of each position; that of all chips, where there are no tiles."""
    tiles = schedule.topology
    if not isinstance(tiles, TiledTopology):
        yield Script.of(schedule)
        return
    phases = schedule.on_chips.phases
    for phase in phases:
        _check_ends(phase, tiles)
    halves = schedule if isinstance(schedule, SplitSchedule) else None
    for core in range(tiles.chips.devices_per_chip):
        for ranks in tiles.players:
            tile = np.full(tiles.chips.num_live, -1, np.int32)
            tile[ranks] = np.arange(len(ranks))
            first = core * schedule.num_chunks
            yield Script(
                num_chunks=schedule.num_chunks,
                phases=tuple(
                    _AtPosition(each, tile, first, schedule.num_chunks) for each in phases
                ),
                names=tuple(f"chip {tiles.chips.coords[rank]}" for rank in ranks),
                contributors=np.arange(len(ranks), dtype=np.int32),
                num_scatter=len(halves.scatter) if halves else 0,
                owner=halves.owner if halves else None,
            )


def _check_ends(phase: Phase, tiles: TiledTopology) -> None:
    """Refuse a transfer whose ends are not the same place of two live tiles."""
    coords = tiles.chips.coords
    place = np.full(len(coords), -1)
    place[tiles.players] = np.arange(len(tiles.players))[:, None]
    for src, dst in phase.pairs:
        if place[src] < 0 or place[src] != place[dst]:
            raise VerificationError(
                f"{phase.name}: chip {coords[src]} sends to chip {coords[dst]}; expected the same "
                f"place of two live tiles, found {_places(place[src])} and {_places(place[dst])}"
            )


def _places(place: int) -> str:
    return "a chip of no live tile" if place < 0 else f"place {place}"


@dataclass(frozen=True, eq=False)
class _AtPosition:
    """The rounds of a phase over chips, as far as they are those of one position."""

    phase: Phase
    tile: Ints  # of the position's chips; -1 for others
    first_chunk: int
    num_chunks: int

    @property
    def name(self) -> str:
        return self.phase.name

    @property
    def num_rounds(self) -> int:
        return self.phase.num_rounds

    def rounds(self) -> Iterator[Columns]:
        return map(self._own, self.phase.rounds())

    def of_chunk(self, chunk: int) -> Columns:
        return self._own(self.phase.of_chunk(self.first_chunk + chunk))

    def _own(self, c: Columns) -> Columns:
        """The transfers of this position, between tiles and with its own chunks."""
        chunk = c.chunk - np.int32(self.first_chunk)
        mine = (self.tile[c.src] >= 0) & (chunk >= 0) & (chunk + c.count <= self.num_chunks)
        own = c.take(mine)
        return own.replace(src=self.tile[own.src], dst=self.tile[own.dst], chunk=chunk[mine])
