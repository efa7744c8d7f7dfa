"""Network: what the links of a mesh can do, in seconds and bytes per second, and what runs on them.

The parameter sets of TPU generations are published figures, each with its source; nobody publishes
the latency of a hop, so one figure stands for all of them. Some come with what ftmesh's executor
costs there, as the TPU compiler estimates it; `Network.wires` leaves that out.

>>> NETWORKS["v3"].bandwidth
82000000000.0
>>> network("100GB/s").latency == DEFAULT.latency
True
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
    """Full-duplex links, all alike, and a device model, or None for the wires alone.

    A transfer of b bytes over h free hops takes ``overhead + h * latency + b / bandwidth``: the
    sender spends `overhead` seconds on it, its head moves on after `latency` seconds at each hop,
    and every link on the way is taken for the time of its bytes.
    """

    bandwidth: float  # bytes per second, each way
    latency: float  # seconds per hop
    overhead: float = 0.0  # seconds at the sender, per transfer
    source: str = "as given"
    device_model: DeviceModel | None = None
    memory: float | None = None  # bytes per second between a chip and its memory, where known
    has_kernel: bool = False  # whether one kernel for all rounds has been compiled for such chips

    def __post_init__(self) -> None:
        if not (math.isfinite(self.bandwidth) and self.bandwidth > 0):
            raise ArgumentError(f"bandwidth must be above 0 bytes/s, not {self.bandwidth!r}")
        if self.memory is not None and not (math.isfinite(self.memory) and self.memory > 0):
            raise ArgumentError(f"memory must move above 0 bytes/s, not {self.memory!r}")
        for name in ("latency", "overhead"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{name} must be 0 seconds or more, not {value!r}")

    @property
    def wires(self) -> Network:
        """The wires alone."""
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

# As `ftmesh compile SLICE --failed BLOCKS --fit` finds them: fitted to all rounds of `ring` and
# `row_pair` for 10 and 100 MB of float32, on v3:16x32 less 4x2@6,14, on v5e:16x16 (--idle) and
# v6e:16x16 less 2x2@2,2, and on v4:4x4x1 and v5p:4x4x1 less 2x2@0,0; on v6e with
# LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib=32768, so that 100 MB are in HBM, as they are
# where a step needs VMEM for other things. Of what bytes cost, two streams were seen to hide 0.41
# to 0.45 on v3 and 0.36 to 0.38 on v4; on v6e 0.33 to 0.43 of some programs and nothing of others,
# 0.15 on v5e, nothing on v5p: nothing to count on (libtpu 0.0.51).
_ESTIMATED = "as estimated by the TPU compiler, libtpu 0.0.48.1, not measured"
_PRODUCTS = f"nobody publishes the clock, at which the TFLOP/s of {_CLOUD} are"
_V3 = DeviceModel(
    0, 389.1, 0.01115, packing=0.009243, clock=940e6, devices=2, hidden=0.4, hidden_mixed=0.4,
    source=f"{_ESTIMATED}; 940 MHz: {_CACM}",
)  # fmt: skip
_V4 = DeviceModel(
    3231, 0, 0.01179, packing=0.009023, clock=1.05e9, devices=2, hidden=0.36, hidden_mixed=0.36,
    source=f"{_ESTIMATED}; {_PRODUCTS} 8 products of 128x128 a cycle",
)  # fmt: skip
_V5E = DeviceModel(
    1863, 1722, 0.007561, packing=0.007367, clock=1.5e9,
    source=f"{_ESTIMATED}; {_PRODUCTS} 4 products of 128x128 a cycle",
)  # fmt: skip
_V5P = DeviceModel(
    2738, 1311, 0.003125, packing=0.003693, clock=1.75e9,
    source=f"{_ESTIMATED}; {_PRODUCTS} 8 products of 128x128 a cycle",
)  # fmt: skip
_V6E = DeviceModel(
    3303, 1450, 0.003501, packing=0.005579, clock=1.75e9,
    source=f"{_ESTIMATED}; {_PRODUCTS} 4 products of 256x256 a cycle",
)  # fmt: skip

#: The links of TPU generations, as they are published, by name; what a chip's memory moves is from
#: the same pages.
NETWORKS = {
    "v2": Network(62e9, _HOP, source=f"496 Gbit/s a link each way: {_CACM}", memory=700e9),
    "v3": Network(
        82e9, _HOP, source=f"656 Gbit/s a link each way: {_CACM}", device_model=_V3, memory=900e9
    ),
    "v4": Network(
        50e9, _HOP, source="50 GB/s a link: Jouppi et al., TPU v4 (ISCA 2023)", device_model=_V4,
        memory=1.2e12, has_kernel=True,
    ),
    "v5e": Network(
        50e9, _HOP, source=f"400 GB/s a chip, both ways, over 4 links: {_CLOUD}", device_model=_V5E,
        memory=819e9,
    ),
    "v5p": Network(
        100e9, _HOP, source=f"1200 GB/s a chip, both ways, over 6 links: {_CLOUD}", device_model=_V5P,
        memory=2.765e12, has_kernel=True,
    ),
    "v6e": Network(
        100e9, _HOP, source=f"3200 Gbit/s a chip, each way, over 4 links: {_CLOUD}", device_model=_V6E,
        memory=1.64e12, has_kernel=True,
    ),
    "v7x": Network(
        100e9, _HOP, source=f"1200 GB/s a chip, both ways, over 6 links: {_CLOUD}", memory=7.38e12,
        has_kernel=True,
    ),
}  # fmt: skip

_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
    "TPU7x": "v7x",
}  # as JAX calls them


def network_of(topology: Topology) -> Network:
    """The network of the devices of `topology`, if they are TPUs that are known, or `DEFAULT`."""
    kinds = {str(getattr(device, "device_kind", "")) for device in topology.devices[:1]}
    return next((NETWORKS[_KINDS[kind]] for kind in kinds if kind in _KINDS), DEFAULT)


def network(
    link: Network | float | str = DEFAULT,
    latency: float | str | None = None,
    overhead: float | str | None = None,
) -> Network:
    """A network from what a user says of it.

    `link` is a network, the name of a TPU generation, or a rate: bytes per second, or text such as
    ``"50GB/s"``. Times are seconds, or text such as ``"0.5us"``; what is not given is `link`'s own,
    or that of `DEFAULT` where `link` is a rate. Only the name of a generation comes with an
    device model.
    """
    if isinstance(link, Network):
        base = link
    elif isinstance(link, str) and link in NETWORKS:
        base = NETWORKS[link]
    else:
        rate = parse_rate(link) if isinstance(link, str) else float(link)
        base = replace(DEFAULT, bandwidth=rate, source="as given")
    given = {"latency": latency, "overhead": overhead}
    times = {
        name: parse_time(value) if isinstance(value, str) else float(value)
        for name, value in given.items()
        if value is not None
    }
    return replace(base, **times) if times else base  # type: ignore[arg-type]
