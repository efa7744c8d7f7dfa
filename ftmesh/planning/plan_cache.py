"""Plan cache: schedules and choices that took long to make, kept on disk for the next process.

Packed trees on hundreds of chips take seconds to plan, and all algorithms longer to compare. Both
are kept under ``$FTMESH_CACHE_DIR``, or ``ftmesh/plans`` in the user's cache folder; an empty
``FTMESH_CACHE_DIR`` turns the cache off. A file is named after everything that it depends on, this
package's source included, and a schedule read from it is proved again like any other, so that a
stale or damaged file costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ftmesh.algorithms import registry
from ftmesh.cost.links import DEFAULT, Network
from ftmesh.cost.simulate import DATAFLOW, SYNCHRONOUS
from ftmesh.errors import FtmeshError
from ftmesh.files import check_local, write_atomic
from ftmesh.planning.chunking import DATAFLOW_WORK, KERNEL_WORK, schedule_for
from ftmesh.schedule.files import dumps, load
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.verify import Proof, verify
from ftmesh.topology.topology import Topology

CACHE_VARIABLE = "FTMESH_CACHE_DIR"
SLOW_SECONDS = 0.5  # what is planned faster is not worth a file
LARGE = 2_000  # chips from which planning takes long enough to say so
MAX_BYTES = 512 * 2**20  # of all files; the oldest go first

Facts = list[dict[str, Any]]

_log = logging.getLogger(__name__)


def cached_schedule(
    topology: Topology,
    algorithm: str,
    payload_bytes: int,
    network: Network,
    mode: str = SYNCHRONOUS,
    max_work: int = DATAFLOW_WORK,
) -> Schedule:
    """Plan `algorithm`, or read its schedule from the plan cache if it is one that takes long."""
    bare = topology.without_devices()
    if algorithm not in registry.CHUNKED_BY_PAYLOAD:
        return replace(_cached_by_mesh(bare, algorithm), topology=topology)
    schedule = _cached_tree(bare, algorithm, payload_bytes, network, mode, max_work)
    return replace(schedule, topology=topology)


@lru_cache(maxsize=4)
def _cached_by_mesh(topology: Topology, algorithm: str) -> Schedule:
    make = partial(registry.build_schedule, topology, algorithm)
    is_slow = registry.current_name(algorithm) in registry.FALLBACKS
    return load_or_plan(make, topology, DEFAULT, algorithm) if is_slow else make()


@lru_cache(maxsize=32)
def _cached_tree(
    topology: Topology,
    algorithm: str,
    payload_bytes: int,
    network: Network,
    mode: str,
    max_work: int,
) -> Schedule:
    def make() -> Schedule:
        return schedule_for(topology, algorithm, payload_bytes, network, mode, max_work=max_work)

    return load_or_plan(make, topology, network, algorithm, payload_bytes, mode, max_work)


def kernel_schedule(
    topology: Topology, algorithm: str, payload_bytes: int, network: Network
) -> Schedule:
    """Plan `algorithm` for the Pallas kernel, whose transfers wait for no round to end."""
    links = network.wires_only
    return cached_schedule(topology, algorithm, payload_bytes, links, DATAFLOW, KERNEL_WORK)


def load_or_plan(
    make: Callable[[], Schedule], topology: Topology, network: Network, *options: object
) -> Schedule:
    """Return the cached schedule for these arguments, or `make` it and cache it if that was slow.

    `options` are all else that `make` depends on. The devices of `topology` do not matter.
    """
    folder = cache_folder()
    if folder is None:
        return make()
    path = folder / f"{_key(topology, network, options)}.npz"
    schedule = _read(path, topology)
    if schedule is not None:
        return schedule
    if topology.num_live > LARGE:
        _log.warning(
            "planning for %s takes up to a minute; the plan is then kept in %s",
            topology,
            folder,
        )
    start = time.monotonic()
    schedule = make()
    if time.monotonic() - start > SLOW_SECONDS:
        _write(path, dumps(schedule))
    return schedule


def load_or_choose(
    choose: Callable[[], Facts], topology: Topology, network: Network, *options: object
) -> Facts:
    """Return the cached facts for these arguments, or `choose` them, and cache what took long.

    They are a list of objects that JSON can hold, which the caller must check. `options` are all
    else that `choose` depends on.
    """
    folder = cache_folder()
    if folder is None:
        return choose()
    path = folder / f"{_key(topology, network, options)}.json"
    with contextlib.suppress(OSError, ValueError, RecursionError):
        facts = json.loads(path.read_bytes())
        if isinstance(facts, list) and all(isinstance(one, dict) for one in facts):
            return facts
    start = time.monotonic()
    facts = choose()
    if time.monotonic() - start > SLOW_SECONDS:
        _write(path, json.dumps(facts).encode())
    return facts


def cache_folder() -> Path | None:
    """Return the folder of cached schedules; None where the cache is off or there is no home."""
    given = os.environ.get(CACHE_VARIABLE)
    if given is not None:
        check_local(given, f"set {CACHE_VARIABLE} to a local folder")
        return Path(given) if given else None
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ftmesh" / "plans"
    except RuntimeError:
        return None


def _key(topology: Topology, network: Network, options: tuple[object, ...]) -> str:
    damage = sorted(topology.failed), sorted(topology.failed_links)
    cores = topology.devices_per_chip, topology.physical.devices_per_chip  # of tiles, of chips
    mesh = str(topology), topology.shape, topology.wrap, damage, cores
    facts = _source_digest(), mesh, network, options
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _source_digest() -> str:
    """Identify the code that plans: schedules of another version are not taken for its own."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for room in ("topology", "schedule", "algorithms", "cost", "planning"):
        for path in sorted((package / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _read(path: Path, topology: Topology) -> Schedule | None:
    try:
        if not path.is_file():
            return None
        schedule = load(path, verify=False)
        proof_of(schedule)
    except (FtmeshError, OSError):
        return None
    if schedule.topology.without_devices() != topology.without_devices():
        return None
    return replace(schedule, topology=topology)


def proof_of(schedule: Schedule) -> Proof:
    """Prove a schedule, or return its proof if this process has lately proved the same object."""
    mesh = schedule.topology.without_devices()
    for known, its_mesh, proof in _proofs:
        if known is schedule.phases and its_mesh == mesh:
            return proof
    _proofs.append((schedule.phases, mesh, verify(schedule)))
    return _proofs[-1][-1]


_proofs: deque[tuple[tuple[Phase, ...], Topology, Proof]] = deque(maxlen=8)


def _write(path: Path, content: bytes) -> None:
    """Write a file, and delete the oldest beyond `MAX_BYTES`; a full disk is ignored."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, [content])
        files = [*path.parent.glob("*.npz"), *path.parent.glob("*.json")]
        newest = sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)
        total = 0
        for file in newest:
            total += file.stat().st_size
            if total > MAX_BYTES:
                file.unlink(missing_ok=True)
    except OSError as error:
        _log.info("the plan is not cached: %s", error)
