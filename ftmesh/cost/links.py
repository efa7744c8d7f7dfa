"""The links of a mesh and what launching on them costs, per TPU generation or as given.

Figures of TPU generations are what others have measured, where anyone has, and published ones
otherwise; each has its source. Where sources differ, a network has a `NetworkRange`, and costs come
as a range. Nobody publishes the latency of a hop of each generation, so one figure stands for all.
Each generation also has a `DeviceModel`: what ftmesh's rounds cost its devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real

from ftmesh.cost.device_model import DeviceModel
from ftmesh.errors import ArgumentError
from ftmesh.topology.devices import tpu_generation
from ftmesh.topology.topology import Topology
from ftmesh.units import format_rate, format_time, parse_rate, parse_time


@dataclass(frozen=True)
class NetworkRange:
    """The least and the most that sources say of a network."""

    bandwidth: tuple[float, float]
    launch: tuple[float, float]  # of a round of permutations
    collective_launch: tuple[float, float]


@dataclass(frozen=True)
class KernelModel:
    """What the Pallas kernel was measured to cost, and for which algorithms it summed rightly.

    A sum takes `launch` seconds, and its time on links and memory divided by `efficiency`.
    """

    launch: float
    efficiency: float
    algorithms: tuple[str, ...]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.launch) and self.launch >= 0):
            raise ArgumentError(f"launch must be 0 seconds or more, not {self.launch!r}")
        if not (math.isfinite(self.efficiency) and self.efficiency > 0):
            raise ArgumentError(f"efficiency must be above 0, not {self.efficiency!r}")


@dataclass(frozen=True)
class Network:
    """Full-duplex links, all alike, and the devices they connect.

    A transfer of b bytes over h free hops takes ``overhead + h * latency + b / bandwidth``: its
    head moves on after `latency` seconds at each hop, and every link on the way is busy while its
    bytes pass.

    Attributes:
        bandwidth: Bytes per second of a link, each way.
        latency, overhead: Seconds per hop, and per transfer at the sender.
        source: Where the numbers come from.
        device_model: What a round costs the devices, or None to count the wires alone.
        memory_bandwidth: Bytes per second between a chip and its memory, if known.
        has_kernel: Whether the Pallas kernel has been compiled for such chips.
        collective_launch: Seconds to launch one of XLA's own collectives, or a kernel.
        all_reduce_efficiency: The share of `bandwidth` that XLA's own all-reduces reach.
        ring_share: The share of a ring's hops that XLA waits for, one after another: half of them
            where the two directions meet, all where they pass each other.
        spread: How far sources differ, if they do.
        kernel: What the Pallas kernel costs where it was measured; plans take it there.
    """

    bandwidth: float
    latency: float
    overhead: float = 0.0
    source: str = "as given"
    device_model: DeviceModel | None = None
    memory_bandwidth: float | None = None
    has_kernel: bool = False
    collective_launch: float = 0.0
    all_reduce_efficiency: float = 1.0
    ring_share: float = 0.5
    spread: NetworkRange | None = None
    kernel: KernelModel | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ArgumentError(f"bandwidth must be above 0 bytes/s, not {self.bandwidth!r}")
        memory = self.memory_bandwidth
        if memory is not None and not (math.isfinite(memory) and memory > 0):
            raise ArgumentError(f"memory_bandwidth must be above 0 bytes/s, not {memory!r}")
        for name in ("latency", "overhead", "collective_launch"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name} must be 0 seconds or more, not {value!r}")

    @property
    def wires_only(self) -> Network:
        """The same links without the device model, and without what launching costs."""
        return replace(
            self,
            device_model=None,
            collective_launch=0.0,
            all_reduce_efficiency=1.0,
            spread=None,
            kernel=None,
        )

    @property
    def slowest(self) -> Network:
        """The network by the least favourable of its sources."""
        return self._at(0, 1, MEASURED_EFFICIENCY, 1.0) if self.spread else self

    @property
    def fastest(self) -> Network:
        """The network by the most favourable of its sources."""
        return self._at(1, 0, 1.0, 0.5) if self.spread else self

    def _at(self, rate: int, launch: int, efficiency: float, ring_share: float) -> Network:
        assert self.spread is not None
        model = self.device_model
        if model is not None:
            model = replace(model, launch=self.spread.launch[launch])
        return replace(
            self,
            bandwidth=self.spread.bandwidth[rate],
            device_model=model,
            collective_launch=self.spread.collective_launch[launch],
            all_reduce_efficiency=efficiency,
            ring_share=ring_share,
            spread=None,
        )

    def __str__(self) -> str:
        text = f"links of {format_rate(self.bandwidth)} each way, {format_time(self.latency)} a hop"
        if self.overhead:
            text += f", {format_time(self.overhead)} at the sender"
        return text


DEFAULT = Network(50e9, 0.5e-6, source="round figures, as used in studies of collectives")

# "How to Scale Your Model" (Austin et al., 2025), chapter 2, puts a hop at about a microsecond, and
# counts half of a ring's hops (chapter 3), as XLA's name for what it runs on a ring, "pincer", has
# it: data come from both sides and meet.
_HOP = 1e-6
_BOOK = "How to Scale Your Model (Austin et al., 2025)"
_CACM = "Jouppi et al., A Domain-Specific Supercomputer (CACM 2020)"
_CLOUD = "cloud.google.com/tpu/docs, system architecture"
_MARIN = "measured with lax.ppermute, marin-community/marin issue 6736"

# Measured all-reduces reach this share of the rate of links that all-gathers and permutations do:
# 0.68 on v6e 16x16 (606 MB, tpu-recipes) and 0.70 on a ring of 8 of v5e (the difference of 134 and
# 268 MB, jetstream-pytorch pull request 168).
MEASURED_EFFICIENCY = 0.69

# Seconds to launch a round of permutations besides its hop. Measured in a loop with barriers, with
# 1 to 16 KiB: 4.5 to 5.5 us on v5p, 5.6 to 5.9 on v6e, where large payloads say 2.29.
_V5P_LAUNCH, _V6E_LAUNCH, _OTHER_LAUNCH = 3.55e-6, 4.6e-6, 4e-6
_LAUNCHES = (1.29e-6, 4.9e-6)  # of all that were measured

# Seconds to launch a collective besides its hops: an all-gather of 128 KiB along 4 chips of v5e
# takes 8 us (the book, chapter 3), one of four chips of 7x 13.2 (fitted to those of tpu-recipes).
_V5E_COLLECTIVE, _V7X_COLLECTIVE, _OTHER_COLLECTIVE = 2.7e-6, 11.2e-6, 7e-6
_COLLECTIVES = (_V5E_COLLECTIVE, _V7X_COLLECTIVE)

# Fitted by `scripts/fit_device_model SLICE` to all rounds of `ring` and `row_pair` for
# 10 and 100 MB of float32, on v2:8x8 less 2x2@2,2, v3:16x32 less 4x2@6,14, on v5e:16x16 (--idle)
# and v6e:16x16 less 2x2@2,2, and on v4:4x4x1, v5p:4x4x1 and tpu7x:4x4x1 less 2x2@0,0; on v6e with
# LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=32768, so that 100 MB are in HBM, as in a step
# that needs VMEM for other things. libtpu 0.0.48.1; for v2 and 7x 0.0.51.
_ESTIMATED = "as estimated by the TPU compiler, not measured"
_PRODUCTS = (
    f"{_ESTIMATED}; clock not published; from the TFLOP/s of {_CLOUD} with products per cycle:"
)


_V2 = DeviceModel(
    0, 328.7, 0.01091, 0.009075, launch=_OTHER_LAUNCH, clock=700e6, devices=2,
    source=f"{_ESTIMATED}; 700 MHz: {_CACM}",
)  # fmt: skip
_V3 = DeviceModel(
    0, 389.1, 0.01115, 0.009243, launch=_OTHER_LAUNCH, clock=940e6, devices=2,
    source=f"{_ESTIMATED}; 940 MHz: {_CACM}",
)  # fmt: skip
_V4 = DeviceModel(
    3231, 0, 0.01179, 0.009023, launch=_OTHER_LAUNCH, clock=1.05e9, devices=2,
    source=f"{_PRODUCTS} 8 of 128x128",
)  # fmt: skip
_V5E = DeviceModel(
    1863, 1722, 0.007561, 0.007367, launch=_OTHER_LAUNCH, clock=1.5e9, devices=1,
    source=f"{_PRODUCTS} 4 of 128x128",
)  # fmt: skip
_V5P = DeviceModel(
    2738, 1311, 0.003125, 0.003693, launch=_V5P_LAUNCH, clock=1.75e9, devices=1,
    source=f"{_PRODUCTS} 8 of 128x128",
)  # fmt: skip
_V6E = DeviceModel(
    3303, 1450, 0.003501, 0.005579, launch=_V6E_LAUNCH, clock=1.75e9, devices=1,
    source=f"{_PRODUCTS} 4 of 256x256",
)  # fmt: skip
_V7X = DeviceModel(
    2408, 1434, 0.001999, 0.003377, launch=_OTHER_LAUNCH, clock=2.2e9, devices=2,
    source=f"{_PRODUCTS} 8 of 256x256",
)  # fmt: skip


def _network(
    bandwidth: float, source: str, model: DeviceModel | None, memory_bandwidth: float,
    rates: tuple[float, float], *, collective: float = _OTHER_COLLECTIVE, has_kernel: bool = False,
) -> Network:  # fmt: skip
    return Network(
        bandwidth, _HOP, 0.0, source, model, memory_bandwidth, has_kernel, collective,
        MEASURED_EFFICIENCY, spread=NetworkRange(rates, _LAUNCHES, _COLLECTIVES),
    )  # fmt: skip


_V2_LINKS = f"496 Gbit/s a link each way: {_CACM}"
_V3_LINKS = f"656 Gbit/s a link each way: {_CACM}; others say 70 and 100 GB/s"
_V4_LINKS = f"45 GB/s a link: {_BOOK}; 50 by Jouppi et al., TPU v4 (ISCA 2023)"
_V5E_LINKS = f"95 % of 45 GB/s, measured for all-gathers: {_BOOK}, chapter 3"
_V7X_LINKS = "measured for all-gathers of four chips: tpu-recipes, microbenchmarks/ironwood"

#: TPU generations by name.
NETWORKS = {
    "v2": _network(62e9, _V2_LINKS, _V2, 700e9, (53e9, 62e9)),
    "v3": _network(82e9, _V3_LINKS, _V3, 900e9, (70e9, 100e9)),
    "v4": _network(45e9, _V4_LINKS, _V4, 1.2e12, (43e9, 50e9), has_kernel=True),
    "v5e": _network(
        42.75e9, _V5E_LINKS, _V5E, 819e9, (37e9, 45e9), collective=_V5E_COLLECTIVE
    ),
    "v5p": _network(86.3e9, _MARIN, _V5P, 2.765e12, (86.3e9, 90e9), has_kernel=True),
    "v6e": _network(86.8e9, _MARIN, _V6E, 1.64e12, (86.8e9, 90e9), has_kernel=True),
    "v7x": _network(
        89.25e9, _V7X_LINKS, _V7X, 7.38e12, (89.25e9, 90e9), collective=_V7X_COLLECTIVE,
        has_kernel=True,
    ),
}  # fmt: skip


def network_for(topology: Topology) -> Network:
    """Return the network of the TPUs of `topology`, or `DEFAULT` if they are of no known kind."""
    kind = getattr(topology.devices[0], "device_kind", "") if topology.devices else ""
    return NETWORKS.get(tpu_generation(str(kind)) or "", DEFAULT)


def parse_network(
    link: Network | float | str = DEFAULT,
    latency: float | str | None = None,
    overhead: float | str | None = None,
) -> Network:
    """Build a network from a user's description.

    Args:
        link: A network, the name of a TPU generation, or a rate: bytes per second, or text such as
            ``"50GB/s"``. Only generations come with a device model.
        latency, overhead: Seconds per hop, and per transfer at the sender, or text such as
            ``"0.5us"``. By default those of `link`, or of `DEFAULT` if `link` is a rate.
    """
    if isinstance(link, Network):
        base = link
    elif isinstance(link, str) and link in NETWORKS:
        base = NETWORKS[link]
    elif not isinstance(link, (str, Real)):
        raise ArgumentError(
            f"a link is a rate such as '50GB/s', a TPU generation or a Network, not {link!r:.60}"
        )
    else:
        rate = parse_rate(link) if isinstance(link, str) else float(link)
        base = replace(DEFAULT, bandwidth=rate, source="as given")
    if latency is not None:
        base = replace(base, latency=_seconds(latency))
    return base if overhead is None else replace(base, overhead=_seconds(overhead))


def _seconds(time: float | str) -> float:
    return parse_time(time) if isinstance(time, str) else float(time)
