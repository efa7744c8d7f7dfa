"""Faults to plant in the Pallas kernel, which the model and the interpreter must find.

`patch` is `setattr`, or that of pytest's `monkeypatch`.
"""

import jax.numpy as jnp
from jax import lax

from ftmesh.execute import pallas
from ftmesh.execute.pallas_rank import KernelLane, KernelRank
from ftmesh.execute.pallas_tables import SLOTS, rank_pages

grant_credit, wait_arrived = KernelLane.grant_credit, KernelLane.wait_arrived


def a_credit_too_few(patch):
    patch(KernelLane, "grant_credit", lambda lane, n: grant_credit(lane, n - (n == SLOTS)))


def a_credit_too_many(patch):
    patch(KernelLane, "grant_credit", lambda lane, n: grant_credit(lane, n + (n == SLOTS)))


def a_slot_reused_early(patch):
    """The sender is told that a slot is free once its piece has arrived, before it is read."""

    def wait_and_grant(lane, piece):
        wait_arrived(lane, piece)
        grant_credit(lane, 1)

    patch(KernelLane, "wait_arrived", wait_and_grant)
    patch(KernelLane, "grant_credit", lambda lane, n: grant_credit(lane, n) if n > 1 else None)


def no_barrier(patch):
    patch(KernelRank, "barrier", lambda rank: None)


def an_extra_wait(patch):
    def wait_twice(lane, piece):
        wait_arrived(lane, piece)
        wait_arrived(lane, piece)

    patch(KernelLane, "wait_arrived", wait_twice)


def swapped_rows(patch):
    """Rank 1 takes the first two rounds for each other; for the interpreter only."""

    def pages(*args):
        right = rank_pages(*args)
        wrong = right.at[0, jnp.array([0, 1])].set(right[0, jnp.array([1, 0])])
        return jnp.where(lax.axis_index("data") == 1, wrong, right)

    patch(pallas, "rank_pages", pages)


PLANT = {
    "a credit too few": a_credit_too_few,
    "a credit too many": a_credit_too_many,
    "a slot reused early": a_slot_reused_early,
    "no barrier": no_barrier,
    "an extra wait": an_extra_wait,
    "two rows of a table swapped": swapped_rows,
}
