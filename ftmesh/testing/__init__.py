"""For tests: emulated devices, which load JAX on first use, and faults to inject into a run."""

from typing import TYPE_CHECKING

from ftmesh.optional_deps import lazy_attributes

if TYPE_CHECKING:
    from ftmesh.testing.emulation import cpu_grid as cpu_grid
    from ftmesh.testing.emulation import on_one_device as on_one_device
    from ftmesh.testing.emulation import request_cpu_devices as request_cpu_devices
    from ftmesh.testing.emulation import shard_map_on_one_device as shard_map_on_one_device

__all__ = ["cpu_grid", "on_one_device", "request_cpu_devices", "shard_map_on_one_device"]

if not TYPE_CHECKING:  # so that type checkers report names that do not exist
    __getattr__ = lazy_attributes(__name__, dict.fromkeys(__all__, "ftmesh.testing.emulation"))
