"""`tree`: all-reduce along many spanning trees at once, on any mesh that hangs together.

Beyond the paper, and near what the links can do at all. The payload is cut into chunks, and each is
summed along a spanning tree of the live chips (`ftmesh.algorithms.spanning_trees`), up and down every edge of
it once (`ftmesh.algorithms.tree_rounds`). Sums and results travel at the same time, so that links are
busy from the beginning to the end; in return there are no halves, and nobody owns a chunk. What
answers an earlier message is the result, and is copied; other messages are added.

Into how many chunks a payload is best cut depends on its size: few for little, since every round
takes its time, and many for much, since the first and the last rounds leave links idle.
"""

from __future__ import annotations

import numpy as np

from ftmesh.algorithms.leaf_chips import LeafChips
from ftmesh.algorithms.spanning_trees import grow_trees
from ftmesh.algorithms.tree_rounds import NONE, Index, Rounds, order_messages
from ftmesh.errors import PlanError
from ftmesh.schedule.phase import Phase
from ftmesh.schedule.schedule import Schedule
from ftmesh.schedule.transfers import ADD, COPY, Transfers, Ints, row_key, make_transfers
from ftmesh.topology.graph import LinkGraph
from ftmesh.topology.topology import Topology

MOST_TREES = 256
NUM_CHUNKS = 256  # where nobody says how many
BALANCES = (1.5, 3.0)  # see `ftmesh.algorithms.spanning_trees`: which is better is found by trying
WORK = 250_000  # ranks times chunks, of all tries together
LARGE = 1_000_000  # ranks times chunks above which orders are turned once: a round in 300 more


def build_schedule(
    topology: Topology,
    num_chunks: int = NUM_CHUNKS,
    *,
    width: int = 1,
    balance: float | None = None,
    lag: int = 0,
    feeding: bool = False,
) -> Schedule:
    """A schedule in which the payload is cut into so many chunks.

    A link carries up to `width` chunks a round, each in a lane of its own. Unless a `balance` is
    given some are tried, but on large meshes one. With a `lag` it is for an executor without
    barriers: what a link has carried is there so many rounds late, while the link goes on. With
    `feeding`, chips that hang on one link take no part in trees: they are fed before and after
    (`ftmesh.algorithms.leaf_chips`).
    """
    if num_chunks < 1:
        raise PlanError(f"a payload is cut into one chunk or more, not into {num_chunks}")
    if lag < 0:
        raise PlanError(f"a lag is a number of rounds, not {lag}")
    if topology.num_live < 2:
        raise PlanError(f"a single {topology.noun} has nothing to sum")
    if len(topology.components()) > 1:
        raise PlanError(f"no link joins some of its {topology.noun}s to the others")
    graph = LinkGraph.from_topology(topology)
    if not feeding:
        trees = Phase("packed trees", _trees(graph, num_chunks, width, balance, lag))
        return Schedule(topology, "tree", num_chunks, (trees,))
    pendants = LeafChips.from_graph(graph)
    others = pendants.others
    if len(others) == 1 or not len(pendants.rank):
        which = "all of" if len(others) == 1 else "none of"
        raise PlanError(f"{which} its {topology.noun}s hang on one link: plan without feeding")
    columns = _trees(pendants.graph_of_others, num_chunks, width, balance, lag)
    columns = columns.replace(src=others[columns.src], dst=others[columns.dst])
    feeding_in = Phase("feeding in", pendants.fed(num_chunks))
    phases = feeding_in, Phase("packed trees", columns), feeding_in.mirrored("handing on")
    return Schedule(topology, "tree", num_chunks, phases)


def _trees(graph: LinkGraph, num_chunks: int, width: int, balance: float | None, lag: int) -> Transfers:
    """The transfers along trees."""
    tries = BALANCES[: max(1, WORK // (graph.num_ranks * num_chunks))]
    tries = tries if balance is None else (balance,)
    found = min((_rounds(graph, num_chunks, width, each, lag) for each in tries), key=np.max)
    link, chunk = np.nonzero(found != NONE)
    now, answer = found[link, chunk], found[link ^ 1, chunk]
    return make_transfers(
        round=now,
        lane=graph.lane[link] * width + (_places(link, now) if width > 1 else 0),
        src=graph.source[link],
        dst=graph.target[link],
        chunk=chunk,
        op=np.where(answer < now, COPY, ADD),
    )


def _rounds(graph: LinkGraph, num_chunks: int, width: int, balance: float, lag: int) -> Rounds:
    """The rounds of all messages, along trees that balance links so."""
    trees = grow_trees(graph, min(MOST_TREES, num_chunks), num_chunks / width, balance=balance, lag=lag)
    turns = 1 if graph.num_ranks * num_chunks > LARGE else 2
    return order_messages(graph, trees, num_chunks, turns=turns, width=width, lag=lag)


def _places(link: Index, now: Ints) -> Index:
    """For each message, how many the link carries before it in its round."""
    key = row_key(link, now)
    order = np.argsort(key, kind="stable")
    place = np.empty(len(key), np.intp)
    place[order] = np.arange(len(key)) - np.searchsorted(key[order], key[order])
    return place
