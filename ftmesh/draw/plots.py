"""Plots, with matplotlib: time against payload, loads of links, scaling, where the time goes.

matplotlib is an extra, ``pip install 'ftmesh[plots]'``; everything else does without. What is
plotted is simulated, and every picture says on which links.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ftmesh.algorithms.registry import CHUNKED_BY_PAYLOAD
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.lower_bounds import Limits, limits
from ftmesh.cost.simulate import Simulation, Simulator
from ftmesh.draw.panel import heading, layers, place, size
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
SCALED = ("ring", "two_dim", "row_pair", "tree")  # what square meshes are planned with
MANY = 1024  # chips beyond which trees take minutes to plan
LIMIT = {"color": "black", "linestyle": "--", "linewidth": 1, "label": "limit of any all-reduce"}
SHARES = {
    "trained": ("trained", "#009e73"),
    "slower": ("lost to fewer chips", "#56b4e9"),
    "thrown_away": ("trained, thrown away", "#d55e00"),
    "restarting": ("restarting", "#e69f00"),
    "waiting": ("waiting", "#999999"),
}


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format that the name ends in; an SVG is the same every time."""
    import matplotlib

    form = Path(path).suffix[1:].lower() or "png"
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "ftmesh"}):
        try:
            figure.savefig(drawn, format=form, metadata={"Date": None} if form == "svg" else None)
        except ValueError as error:
            raise ArgumentError(f"cannot write {path}: {error}") from None
    write_atomic(path, [drawn.getvalue()])


def time_against_payload(simulators: Mapping[str, Simulator], on: Network = DEFAULT) -> Figure:
    """Simulated time of each schedule, all on one topology, from 4 kB to 4 GB, with the limit."""
    payloads = np.unique(np.geomspace(4e3, 4e9, 61).astype(np.int64))
    topology = next(iter(simulators.values())).schedule.topology
    least = limits(topology)
    figure, axes = _figure(f"All-reduce on {topology}", f"{on}; synchronous rounds, simulated")
    for name, simulator in simulators.items():
        times = [1e6 * simulator.seconds(int(size), on) for size in payloads]
        axes.plot(payloads, times, color=COLOURS.get(simulator.schedule.algorithm), label=name)
    axes.plot(payloads, [1e6 * least.all_reduce_seconds(int(m), on) for m in payloads], **LIMIT)
    axes.set(xscale="log", yscale="log", xlabel="payload, bytes", ylabel="time, us")
    return _finish(figure, axes)


def scaling(sides: Sequence[int], payload_bytes: int, on: Network = DEFAULT) -> Figure:
    """Simulated time on square meshes, whole and less a 2x2 block near the middle, with the limit.

    A ring's time is its formula (see `ftmesh.simulate`), which needs no schedule of millions of
    transfers; trees end at 32x32.
    """
    figure, axes = _figure(
        f"All-reduce of {format_bytes(payload_bytes)} on square meshes",
        f"{on}; simulated; solid: whole, dotted: less a 2x2 block",
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
                seconds = _seconds(topology, name, payload_bytes, on)
                if seconds is not None:
                    line.append((side, 1e6 * seconds))
        for name, line in lines.items():
            if line:
                axes.plot(
                    *zip(*line, strict=True),
                    style,
                    marker="o",
                    markersize=3,
                    color=COLOURS[name],
                    label=None if failed else name,
                )
    axes.plot(sides, [1e6 * one.all_reduce_seconds(payload_bytes, on) for one in least], **LIMIT)
    axes.set(xscale="log", xlabel="chips along a side", ylabel="time, us", ylim=0)
    axes.set_xticks(sides, labels=[str(side) for side in sides])
    axes.minorticks_off()
    return _finish(figure, axes)


def _seconds(topology: Topology, name: str, payload_bytes: int, on: Network) -> float | None:
    if name == "ring":
        live = topology.num_live
        step = on.overhead + on.latency + payload_bytes / (2 * live * on.bandwidth)
        return 2 * (live - 1) * step
    if name in CHUNKED_BY_PAYLOAD and topology.num_live > MANY:
        return None
    try:
        return Simulator(schedule_for(topology, name, payload_bytes, on)).seconds(payload_bytes, on)
    except PlanError:
        return None


def link_loads(simulation: Simulation) -> Figure:
    """What each link carries, on the mesh, as a share of the payload; both ways are drawn apart.

    Of a link over the edge, or to another layer, each way is drawn where it begins.
    """
    topology = simulation.schedule.topology.physical
    columns, rows = size(topology)
    cell = 7 / max(columns, rows, 8)  # inches between chips
    figure, axes = _figure(
        f"What links carry: {simulation.schedule.algorithm} on {topology}",
        "share of the payload, in the whole all-reduce",
        size=(max(cell * columns + 2, 5.5), cell * rows + 1.5),
    )
    from matplotlib.collections import LineCollection

    ends, shares = [], []
    for a, b in topology.links:
        way = np.array(heading(topology, a, b))
        start = np.add(place(topology, a), 0.12 * np.array([-way[1], way[0]]))
        is_beside = np.abs(np.subtract(place(topology, b), place(topology, a))).sum() == 1
        ends.append([start, start + (way if is_beside else 0.42 * way)])
        shares.append(simulation.link_bytes.get((a, b), 0.0) / simulation.payload_bytes)
    lines = LineCollection(ends, array=np.array(shares), cmap="viridis_r", linewidths=10 * cell)
    lines.set_clim(0.0)
    axes.add_collection(lines)
    live, failed = (
        np.array([place(topology, coord) for coord in coords]).reshape(-1, 2).T
        for coords in (topology.coords, sorted(topology.failed))
    )
    axes.plot(*live, "o", markersize=9 * cell, color="#444444")
    if topology.failed:
        axes.plot(*failed, "x", markersize=30 * cell, color="#cc0000")
    if len(topology.shape) > 2:
        axes.set_axis_off()
        for z, (x, y) in enumerate(layers(topology)):
            axes.text(x, y - 0.5, f"z = {z}", fontsize=8)
    axes.set(aspect="equal", xlabel="x", ylabel="y")
    axes.set_xlim(-0.7, columns - 0.3)
    axes.set_ylim(rows - 0.3, -0.7)
    figure.colorbar(lines, ax=axes, shrink=0.8)
    return figure


def where_time_goes(outcomes: Mapping[str, Sequence[Outcome]], job: TrainingJob) -> Figure:
    """What each answer to failures makes of the time; what all train alike is cut off."""
    figure, axes = _figure(
        f"Where the time goes on {job.topology}",
        f"a board fails every {format_time(job.mtbf)} and is repaired in "
        f"{format_time(job.repair_time)}; checkpoints every {format_time(job.checkpoint_interval)}; played",
    )
    names = list(outcomes)
    left = np.zeros(len(names))
    for share, (label, colour) in SHARES.items():
        width = np.array([statistics.fmean(getattr(o, share) for o in outcomes[n]) for n in names])
        axes.barh(names, width, left=left, color=colour, label=label)
        left += width
    least = min(statistics.fmean(one.trained for one in each) for each in outcomes.values())
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
