"""A program that kills sessions once its standard input closes, however its launcher ended.

A line ``+12`` puts session 12 in its care and ``-12`` takes it out again. It is run by path, alone,
so that it starts at once.
"""

import contextlib
import os
import signal
import sys
import time

PROC = "/proc"  # Linux has it
KILL_TURNS = 500
KILL_TURN_SECONDS = 0.01


def main() -> None:
    """Read until the end, then kill what is left."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        (sessions.add if line[0] == "+" else sessions.discard)(int(line[1:]))
    kill(sessions)


def kill(sessions: set[int]) -> None:
    """Kill all of the sessions, again and again while one is quick enough to start another."""
    for _ in range(KILL_TURNS):
        sessions = {session for session in sessions if send(session, signal.SIGKILL)}
        if not sessions:
            return
        time.sleep(KILL_TURN_SECONDS)


def send(session: int, *signums: int) -> bool:
    """Send signals to every process of a session; whether there was any."""
    groups = groups_of(session)
    for group in groups:
        for signum in signums:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signum)
    return bool(groups)


def groups_of(session: int) -> set[int]:
    """The process groups of a session in which something runs; its first, where none can be told.

    A shell puts jobs into groups of their own, and so does ``timeout``.
    """
    if not os.path.exists(f"{PROC}/self/stat"):
        try:
            os.killpg(session, 0)
        except (ProcessLookupError, PermissionError):  # the latter where all have ended
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
