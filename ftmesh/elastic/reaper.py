"""A program that kills sessions once its stdin closes, however its launcher ended.

The line ``+12`` puts session 12 under its watch, ``-12`` releases it. It is run by path and imports
only the standard library, so it starts at once.
"""

import contextlib
import os
import signal
import sys
import time

PROC = "/proc"  # Linux only
KILL_ATTEMPTS = 500
RETRY_SECONDS = 0.01


def main() -> None:
    """Read lines until stdin closes, then kill what is left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    kill(sessions)


def kill(sessions: set[int]) -> None:
    """Kill sessions, again while a process in them was quick enough to start another."""
    for _ in range(KILL_ATTEMPTS):
        sessions = {session for session in sessions if send(session, signal.SIGKILL)}
        if not sessions:
            return
        time.sleep(RETRY_SECONDS)


def send(session: int, *signums: int) -> bool:
    """Send signals to every process of a session; return whether there was any."""
    groups = groups_of(session)
    for group in groups:
        for signum in signums:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signum)
    return bool(groups)


def groups_of(session: int) -> set[int]:
    """Return the process groups of a session in which something runs.

    Shells and ``timeout`` put jobs into groups of their own. Without /proc only the first group of
    a session is known.
    """
    if not os.path.exists(f"{PROC}/self/stat"):
        try:
            os.killpg(session, 0)
        except (ProcessLookupError, PermissionError):  # the latter if all have exited
            return set()
        return {session}
    groups = set()
    for name in filter(str.isdigit, os.listdir(PROC)):
        with contextlib.suppress(OSError), open(f"{PROC}/{name}/stat", "rb") as file:
            # "12 (any name) S parent group session ..."
            state, _, group, its_session = file.read().rpartition(b")")[2].split()[:4]
            if int(its_session) == session and state not in b"ZX":
                groups.add(int(group))
    return groups


if __name__ == "__main__":
    main()
