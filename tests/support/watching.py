"""Records on which devices a process compiles programs and puts arrays.

Nothing runs on a device for which nothing is compiled; all compilation goes through one function
of JAX.
"""

from unittest.mock import patch

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import pxla
from jax._src.lib import xla_client


class DeviceWatcher:
    """`used` has the indices of these devices in `jax.devices()`."""

    def __init__(self):
        self.used = set()
        self._patches = []

    def __enter__(self):
        def compile_and_record(backend, computation, devices, *args, **options):
            self._record(np.asarray(devices).flat)
            return compile_(backend, computation, devices, *args, **options)

        def recording(put):
            def put_and_record(aval, sharding, arrays, devices, *args, **options):
                self._record(devices)
                return put(aval, sharding, arrays, devices, *args, **options)

            return put_and_record

        compile_ = compiler.compile_or_get_cached
        self._patches = [patch.object(compiler, "compile_or_get_cached", compile_and_record)]
        for module in (pxla, xla_client):
            original = module.batched_device_put
            self._patches.append(patch.object(module, "batched_device_put", recording(original)))
        for patched in self._patches:
            patched.start()
        return self

    def __exit__(self, *error):
        for patched in self._patches:
            patched.stop()

    def _record(self, devices):
        indices = {device: index for index, device in enumerate(jax.devices())}
        self.used |= {indices[device] for device in devices if isinstance(device, jax.Device)}
