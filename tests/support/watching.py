"""Watching: which devices a process has programs compiled for, and arrays put on.

Nothing runs on a device for which nothing is compiled, be it asked for by a user, by ftmesh or in
the depths of a library: all go through one function of JAX.
"""

from unittest.mock import patch

import jax
import numpy as np
from jax._src import compiler
from jax._src.interpreters import pxla
from jax._src.lib import xla_client


class Watching:
    """`used` are the places of all such devices among JAX's."""

    def __init__(self):
        self.used = set()
        self._patches = []

    def __enter__(self):
        def compiling(backend, computation, devices, *args, **options):
            self._note(np.asarray(devices).flat)
            return compile_(backend, computation, devices, *args, **options)

        def putting(put):
            def noting(aval, sharding, arrays, devices, *args, **options):
                self._note(devices)
                return put(aval, sharding, arrays, devices, *args, **options)

            return noting

        compile_ = compiler.compile_or_get_cached
        self._patches = [patch.object(compiler, "compile_or_get_cached", compiling)]
        for module in (pxla, xla_client):
            there = module.batched_device_put
            self._patches.append(patch.object(module, "batched_device_put", putting(there)))
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *error):
        for each in self._patches:
            each.stop()

    def _note(self, devices):
        places = {device: place for place, device in enumerate(jax.devices())}
        self.used |= {places[device] for device in devices if isinstance(device, jax.Device)}
