"""What a self-test is asked to do, as the parent passes it on to its workers."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass

TIMEOUT = 60.0  # seconds for a check, compilation included
LIMIT = 600.0  # for the whole test
JOIN_TIMEOUT = 300.0  # for all processes to start


@dataclass(frozen=True)
class Settings:
    """The arguments of a self-test.

    Attributes:
        journal: Path of the journal.
        deadline: When the whole test must be over, in seconds since 1970.
        mesh: The mesh to emulate on CPU devices; None tests the devices that JAX has.
        failed, failed_links, wrap: As on the command line.
        timeout: Seconds for a check.
        payloads: Bytes to time sums of; none for those that suit the devices.
        only: Check names to run, or beginnings of names; none for all.
        kernels: Whether Pallas kernels are run.
        coordinator, num_processes, process_id: The other processes; None lets JAX find them.
        join_timeout: Seconds for all of them to come.
    """

    journal: str
    deadline: float
    mesh: str | None = None
    failed: str | None = None
    failed_links: str = ""
    wrap: str | None = None
    timeout: float = TIMEOUT
    payloads: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    kernels: bool = True
    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    join_timeout: float = JOIN_TIMEOUT

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.time()

    def shared(self) -> dict[str, object]:
        """Return what all processes must have been given alike, by option."""
        names = ("failed", "failed_links", "wrap", "timeout", "payloads", "only", "kernels")
        return {f"--{name.replace('_', '-')}": getattr(self, name) for name in names}

    def to_json(self) -> str:
        """Return the settings as an argument for a worker."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        """Return the settings that `to_json` wrote."""
        values = json.loads(text)
        lists = {name: tuple(values[name]) for name in ("payloads", "only")}
        return Settings(**{**values, **lists})
