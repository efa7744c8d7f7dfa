"""The page: one HTML file with its style, its scripts and its scenes, which loads nothing else.

A scene is a mesh, the schedules of its algorithms and their costs, as JSON. The page neither plans
nor simulates: it plays the transfers listed there, and plots the times that `ftmesh.cost`
simulated. Fields of a scene:

- ``mesh``: shape, wrap, failed, failed_links, devices_per_chip, and its name.
- ``payloads`` (bytes), and for each, in ``limit_us``, the least time of any all-reduce.
- ``peers``: what XLA takes by itself: name, ``note``, and ``us`` for each payload; none for tiles.
- ``algorithms``: for each its name and, if it was tried, its ``refusal``, or rounds, ``us`` and
  ``phase_us`` (the time for each payload, and the end of each phase) and the ``schedule``.
- ``auto``: the algorithm that `ftmesh.plan` selects for ``payload_bytes``.
- ``shown``: the algorithm that is shown first.

Fields of a verified schedule, whose columns of integers are packed as text:

- ``num_chunks``.
- ``src``, ``dst``: the ranks of each pair that exchanges data.
- ``route``, ``hops``: the grid indices on the route of each pair, and its number of links.
- ``phases``: each with ``starts``, the first row of every round and the end of the last, and for
  every row ``pair``, ``chunk``, ``count`` and ``op`` (0 adds, 1 copies).
- ``busiest_share``: the share of the payload that the busiest link carries.
- ``proof``: the result of the verification, in words.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ftmesh.algorithms import registry
from ftmesh.cost.executors import lax_psum_peers
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.lower_bounds import limits
from ftmesh.cost.simulate import Simulator
from ftmesh.errors import ArgumentError, PlanError
from ftmesh.planning.plan_cache import cached_schedule
from ftmesh.planning.selection import AUTO, select_algorithm
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import Ints
from ftmesh.schedule.verify import verify
from ftmesh.topology.notation import Coord, format_shape
from ftmesh.topology.tiles import TiledTopology
from ftmesh.topology.topology import Topology

FORMAT = "ftmesh.view/1"
ALL = "all"
MAX_CHIPS = 1024  # of a mesh that the page shows
_PAYLOADS = (4_000, 4_000_000_000, 25)  # first, last and number, evenly on a logarithmic scale
_NAMES = "words unpack sums places colours filling paint chart player panel main asking events"
SCRIPTS = tuple(f"{name}.js" for name in _NAMES.split())


def build_scene(
    topology: Topology,
    algorithm: str = AUTO,
    *,
    payload_bytes: int = 100_000_000,
    network: Network = DEFAULT,
) -> dict[str, Any]:
    """Build the scene of `topology`: the cost of every algorithm, and verified schedules.

    Algorithms that take long to plan are left out unless they are selected or requested.

    Args:
        algorithm: Whose schedule to include: a name, ``"auto"`` or ``"all"``.
        payload_bytes: For which ``"auto"`` selects.

    >>> result = build_scene(Topology.grid("8x8", failed="2x2@2,2"), "ring")
    >>> result["shown"], [a["rounds"] for a in result["algorithms"] if "schedule" in a]
    ('ring', [118])
    """
    algorithm = registry.current_name(algorithm)
    check_fits(topology.shape)
    auto = select_algorithm(topology, payload_bytes, network).algorithm
    outcomes = _outcomes(topology, algorithm, auto, payload_bytes, network)
    first = auto if algorithm in (AUTO, ALL) else algorithm
    included = list(outcomes) if algorithm == ALL else [first]
    choice = {"auto": auto, "shown": first}
    return _scene(topology, outcomes, included, payload_bytes, network, choice)


def build_schedule_scene(
    schedule: Schedule, *, payload_bytes: int = 100_000_000, network: Network = DEFAULT
) -> dict[str, Any]:
    """Build the scene of an existing schedule, such as one from a file; its ``auto`` is None."""
    if isinstance(schedule.topology, TiledTopology):
        raise ArgumentError(
            f"the page cannot show tiles, and the schedule is for tiles of "
            f"{schedule.topology.chips}: use 'ftmesh draw'"
        )
    check_fits(schedule.topology.shape)
    name = schedule.algorithm
    choice = {"auto": None, "shown": name}
    return _scene(schedule.topology, {name: schedule}, [name], payload_bytes, network, choice)


def _scene(
    topology: Topology,
    outcomes: Mapping[str, Schedule | PlanError],
    included: list[str],
    payload_bytes: int,
    network: Network,
    choice: Mapping[str, str | None],
) -> dict[str, Any]:
    """The scene with the costs of all `outcomes`, and the schedules of those `included`."""
    low, high, number = _PAYLOADS
    evenly = np.geomspace(low, high, number).round().astype(np.int64).tolist()
    payloads = sorted({*evenly, payload_bytes})
    entries = []
    for name in dict.fromkeys([*registry.ALGORITHMS, *outcomes]):
        if name in registry.TORUS_ONLY and name not in outcomes:
            continue  # the mesh is no torus
        outcome = outcomes.get(name)
        entry: dict[str, Any] = {"algorithm": name}
        if isinstance(outcome, PlanError):
            entry["refusal"] = str(outcome)
        elif outcome is not None:
            entry |= _cost(outcome, payloads, network)
            if name in included:
                entry["schedule"] = _encode_schedule(outcome)
        entries.append(entry)
    bounds = limits(topology)
    return {
        "format": FORMAT,
        "mesh": {
            "name": str(topology),
            "shape": topology.shape,
            "wrap": topology.wrap,
            "failed": sorted(topology.failed),
            "failed_links": sorted(topology.failed_links),
            "devices_per_chip": topology.devices_per_chip,
        },
        "network": str(network) + (", with device time" if network.device_model else ""),
        "payload_bytes": payload_bytes,
        "payloads": payloads,
        "limit_us": [_us(bounds.all_reduce_seconds(size, network)) for size in payloads],
        "limit_why": bounds.why_all_reduce,
        "peers": _peers(topology, payloads, network),
        **choice,
        "algorithms": entries,
    }


def _peers(topology: Topology, payloads: list[int], network: Network) -> list[dict[str, Any]]:
    sizes = [lax_psum_peers(topology, size, network) for size in payloads]
    return [
        {"name": same[0].name, "note": same[0].note, "us": [_us(peer.seconds) for peer in same]}
        for same in zip(*sizes, strict=True)
    ]


def check_fits(shape: Coord) -> None:
    """Raise `ArgumentError` if a mesh is too large for the page."""
    if math.prod(shape) > MAX_CHIPS:
        raise ArgumentError(
            f"the page shows meshes of up to {MAX_CHIPS:,} chips, and {format_shape(shape)} has "
            f"{math.prod(shape):,}: use a smaller one, or 'ftmesh plan' and 'ftmesh draw'"
        )


def _outcomes(
    topology: Topology, algorithm: str, auto: str, payload_bytes: int, network: Network
) -> dict[str, Schedule | PlanError]:
    """Schedules and errors by algorithm; those that take long only if selected or requested."""
    outcomes = registry.try_algorithms(topology)
    wanted = [algorithm] if algorithm not in (AUTO, ALL) else []
    if algorithm == ALL:
        wanted += (*registry.FALLBACKS, *registry.CHUNKED_BY_PAYLOAD)
    for name in dict.fromkeys([auto, *wanted]):
        if name not in outcomes:
            outcomes[name] = cached_schedule(topology, name, payload_bytes, network)
    if algorithm not in (AUTO, ALL) and not isinstance(outcomes.get(algorithm), Schedule):
        cached_schedule(
            topology, algorithm, payload_bytes, network
        )  # raises an error that says why
    return outcomes


def _cost(schedule: Schedule, payloads: list[int], network: Network) -> dict[str, Any]:
    simulator = Simulator(schedule)
    times = [simulator.phase_ends(size, network) for size in payloads]
    return {
        "rounds": schedule.num_rounds,
        "cut_by_size": schedule.algorithm in registry.CHUNKED_BY_PAYLOAD,
        "us": [_us(seconds) for seconds, _ in times],
        "phase_us": [[_us(end) for end in ends] for _, ends in times],
    }


def _us(seconds: float) -> float:
    return float(f"{1e6 * seconds:.6g}")


def _encode_schedule(schedule: Schedule) -> dict[str, Any]:
    proof = verify(schedule)
    topology = schedule.topology
    pairs = sorted(schedule.routes)
    ends = np.array(pairs, np.int32)
    routes = [[topology.grid_index(coord) for coord in schedule.routes[pair]] for pair in pairs]
    loads: Counter[Any] = Counter()
    for phase in schedule.phases:
        loads.update(schedule.link_loads(phase))
    return {
        "num_chunks": schedule.num_chunks,
        "src": pack(ends[:, 0]),
        "dst": pack(ends[:, 1]),
        "route": pack([index for route in routes for index in route]),
        "hops": pack([len(route) - 1 for route in routes]),
        "phases": [_encode_phase(phase, ends) for phase in schedule.phases],
        "busiest_share": max(loads.values()) / schedule.num_chunks,
        "proof": str(proof),
    }


def _encode_phase(phase: Phase, ends: Ints) -> dict[str, Any]:
    rows = phase.transfers
    known = (ends.astype(np.int64) * (1 << 32, 1)).sum(axis=1)  # sorted, as the pairs are
    pair = np.searchsorted(known, rows.src.astype(np.int64) * (1 << 32) + rows.dst)
    return {
        "name": phase.name,
        "rounds": phase.num_rounds,
        "starts": pack(phase.round_bounds),
        "pair": pack(pair),
        "chunk": pack(rows.chunk),
        "count": pack(rows.count),
        "op": pack(rows.op),
    }


def pack(values: ArrayLike) -> str:
    """Pack 32-bit integers as base64 of the compressed differences between neighbours.

    Chunks rotate and pairs repeat, so that differences are small and alike: a ring of a thousand
    chips, four million transfers, takes about 200 kB. The inverse is `unpack.js`.
    """
    column = np.asarray(values, np.int32).ravel()
    differences = np.diff(column, prepend=np.int32(0)).astype("<i4")
    return base64.b64encode(zlib.compress(differences.tobytes())).decode("ascii")


def render_page(
    scenes: Sequence[dict[str, Any]], *, options: str = "", plans_at: str | None = None
) -> str:
    """Render the HTML of the page. Its content policy allows its own scripts and that server only.

    Args:
        scenes: From `build_scene`. The first is shown, and the others on a click.
        options: Command line options about links, for the commands that the page suggests.
        plans_at: URL at which a `Server` plans for other damage, if there is one.
    """
    style = _asset("view.css")
    script = "\n".join(_asset(name) for name in SCRIPTS)
    data = {"scenes": list(scenes), "options": options, "plans_at": plans_at}
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        f"connect-src {'self' if plans_at else 'none'!r}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = {
        "policy": policy,
        "style": style,
        "scenes": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("view.html"))


def _asset(name: str) -> str:
    return (files("ftmesh.view") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
