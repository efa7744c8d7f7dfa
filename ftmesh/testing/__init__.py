"""For tests and trials: emulated devices, and faults that are planted in a run.

What needs JAX is loaded when it is first asked for; faults do not.
"""

from typing import TYPE_CHECKING

from ftmesh.optional_deps import later

if TYPE_CHECKING:
    from ftmesh.testing.emulation import ask_for_cpu_devices as ask_for_cpu_devices
    from ftmesh.testing.emulation import cpu_grid as cpu_grid
    from ftmesh.testing.emulation import on_one_device as on_one_device
    from ftmesh.testing.emulation import shard_map_on_one_device as shard_map_on_one_device

_OF_EMULATION = (
    "ask_for_cpu_devices",
    "cpu_grid",
    "on_one_device",
    "shard_map_on_one_device",
)


__all__ = list(_OF_EMULATION)

if not TYPE_CHECKING:  # to type checkers, a name that does not exist is an error
    __getattr__ = later(__name__, dict.fromkeys(__all__, "ftmesh.testing.emulation"))
