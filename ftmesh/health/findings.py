"""Findings: which chips and links are wrong, silent or slow, and what to leave out for that.

print(findings)         # a line for each, and last of all --failed 1x1@1,2
findings.failed         # "1x1@1,2"
findings.to_json()
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

from ftmesh.topology.notation import Coord, Link, format_coord, format_failed
from ftmesh.topology.topology import Topology
from ftmesh.units import format_time

K = TypeVar("K", bound=Hashable)
Kind = Literal["wrong", "silent", "slow"]

_FEWEST = 2  # peers that one can be compared with


@dataclass(frozen=True)
class Finding:
    """What is the matter with a chip, or with the link between two."""

    kind: Kind
    chips: tuple[Coord, ...]
    detail: str
    seconds: float | None = None  # that a slow one took
    usual: float | None = None  # and its peers
    is_sure: bool = True  # False: it is this one, or another that was tried with it

    @staticmethod
    def slow(chips: tuple[Coord, ...], seconds: float, usual: float) -> Finding:
        """One that took so long, and its peers not."""
        detail = f"{format_time(seconds)}, where others take {format_time(usual)}"
        return Finding("slow", chips, detail, seconds, usual)

    @property
    def name(self) -> str:
        """Which it is: ``chip 1,2`` or ``link 0,0-1,0``."""
        noun = "chip" if len(self.chips) == 1 else "link"
        return f"{noun} {'-'.join(map(format_coord, self.chips))}"

    def __str__(self) -> str:
        return f"{self.name} is {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Findings:
    """What an examination of a mesh has found; `untried` are the links that it did not come to."""

    topology: Topology
    found: tuple[Finding, ...]
    num_links: int
    untried: tuple[Link, ...] = ()
    seconds: float = 0.0

    @property
    def is_well(self) -> bool:
        """Whether every chip and every link was looked at and nothing was found."""
        return not self.found and not self.untried

    def chips(self, *kinds: Kind) -> tuple[Coord, ...]:
        """The chips that were found to be so."""
        return tuple(sorted({one.chips[0] for one in self._of(1, kinds)}))

    def links(self, *kinds: Kind) -> tuple[Link, ...]:
        """The links that were found to be so, their lower ends first."""
        return tuple(sorted({(one.chips[0], one.chips[1]) for one in self._of(2, kinds)}))

    def _of(self, size: int, kinds: tuple[Kind, ...]) -> list[Finding]:
        return [one for one in self.found if len(one.chips) == size and one.kind in kinds]

    @cached_property
    def masked(self) -> frozenset[Coord]:
        """The chips to leave out: wrong or silent ones, and one end of every link that is.

        Of its ends the one with more such links, or with fewer others. Slow ones stay in, and so do
        those that are not sure.
        """
        masked = set(self.chips("wrong", "silent"))
        sure = {one.chips for one in self._of(2, ("wrong", "silent")) if one.is_sure}
        left = {link for link in sure if not masked.intersection(link)}
        while left:
            bad = Counter(end for link in left for end in link)

            def badness(end: Coord, bad: Counter[Coord] = bad) -> tuple[int, int, Coord]:
                live = set(self.topology.neighbours(end)) - masked
                return bad[end], bad[end] - len(live), end

            masked.add(max(bad, key=badness))
            left = {link for link in left if not masked.intersection(link)}
        return frozenset(masked)

    @property
    def failed(self) -> str:
        """All that should be left out, what was left out before too, as ``--failed`` takes it."""
        return format_failed(self.masked | self.topology.failed)

    @property
    def links_alone(self) -> dict[str, str] | None:
        """What to leave out instead, where links were found: chips that are bad, and the links.

        As ``--failed`` and ``--failed-links`` take it; both ends of a link stay in use.
        """
        chips = {*self.chips("wrong", "silent"), *self.topology.failed}
        sure = {one.chips for one in self._of(2, ("wrong", "silent")) if one.is_sure}
        links = sorted((a, b) for a, b in sure if not chips & {a, b})
        if not links:
            return None
        links = sorted({*links, *self.topology.failed_links})
        names = (f"{format_coord(a)}-{format_coord(b)}" for a, b in links)
        return {"failed": format_failed(chips), "failed_links": ";".join(names)}

    @property
    def picture(self) -> Topology:
        """The mesh with what is wrong or silent as failed, for a drawing."""
        bad = frozenset(self.chips("wrong", "silent"))
        links = self.topology.failed_links | set(self.links("wrong", "silent"))
        if len(bad | self.topology.failed) == self.topology.num_chips:
            return self.topology.without_devices()
        bare = self.topology.without_devices()
        return replace(bare, failed=bare.failed | bad, failed_links=links)

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "mesh": self.topology.name,
            "live": self.topology.num_live,
            "links": self.num_links,
            "well": self.is_well,
            "found": [asdict(one) for one in self.found],
            "untried": [[list(a), list(b)] for a, b in self.untried],
            "failed": self.failed,
            "links_alone": self.links_alone,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        if self.is_well:
            return f"all {self.topology.num_live} chips and {self.num_links} links are well"
        lines = [str(one) for one in self.found]
        if self.untried:
            lines.append(
                f"{len(self.untried)} of {self.num_links} links were not tried, as their chips "
                "wait behind what is silent: look again without it"
            )
        if not all(one.is_sure for one in self.found):
            lines.append("to know which link it is, have each tried by itself, with --one-by-one")
        if self.links_alone:
            both = {"failed": "--failed", "failed_links": "--failed-links"}
            options = (
                f"{both[key]} {quoted(what)}" for key, what in self.links_alone.items() if what
            )
            lines.append(f"to keep both ends of a link: {' '.join(options)}; or else:")
        if self.masked:
            lines.append(f"--failed {quoted(self.failed)}")
        return "\n".join(lines)


def quoted(blocks: str) -> str:
    """Blocks as a shell takes them.

    >>> quoted("1x1@1,2"), quoted("1x1@1,2;1x1@3,3")
    ('1x1@1,2', "'1x1@1,2;1x1@3,3'")
    """
    return f"'{blocks}'" if ";" in blocks else blocks


# Judgement ------------------------------------------------------------------------------------


def minority(values: Mapping[K, Hashable]) -> list[K]:
    """Who has another value than most; where no value has more than each other, all of them.

    >>> minority({"a": 1, "b": 2, "c": 1}), minority({"a": 1, "b": 2})
    (['b'], ['a', 'b'])
    """
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return []
    (usual, most), (_, second) = counts
    return [who for who, value in values.items() if value != usual or most == second]


def laggards(
    seconds: Mapping[K, float],
    peers: Mapping[K, Hashable],
    *,
    slow: float,
    floor: float,
    among: Iterable[K] | None = None,
) -> dict[K, float]:
    """Who took more than `slow` times the median of its peers, and `floor` seconds more; and that.

    Peers are those with the same value in `peers`, fewer than two of which say nothing. With
    `among`, these alone are judged, and the others are their peers.

    >>> laggards({"a": 1.0, "b": 1.1, "c": 4.0}, dict.fromkeys("abc"), slow=3, floor=0.1)
    {'c': 1.05}
    """
    judged = set(seconds if among is None else among)
    found = {}
    for who in judged & set(seconds):
        others = [
            seconds[other]
            for other in seconds
            if other != who
            and peers[other] == peers[who]
            and (among is None or other not in judged)
        ]
        if len(others) >= _FEWEST:
            usual = statistics.median(others)
            if seconds[who] > max(slow * usual, usual + floor):
                found[who] = usual
    return found
