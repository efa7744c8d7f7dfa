"""Plan and verify all-reduces on randomly damaged meshes and tori, with `tree` and `flood`.

    python -m examples.damages                          5,000 meshes: ten minutes of one core
    python -m examples.damages --number 200 --seed 7    200 others

Chips, blocks of chips and links fail at random, in one, two or three dimensions. A connected mesh
must get a verified plan. A disconnected mesh must be rejected with an error that names its parts,
and its largest part must get a plan. Some plans are also run, on integers.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

import ftmesh
from ftmesh import PlanError, Schedule, Topology
from ftmesh.algorithms import registry
from ftmesh.command_line import MAX_SEED, Parser, whole_number
from ftmesh.testing import on_one_device
from ftmesh.topology.notation import Coord

Seconds = defaultdict[str, float]  # CPU time by activity

ALGORITHMS = "tree", "flood"
CHUNKS = 1, 2, 5, 16, 48  # of the trees
ROW_LENGTH = 37  # numbers per rank, for plans that are run


def main(argv: Sequence[str] | None = None) -> int:
    """Check the meshes, print the counts, and return the exit status."""
    parser = Parser(
        prog="python -m examples.damages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--number",
        type=whole_number(1),
        default=5000,
        metavar="N",
        help="number of meshes (default: 5000)",
    )
    parser.add_argument(
        "--computed",
        type=whole_number(0),
        default=100,
        metavar="N",
        help="meshes whose plans are also run (default: 100)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, MAX_SEED),
        default=0,
        metavar="N",
        help="random seed (default: 0)",
    )
    jax.config.update("jax_platforms", "cpu")  # for the plans that are run
    args = parser.parse_args(argv)
    jax.config.update("jax_disable_most_optimizations", True)  # most of the time is compilation
    counts: Counter[str] = Counter()
    seconds: Seconds = defaultdict(float)
    every = max(1, args.number // max(1, args.computed))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("meshes", total=args.number)
        for index, topology in enumerate(connected_meshes(args.number, args.seed, counts)):
            chunks = CHUNKS[index % len(CHUNKS)]
            run_it = index % every == 0 and counts["computed"] < 2 * args.computed
            for problem in find_problems(topology, chunks, counts, seconds, compute=run_it):
                progress.console.print(problem, markup=False, highlight=False, soft_wrap=True)
            progress.advance(bar)
    print(summary(counts, seconds))
    return int(bool(counts["rejected"] or counts["wrong"]))


def connected_meshes(number: int, seed: int, counts: Counter[str]) -> Iterator[Topology]:
    """Yield `number` connected meshes; of a disconnected one, its largest part."""
    rng = np.random.default_rng(seed)
    while number:
        topology = random_mesh(rng)
        if topology.num_live < 2:
            continue
        parts = topology.components()
        if len(parts) > 1:
            counts["cut"] += 1
            counts["wrong"] += not is_rejected(topology, parts)
            topology = topology.with_failed(coord for part in parts[1:] for coord in part)
            if topology.num_live < 2:
                continue
        counts["chips"] += bool(topology.failed)
        counts["links"] += bool(topology.failed_links)
        counts["tori"] += any(topology.wrap)
        counts[f"axes {len(topology.shape)}"] += 1
        number -= 1
        yield topology


def random_mesh(rng: np.random.Generator) -> Topology:
    """Draw a mesh with failed chips, blocks and links, connected or not."""
    sizes: tuple[int, ...]
    match rng.choice(["line", "mesh", "cube"], p=[0.1, 0.6, 0.3]):
        case "line":
            sizes = (int(rng.integers(2, 33)),)
        case "mesh":
            sizes = tuple(rng.integers(4, rng.integers(6, 18), 2).tolist())  # more small ones
        case _:
            sizes = *rng.integers(3, 5, 2).tolist(), int(rng.integers(3, 9))
    wrap = (rng.random(len(sizes)) < rng.choice([0.0, 0.5, 1.0])).tolist()
    failed: set[Coord] = set()
    for _ in range(rng.integers(0, 4)):
        low = rng.integers(0, sizes)
        size = rng.integers(1, np.minimum(4, sizes) + 1)
        corners = zip(low, low + size, sizes, strict=True)
        block = np.indices([min(high, n) - a for a, high, n in corners]).reshape(len(sizes), -1).T
        failed.update(tuple(chip) for chip in (block + low).tolist())
    fraction = rng.choice([0.0, 0.03, 0.15])
    failed.update(
        tuple(rng.integers(0, sizes).tolist()) for _ in range(int(fraction * prod(sizes)))
    )
    failed.discard(tuple(rng.integers(0, sizes).tolist()))  # at least one live chip
    without_link_failures = Topology.grid(sizes, failed=failed, wrap=wrap)
    fraction = rng.choice([0.0, 0.02, 0.1])
    links = [link for link in without_link_failures.links if link[0] < link[1]]
    dead = rng.choice(len(links), int(fraction * len(links)), replace=False) if links else ()
    return Topology.grid(sizes, failed=failed, failed_links=[links[i] for i in dead], wrap=wrap)


def is_rejected(topology: Topology, parts: Sequence[Sequence[Coord]]) -> bool:
    """True if a disconnected mesh is rejected with an error that names its parts."""
    try:
        registry.build_schedule(topology, "tree")
    except PlanError as error:
        phrases = [
            f"is cut into {len(parts)} parts",
            "the largest part",
            "the largest whole sub-mesh",
        ]
        phrases += [f"{len(part)} chips around {part[0]}" for part in parts]
        return all(phrase in str(error) for phrase in phrases)
    return False


def find_problems(
    topology: Topology,
    num_chunks: int,
    counts: Counter[str],
    seconds: Seconds,
    *,
    compute: bool,
) -> Iterator[str]:
    """Plan and verify with each algorithm; yield a line for every problem."""
    for name in ALGORITHMS:
        try:
            start = time.process_time()
            schedule = registry.build_schedule(topology, name, num_chunks=num_chunks)
            planned = time.process_time()
            ftmesh.verify(schedule)
            seconds[f"planning {name}"] += planned - start
            seconds[f"verifying {name}"] += time.process_time() - planned
            counts["verified"] += 1
            if compute:
                check_sum(schedule)
                counts["computed"] += 1
        except PlanError as error:
            counts["rejected"] += 1
            yield f"rejected by {name}: {error}"
        except (ftmesh.VerificationError, AssertionError) as error:
            counts["wrong"] += 1
            yield f"wrong by {name} on {topology}, wrapping {topology.wrap}: {error}"


def check_sum(schedule: Schedule) -> None:
    """Run the schedule on integers, all ranks on one device, and check the sum."""
    plan = ftmesh.Plan.from_schedule(schedule)
    rows = np.random.default_rng(0).integers(-1000, 1000, (schedule.topology.num_live, ROW_LENGTH))
    total = on_one_device(lambda x: plan.psum(x, "data"))(rows.astype(np.int32))
    np.testing.assert_array_equal(total, np.broadcast_to(rows.sum(axis=0), rows.shape))


def summary(counts: Counter[str], seconds: Seconds) -> str:
    """Describe the counts and times."""
    axes = sum(counts[f"axes {n}"] for n in (1, 2, 3))
    lines = [
        f"{axes} meshes: {counts['axes 1']} in 1D, {counts['axes 2']} in 2D, "
        f"{counts['axes 3']} in 3D; {counts['tori']} of them tori; failed chips in "
        f"{counts['chips']}, failed links in {counts['links']}",
        f"{counts['verified']} plans verified, {counts['computed']} of them run; "
        f"{counts['rejected']} rejected, {counts['wrong']} wrong",
        f"{counts['cut']} meshes were disconnected and rejected; their largest part was planned",
        "CPU seconds: "
        + ", ".join(f"{name} {spent:.0f}" for name, spent in sorted(seconds.items())),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
