"""Profiles of devices that do not exist: sums that take what a known network says."""

from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from types import SimpleNamespace

import numpy as np

from ftmesh.algorithms import registry
from ftmesh.algorithms.rings import along_ring_order
from ftmesh.cost.device_model import DeviceModel
from ftmesh.cost.executors import kernel_seconds, native_ring_seconds
from ftmesh.cost.links import NETWORKS, KernelModel, Network
from ftmesh.cost.profile import Profile, installed_version
from ftmesh.cost.profile_fit import HopTimes, TimedSum
from ftmesh.cost.simulate import Simulator
from ftmesh.planning.chunking import schedule_for
from ftmesh.schedule.schedule import Schedule
from ftmesh.topology.ring_order import ring_order
from ftmesh.topology.topology import Topology

V6E = "TPU v6 lite"
PAYLOADS = (4_096, 65_536, 1_048_576, 16_777_216, 100_000_000)
DAMAGES = ("2x2@2,2", "1x1@0,0")
NOW = datetime(2026, 11, 18, 12, tzinfo=UTC)

#: What the devices cost in truth: slower launches and links than the table of v6e has.
TRUE = Network(
    70e9,
    1.5e-6,
    device_model=DeviceModel(
        0, 2000, 0.006, packing=0.008, clock=NETWORKS["v6e"].device_model.clock, launch=6e-6
    ),
    memory_bandwidth=NETWORKS["v6e"].memory_bandwidth,
    collective_launch=12e-6,
    all_reduce_efficiency=0.6,
    has_kernel=True,
    kernel=KernelModel(40e-6, 0.5, ("ring", "tree")),
)

HOP_TIMES = HopTimes(TRUE.latency, TRUE.bandwidth)


def tpus(shape=(6, 6), failed="", *, kind=V6E, platform="tpu", processes=1):
    """Devices as JAX lists them, one to a chip; rows of them belong to `processes`."""
    width, height = shape
    devices = [
        SimpleNamespace(
            id=x + width * y,
            coords=(x, y, 0),
            core_on_chip=0,
            device_kind=kind,
            platform=platform,
            process_index=y * processes // height,
        )
        for y in range(height)
        for x in range(width)
    ]
    return Topology.from_devices(devices, failed=failed)


def true_seconds(schedule, executor, payload, network=TRUE):
    """What a sum takes in truth."""
    if executor == "xla":
        return native_ring_seconds(ring_order(schedule.topology), payload, network)
    if executor == "pallas":
        return kernel_seconds(schedule, payload, network)
    return Simulator(schedule).seconds(payload, network)


@lru_cache
def timed_sums(network=TRUE, *, noise=0.0, kernel=False, hop_times=True, kind=V6E, seed=0):
    """Sums of every algorithm on two damages, which take what `network` says, and noise."""
    rng = np.random.default_rng(seed)
    hop = HopTimes(network.latency, network.bandwidth) if hop_times else None
    timed = []
    for failed in DAMAGES:
        topology = tpus(failed=failed, kind=kind)
        outcomes = registry.try_algorithms(topology)
        schedules = [one for one in outcomes.values() if isinstance(one, Schedule)]
        for payload in PAYLOADS:
            tree = schedule_for(topology, "tree", payload, NETWORKS["v6e"])
            runs = [(one, "ppermute") for one in (*schedules, tree)]
            runs += [(along_ring_order(topology), "xla")]
            if kernel:
                runs += [(one, "pallas") for one in (*schedules, tree)]
            for schedule, executor in runs:
                seconds = true_seconds(schedule, executor, payload, network)
                seconds *= float(np.exp(noise * rng.standard_normal()))
                quartiles = 0.95 * seconds, seconds, 1.1 * seconds
                timed.append(TimedSum.from_schedule(schedule, executor, payload, quartiles, hop))
    return tuple(timed)


def make_profile(sums=None, *, hop_times=HOP_TIMES, **changes):
    """A profile of v6e 6x6, measured yesterday."""
    profile = Profile(
        device_kind=V6E,
        platform="tpu",
        shape=(6, 6),
        wrap=(False, False),
        devices_per_chip=1,
        num_devices=36,
        num_processes=1,
        ftmesh_version=installed_version(),
        jax_version=installed_version("jax"),
        measured_at="2026-11-17T11:00:00+00:00",
        hop_times=hop_times,
        sums=timed_sums() if sums is None else sums,
    )
    return replace(profile, **changes)
