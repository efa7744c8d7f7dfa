"""ProcessGroup: the processes of a run, what they agree on, and which of them is the primary.

    with initialize() as group:
        topology = Topology.from_devices(jax.devices(), failed="2x2@2,2")
        group = group.for_topology(topology)
        group.agree({"learning rate": 0.1})
        if group.is_primary:
            print("printed once, by one process")

All communication uses a key-value store on the hosts, not the chips, and has a timeout.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self, TypeVar

from ftmesh.distributed.kv_store import KvClient
from ftmesh.distributed.peer_monitor import format_processes as format_processes
from ftmesh.distributed.shutdown import Shutdown
from ftmesh.errors import ClusterError, PeerLostError
from ftmesh.topology.devices import process_of
from ftmesh.topology.topology import Topology

T = TypeVar("T")

TIMEOUT = 300.0  # seconds to wait for other processes, unless a caller gives another
_MAX_VALUE_CHARS = 200  # of a value in a message


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, as one of them sees it. `initialize` builds it.

    Attributes:
        process: Index of this process.
        num_processes: How many processes were started.
        timeout: Default timeout of every wait, in seconds.
        members: Processes that have devices in the program; all of them until `for_topology`.
        primary: The first member with a live device. It prints, writes files and plans for all.
        live_devices: This process's live devices; None if not known yet, or emulated.
        kv: Key-value store shared by the processes; None in a single process.
        shutdown: How this process exits with the others; None in a single process.
    """

    process: int = 0
    num_processes: int = 1
    timeout: float = TIMEOUT
    members: tuple[int, ...] = (0,)
    primary: int = 0
    live_devices: tuple[Any, ...] | None = None
    kv: KvClient | None = None
    shutdown: Shutdown | None = None

    @property
    def is_single_process(self) -> bool:
        """True if this process runs alone."""
        return self.kv is None

    @property
    def is_primary(self) -> bool:
        """True in the one process that prints and writes for all."""
        return self.process == self.primary

    @property
    def is_member(self) -> bool:
        """True if this process has devices in the program."""
        return self.process in self.members

    @property
    def default_device(self) -> Any:
        """Device for unsharded computation; None if this process has no live device."""
        return self.live_devices[0] if self.live_devices else None

    def for_topology(self, topology: Topology, *, with_idle: bool = False) -> Self:
        """Return the group with `members`, `primary` and `live_devices` for `topology`.

        Args:
            topology: The mesh of the run. Its live devices are in the program.
            with_idle: The devices of failed chips are in the program too.
        """
        if not topology.devices:
            return self
        own = tuple(device for device in topology.devices if process_of(device) == self.process)
        if self.is_single_process:
            return replace(self, live_devices=own)
        used = topology.all_devices if with_idle else topology.devices
        return replace(
            self,
            members=tuple(sorted({process_of(device) for device in used})),
            primary=min(process_of(device) for device in topology.devices),
            live_devices=own,
        )

    def barrier(self, name: str, *, timeout: float | None = None) -> None:
        """Wait until all members have called this with the same `name`.

        Raises:
            PeerLostError: Some did not call it within `timeout` seconds; the message lists them.
        """
        if self.kv is not None:
            self._exchange(self.kv, self._key(self.kv, f"barrier/{name}"), b"", name, timeout)

    def agree(self, facts: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Check that all members have the same `facts`, which are compared as text.

        Raises:
            ClusterError: In every member, if two differ; the message says who has which value.
        """
        if self.kv is None:
            return
        key = self._key(self.kv, "agree")
        own = {name: str(value) for name, value in facts.items()}
        purpose = f"agree on {_first_few(own)}"
        self._exchange(self.kv, key, json.dumps(own).encode(), purpose, timeout)
        first = self.members[0]
        if self.process == first:
            entries = self.kv.get_by_process(key)
            difference = find_difference({p: json.loads(value) for p, value in entries.items()})
            self.kv.put(f"{key}-result", json.dumps(difference).encode())
        difference = json.loads(self._get(self.kv, f"{key}-result", first, purpose, timeout))
        if difference is not None:
            raise ClusterError(f"the processes do not agree on {difference}; all need the same")

    def broadcast(self, value: Any, name: str, *, timeout: float | None = None) -> Any:
        """Return the primary's `value` in every member. What other members pass is ignored.

        Args:
            value: Bytes, or anything that JSON can hold.
            name: What it is, for messages.
            timeout: Seconds to wait for the primary.
        """
        if self.kv is None:
            return value
        key = self._key(self.kv, f"broadcast/{name}")
        if self.is_primary:
            is_raw = isinstance(value, bytes)
            self.kv.put(key, b"b" + value if is_raw else b"j" + json.dumps(value).encode())
            return value
        data = self._get(self.kv, key, self.primary, name, timeout)
        return data[1:] if data[:1] == b"b" else json.loads(data[1:])

    def gather(self, value: Any, name: str, *, timeout: float | None = None) -> dict[int, Any]:
        """Return every member's `value` (JSON) by process index, in all members."""
        if self.kv is None:
            return {self.process: value}
        key = self._key(self.kv, f"gather/{name}")
        self._exchange(self.kv, key, json.dumps(value).encode(), f"gather {name}", timeout)
        entries = self.kv.get_by_process(key)
        return {process: json.loads(entries[process]) for process in self.members}

    def primary_first(
        self, function: Callable[[], T], name: str, *, timeout: float | None = None
    ) -> T:
        """Call `function` in the primary, then in the others. Returns each process's own result.

        For work whose result the others use, such as an index of the data.
        """
        if not self.is_primary:
            self.barrier(name, timeout=timeout)
            return function()
        result = function()
        self.barrier(name, timeout=timeout)
        return result

    def before_exit(self, callback: Callable[[], Any]) -> None:
        """Call `callback` also if this process exits because another one failed."""
        if self.shutdown is not None:
            self.shutdown.before_exit(callback)

    def abort(self, reason: str, *, status: int = 1) -> NoReturn:
        """End all processes; each prints `reason` within seconds."""
        if self.shutdown is None:
            raise ClusterError(reason)
        self.shutdown.abort(reason, status)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.shutdown is not None and error is None:
            self.shutdown.leave()
        elif self.shutdown is not None and error is not None:
            self.shutdown.fail(error)

    def _key(self, kv: KvClient, name: str) -> str:
        """Return a key that no two uses of a name by these members share."""
        if not self.is_member:
            raise ClusterError(
                f"process {self.process} has no device in the program and cannot agree with the "
                "members: leave the group's `with` block, which waits for them"
            )
        checksum = zlib.crc32(json.dumps(self.members).encode())
        return kv.next_key(f"{name}/{checksum:08x}")

    def _exchange(
        self, kv: KvClient, key: str, value: bytes, purpose: str, timeout: float | None
    ) -> None:
        timeout = self.timeout if timeout is None else timeout
        kv.drop_old(key, self.process)
        kv.put(f"{key}/{self.process}", value)
        if not kv.barrier(f"{key}-meet", self.members, timeout):
            missing = set(self.members) - set(kv.get_by_process(key))
            who = f"{format_processes(missing)} did not come" if missing else "not all came"
            raise PeerLostError(f"{who} to {purpose} within {timeout:g} s")

    def _get(
        self, kv: KvClient, key: str, owner: int, purpose: str, timeout: float | None
    ) -> bytes:
        timeout = self.timeout if timeout is None else timeout
        value = kv.get(key, timeout)
        if value is None:
            raise PeerLostError(f"process {owner} did not send {purpose} within {timeout:g} s")
        return value


SINGLE_PROCESS = ProcessGroup()


def find_difference(facts_by_process: Mapping[int, Mapping[str, str]]) -> str | None:
    """Describe the first fact on which processes differ; None if they agree.

    >>> find_difference({0: {"failed chips": "none"}, 1: {"failed chips": "2x2@2,2"}})
    'failed chips: process 0 has none; process 1 has 2x2@2,2'
    """
    names = dict.fromkeys(name for facts in facts_by_process.values() for name in facts)
    for name in names:
        by_value: dict[str, list[int]] = {}
        for process, facts in sorted(facts_by_process.items()):
            by_value.setdefault(facts.get(name, "nothing"), []).append(process)
        if len(by_value) > 1:
            parts = (
                f"{format_processes(who)} {'has' if len(who) == 1 else 'have'} {_clipped(value)}"
                for value, who in by_value.items()
            )
            return f"{name}: {'; '.join(parts)}"
    return None


def _first_few(names: Iterable[str]) -> str:
    words = list(names)
    if len(words) <= 3:
        return ", ".join(words)
    return f"{', '.join(words[:2])} and {len(words) - 2} more"


def _clipped(value: str) -> str:
    value = " ".join(value.split())
    return value if len(value) <= _MAX_VALUE_CHARS else f"{value[: _MAX_VALUE_CHARS - 3]}..."
