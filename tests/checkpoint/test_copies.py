"""Copies: what devices of a lost host had comes from the partners of their ranks, to the bit."""

import jax
import numpy as np
import pytest

from ftmesh.checkpoint.snapshot import Copies
from ftmesh.errors import DamagedCheckpointError
from ftmesh.topology.partners import partners
from ftmesh.topology.topology import Topology
from tests.support.shards import given, sharded_on, state_on, tensors_in, tensors_of, without

pytestmark = pytest.mark.usefixtures("quick_compiler")

HOSTS = [x // 2 + 2 * (y // 2) for x, y in Topology.grid("4x4").coords]
PARTNERS = tuple(partners(Topology.grid("4x4"), HOSTS).tolist())
HAVE_COPIES = {(HOSTS[rank], HOSTS[partner]) for rank, partner in enumerate(PARTNERS)}


@pytest.fixture(scope="module")
def on(quick_compiler):
    return sharded_on(partners=PARTNERS)


@pytest.fixture(scope="module")
def held(on):
    """A state, the copies, and every tensor of it."""
    state, copies = state_on(on)
    return state, copies, tensors_of(on, state)


def found_without(on, held, lost, table=PARTNERS):
    """Every tensor, from what hosts that are left give of a state; of the lost nothing is left."""
    state, copies, _ = held
    host_of = dict(zip(on.devices, HOSTS, strict=True))
    gone = {device for device, host in host_of.items() if host in lost}
    state, copies = without(state, gone), without(copies, gone)
    here = [device for device in on.devices if device not in gone]
    files = given(on, state, host_of.__getitem__, devices=here, copies=Copies(copies, table))
    return tensors_in(files)


def test_the_state_has_something_to_lose(held):
    _, _, wanted = held
    assert len(wanted) > 10
    assert len(set(wanted.values())) > 9


def test_copies_are_what_the_others_own(on, held):
    state, copies, _ = held
    for own, copy in zip(*map(jax.tree.leaves, (state.rows, copies)), strict=True):
        rows = np.asarray(own).reshape(16, -1)
        there = np.asarray(copy).reshape(16, -1)
        assert rows.tobytes() == there[list(PARTNERS)].tobytes()


@pytest.mark.parametrize("lost", [set(), {0}, {1}, {2}, {3}])
def test_a_lost_host(on, held, lost):
    assert found_without(on, held, lost) == held[2]


@pytest.mark.parametrize("lost", [{0, 3}, {1, 2}, {0, 1}, {2, 3}, {0, 2}, {1, 3}])
def test_two_lost_hosts(on, held, lost):
    """Where one had the copies of the other, that is noticed; else all is there."""
    one, other = sorted(lost)
    if {(one, other), (other, one)} & HAVE_COPIES:
        with pytest.raises(DamagedCheckpointError):
            found_without(on, held, lost)
    else:
        assert found_without(on, held, lost) == held[2]


def test_another_table_of_partners_is_noticed(on, held):
    """What the tests above stand on: copies that are taken for another rank's are seen."""
    wrong = (*PARTNERS[4:], *PARTNERS[:4])
    assert found_without(on, held, {0}, PARTNERS) == held[2]
    try:
        found = found_without(on, held, {0}, wrong)
    except DamagedCheckpointError:
        return
    assert found != held[2]
