"""The links of a mesh: bandwidth and latency, per TPU generation or as given.

The parameters of TPU generations are published figures, each with its source. Nobody publishes the
latency of a hop, so one figure stands for all generations. Some generations also have a
`DeviceModel`: what ftmesh's rounds cost their devices, as estimated by the TPU compiler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ftmesh.cost.device_model import DeviceModel
from ftmesh.errors import ArgumentError
from ftmesh.topology.topology import Topology
from ftmesh.units import format_rate, format_time, parse_rate, parse_time


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
    """

    bandwidth: float
    latency: float
    overhead: float = 0.0
    source: str = "as given"
    device_model: DeviceModel | None = None
    memory_bandwidth: float | None = None
    has_kernel: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ArgumentError(f"bandwidth must be above 0 bytes/s, not {self.bandwidth!r}")
        memory = self.memory_bandwidth
        if memory is not None and not (math.isfinite(memory) and memory > 0):
            raise ArgumentError(f"memory_bandwidth must be above 0 bytes/s, not {memory!r}")
        for name in ("latency", "overhead"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name} must be 0 seconds or more, not {value!r}")

    @property
    def wires_only(self) -> Network:
        """The same network without its device model."""
        return replace(self, device_model=None) if self.device_model else self

    def __str__(self) -> str:
        text = f"links of {format_rate(self.bandwidth)} each way, {format_time(self.latency)} a hop"
        if self.overhead:
            text += f", {format_time(self.overhead)} at the sender"
        return text


DEFAULT = Network(50e9, 0.5e-6, source="round figures, as used in studies of collectives")

# "How to Scale Your Model" (Austin et al., 2025), chapter 2, puts a hop at about a microsecond.
_HOP = 1e-6
_CACM = "Jouppi et al., A Domain-Specific Supercomputer (CACM 2020)"
_CLOUD = "cloud.google.com/tpu/docs, system architecture"

# Fitted by `scripts/fit_device_model SLICE` to all rounds of `ring` and `row_pair` for
# 10 and 100 MB of float32, on v3:16x32 less 4x2@6,14, on v5e:16x16 (--idle) and v6e:16x16 less
# 2x2@2,2, and on v4:4x4x1 and v5p:4x4x1 less 2x2@0,0; on v6e with
# LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=32768, so that 100 MB are in HBM, as in a step
# that needs VMEM for other things.
_ESTIMATED = "as estimated by the TPU compiler, libtpu 0.0.48.1, not measured"
_PRODUCTS = (
    f"{_ESTIMATED}; clock not published; from the TFLOP/s of {_CLOUD} with products per cycle:"
)
_V3 = DeviceModel(
    0, 389.1, 0.01115, 0.009243, clock=940e6, devices=2, source=f"{_ESTIMATED}; 940 MHz: {_CACM}"
)
_V4 = DeviceModel(
    3231, 0, 0.01179, 0.009023, clock=1.05e9, devices=2, source=f"{_PRODUCTS} 8 of 128x128"
)
_V5E = DeviceModel(1863, 1722, 0.007561, 0.007367, clock=1.5e9, source=f"{_PRODUCTS} 4 of 128x128")
_V5P = DeviceModel(2738, 1311, 0.003125, 0.003693, clock=1.75e9, source=f"{_PRODUCTS} 8 of 128x128")
_V6E = DeviceModel(3303, 1450, 0.003501, 0.005579, clock=1.75e9, source=f"{_PRODUCTS} 4 of 256x256")

_V2_LINKS = f"496 Gbit/s a link each way: {_CACM}"
_V3_LINKS = f"656 Gbit/s a link each way: {_CACM}"
_V4_LINKS = "50 GB/s a link: Jouppi et al., TPU v4 (ISCA 2023)"
_V5E_LINKS = f"400 GB/s a chip, both ways, over 4 links: {_CLOUD}"
_V6E_LINKS = f"3200 Gbit/s a chip, each way, over 4 links: {_CLOUD}"
_SIX_LINKS = f"1200 GB/s a chip, both ways, over 6 links: {_CLOUD}"  # v5p and v7x

#: Published figures of TPU generations, by name.
NETWORKS = {  # bandwidth, latency, overhead, source, device model, memory bandwidth
    "v2": Network(62e9, _HOP, 0.0, _V2_LINKS, None, 700e9),
    "v3": Network(82e9, _HOP, 0.0, _V3_LINKS, _V3, 900e9),
    "v4": Network(50e9, _HOP, 0.0, _V4_LINKS, _V4, 1.2e12, has_kernel=True),
    "v5e": Network(50e9, _HOP, 0.0, _V5E_LINKS, _V5E, 819e9),
    "v5p": Network(100e9, _HOP, 0.0, _SIX_LINKS, _V5P, 2.765e12, has_kernel=True),
    "v6e": Network(100e9, _HOP, 0.0, _V6E_LINKS, _V6E, 1.64e12, has_kernel=True),
    "v7x": Network(100e9, _HOP, 0.0, _SIX_LINKS, None, 7.38e12, has_kernel=True),
}
_BY_DEVICE_KIND = {f"TPU {kind}": NETWORKS[kind] for kind in ("v2", "v3", "v4")} | {
    "TPU v5 lite": NETWORKS["v5e"],
    "TPU v5": NETWORKS["v5p"],
    "TPU v6 lite": NETWORKS["v6e"],
    "TPU7x": NETWORKS["v7x"],
}


def network_for(topology: Topology) -> Network:
    """Return the network of the TPUs of `topology`, or `DEFAULT` if they are of no known kind."""
    kind = getattr(topology.devices[0], "device_kind", "") if topology.devices else ""
    return _BY_DEVICE_KIND.get(str(kind), DEFAULT)


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
    else:
        rate = parse_rate(link) if isinstance(link, str) else float(link)
        base = replace(DEFAULT, bandwidth=rate, source="as given")
    if latency is not None:
        base = replace(base, latency=_seconds(latency))
    return base if overhead is None else replace(base, overhead=_seconds(overhead))


def _seconds(time: float | str) -> float:
    return parse_time(time) if isinstance(time, str) else float(time)
