"""On chips: a phase over tiles as what the chips of those tiles do, all positions at once."""

from __future__ import annotations

from itertools import product

import numpy as np

from ftmesh.schedule.circling import Circling
from ftmesh.schedule.columns import Columns, Ints, join
from ftmesh.schedule.phase import Phase
from ftmesh.topology.tiles import TiledTopology


def on_chips(phase: Phase, tiles: TiledTopology, num_chunks: int) -> Phase:
    """The phase as each position runs it: from chip to chip, at the same place in both tiles.

    Chips have the ranks of ``tiles.chips``. Each brings `num_chunks` chunks of its own; the second
    core of a chip comes after the first, in its chunks and in its lanes.
    """
    chips, cores = tiles.players, range(tiles.chips.devices_per_chip)
    above = max(phase.lanes) + 1
    if isinstance(phase.what, Columns):
        rows = phase.what
        each_position = product(cores, chips)
        return Phase(
            phase.name,
            join(
                _rows(rows, ranks, core * num_chunks, core * above) for core, ranks in each_position
            ),
        )
    return Phase(
        phase.name,
        tuple(
            Circling(
                rings=chips[:, each.rings].reshape(-1, each.num_places),
                first_chunk=np.tile(each.first_chunk + np.int32(core * num_chunks), len(chips)),
                lane=each.lane + core * above,
                count=each.count,
                mirrored=each.mirrored,
            )
            for core in cores
            for each in phase.what
        ),
    )


def _rows(c: Columns, ranks: Ints, chunk: int, lane: int) -> Columns:
    return c.replace(
        src=ranks[c.src],
        dst=ranks[c.dst],
        chunk=c.chunk + np.int32(chunk),
        lane=c.lane + np.int32(lane),
    )
