"""The Pallas executor: one TPU kernel runs all rounds of a program's loops.

Its results have the same bits as those of the `ppermute` executor. On other devices than TPUs, JAX
interprets the kernel, which is slow and meant for tests.

Pieces of chunks go from a rank's buffer in HBM over the links into VMEM slots of its partner, which
adds them to the rows they are for, or copies them there. A transfer starts once its data has
arrived and a slot is free: there is one barrier at the start, and no lockstep.

Each step first starts the sends, and prefetches the rows that will be added to once they are up to
date. Then, `lag` pieces behind, it waits until what was sent has left, since its rows may be
overwritten now, adds or copies what has arrived, tells the sender that the slot is free, and writes
back. A piece for rows that another lane writes in the same round comes after that lane's.

Credits count a sender's free slots. A receiver grants all of them when it starts a loop; a sender
waits for all of them to come back when it ends it. So every semaphore ends at zero; and since a
rank cannot finish before its partners have started, no partner mistakes the barrier of a later call
for this one's.
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
from ftmesh.execute.context import ExecutionContext
from ftmesh.execute.lowering import Loop, Program
from ftmesh.execute.pallas_rank import (
    WIDTH,
    KernelLane,
    KernelRank,
    KernelSpec,
    unless,
    when,
)
from ftmesh.execute.pallas_tables import (
    RECEIVE,
    SEND,
    PieceSplit,
    partner_table,
    rank_headers,
    rank_pages,
    split_loops,
)
from ftmesh.schedule.transfers import COPY
from ftmesh.topology.devices import platform_of, process_of

TILE_BYTES = 4096
MAX_PIECE_BYTES = 256 * 2**10  # of one transfer between two ranks
MAX_VMEM_BYTES = 10 * 2**20  # of a kernel; the smallest chips have 16 MiB
SUMMABLE_DTYPES = ("float32", "bfloat16", "int32", "uint32")
UNSUPPORTED_PLATFORMS = {"TPU v2", "TPU v3"}
REMEDY = "plan with executor='ppermute'"
INTERPRET = pltpu.InterpretParams()


def run_loops(
    buffer: jax.Array, loops: tuple[Loop, ...], program: Program, context: ExecutionContext
) -> jax.Array:
    """Run loops of a program on one rank's buffer.

    Raises:
        CollectiveError: The devices, the dtype or the size are not supported.
    """
    if not loops:
        return buffer
    _check_devices(program, context.emulated)
    dtype, wire = buffer.dtype, context.wire.partials
    adds = any(lane.op != COPY for loop in loops for lane in loop.lanes)
    buffer = _to_kernel_dtype(buffer, is_added=adds or wire is not None)
    wire = jnp.dtype(wire or buffer.dtype)
    if wire != buffer.dtype:
        _check_summable(wire)
    tile = TILE_BYTES // WIDTH // min(buffer.dtype.itemsize, wire.itemsize)
    tiled = _pad_to_tiles(buffer, tile)
    chunk_rows = tiled.shape[1]
    if (rows := program.num_chunks * chunk_rows) >= 2**31:
        raise CollectiveError(
            f"the Pallas executor counts rows of {WIDTH} elements in 32 bits, and this buffer has "
            f"{rows:,}: sum in smaller buckets, or {REMEDY}"
        )
    max_rows = _max_rows(loops, buffer, tile)
    spec = KernelSpec(
        axis_name=context.axis_name,
        splits=split_loops(loops, chunk_rows=chunk_rows, tile=tile, max_rows=max_rows),
        chunk_rows=chunk_rows,
        tile=tile,
        dtype=buffer.dtype,
        wire=wire,
        num_partners=partner_table(loops, program.num_ranks).shape[1],
    )
    if spec.vmem_bytes > MAX_VMEM_BYTES:
        raise CollectiveError(
            f"transfers of this program overlap, so each is one piece, and {spec.vmem_bytes} bytes "
            f"of them do not fit the {MAX_VMEM_BYTES} bytes of VMEM that the Pallas executor uses: "
            f"sum in smaller buckets, or {REMEDY}"
        )
    # A kernel counts in 32 bits, and does not know the axes over which values vary.
    with jax.enable_x64(False), _compat.without_vma_check():
        out = _call_kernel(tiled.reshape(-1, WIDTH), spec, loops, program)
    return _from_kernel_dtype(_remove_padding(out, buffer.shape), dtype)


def _call_kernel(
    buffer: jax.Array, spec: KernelSpec, loops: tuple[Loop, ...], program: Program
) -> Any:
    """Run the kernel in place on the buffer of this rank."""
    header = jnp.asarray(rank_headers(loops, program.num_ranks))[lax.axis_index(spec.axis_name)]
    pages = rank_pages(spec.splits, header, spec.num_partners)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(kernel, spec),
        out_shape=jax.ShapeDtypeStruct(buffer.shape, buffer.dtype),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), anywhere, anywhere],
        out_specs=anywhere,
        scratch_shapes=spec.scratch_shapes(pages.shape[-1]),
        input_output_aliases={2: 0},
        compiler_params=pltpu.CompilerParams(
            collective_id=_collective_id(loops, program),
            has_side_effects=True,
            # Rows come from a table that is proved, and checking them takes a third of the kernel.
            disable_bounds_checks=True,
        ),
        interpret=INTERPRET if is_interpreted(program) else False,
        name="ftmesh_loops",
    )(header, pages, buffer)


def is_interpreted(program: Program) -> bool:
    """True if the program's devices, or JAX's if those are not known, are not TPUs."""
    platforms = {device.platform for device in program.devices} or {jax.default_backend()}
    return platforms != {"tpu"}


def _check_devices(program: Program, emulated: bool) -> None:
    if emulated:
        raise CollectiveError(
            "the Pallas executor moves data between devices, and a vmap has one: use shard_map "
            f"over plan.jax_mesh, or {REMEDY}"
        )
    for kind in sorted({platform_of(d) for d in program.devices} & UNSUPPORTED_PLATFORMS):
        raise CollectiveError(
            f"the Pallas executor does not run on {kind}: its kernel cannot be compiled there; "
            f"{REMEDY}"
        )
    if is_interpreted(program) and len({process_of(device) for device in program.devices}) > 1:
        raise CollectiveError(
            "on other devices than TPUs the Pallas executor is interpreted, which needs all "
            f"devices in one process, and these belong to several: {REMEDY}"
        )


def _pad_to_tiles(buffer: jax.Array, tile: int) -> jax.Array:
    """The buffer as ``[chunks, rows, 128]``, with chunks padded to whole tiles of rows."""
    num_chunks, size = buffer.shape[0], math.prod(buffer.shape[1:])
    rows = -(-size // (tile * WIDTH)) * tile
    if rows * WIDTH != size:
        padding = (0, 0), (0, rows * WIDTH - size)
        buffer = jnp.pad(buffer.reshape(num_chunks, size), padding)
    return buffer.reshape(num_chunks, rows, WIDTH)


def _remove_padding(tiled: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if tiled.size != math.prod(shape):
        tiled = tiled.reshape(shape[0], -1)[:, : math.prod(shape[1:])]
    return tiled.reshape(shape)


def _max_rows(loops: tuple[Loop, ...], buffer: jax.Array, tile: int) -> int:
    """The most rows of a piece, so that all slots of all lanes fit in VMEM."""
    lanes = max(len(loop.lanes) for loop in loops)
    row_bytes = WIDTH * int(buffer.dtype.itemsize)
    rows = min(MAX_PIECE_BYTES, MAX_VMEM_BYTES // (10 * lanes)) // row_bytes
    return max(tile, rows // tile * tile)


def _collective_id(loops: tuple[Loop, ...], program: Program) -> int:
    """The id of the kernel's barrier, the same in all processes.

    Kernels that may run at the same time should have different ids, unless they have the same
    partners on all ranks. The all-reduce, reduce-scatter and all-gather of a program always differ;
    two programs differ if their partners do, or collide by chance. A collision is harmless as long
    as every live rank owns a chunk: then no rank finishes before all of them have started.
    """
    part = 0 if loops == program.loops else 1 if loops == program.reduce_scatter else 2
    return 3 * (zlib.crc32(partner_table(program.loops, program.num_ranks).tobytes()) % 10) + part


# Dtypes -----------------------------------------------------------------------------------------
#
# Kernels for TPUs add few dtypes. Small integers are added in 32 bits: what is left of that sum in
# their own bits is theirs. Complex numbers are added part by part. Where nothing is added, numbers
# of 8 and 16 bits travel as integers of that size. All this gives the same bits.


def _to_kernel_dtype(buffer: jax.Array, *, is_added: bool) -> jax.Array:
    """Return `buffer` in a dtype that the kernel can copy, or add if `is_added`.

    Complex numbers get a second dimension, of their two parts.

    Raises:
        CollectiveError: There is no such dtype.
    """
    dtype = buffer.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        parts = jnp.stack([buffer.real, buffer.imag], axis=1)
        return _to_kernel_dtype(parts, is_added=is_added)
    if dtype.itemsize > 4:
        raise CollectiveError(
            f"the Pallas executor has no 64-bit numbers, and these are {dtype.name}: cast to 32 "
            f"bits, or {REMEDY}"
        )
    is_small_integer = jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4
    if is_added and is_small_integer:
        return buffer.astype(jnp.int32)
    if is_added:
        _check_summable(dtype)
    if dtype.name in SUMMABLE_DTYPES:
        return buffer
    integers = {1: jnp.int8, 2: jnp.int16}[dtype.itemsize]
    if is_small_integer:
        return buffer.astype(integers)
    return lax.bitcast_convert_type(buffer, integers)


def _from_kernel_dtype(result: jax.Array, dtype: Any) -> jax.Array:
    """Return what `_to_kernel_dtype` made of a buffer of `dtype`, in that dtype again."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(result[:, 0], result[:, 1])
    if result.dtype == dtype or jnp.issubdtype(dtype, jnp.integer):
        return result.astype(dtype)
    return lax.bitcast_convert_type(result, dtype)


def _check_summable(dtype: Any) -> None:
    """Raise CollectiveError unless the kernel can add numbers of `dtype`."""
    if dtype.name not in SUMMABLE_DTYPES:
        raise CollectiveError(
            f"the Pallas executor does not add {dtype.name}: add in float32, which is the default "
            f"of accumulate_dtype, or {REMEDY}"
        )


# The kernel -------------------------------------------------------------------------------------


def kernel(
    spec: KernelSpec, header: Any, pages: Any, aliased: Any, buffer: Any, *scratch: Any
) -> None:
    """Run the loops of `spec` on the buffer of this rank, which aliases the input."""
    rank = KernelRank(spec, header, pages, buffer, *scratch)

    @when(header[0] >= 0)  # a rank without partners is idle
    def _() -> None:
        rank.barrier()
        first = 0
        for split in spec.splits:
            lanes = [KernelLane(rank, split, i, first + i) for i in range(len(split.loop.lanes))]
            run_loop(rank, split, lanes)
            first += len(lanes)


def run_loop(rank: KernelRank, split: PieceSplit, lanes: list[KernelLane]) -> None:
    """Run all rounds of a loop, piece by piece."""
    for lane in lanes:
        lane.grant_credits()
    rank.start_page_fetch(split.first_page)
    rank.wait_for_page()
    total = split.loop.num_rounds * split.num_pieces

    def step(i: Any, carry: Any) -> Any:
        @when(True if split.lag == 0 else i < total)
        def _() -> None:
            rank.advance_page(split, i)
            if split.fetch_lag == 0:
                fetch(lanes, i)
            sends = [lane.transfer(i, SEND) for lane in lanes]
            for lane, transfer in zip(lanes, sends, strict=True):
                if rank.spec.is_cast:
                    transfer.apply(lane.stage)
            for lane, transfer in zip(lanes, sends, strict=True):
                transfer.apply(lane.send)

        if split.fetch_lag > 0:
            behind = i - split.fetch_lag
            when((behind >= 0) & (behind < total))(partial(fetch, lanes, behind))

        @when(True if split.lag == 0 else i >= split.lag)
        def _() -> None:
            then = i - split.lag
            for lane in lanes:
                lane.transfer(then, SEND).apply(lane.wait_sent)
            pending = [(lane, lane.transfer(then, RECEIVE), lane.must_wait(then)) for lane in lanes]
            for act in (KernelLane.receive, KernelLane.wait_written):
                for lane, transfer, waits in pending:
                    unless(waits)(partial(transfer.apply, partial(act, lane)))
            for lane, transfer, waits in pending:
                for act in (KernelLane.fetch_and_receive, KernelLane.wait_written):
                    when(waits)(partial(transfer.apply, partial(act, lane)))

        return carry

    lax.fori_loop(0, total + split.lag, step, 0)
    for lane in lanes:
        lane.take_credits()


def fetch(lanes: list[KernelLane], step: Any) -> None:
    """Prefetch the rows that are added to in a step, unless other lanes write them first."""
    for lane in lanes:
        if lane.lane.op != COPY:
            transfer = lane.transfer(step, RECEIVE)
            unless(lane.must_wait(step))(partial(transfer.apply, lane.fetch))
