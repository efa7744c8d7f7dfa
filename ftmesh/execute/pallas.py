"""The Pallas executor: one kernel runs all rounds of a program's loops, on TPUs.

It does what the loops of `ppermute` do, bit for bit. Elsewhere than on TPUs the kernel is
interpreted, by JAX: slow, and good for tests.
"""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ftmesh.errors import CollectiveError
from ftmesh.execute import _compat
from ftmesh.execute.context import Setting
from ftmesh.execute.lowering import Loop, Program
from ftmesh.execute.pallas_kernel import kernel
from ftmesh.execute.pallas_rank import WIDTH, Work
from ftmesh.execute.pallas_tables import cuts, headings, pages, partners
from ftmesh.schedule.transfers import COPY
from ftmesh.topology.devices import platform_of, process_of

TILE_BYTES = 4096
PIECE_BYTES = 256 * 2**10  # the most that travels at once
VMEM_BYTES = 10 * 2**20  # the most that a kernel takes; the smallest chips have 16 MiB
ADDED = ("float32", "bfloat16", "int32", "uint32")
REFUSED = {"TPU v2", "TPU v3"}
INSTEAD = "plan with executor='ppermute'"
INTERPRET = pltpu.InterpretParams()


def run_loops(
    buffer: jax.Array, loops: tuple[Loop, ...], program: Program, setting: Setting
) -> jax.Array:
    """Run loops of a program on one rank's buffer."""
    if not loops:
        return buffer
    wire = jnp.dtype(setting.wire.partials or buffer.dtype)
    _check_devices(program, setting.emulated)
    _check_dtypes(buffer.dtype, wire, loops)
    given = buffer.dtype
    if given == jnp.float16:  # of which kernels take none; it is only copied
        buffer, wire = lax.bitcast_convert_type(buffer, jnp.int16), jnp.dtype(jnp.int16)
    tile = TILE_BYTES // WIDTH // min(buffer.dtype.itemsize, wire.itemsize)
    laid = _in_tiles(buffer, tile)
    chunk_rows = laid.shape[1]
    if (rows := program.num_chunks * chunk_rows) >= 2**31:
        raise CollectiveError(
            f"the Pallas executor counts rows of {WIDTH} numbers in 32 bits, and this buffer has "
            f"{rows:,}: sum in smaller buckets, or {INSTEAD}"
        )
    num_partners = partners(loops, program.num_ranks).shape[1]
    work = Work(
        axis_name=setting.axis_name,
        cuts=cuts(loops, chunk_rows=chunk_rows, tile=tile, most=_most_rows(loops, buffer, tile)),
        chunk_rows=chunk_rows,
        tile=tile,
        dtype=buffer.dtype,
        wire=wire,
        num_partners=num_partners,
    )
    if work.vmem_bytes > VMEM_BYTES:
        raise CollectiveError(
            f"transfers of this program overlap, so that each is one piece, and {work.vmem_bytes} "
            f"bytes of them do not fit the {VMEM_BYTES} bytes of VMEM that the Pallas executor "
            f"takes: sum in smaller buckets, or {INSTEAD}"
        )
    # A kernel counts in 32 bits, and does not know of axes along which values vary.
    with jax.enable_x64(False), _compat.unchecked_types():
        out = _call(laid.reshape(-1, WIDTH), work, loops, program)
    out = _out_of_tiles(out, buffer.shape)
    return out if out.dtype == given else lax.bitcast_convert_type(out, given)


def _call(buffer: jax.Array, work: Work, loops: tuple[Loop, ...], program: Program) -> Any:
    """Run the kernel on the buffer of this rank, in place."""
    heading = jnp.asarray(headings(loops, program.num_ranks))[lax.axis_index(work.axis_name)]
    table = pages(work.cuts, heading, work.num_partners)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)

    return pl.pallas_call(
        partial(kernel, work),
        out_shape=jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=work.scratch(table.shape[-1]),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(
            collective_id=_collective_id(loops, program), has_side_effects=True
        ),
        interpret=INTERPRET if is_interpreted(program) else False,
        name="ftmesh_loops",
    )(heading, table, buffer)


def is_interpreted(program: Program) -> bool:
    """Whether the devices of a program, or JAX's own where they are not known, are no TPUs."""
    platforms = {device.platform for device in program.devices} or {jax.default_backend()}
    return platforms != {"tpu"}


def _check_devices(program: Program, emulated: bool) -> None:
    """Refuses devices that the kernel cannot run on."""
    if emulated:
        raise CollectiveError(
            "the Pallas executor moves data between devices, and a vmap has one: use shard_map "
            f"over plan.jax_mesh, or {INSTEAD}"
        )
    for kind in sorted({platform_of(device) for device in program.devices} & REFUSED):
        raise CollectiveError(
            f"the Pallas executor does not run on {kind}, for which its kernel cannot be compiled: "
            f"{INSTEAD}"
        )
    if is_interpreted(program) and len({process_of(device) for device in program.devices}) > 1:
        raise CollectiveError(
            "elsewhere than on TPUs the Pallas executor is interpreted, which takes all devices in "
            f"one process, and these are of several: {INSTEAD}"
        )


def _check_dtypes(dtype: Any, wire: Any, loops: tuple[Loop, ...]) -> None:
    """Refuses numbers that the kernel cannot add, or cast."""
    is_added = any(lane.op != COPY for loop in loops for lane in loop.lanes)
    for each in (dtype, wire):
        if each.name not in ADDED and (is_added or wire != dtype or each.itemsize > 4):
            raise CollectiveError(
                f"the Pallas executor does not add {each.name}, only {', '.join(ADDED)}: cast to "
                f"one of these, or {INSTEAD}"
            )


def _in_tiles(buffer: jax.Array, tile: int) -> jax.Array:
    """The buffer as ``[chunks, rows, 128]``, chunks filled up to whole tiles of rows."""
    num_chunks, size = buffer.shape[0], math.prod(buffer.shape[1:])
    rows = -(-size // (tile * WIDTH)) * tile
    if rows * WIDTH != size:
        room = (0, 0), (0, rows * WIDTH - size)
        buffer = jnp.pad(buffer.reshape(num_chunks, size), room)
    return buffer.reshape(num_chunks, rows, WIDTH)


def _out_of_tiles(laid: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The buffer of some shape that was laid into tiles."""
    if laid.size != math.prod(shape):
        laid = laid.reshape(shape[0], -1)[:, : math.prod(shape[1:])]
    return laid.reshape(shape)


def _most_rows(loops: tuple[Loop, ...], buffer: jax.Array, tile: int) -> int:
    """The most rows of a piece: as many as fit in all slots of all lanes."""
    lanes = max(len(loop.lanes) for loop in loops)
    row_bytes = WIDTH * int(buffer.dtype.itemsize)
    most = min(PIECE_BYTES, VMEM_BYTES // (10 * lanes)) // row_bytes
    return max(tile, most // tile * tile)


def _collective_id(loops: tuple[Loop, ...], program: Program) -> int:
    """The number of the barrier that a kernel uses, the same in all processes.

    Kernels of which both may run at once should have different ones, unless they have the same
    partners everywhere. The two halves and the whole of a program always do; programs differ as
    their partners do, or share a number by chance. Where they share one nothing is lost, as long as
    every rank that takes part owns something: then none is done before all of these have begun.
    """
    half = 0 if loops == program.loops else 1 if loops == program.scatter else 2
    return 3 * (zlib.crc32(partners(program.loops, program.num_ranks).tobytes()) % 10) + half
