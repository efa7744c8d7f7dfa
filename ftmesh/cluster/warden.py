"""A program that kills process groups once its standard input closes, however its launcher ended.

A line ``+12`` puts group 12 in its care and ``-12`` takes it out again. It is run by path, alone,
so that it starts at once.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the end, then kill what is left."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
