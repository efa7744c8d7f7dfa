"""Programs made of random transfers, which sum nothing in particular, for executors to agree on."""

import numpy as np

from ftmesh.execute.lower import IDLE, Lane, Loop, Program, Table


def random_loop(rng, *, num_ranks, num_chunks, num_rounds, ops, count=1, aligned=True):
    """Lanes with random partners, some of them none, that send random chunks or none."""
    lanes = []
    for op in ops:
        receivers = np.sort(
            rng.permutation(num_ranks)[: rng.integers(num_ranks // 2, num_ranks + 1)]
        )
        senders = rng.permutation(num_ranks)[: len(receivers)]
        source = np.full(num_ranks, -1, np.int32)
        source[receivers] = senders
        step = count if aligned else 1
        starts = np.arange(0, num_chunks - count + 1, step)
        chunks = rng.choice(starts, (num_ranks, num_rounds))
        chunks[rng.random(chunks.shape) < 0.2] = IDLE
        chunks[np.setdiff1d(np.arange(num_ranks), senders)] = IDLE
        pairs = tuple(zip(senders.tolist(), receivers.tolist(), strict=True))
        lanes.append(Lane(pairs, source, count, op, Table.of(chunks.astype(np.int32))))
    return Loop("random", num_rounds, tuple(lanes))


def program_of(loops, *, num_ranks, num_chunks, **options):
    return Program(
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        scatter=(),
        gather=tuple(loops),
        owner=None,
        depth=1,
        live=np.arange(num_ranks, dtype=np.int32),
        names=tuple(f"rank {r}" for r in range(num_ranks)),
        **options,
    )
