"""Keepers: those of several hosts, of which any may be gone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ftmesh.elastic.peer_store import Keeper, Refused
from ftmesh.errors import ClusterError

MOST_THREADS = 16  # that ask at once

Answer = TypeVar("Answer")
Holders = Mapping[str, Sequence[int]]  # the hosts that hold a blob, by its name


class Keepers:
    """The keepers at `addresses`, by host, for a process on one of these hosts.

    One that does not answer within `limit` seconds is left alone from then on; `say` is told of
    that, and of what is refused.
    """

    def __init__(
        self,
        addresses: Mapping[int, str],
        *,
        host: int,
        secret: str,
        limit: float,
        say: Callable[[str], None],
    ) -> None:
        hosts = sorted(addresses, key=lambda other: (other < host, other))
        self._keepers = {each: Keeper(addresses[each], secret, limit) for each in hosts}
        self._say = say
        self._lost: set[int] = set()
        self._threads = ThreadPoolExecutor(MOST_THREADS, "keepers")

    @property
    def hosts(self) -> list[int]:
        """All of them: the process's own, those after it, those before it."""
        return list(self._keepers)

    def give(self, blobs: Mapping[str, bytes], number: int) -> int:
        """Have the first `number` keepers that will take them hold blobs; how many have."""
        sums = {name: zlib.crc32(data) for name, data in blobs.items()}
        taken = 0
        for host in self.hosts:
            if taken < number and all(self._put(host, n, blobs[n], sums[n]) for n in blobs):
                taken += 1
        return taken

    def holders(self, prefix: str) -> Holders:
        """Who has which blobs whose names begin so, of all that answer."""
        asked = self._threads.map(
            lambda host: self._ask(host, lambda keeper: keeper.names(prefix)), self.hosts
        )
        holders: dict[str, list[int]] = {}
        for host, names in zip(self.hosts, asked, strict=True):
            for name in names or []:
                holders.setdefault(name, []).append(host)
        return holders

    def get(self, names: Sequence[str], holders: Holders) -> list[bytes | None]:
        """Blobs from those that hold them; None for one that nobody gives as it was."""
        return list(self._threads.map(lambda name: self._got(name, holders), names))

    def drop(self, prefix: str) -> None:
        """Have all forget the blobs whose names begin so."""
        list(
            self._threads.map(
                lambda host: self._ask(host, lambda keeper: keeper.drop(prefix)), self.hosts
            )
        )

    def close(self) -> None:
        """Leave them."""
        self._threads.shutdown()
        for keeper in self._keepers.values():
            keeper.close()

    def _got(self, name: str, holders: Holders) -> bytes | None:
        for host in holders.get(name, ()):
            data = self._ask(host, lambda keeper: keeper.get(name))
            if data is not None:
                return data
        return None

    def _put(self, host: int, name: str, data: bytes, crc32: int) -> bool:
        def put(keeper: Keeper) -> bool:
            keeper.put(name, data, crc32)
            return True

        return self._ask(host, put) is not None

    def _ask(self, host: int, question: Callable[[Keeper], Answer]) -> Answer | None:
        """What a keeper answers, if it does."""
        if host in self._lost:
            return None
        try:
            return question(self._keepers[host])
        except Refused as error:
            self._say(f"host {host}: {error}")
        except ClusterError as error:
            if host not in self._lost:  # two may have asked at once
                self._lost.add(host)
                self._say(f"host {host} has no keeper any more: {error}")
        return None
