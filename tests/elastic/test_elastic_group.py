"""Which group `initialize` returns, with a controller and without."""

import pytest

from ftmesh import distributed, elastic
from ftmesh.errors import ClusterError
from ftmesh.testing import cpu_grid


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
