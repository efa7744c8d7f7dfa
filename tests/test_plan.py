import pytest

import ftmesh
from ftmesh import Topology

TOPO = Topology.grid("8x8", failed="2x2@2,2")


def test_a_plan_is_a_proven_schedule_for_a_payload():
    plan = ftmesh.plan(TOPO, algorithm="row_pair", payload_bytes=100_000_000)
    assert plan.algorithm == "row_pair"
    assert plan.topology == TOPO
    assert plan.proof == ftmesh.verify(plan.schedule)
    assert "46.9 MB" in str(plan)


@pytest.mark.parametrize("payload", [-5, 0, "100MB", 1.5])
def test_a_payload_is_a_positive_whole_number(payload):
    with pytest.raises(ftmesh.ArgumentError, match="positive whole number"):
        ftmesh.plan(TOPO, payload_bytes=payload)


def test_proof_can_be_left_out():
    assert ftmesh.plan(TOPO, "ring", verify=False).proof is None
