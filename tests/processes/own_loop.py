"""A program of a user that joins others, and does WHAT in PROCESS: own_loop.py WHAT PROCESS"""

import os
import signal
import sys
import time

import jax

from ftmesh.distributed import initialize


def main(what, who):
    if what == "joins twice":
        number = int(os.environ["FTMESH_NUM_PROCESSES"])
        me = int(os.environ["FTMESH_PROCESS_ID"])
        jax.distributed.initialize(os.environ["FTMESH_COORDINATOR"], number, me)
    group = initialize(timeout=60)
    wrong = what if group.process == who else ""
    if wrong == "raises before the block":
        raise ValueError("outside")
    with group:
        if wrong == "leaves early":
            sys.exit(3)
        if wrong == "says a word":
            sys.exit("that was all")
        if wrong == "raises":
            raise ValueError("inside")
        if wrong == "cannot speak":
            os.close(2)
            os.close(1)
            raise ValueError("unheard here")
        if wrong == "is done before the others":
            pass
        elif what == "is done before the others":
            time.sleep(2)
        elif what == "is interrupted twice":
            if group.process == who:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)
        elif what != "joins twice":
            group.barrier("a place that one of us never comes to", timeout=60)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
