"""Place: what the mesh of a pod is, and which part of it each host has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftmesh.errors import ArgumentError
from ftmesh.launch.environment import check_pod
from ftmesh.topology.notation import Block, format_shape, parse_shape


@dataclass(frozen=True)
class Place:
    """What the mesh is, and which part of it each host has."""

    mesh: str
    blocks: tuple[Block, ...]

    @staticmethod
    def of(mesh: str, host_shape: str | None, hosts: int, devices_per_host: int) -> Place:
        """Hosts one after another, x first, each with a block of `host_shape`; else of rows."""
        shape = parse_shape(mesh)
        check_pod(hosts, devices_per_host)
        if host_shape is None:
            host = _rows(shape, devices_per_host)
        else:
            host = parse_shape(host_shape)
            host += (1,) * (len(shape) - len(host))
        number, each = 1, 1
        for size, part in zip(shape, host, strict=False):
            number, each = number * (size // part), each * part
            if size % part:
                number = 0
        if len(host) != len(shape) or number != hosts or each != devices_per_host:
            raise ArgumentError(
                f"{hosts} hosts of {format_shape(host)}, each with {devices_per_host} devices, do "
                f"not fill mesh {mesh}: give another --host-shape, such as 2x2"
            )
        grid = [size // part for size, part in zip(shape, host, strict=True)]
        blocks = []
        for index in range(hosts):
            low = []
            for count, part in zip(grid, host, strict=True):
                index, place = divmod(index, count)
                low.append(place * part)
            blocks.append(Block(host, tuple(low)))
        return Place(format_shape(shape), tuple(blocks))


def _rows(shape: Sequence[int], devices: int) -> tuple[int, ...]:
    """The block that so many devices fill, row by row, if there is one."""
    block = []
    for size in shape:
        part = min(size, devices)
        block.append(part)
        devices = -(-devices // part)
    return tuple(block)
