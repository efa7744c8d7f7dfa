"""Plots of simulations and measurements: time by payload, link loads, scaling, goodput.

They need matplotlib, ``pip install 'ftmesh[plots]'``, and name the links that were simulated.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftmesh.algorithms.registry import CHUNKED_BY_PAYLOAD
from ftmesh.cost.executors import lax_psum_peers
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.lower_bounds import Limits, limits
from ftmesh.cost.simulate import Simulation, Simulator
from ftmesh.draw.panel import direction, layer_origins, page_size, position
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.files import write_atomic
from ftmesh.optional_deps import require
from ftmesh.planning.advise import Outcome, TrainingJob
from ftmesh.planning.chunking import schedule_for
from ftmesh.topology.topology import Topology
from ftmesh.units import format_bytes, format_time

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {
    "ring": "#0072b2",
    "two_dim": "#009e73",
    "row_pair": "#d55e00",
    "tree": "#cc79a7",
    "multi_ring": "#56b4e9",
    "flood": "#e69f00",
    "chain": "#8c6d31",
}
SCALED = ("ring", "two_dim", "row_pair", "tree")  # on square meshes
MAX_TREE_CHIPS = 1024  # trees take minutes to plan beyond
LOWER_BOUND = {"color": "black", "ls": "--", "lw": 1, "label": "lower bound of any all-reduce"}
SHARES = {
    "trained": ("trained", "#009e73"),
    "slower": ("lost to fewer chips", "#56b4e9"),
    "thrown_away": ("trained, thrown away", "#d55e00"),
    "restarting": ("restarting", "#e69f00"),
    "waiting": ("waiting", "#999999"),
}


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format of the file's suffix; SVG files are reproducible."""
    import matplotlib

    form = Path(path).suffix[1:].lower() or "png"
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ftmesh"}):
        try:
            figure.savefig(drawn, format=form, metadata={"Date": None} if form == "svg" else None)
        except ValueError as error:
            raise ArgumentError(f"cannot write {path}: {error}") from None
    write_atomic(path, [drawn.getvalue()])


def time_against_payload(simulators: Mapping[str, Simulator], network: Network = DEFAULT) -> Figure:
    """Plot the time of schedules and of `lax.psum` on one topology, from 4 kB to 4 GB."""
    payloads = np.unique(np.geomspace(4e3, 4e9, 61).astype(np.int64))
    topology = next(iter(simulators.values())).schedule.topology
    least = limits(topology)
    figure, axes = _figure(f"All-reduce on {topology}", f"{network}; synchronous rounds, simulated")
    for name, simulator in simulators.items():
        times = [1e6 * simulator.seconds(int(size), network) for size in payloads]
        axes.plot(payloads, times, color=COLOURS.get(simulator.schedule.algorithm), label=name)
    by_size = [lax_psum_peers(topology, int(size), network) for size in payloads]
    for same, style in zip(zip(*by_size, strict=True), ("--", "-."), strict=False):
        times = [1e6 * peer.seconds for peer in same]
        axes.plot(payloads, times, style, color="0.5", label=same[0].name)
    bounds = [1e6 * least.all_reduce_seconds(int(size), network) for size in payloads]
    axes.plot(payloads, bounds, **LOWER_BOUND)
    axes.set(xscale="log", yscale="log", xlabel="payload, bytes", ylabel="time, us")
    return _finish(figure, axes)


def measured_times(timings: Sequence[Mapping[str, Any]], title: str, subtitle: str) -> Figure:
    """Plot the measured time of sums by payload; `timings` are those of ``ftmesh bench --json``."""
    figure, axes = _figure(title, subtitle)
    for name in dict.fromkeys(timing["contender"] for timing in timings):
        own = [timing for timing in timings if timing["contender"] == name]
        base, _, kernel = str(name).partition(", ")
        look: dict[str, Any] = {"color": COLOURS.get(base), "ls": ":" if kernel else "-"}
        if base not in COLOURS:
            look = {"color": "black" if base == "lax.psum" else "0.5", "ls": "--"}
        sizes = [timing["payload_bytes"] for timing in own]
        axes.plot(sizes, [1e6 * t["median_s"] for t in own], marker="o", ms=3, label=name, **look)
    axes.set(xscale="log", yscale="log", xlabel="payload, bytes", ylabel="time, us")
    return _finish(figure, axes)


def scaling(sides: Sequence[int], payload_bytes: int, network: Network = DEFAULT) -> Figure:
    """Plot the simulated time on square meshes, whole and less a 2x2 block near the middle.

    The time of a ring is its formula (see `ftmesh.cost.simulate`), which needs no schedule of
    millions of transfers; trees end at 32x32.
    """
    figure, axes = _figure(
        f"All-reduce of {format_bytes(payload_bytes)} on square meshes",
        f"{network}; simulated; solid: whole, dotted: less a 2x2 block",
    )
    least: list[Limits] = []
    for failed, style in ((False, "-"), (True, ":")):
        lines: dict[str, list[tuple[int, float]]] = {name: [] for name in SCALED}
        for side in sides:
            middle = (side // 2 - 1) // 2 * 2
            block = f"2x2@{middle},{middle}" if failed else ""
            topology = Topology.grid((side, side), failed=block)
            least += [] if failed else [limits(topology)]
            for name, line in lines.items():
                seconds = _seconds(topology, name, payload_bytes, network)
                if seconds is not None:
                    line.append((side, 1e6 * seconds))
        for name, line in lines.items():
            if line:
                look = {"color": COLOURS[name], "label": None if failed else name}
                axes.plot(*zip(*line, strict=True), style, marker="o", markersize=3, **look)
    bounds = [1e6 * limit.all_reduce_seconds(payload_bytes, network) for limit in least]
    axes.plot(sides, bounds, **LOWER_BOUND)
    axes.set(xscale="log", xlabel="chips along a side", ylabel="time, us", ylim=0)
    axes.set_xticks(sides, labels=[str(side) for side in sides])
    axes.minorticks_off()
    return _finish(figure, axes)


def _seconds(topology: Topology, name: str, payload_bytes: int, network: Network) -> float | None:
    if name == "ring":
        live = topology.num_live
        step = network.overhead + network.latency + payload_bytes / (2 * live * network.bandwidth)
        return 2 * (live - 1) * step
    if name in CHUNKED_BY_PAYLOAD and topology.num_live > MAX_TREE_CHIPS:
        return None
    try:
        schedule = schedule_for(topology, name, payload_bytes, network)
    except PlanError:
        return None
    return Simulator(schedule).seconds(payload_bytes, network)


def link_loads(simulation: Simulation) -> Figure:
    """Plot the load of each link on the mesh, as a share of the payload, in both directions.

    Links over the edge, or to another layer, are drawn as a stub at their source.
    """
    topology = simulation.schedule.topology.physical
    columns, rows = page_size(topology)
    cell = 7 / max(columns, rows, 8)  # inches between chips
    figure, axes = _figure(
        f"What links carry: {simulation.schedule.algorithm} on {topology}",
        "share of the payload, in the whole all-reduce",
        size=(max(cell * columns + 2, 5.5), cell * rows + 1.5),
    )
    from matplotlib.collections import LineCollection

    ends, shares = [], []
    for a, b in topology.links:
        step = np.array(direction(topology, a, b))
        start = np.add(position(topology, a), 0.12 * np.array([-step[1], step[0]]))
        is_adjacent = np.abs(np.subtract(position(topology, b), position(topology, a))).sum() == 1
        ends.append([start, start + (step if is_adjacent else 0.42 * step)])
        shares.append(simulation.link_bytes.get((a, b), 0.0) / simulation.payload_bytes)
    lines = LineCollection(ends, array=np.array(shares), cmap="viridis_r", linewidths=10 * cell)
    lines.set_clim(0.0)
    axes.add_collection(lines)
    live, failed = (
        np.array([position(topology, coord) for coord in coords]).reshape(-1, 2).T
        for coords in (topology.coords, sorted(topology.failed))
    )
    axes.plot(*live, "o", markersize=9 * cell, color="#444444")
    if topology.failed:
        axes.plot(*failed, "x", markersize=30 * cell, color="#cc0000")
    if len(topology.shape) > 2:
        axes.set_axis_off()
        for z, (x, y) in enumerate(layer_origins(topology)):
            axes.text(x, y - 0.5, f"z = {z}", fontsize=8)
    axes.set(aspect="equal", xlabel="x", ylabel="y")
    axes.set_xlim(-0.7, columns - 0.3)
    axes.set_ylim(rows - 0.3, -0.7)
    figure.colorbar(lines, ax=axes, shrink=0.8)
    return figure


def where_time_goes(outcomes: Mapping[str, Sequence[Outcome]], job: TrainingJob) -> Figure:
    """Plot where the time goes under each strategy; the part that all train alike is cut off."""
    figure, axes = _figure(
        f"Where the time goes on {job.topology}",
        f"a board fails every {format_time(job.mtbf)} and is repaired in "
        f"{format_time(job.repair_time)}; checkpoints every "
        f"{format_time(job.checkpoint_interval)}; simulated",
    )
    names = list(outcomes)
    left = np.zeros(len(names))
    for share, (label, colour) in SHARES.items():
        width = np.array([statistics.fmean(getattr(o, share) for o in outcomes[n]) for n in names])
        axes.barh(names, width, left=left, color=colour, label=label)
        left += width
    least = min(statistics.fmean(o.trained for o in runs) for runs in outcomes.values())
    axes.set_xlim(1 - 1.6 * (1 - least), 1.0)
    axes.set_xlabel("share of the time, in work of the full mesh")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)
    return figure


def _figure(title: str, subtitle: str, size: tuple[float, float] = (7, 4.6)) -> tuple[Figure, Any]:
    """An empty figure, independent of any window system."""
    require("ftmesh.draw.plots", "plots", "matplotlib")
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title)
    axes.set_title(subtitle, fontsize="small")
    return figure, axes


def _finish(figure: Figure, axes: Any) -> Figure:
    axes.grid(True, alpha=0.3)
    axes.legend(frameon=False)
    return figure
