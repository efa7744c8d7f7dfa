"""For tests and trials: emulated devices, and faults that are planted in a run.

What needs JAX is loaded when it is first asked for; faults do not.
"""

import importlib
from typing import TYPE_CHECKING, Any

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

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return getattr(importlib.import_module("ftmesh.testing.emulation"), name)
        raise AttributeError(f"module 'ftmesh.testing' has no attribute {name!r}")
