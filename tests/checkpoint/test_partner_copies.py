"""The shards of a lost host are restored from the copies that partners have, bit for bit."""

from dataclasses import dataclass

import numpy as np
import pytest

from ftmesh.checkpoint.snapshot import PartnerCopies, ShardCopier
from ftmesh.errors import DamagedCheckpointError
from ftmesh.topology.ranks import Ranks, backup_ranks
from ftmesh.topology.topology import Topology
from tests.support.shards import (
    random_state,
    read_tensors,
    sharded_arrays,
    sharded_setup,
    snapshot_files,
    spoil_devices,
    tensor_bytes,
)

pytestmark = pytest.mark.usefixtures("quick_compiler")

# By rows: so some ranks are not the partner of their partner.
HOSTS = [y for _, y in Topology.grid("4x4").coords]
PARTNERS = tuple(backup_ranks(Topology.grid("4x4"), HOSTS).tolist())
HAVE_COPIES = {(HOSTS[rank], HOSTS[partner]) for rank, partner in enumerate(PARTNERS)}


@dataclass(frozen=True)
class Tpu:
    """A fake device of a v6e."""

    id: int
    process_index: int
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


def test_partners_are_on_other_hosts():
    """Ranks follow the ring, and so must the hosts of their devices: here boxes of 2x2 chips."""
    tpus = [Tpu(n, n % 4 // 2 + 2 * (n // 8)) for n in range(16)]
    topology = Topology.from_devices(tpus, shape="4x4", failed="1x2@0,1")
    partners = ShardCopier.for_topology(topology)._partners
    assert set(partners) == set(partners.values()) == set(topology.devices)
    assert all(a.process_index != b.process_index for a, b in partners.items())
    in_grid_order = dict(zip(Ranks(topology).devices, topology.devices, strict=True))
    assert any(
        in_grid_order[a].process_index == in_grid_order[b].process_index
        for a, b in partners.items()
    )


@pytest.fixture(scope="module")
def setup(quick_compiler):
    return sharded_setup()


@pytest.fixture(scope="module")
def saved(setup):
    """A state, its copies, and the bytes of every tensor."""
    state = random_state(setup)
    host_of = dict(zip(setup.devices, HOSTS, strict=True))
    copier = ShardCopier(partner_of(setup), host_of.__getitem__)
    return state, copier.copy(state), tensor_bytes(setup, state)


def partner_of(setup, partners=PARTNERS):
    devices = setup.devices
    return {device: devices[rank] for device, rank in zip(devices, partners, strict=True)}


def tensors_without(setup, saved, lost, partners=PARTNERS):
    """Return every tensor from what the remaining hosts have."""
    state, copies, _ = saved
    host_of = dict(zip(setup.devices, HOSTS, strict=True))
    gone = {device for device, host in host_of.items() if host in lost}
    state, vectors = spoil_devices(state, gone), spoil_devices(copies.vectors, gone)
    remaining = [device for device in setup.devices if device not in gone]
    files = snapshot_files(
        setup, state, host_of.__getitem__, devices=remaining,
        copies=PartnerCopies(vectors, copies.places, partner_of(setup, partners)),
    )  # fmt: skip
    return read_tensors(files)


def test_tensors_differ(saved):
    _, _, tensors = saved
    assert len(tensors) > 10
    assert len(set(tensors.values())) > 9


def test_copies_equal_the_shards_of_partners(setup, saved):
    state, copies, _ = saved
    for own, name in zip(sharded_arrays(state), copies.places, strict=True):
        rows = np.asarray(own).reshape(16, -1)
        copied = np.stack([copies.block(name, device) for device in setup.devices])
        assert rows.tobytes() == copied[list(PARTNERS)].tobytes()


@pytest.mark.parametrize("lost", [set(), {0}, {1}, {2}, {3}])
def test_a_lost_host(setup, saved, lost):
    assert tensors_without(setup, saved, lost) == saved[2]


@pytest.mark.parametrize("lost", [{0, 3}, {1, 2}, {0, 1}, {2, 3}, {0, 2}, {1, 3}])
def test_two_lost_hosts(setup, saved, lost):
    """It is an error if one had the copies of the other; otherwise nothing is lost."""
    one, other = sorted(lost)
    if {(one, other), (other, one)} & HAVE_COPIES:
        with pytest.raises(DamagedCheckpointError):
            tensors_without(setup, saved, lost)
    else:
        assert tensors_without(setup, saved, lost) == saved[2]


def test_a_wrong_table_of_partners_is_noticed(setup, saved):
    """The tests above would notice copies that are taken for another rank's."""
    wrong = (*PARTNERS[4:], *PARTNERS[:4])
    assert tensors_without(setup, saved, {0}, PARTNERS) == saved[2]
    try:
        tensors = tensors_without(setup, saved, {0}, wrong)
    except DamagedCheckpointError:
        return
    assert tensors != saved[2]
