"""Where a plan's costs come from: what was given, a profile that fits its devices, or a table.

Without ``link=``, a plan for devices looks for a profile (`ftmesh.cost.profile`): the file that
``$FTMESH_PROFILE`` names, which must fit, or the one that ``ftmesh selftest`` left next to the plan
cache, which is ignored if it does not; neither, if the variable is set and empty. What is in the
cache is not used by several processes: each host has a cache of its own, and hosts that choose
differently wait for each other for ever. Nor is it for CPU devices, which measure programs and not
a network.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ftmesh.cost.links import Network, network_for, parse_network
from ftmesh.cost.profile import MEASURE_AGAIN, STALE, Profile, installed_version
from ftmesh.errors import ArgumentError
from ftmesh.execute.lowering import XLA
from ftmesh.files import check_local
from ftmesh.planning.plan_cache import CACHE_VARIABLE, cache_folder
from ftmesh.topology.devices import process_of
from ftmesh.topology.notation import Coord, format_shape
from ftmesh.topology.topology import Topology

PROFILE_VARIABLE = "FTMESH_PROFILE"
NOT_MEASURED = "not measured"
MEASURED = "measured on "  # how the source of a profile's network begins

LinkArgument = Network | Profile | float | str | os.PathLike[str] | None

_log = logging.getLogger(__name__)


class Costs(NamedTuple):
    """The network that a plan is costed on, and whether it was measured, in words."""

    network: Network
    measured: str = NOT_MEASURED


def find_costs(
    topology: Topology, link: LinkArgument = None, *, now: datetime | None = None
) -> Costs:
    """Return the costs of a plan for `topology`.

    Args:
        link: A `Network`, a rate or a TPU generation as for `parse_network`, a `Profile`, or the
            path of one, which ends in ``.json``. By default a profile that fits the devices, or
            the figures of their generation.
        now: The time, to tell the age of a profile.

    Raises:
        ArgumentError: A profile that was given, or that ``$FTMESH_PROFILE`` names, cannot be read
            or is not for `topology`.
    """
    if isinstance(link, Profile):
        return _costs_by_name(link, "the profile", topology, now)
    if isinstance(link, os.PathLike) or (isinstance(link, str) and is_profile_path(link)):
        return _costs_by_name(_read(Path(link)), f"profile {link}", topology, now)
    if link is not None:
        network = parse_network(link)
        is_measured = network.source.startswith(MEASURED)
        return Costs(network, network.source if is_measured else NOT_MEASURED)
    if not topology.physical.devices:
        return Costs(network_for(topology))
    named = os.environ.get(PROFILE_VARIABLE)
    if named == "":  # profiles are off
        return Costs(network_for(topology))
    if named:
        what = f"the environment variable {PROFILE_VARIABLE}: profile {named}"
        return _costs_by_name(_read(Path(named)), what, topology, now)
    profile, why_not = installed_profile(topology, now=now)
    if profile is not None:
        return _costs_on(profile, profile.describe(now), topology)
    return Costs(network_for(topology), NOT_MEASURED + (f" ({why_not})" if why_not else ""))


def is_profile_path(link: str) -> bool:
    """Whether `link` names the file of a profile."""
    return link.endswith(".json")


def _costs_by_name(profile: Profile, what: str, topology: Topology, now: datetime | None) -> Costs:
    """Costs by a profile that was asked for, which may be old."""
    if obstacle := profile.obstacle(topology, now):
        raise ArgumentError(f"{what} was {obstacle}")
    note = f"; stale: {MEASURE_AGAIN} again" if profile.is_stale(now) else ""
    return _costs_on(profile, profile.describe(now) + note, topology)


def _costs_on(profile: Profile, measured: str, topology: Topology) -> Costs:
    """The costs of a profile without what it cannot vouch for on `topology`, with a note on that.

    Kernels count only with the JAX that they were tried with, whose compiler comes with it. XLA
    sums in another way on a whole TPU slice than on part of one.
    """
    network, notes = profile.network(), [measured]
    current = installed_version("jax")
    if network.kernel and current and current != profile.jax_version:
        network = replace(network, kernel=None, has_kernel=False)
        notes.append(f"kernels were tried with JAX {profile.jax_version}, and this is {current}")
    was_damaged = any(one.failed for one in profile.sums if one.executor == XLA)
    if profile.platform == "tpu" and was_damaged != bool(topology.physical.failed):
        known = network_for(topology)
        network = replace(
            network,
            collective_launch=known.collective_launch,
            all_reduce_efficiency=known.all_reduce_efficiency,
            ring_share=known.ring_share,
            kernel=None,
            has_kernel=False,
        )
        kind = "a damaged" if was_damaged else "a whole"
        notes.append(f"XLA's sum was timed on {kind} mesh: modelled here, and without kernels")
    return Costs(network, "; ".join(notes))


class InstalledProfile(NamedTuple):
    """The profile in the cache that fits, or why there is none; no reason if there is no file."""

    profile: Profile | None
    why_not: str = ""


def installed_profile(topology: Topology, *, now: datetime | None = None) -> InstalledProfile:
    """Return the profile that `install_profile` kept for the devices of `topology`.

    One that cannot be used is left out, and a warning logged once.
    """
    path = _installed_path(topology)
    if path is None or not os.path.exists(path):
        return InstalledProfile(None)
    if len({process_of(device) for device in topology.physical.devices}) > 1:
        return InstalledProfile(
            None,
            f"profile {path} is not used by several processes: copy it to every host and set "
            f"{PROFILE_VARIABLE}, or give link=",
        )
    try:
        profile = _read(path)
    except ArgumentError as error:
        reason = str(error)
    else:
        reason = profile.obstacle(topology, now)
        if not reason and profile.is_stale(now):
            reason = f"measured more than {STALE.days} days ago: {MEASURE_AGAIN} again"
        if not reason:
            return InstalledProfile(profile)
    _warn_once(f"profile {path} is not used: {reason}")
    return InstalledProfile(None, f"profile {path} rejected: {reason}")


def install_profile(profile: Profile) -> Path:
    """Keep `profile` for plans on such devices, in place of an older one; return its path."""
    folder = profile_folder()
    if folder is None:
        raise ArgumentError(
            f"there is no cache folder to keep the profile in: set {CACHE_VARIABLE} to a folder, "
            "or save the profile and give its path as link="
        )
    name = _file_name(profile.device_kind, profile.shape, profile.wrap, profile.devices_per_chip)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"cannot write {folder}: {error.strerror}") from error
    profile.save(folder / name)
    return folder / name


def profile_folder() -> Path | None:
    """Return the folder of installed profiles; None where the plan cache is off."""
    folder = cache_folder()
    if folder is None:
        return None
    return (folder if os.environ.get(CACHE_VARIABLE) else folder.parent) / "profiles"


def _installed_path(topology: Topology) -> Path | None:
    chips, folder = topology.physical, profile_folder()
    if folder is None or not chips.devices:
        return None
    device = chips.devices[0]
    if getattr(device, "platform", "cpu") == "cpu":
        return None
    kind = str(getattr(device, "device_kind", ""))
    return folder / _file_name(kind, chips.shape, chips.wrap, chips.devices_per_chip)


def _file_name(kind: str, shape: Coord, wrap: tuple[bool, ...], devices_per_chip: int) -> str:
    words = re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-")[:100]
    axes = "".join("xyz"[axis] for axis, wraps in enumerate(wrap) if wraps) or "none"
    return f"{words}-{format_shape(shape)}-wrap-{axes}-{devices_per_chip}.json"


def _read(path: Path) -> Profile:
    """Load a profile, or return it again if the file has not changed."""
    check_local(path)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # of a name that no file can have
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(f"cannot read profile {path}: {reason}") from error
    return _load(path, status.st_mtime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=8)
def _load(path: Path, *_: int) -> Profile:
    return Profile.load(path)


@lru_cache(maxsize=256)
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
