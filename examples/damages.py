"""Random damages of meshes and tori, planned by `tree` and `flood` and proved.

    python -m examples.damages                          5,000 of them: ten minutes of one core
    python -m examples.damages --number 200 --seed 7    some others

Chips, blocks of chips and links fail at random, on one axis, two or three. What hangs together must
be planned, and the plan proved, whatever it looks like; what is cut must be refused, with its parts
named, and its largest part be planned. Some plans are computed, on integers.
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
from ftmesh.command_line import MOST_SEED, Parser, whole_number
from ftmesh.testing import on_one_device
from ftmesh.topology.notation import Coord

Seconds = defaultdict[str, float]  # of one core, by what was done

ALGORITHMS = "tree", "flood"
CHUNKS = 1, 2, 5, 16, 48  # for trees
ROWS = 37  # numbers of a rank, where plans are computed


def main(argv: Sequence[str] | None = None) -> int:
    """Look at so many damages, print counts; the exit status."""
    parser = Parser(
        prog="python -m examples.damages",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--number", type=whole_number(1), default=5000, metavar="N", help="damages (5000)"
    )
    parser.add_argument(
        "--computed", type=whole_number(0), default=100, metavar="N", help="of them (100)"
    )
    parser.add_argument(
        "--seed", type=whole_number(0, MOST_SEED), default=0, metavar="N", help="of the damages (0)"
    )
    jax.config.update("jax_platforms", "cpu")  # on which some are computed
    args = parser.parse_args(argv)
    jax.config.update("jax_disable_most_optimizations", True)  # the compiler takes longest
    counts: Counter[str] = Counter()
    seconds: Seconds = defaultdict(float)
    every = max(1, args.number // max(1, args.computed))
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("damages", total=args.number)
        for number, topology in enumerate(damages(args.number, args.seed, counts)):
            chunks = CHUNKS[number % len(CHUNKS)]
            is_computed = number % every == 0 and counts["computed"] < 2 * args.computed
            for trouble in troubles(topology, chunks, counts, seconds, compute=is_computed):
                progress.console.print(trouble, markup=False, highlight=False, soft_wrap=True)
            progress.advance(bar)
    print(summary(counts, seconds))
    return int(bool(counts["refused"] or counts["wrong"]))


def damages(number: int, seed: int, counts: Counter[str]) -> Iterator[Topology]:
    """So many that hang together; of those that are cut, when that is said rightly, a part."""
    rng = np.random.default_rng(seed)
    while number:
        topology = damaged(rng)
        if topology.num_live < 2:
            continue
        parts = topology.components()
        if len(parts) > 1:
            counts["cut"] += 1
            counts["wrong"] += not is_refused(topology, parts)
            topology = topology.less(coord for part in parts[1:] for coord in part)
            if topology.num_live < 2:
                continue
        counts["chips"] += bool(topology.failed)
        counts["links"] += bool(topology.failed_links)
        counts["tori"] += any(topology.wrap)
        counts[f"axes {len(topology.shape)}"] += 1
        number -= 1
        yield topology


def damaged(rng: np.random.Generator) -> Topology:
    """A mesh with chips, blocks and links that have failed at random, connected or not."""
    sizes: tuple[int, ...]
    match rng.choice(["line", "mesh", "cube"], p=[0.1, 0.6, 0.3]):
        case "line":
            sizes = (int(rng.integers(2, 33)),)
        case "mesh":
            sizes = tuple(rng.integers(4, rng.integers(6, 18), 2).tolist())  # small ones more often
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
    share = rng.choice([0.0, 0.03, 0.15])
    failed.update(tuple(rng.integers(0, sizes).tolist()) for _ in range(int(share * prod(sizes))))
    failed.discard(tuple(rng.integers(0, sizes).tolist()))  # there is a live chip
    whole = Topology.grid(sizes, failed=failed, wrap=wrap)
    share = rng.choice([0.0, 0.02, 0.1])
    cables = [link for link in whole.links if link[0] < link[1]]
    dead = rng.choice(len(cables), int(share * len(cables)), replace=False) if cables else ()
    return Topology.grid(sizes, failed=failed, failed_links=[cables[i] for i in dead], wrap=wrap)


def is_refused(topology: Topology, parts: Sequence[Sequence[Coord]]) -> bool:
    """Whether a mesh that is cut is refused in so many words."""
    try:
        registry.schedule(topology, "tree")
    except PlanError as error:
        words = [
            f"is cut into {len(parts)} parts",
            "the largest part",
            "the largest whole sub-mesh",
        ]
        words += [f"{len(part)} chips around {part[0]}" for part in parts]
        return all(word in str(error) for word in words)
    return False


def troubles(
    topology: Topology,
    num_chunks: int,
    counts: Counter[str],
    seconds: Seconds,
    *,
    compute: bool,
) -> Iterator[str]:
    """Plan a damage by each algorithm and prove it; a line for whatever goes wrong."""
    for name in ALGORITHMS:
        try:
            begin = time.process_time()
            schedule = registry.schedule(topology, name, num_chunks=num_chunks)
            middle = time.process_time()
            ftmesh.verify(schedule)
            seconds[f"{name}, planned"] += middle - begin
            seconds[f"{name}, proved"] += time.process_time() - middle
            counts["proved"] += 1
            if compute:
                check_sum(schedule)
                counts["computed"] += 1
        except PlanError as error:
            counts["refused"] += 1
            yield f"refused by {name}: {error}"
        except (ftmesh.VerificationError, AssertionError) as error:
            counts["wrong"] += 1
            yield f"wrong by {name} on {topology}, wrapping {topology.wrap}: {error}"


def check_sum(schedule: Schedule) -> None:
    """Compute a sum of integers at all ranks at once, on one device."""
    plan = ftmesh.plan(schedule.topology, schedule=schedule, verify=False)
    rows = np.random.default_rng(0).integers(-1000, 1000, (schedule.topology.num_live, ROWS))
    total = on_one_device(lambda x: plan.psum(x, "data"))(rows.astype(np.int32))
    np.testing.assert_array_equal(total, np.broadcast_to(rows.sum(axis=0), rows.shape))


def summary(counts: Counter[str], seconds: Seconds) -> str:
    """What was looked at and found, in words."""
    axes = sum(counts[f"axes {n}"] for n in (1, 2, 3))
    lines = [
        f"{axes} damages: {counts['axes 1']} on one axis, {counts['axes 2']} on two, "
        f"{counts['axes 3']} on three; {counts['tori']} of them tori; failed chips in "
        f"{counts['chips']}, failed links in {counts['links']}",
        f"{counts['proved']} plans proved, {counts['computed']} of them computed; "
        f"{counts['refused']} refused, {counts['wrong']} wrong",
        f"{counts['cut']} were cut, and refused; of these the largest part was planned",
        "seconds of one core: "
        + ", ".join(f"{name} {spent:.0f}" for name, spent in sorted(seconds.items())),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
