"""A kernel with a fault, run for some seconds: ``python pallas_fault.py "a credit too few"``."""

import os
import sys
import threading

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np

from ftmesh.execute.pallas_lanes import OneLane
from ftmesh.execute.pallas_tables import SLOTS
from tests.support.pallas_programs import crossing_loop, on_devices, program_of

SECONDS, SOUND_SECONDS, WAITS_FOR_EVER = 20, 200, 3  # a sound one takes three

grant, wait_came = OneLane.grant, OneLane.wait_came


def plant(fault):
    if fault == "a credit too few":
        OneLane.grant = lambda self, number: grant(self, number - (number == SLOTS))
    elif fault == "a wait too many":
        OneLane.wait_came = lambda self, piece: (wait_came(self, piece), wait_came(self, piece))


def run():
    held = np.ones((2, 1, 8, 128), np.int32)
    on_devices(program_of([crossing_loop(6, num_ranks=2, lanes=(1,))], (2, 1)), held)
    os._exit(0)


if __name__ == "__main__":
    plant(sys.argv[1])
    jax.config.update("jax_disable_most_optimizations", True)
    threading.Thread(target=run).start()
    threading.Event().wait(SOUND_SECONDS if sys.argv[1] == "nothing" else SECONDS)
    os._exit(WAITS_FOR_EVER)
