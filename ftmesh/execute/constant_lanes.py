"""Constant lanes: transfers in as few permutations as will do, the same ones in all rounds."""

from __future__ import annotations

import numpy as np

from ftmesh.schedule.transfers import Columns, Ints, row_key


def constant_lanes(columns: Columns) -> Ints:
    """A lane for each transfer, so that a lane is one partial permutation in all rounds together.

    The schedule's own lanes are kept where they have that property. Otherwise the distinct pairs
    of ranks are coloured so that no two of a colour share a source or a destination.
    """
    if _is_permutation(columns.lane, columns.src, columns.dst):
        return columns.lane
    seen: dict[tuple[int, int, int], int] = {}
    repeat = np.empty(len(columns.src), np.int32)  # which of several transfers of a pair in a round
    for i, key in enumerate(zip(columns.round.tolist(), columns.src.tolist(), columns.dst.tolist(),
                                strict=True)):  # fmt: skip
        repeat[i] = seen[key] = seen.get(key, -1) + 1
    edges = list(zip(columns.src.tolist(), columns.dst.tolist(), repeat.tolist(), strict=True))
    colour = _edge_colours(sorted(set(edges)))
    return np.array([colour[edge] for edge in edges], np.int32)


def _is_permutation(lane: Ints, src: Ints, dst: Ints) -> bool:
    _, first = np.unique(row_key(lane, src, dst), return_index=True)
    return all(len(np.unique(row_key(lane[first], end[first]))) == len(first) for end in (src, dst))


def _edge_colours(edges: list[tuple[int, int, int]]) -> dict[tuple[int, int, int], int]:
    """A proper edge colouring of a bipartite multigraph with as few colours as its degree (König).

    An edge takes a colour free at both ends; where there is none, the two colours free at one end
    each are swapped along the path of alternating edges that starts at the destination.
    """
    at_src: dict[int, dict[int, tuple[int, int, int]]] = {}
    at_dst: dict[int, dict[int, tuple[int, int, int]]] = {}
    colour: dict[tuple[int, int, int], int] = {}

    def free(used: dict[int, tuple[int, int, int]]) -> int:
        return next(c for c in range(len(edges)) if c not in used)

    for edge in edges:
        src, dst, _ = edge
        out, into = at_src.setdefault(src, {}), at_dst.setdefault(dst, {})
        a, b = free(out), free(into)
        if a != b:
            path, here, tables, this, other = [], dst, (at_dst, at_src), a, b
            while (step := tables[0].get(here, {}).get(this)) is not None:
                path.append(step)
                here = step[0] if tables[0] is at_dst else step[1]
                tables, this, other = tables[::-1], other, this
            for step in path:
                del at_src[step[0]][colour[step]], at_dst[step[1]][colour[step]]
            for step in path:
                colour[step] = b if colour[step] == a else a
                at_src[step[0]][colour[step]] = at_dst[step[1]][colour[step]] = step
        colour[edge] = a
        out[a] = into[a] = edge
    return colour
