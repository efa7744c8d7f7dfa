"""Replica groups: which devices a compiled collective runs among, in all the forms it is written.

Devices are numbered as in the mesh that the program was compiled for.
"""

from __future__ import annotations

import itertools
import re

import numpy as np
from numpy.typing import NDArray

from ftmesh.errors import ArgumentError

Ids = NDArray[np.int_]


def groups_of(text: str, num_devices: int) -> list[Ids]:
    """The devices of each group in which a collective runs; of a permutation, each pair.

    >>> [group.tolist() for group in groups_of("x(), replica_groups=[2,3]<=[3,2]T(1,0)", 6)]
    [[0, 2, 4], [1, 3, 5]]
    """
    everyone = np.arange(num_devices)
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}(?!,\{)", text):
        return _listed(pairs[1])
    written = re.search(r"replica_groups=(.*)", text)
    # With a channel and without global ids, these take all partitions of the replicas named.
    takes_replicas = re.match(r"(all-reduce|all-gather|reduce-scatter)\b", text)
    names_replicas = "channel_id=" in text and "use_global_device_ids=true" not in text
    if not written or written[1].startswith("{}") or (takes_replicas and names_replicas):
        return [everyone]
    if listed := re.match(r"\{(\{.*?\})\}", written[1]):
        return _listed(listed[1])
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", written[1]):
        return list(_iota(iota[2]).reshape(_numbers(iota[1])))
    if mesh := re.match(
        r"@?mesh[\[<](.*?)[\]>](?:, ?device_ids=\(((?:[^()]|\([^()]*\))*)\))? ?\{(.*?)\}",
        written[1],
    ):
        return _along_axes(*mesh.groups())
    raise ArgumentError(
        f"replica groups are written in a form that is not known here: {written[1][:80]}; read the "
        "program with the JAX that compiled it"
    )


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _listed(text: str) -> list[Ids]:
    return [np.array(_numbers(group), int) for group in re.findall(r"\{(.*?)\}", f"{text}}}")]


def _iota(text: str) -> Ids:
    """All numbers in the order that ``[2,3]T(1,0)`` says."""
    sizes, _, order = text.partition("T")
    shape = _numbers(sizes)
    every = np.arange(np.prod(shape)).reshape(shape)
    return every.transpose(_numbers(order)) if order else every


def _along_axes(axes: str, ids: str | None, along: str) -> list[Ids]:
    """Groups along some axes of a mesh, or along parts of them.

    ``'b':(2)2`` is the part of axis b that has size 2 and comes after one of size 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    parts = [
        (name, int(before or 1), int(before or 1) * int(size or sizes[name]))
        for name, before, size in re.findall(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?", along)
    ]
    shape: list[int] = []
    grouped: list[int] = []
    for name, size in sizes.items():
        own = [(start, stop) for part, start, stop in parts if part == name]
        cuts = sorted({1, size, *(cut for part in own for cut in part)})
        for low, high in itertools.pairwise(cuts):
            if any(start <= low and high <= stop for start, stop in own):
                grouped.append(len(shape))
            shape.append(high // low)
    every = np.arange(np.prod(shape, dtype=int))
    if ids:
        every = _iota(ids).reshape(-1) if "[" in ids else np.array(_numbers(ids))
    rest = [axis for axis in range(len(shape)) if axis not in grouped]
    width = int(np.prod([shape[axis] for axis in grouped], dtype=int))
    return list(every.reshape(shape).transpose(*rest, *grouped).reshape(-1, width))
