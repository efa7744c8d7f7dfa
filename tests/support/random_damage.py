"""Random connected damages, and facts about them that do not come from the package."""

import random
from itertools import product

from ftmesh.topology.topology import Topology


def random_damage(rng: random.Random, shapes, *, most_failed=0.25, most_links=3):
    """A connected mesh with random failed chips, blocks and links, of one of some shapes.

    `shapes` are the largest sizes of the axes; each axis is of 2 chips or more, and may wrap.
    """
    while True:
        shape = tuple(rng.randint(2, most) for most in rng.choice(shapes))
        wrap = tuple(rng.random() < 0.3 for _ in shape)
        everyone = list(product(*map(range, shape)))
        failed = set()
        for _ in range(rng.randint(0, 2)):  # blocks
            corner = rng.choice(everyone)
            sides = [rng.randint(1, 3) for _ in shape]
            ranges = (range(c, c + side) for c, side in zip(corner, sides, strict=True))
            failed |= set(product(*ranges)) & set(everyone)
        failed |= set(rng.sample(everyone, rng.randint(0, int(most_failed * len(everyone) / 2))))
        if len(failed) > most_failed * len(everyone):
            continue
        links = sorted(
            {(min(a, b), max(a, b)) for a, ends in adjacency(shape, wrap).items() for b in ends}
        )
        cut = rng.sample(links, rng.randint(0, min(most_links, len(links))))
        neighbours = adjacency(shape, wrap, failed, cut)
        if is_connected(neighbours):
            return Topology.grid(shape, failed=sorted(failed), failed_links=cut, wrap=wrap)


def adjacency(shape, wrap, failed=(), cut=()):
    """The live neighbours of every live chip."""
    failed, cut = set(failed), {frozenset(link) for link in cut}
    live = [c for c in product(*map(range, shape)) if c not in failed]
    neighbours = {coord: set() for coord in live}
    for a in live:
        for axis, size in enumerate(shape):
            b = (*a[:axis], a[axis] + 1, *a[axis + 1 :])
            if b[axis] == size:
                if not wrap[axis] or size <= 2:
                    continue
                b = (*a[:axis], 0, *a[axis + 1 :])
            if b in neighbours and frozenset((a, b)) not in cut:
                neighbours[a].add(b)
                neighbours[b].add(a)
    return {coord: sorted(ends) for coord, ends in neighbours.items()}


def live_neighbours(topology):
    return adjacency(topology.shape, topology.wrap, topology.failed, topology.failed_links)


def is_connected(neighbours):
    start = next(iter(neighbours))
    reached, stack = {start}, [start]
    while stack:
        for b in neighbours[stack.pop()]:
            if b not in reached:
                reached.add(b)
                stack.append(b)
    return len(reached) == len(neighbours)


def fewest_long_steps(neighbours):
    """A lower bound on the steps of more than one hop, of any ring through all chips.

    Where hops alternate between two colours, a ring with more chips of one has two of it side by
    side as often. Of the two steps of a chip with a single link, one is long; so it is wherever the
    loss of one chip would divide the mesh.
    """
    if len(neighbours) < 3:
        return 0
    ends = sum(len(others) == 1 for others in neighbours.values())
    divides = any(
        not is_connected(
            {a: [b for b in ends if b != gone] for a, ends in neighbours.items() if a != gone}
        )
        for gone in neighbours
    )
    return max(_imbalance(neighbours), (ends + 1) // 2, int(divides))


def _imbalance(neighbours):
    """How many more chips one colour has than the other; 0 if the mesh has no two colours."""
    start = next(iter(neighbours))
    colour, stack = {start: 0}, [start]
    while stack:
        here = stack.pop()
        for b in neighbours[here]:
            if b not in colour:
                colour[b] = 1 - colour[here]
                stack.append(b)
            elif colour[b] == colour[here]:
                return 0
    counts = [list(colour.values()).count(c) for c in (0, 1)]
    return abs(counts[0] - counts[1])


def find_circuit_by_force(neighbours, *, max_steps=200_000):
    """A closed walk over neighbours through all chips, found by trying all; None if there is none.

    Raises TimeoutError after `max_steps`.
    """
    num_steps = 0
    if (
        len(neighbours) < 3
        or _imbalance(neighbours)
        or any(len(b) < 2 for b in neighbours.values())
    ):
        return None
    start = min(neighbours, key=lambda coord: (len(neighbours[coord]), coord))
    walk, left = [start], set(neighbours) - {start}

    def is_hopeless():
        """Whether a chip that is left can no longer be entered and left, or be reached."""
        ends = {walk[-1], start}
        for coord in left:
            if sum(b in left or b in ends for b in neighbours[coord]) < 2:
                return True
        reached, stack = set(), [walk[-1]]
        while stack:
            for b in neighbours[stack.pop()]:
                if b in left and b not in reached:
                    reached.add(b)
                    stack.append(b)
        return len(reached) < len(left)

    def extend():
        nonlocal num_steps
        num_steps += 1
        if num_steps > max_steps:
            raise TimeoutError
        if not left:
            return start in neighbours[walk[-1]]
        if is_hopeless():
            return False
        options = [b for b in neighbours[walk[-1]] if b in left]
        for b in sorted(options, key=lambda b: (sum(c in left for c in neighbours[b]), b)):
            walk.append(b)
            left.remove(b)
            if extend():
                return True
            left.add(walk.pop())
        return False

    return walk if extend() else None
