"""Parses and formats shapes, blocks, links and drawings: ``16x32``, ``4x2@6,14``, ``3,2-4,2``."""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ftmesh.errors import ArgumentError, TopologyError

Coord = tuple[int, ...]
Link = tuple[Coord, Coord]

_NUMBER = r"[0-9]{1,9}"
_SIZES, _INDICES = f"{_NUMBER}(?:x{_NUMBER})*", f"{_NUMBER}(?:,{_NUMBER})*"
_SHAPE, _COORD = re.compile(_SIZES), re.compile(_INDICES)
_BLOCK, _LINK = re.compile(f"({_SIZES})@({_INDICES})"), re.compile(f"({_INDICES})-({_INDICES})")

MAX_CHIPS = 1_000_000


class Block(NamedTuple):
    """A box of chips, written ``4x2@6,14``: its size along each axis and its low corner."""

    size: Coord
    corner: Coord

    def __str__(self) -> str:
        return f"{format_shape(self.size)}@{format_coord(self.corner)}"

    @property
    def top(self) -> Coord:
        return tuple(c + s - 1 for c, s in zip(self.corner, self.size, strict=True))

    def coords(self) -> list[Coord]:
        """Return the coords inside, x fastest."""
        axes = [range(c, c + s) for c, s in zip(self.corner, self.size, strict=True)]
        return [tuple(reversed(c)) for c in itertools.product(*reversed(axes))]


Failed = str | Block | Iterable["Block | Sequence[int]"] | None


def parse_shape(shape: str | Sequence[int]) -> Coord:
    """Return ``"16x32"`` or ``(16, 32)`` as a tuple, x first."""
    if isinstance(shape, str):
        if not _SHAPE.fullmatch(shape):
            raise TopologyError(
                f"{shape!r:.60} is not a mesh shape: write sizes joined by 'x', x first, as in "
                "'16x32'"
            )
        shape = [int(n) for n in shape.split("x")]
    sizes = _integers(shape)
    if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
        raise TopologyError(f"mesh shape {sizes} needs one to three axes, of 1 or more chips each")
    if math.prod(sizes) > MAX_CHIPS:
        raise TopologyError(
            f"mesh {format_shape(sizes)} has more than {MAX_CHIPS:,} chips, the most supported"
        )
    return sizes


def format_shape(shape: Sequence[int]) -> str:
    """Return ``(16, 32)`` as ``16x32``."""
    return "x".join(map(str, shape))


def format_coord(coord: Coord) -> str:
    """Return ``(6, 14)`` as ``6,14``."""
    return ",".join(map(str, coord))


def step_along(coord: Coord, axis: int, steps: int) -> Coord:
    """Return the coordinates `steps` up `axis` from `coord`, perhaps beyond the edge of a mesh."""
    return (*coord[:axis], coord[axis] + steps, *coord[axis + 1 :])


def parse_blocks(failed: str | Block | Iterable[Block | Sequence[int]]) -> list[Block]:
    """Return blocks from ``"2x2@2,2;4x2@6,14"``, a block, or a list of blocks or coords."""
    if isinstance(failed, str):
        pieces = (piece.strip() for piece in failed.split(";"))
        return _distinct(_parse_block(piece) for piece in pieces if piece)
    items = [failed] if isinstance(failed, Block) else failed
    if not isinstance(items, Iterable):
        raise TopologyError(
            f"failed must be text such as '2x2@2,2' or a list of coords, not {failed!r}"
        )
    return _distinct(
        _check_block(item) if isinstance(item, Block) else _single(item) for item in items
    )


def parse_chips(failed: Failed) -> frozenset[Coord]:
    """Return the coords of all chips of some blocks; see `parse_blocks`."""
    blocks = parse_blocks("" if failed is None else failed)
    return frozenset(coord for block in blocks for coord in block.coords())


def parse_links(links: str | Iterable[Sequence[Sequence[int]]] | None) -> frozenset[Link]:
    """Return links, low end first, from ``"3,2-4,2;0,0-0,1"`` or a list of pairs of coords."""
    if links is None:
        return frozenset()
    if isinstance(links, str):
        pieces = (piece.strip() for piece in links.split(";"))
        pairs = [parse_link(piece) for piece in pieces if piece]
    else:
        try:
            pairs = [(_integers(a), _integers(b)) for a, b in links]
        except (TypeError, ValueError):
            raise TopologyError(
                f"failed links are text such as '3,2-4,2' or pairs of coords, not {links!r:.60}"
            ) from None
    return frozenset((min(a, b), max(a, b)) for a, b in pairs)


def parse_link(text: str) -> Link:
    """Return ``"3,2-4,2"`` as a pair of coords."""
    match = _LINK.fullmatch(text)
    if not match:
        raise TopologyError(f"{text!r:.60} is not a link: write two coords, as in '3,2-4,2'")
    return parse_coord(match[1]), parse_coord(match[2])


def format_links(links: Iterable[Link]) -> str:
    """Return links as `parse_links` reads them."""
    return ";".join(f"{format_coord(a)}-{format_coord(b)}" for a, b in sorted(links))


def parse_coord(text: str) -> Coord:
    """Return ``6,14`` as ``(6, 14)``."""
    if not _COORD.fullmatch(text):
        raise TopologyError(f"{text!r:.60} is not a coord: write it as in '6,14', x first")
    return tuple(int(n) for n in text.split(","))


def parse_drawing(drawing: str) -> tuple[Coord, frozenset[Coord]]:
    """Return shape and failed chips of a picture: ``.`` live, ``X`` failed, x across, y down."""
    if not isinstance(drawing, str):
        raise TopologyError(f"a drawing is text, one line per row, not {drawing!r:.60}")
    rows = [row.strip() for row in drawing.strip().splitlines()]
    wrong = sorted({char for row in rows for char in row} - set(".X"))
    if wrong:
        raise TopologyError(f"a drawing uses '.' for live and 'X' for failed chips, not {wrong}")
    widths = {len(row) for row in rows}
    if len(widths) != 1 or widths == {0}:
        raise TopologyError(f"the rows of a drawing must have one length, not {sorted(widths)}")
    failed = {(x, y) for y, row in enumerate(rows) for x, char in enumerate(row) if char == "X"}
    return (widths.pop(), len(rows)), frozenset(failed)


def format_drawing(shape: Coord, failed: Collection[Coord]) -> str:
    """Return the picture that `parse_drawing` reads; one axis gives one row."""
    if len(shape) > 2:
        raise TopologyError(f"text drawings need one or two axes, not {format_shape(shape)}")
    marks = "".join(".X"[coord in failed] for coord in Block(shape, (0,) * len(shape)).coords())
    return "\n".join(marks[start : start + shape[0]] for start in range(0, len(marks), shape[0]))


def parse_wrap(wrap: bool | Sequence[bool], shape: Coord) -> tuple[bool, ...]:
    """Return whether each axis of `shape` wraps, from one value for all or one for each."""
    wraps = (wrap,) * len(shape) if isinstance(wrap, bool) else tuple(wrap)
    if not all(isinstance(value, (bool, np.bool_)) for value in wraps):
        raise TopologyError(f"wrap must be True, False, or one of these per axis, not {wrap!r}")
    return tuple(map(bool, wraps))


def parse_wrap_axes(wrap: str | None, shape: Coord) -> tuple[bool, ...] | None:
    """Return which axes of `shape` wrap by --wrap, or None if it was not given.

    >>> parse_wrap_axes("y", (4, 4)), parse_wrap_axes("none", (4, 4))
    ((False, True), (False, False))
    """
    if wrap is None:
        return None
    named, axes = "" if wrap == "none" else wrap, "xyz"[: len(shape)]
    unknown = sorted(set(named) - set(axes))
    if unknown:
        raise ArgumentError(
            f"--wrap {wrap}: mesh {format_shape(shape)} has no axis {unknown[0]!r}; write axes as "
            "in 'xy', or 'none'"
        )
    return tuple(axis in named for axis in axes)


def format_failed(failed: Iterable[Coord]) -> str:
    """Return blocks that cover exactly the given chips, as `parse_blocks` reads them.

    >>> format_failed({(2, 2), (3, 2), (2, 3), (3, 3), (7, 7)})
    '2x2@2,2;1x1@7,7'
    """
    remaining = set(failed)
    blocks = []
    while remaining:
        corner = min(remaining, key=lambda coord: coord[::-1])
        size = [1] * len(corner)
        for axis in range(len(corner)):
            while remaining.issuperset(Block(tuple(size), corner).coords()):
                size[axis] += 1
            size[axis] -= 1
        blocks.append(Block(tuple(size), corner))
        remaining.difference_update(blocks[-1].coords())
    return ";".join(map(str, blocks))


def _integers(values: Iterable[Any]) -> Coord:
    try:
        return tuple(operator.index(n) for n in values)
    except TypeError:
        raise TopologyError(f"{values!r} is not a list of integers, such as (6, 14)") from None


def _single(coord: Sequence[int]) -> Block:
    corner = _integers(coord)
    return Block((1,) * len(corner), corner)


def _parse_block(text: str) -> Block:
    match = _BLOCK.fullmatch(text)
    if not match:
        raise TopologyError(
            f"{text!r:.60} is not a block: write WxH@x,y, size first and then the low corner, "
            "as in '4x2@6,14', or on three axes WxHxD@x,y,z; join several with ';'"
        )
    return _check_block(Block(parse_shape(match[1]), parse_coord(match[2])))


def _distinct(items: Iterable[Block]) -> list[Block]:
    """Blocks without repeats; raises if they name more chips than any mesh has."""
    blocks = list(dict.fromkeys(items))
    total = sum(math.prod(block.size) for block in blocks)
    if total > MAX_CHIPS:
        raise TopologyError(
            f"{len(blocks):,} blocks name {total:,} chips in all, more than the {MAX_CHIPS:,} "
            "supported: name each chip once"
        )
    return blocks


def _check_block(block: Block) -> Block:
    block = Block(parse_shape(block.size), _integers(block.corner))
    if len(block.size) != len(block.corner):
        raise TopologyError(
            f"block {block} has a corner that does not have the {len(block.size)} axes of its size"
        )
    return block
