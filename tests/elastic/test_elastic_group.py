"""Which group `initialize` returns, with a controller and without."""

import os

import pytest

from ftmesh import distributed, elastic
from ftmesh.elastic import elastic_group
from ftmesh.elastic.controller_client import ControllerClient
from ftmesh.elastic.elastic_group import ControllerKvClient
from ftmesh.elastic.rpc import MAX_DATA_BYTES
from ftmesh.errors import ClusterError
from ftmesh.testing import cpu_grid
from tests.support.controllers import SECRET, TIMEOUT, ControllerHarness
from tests.support.pods import run_in_all


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID", "STEWARD"):
        monkeypatch.delenv(f"FTMESH_{name}", raising=False)


def test_without_a_controller_it_is_a_plain_group_in_its_first_generation():
    with elastic.initialize(timeout=7) as group:
        assert isinstance(group, elastic.ElasticGroup)
        assert (group.timeout, group.generation, group.controller) == (7, 1, None)
        assert group.is_single_process
        group.report_phase("step", 3)
        topology = cpu_grid("2x2")
        assert group.live_topology(topology) is topology


def test_plain_initialize_under_a_controller_is_an_error(monkeypatch):
    monkeypatch.setenv("FTMESH_STEWARD", "127.0.0.1:2000")
    with pytest.raises(ClusterError, match=r"call ftmesh\.elastic\.initialize\(\)"):
        distributed.initialize("127.0.0.1:2001", 2, 1)


def test_failed_collectives_of_any_size():
    """jaxlib runs small computations at once, and raises ValueError where a peer is lost."""
    lost = "UNKNOWN: Gloo all-reduce failed: Connection reset by peer"
    error = RuntimeError("step 3")
    error.__cause__ = ValueError(lost)
    assert elastic_group._is_caused_by(error, elastic_group._is_of_the_runtime)
    for own in (ValueError("shapes differ"), TypeError(lost), ValueError("label UNKNOWN: 3")):
        assert not elastic_group._is_caused_by(own, elastic_group._is_of_the_runtime)


def test_a_plan_that_is_longer_than_a_message():
    """The primary broadcasts it, while the others wait or have not come yet."""
    plan = os.urandom(MAX_DATA_BYTES + 5)
    harness = ControllerHarness(hosts=2)
    clients = [
        ControllerClient.connect(
            harness.listener.address, SECRET, process, 1, 2, timeout=TIMEOUT, on_end=pytest.fail
        )
        for process in (0, 1)
    ]
    try:
        groups = [
            elastic.ElasticGroup(
                process, 2, TIMEOUT, (0, 1), kv=ControllerKvClient(client), controller=client
            )
            for process, client in enumerate(clients)
        ]
        for _ in range(2):
            values = run_in_all(lambda group: group.broadcast(plan, "the schedule"), groups)
            assert values == [plan] * 2
        groups[0].kv.put("long", plan)
        assert groups[1].kv.try_get("long") == plan
    finally:
        for client in clients:
            client._has_left = True
            client._channel.close()
        harness.close()
