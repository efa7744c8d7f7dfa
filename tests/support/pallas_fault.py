"""Run a kernel with a planted fault: ``python pallas_fault.py "a credit too few"``."""

import os
import sys
import threading

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import numpy as np

from tests.support.kernel_faults import PLANT
from tests.support.pallas_programs import crossing_loop, make_program, run_on_devices

TIMEOUT, CORRECT_TIMEOUT = 20, 200  # seconds; a correct kernel takes three
HANGS = 3  # exit status


def run():
    held = np.ones((2, 1, 8, 128), np.int32)
    run_on_devices(make_program([crossing_loop(6, num_ranks=2, lanes=(1,))], (2, 1)), held)
    os._exit(0)


if __name__ == "__main__":
    fault = sys.argv[1]
    if fault != "none":
        PLANT[fault](setattr)
    jax.config.update("jax_disable_most_optimizations", True)
    threading.Thread(target=run).start()
    threading.Event().wait(CORRECT_TIMEOUT if fault == "none" else TIMEOUT)
    os._exit(HANGS)
