import jax.numpy as jnp
import numpy as np
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


class TestOtherSizes:
    LARGE = Topology.grid("16x32", failed="4x2@6,14")

    def test_auto_takes_another_algorithm_where_that_is_faster(self):
        plan = ftmesh.plan(self.LARGE, payload_bytes=672_000_000, with_idle=True, unrolled=True)
        small = plan.at(8)
        assert (plan.algorithm, small.algorithm) == ("ring", "row_pair")
        assert small.proof == ftmesh.verify(small.schedule)
        assert (small.topology, small.with_idle, small.unrolled) == (plan.topology, True, True)
        assert plan.at(672_000_000) is plan
        assert plan.at(1) is plan.at(5000) is small, "one program for each algorithm"
        assert small.at(672_000_000) is plan, "siblings know each other"

    def test_a_plan_stays_for_its_own_size(self):
        """Also where a power of two, a little larger, would make another choice."""
        sizes = [2**k + 1 for k in range(13, 27)]
        assert all((plan := ftmesh.plan(TOPO, payload_bytes=n)).at(n) is plan for n in sizes)

    def test_numbers_of_sixteen_bits_are_priced_as_they_travel(self):
        plan = ftmesh.plan(TOPO, payload_bytes=100_000_000)
        for size in (2**k for k in range(10, 27)):
            found = plan.at(size, wire_dtype="bfloat16").algorithm
            assert found == ftmesh.plan(TOPO, payload_bytes=size, wire_dtype="bfloat16").algorithm

    def test_a_named_algorithm_stays(self):
        plan = ftmesh.plan(self.LARGE, "ring", verify=False)
        assert plan.at(8) is plan

    def test_nothing_is_proved_where_nothing_was(self):
        plan = ftmesh.plan(TOPO, payload_bytes=100_000_000, verify=False)
        assert plan.at(8).algorithm != plan.algorithm
        assert plan.at(8).proof is None

    def test_topologies_have_siblings_of_their_own(self):
        one, other = (ftmesh.plan(topology) for topology in (TOPO, Topology.grid("8x8")))
        assert one.at(8).topology == TOPO
        assert other.at(8).topology == Topology.grid("8x8")


def test_a_plan_says_in_what_partial_sums_travel():
    deep, shallow = ftmesh.plan(TOPO, "ring"), ftmesh.plan(Topology.grid("2x2"), "two_dim")
    assert deep.partials_travel_in("bfloat16") == "float32"
    assert shallow.partials_travel_in(jnp.bfloat16) == "bfloat16"
    assert deep.partials_travel_in(np.float32) == "float32"
    assert str(deep).splitlines()[-2:] == [
        "  partial sums of bfloat16 travel as float32: 59 additions could be 23.0% off, 1% is the "
        "bound",
        "  partial sums of float16 travel as float32, which has the range for them",
    ]
    with pytest.raises(ftmesh.ArgumentError, match="the name of a floating dtype"):
        deep.partials_travel_in("int8")


@pytest.mark.parametrize("size", ["1MB", 1e6, -5, None])
def test_a_payload_is_a_whole_number_of_bytes(size):
    with pytest.raises(ftmesh.ArgumentError, match="a whole number of bytes, not"):
        ftmesh.plan(TOPO).at(size)


def test_a_dtype_or_its_name():
    import jax.numpy as jnp

    assert ftmesh.plan(TOPO, wire_dtype=jnp.bfloat16).wire_dtype == "bfloat16"
    assert ftmesh.plan(TOPO).partials_travel_in(jnp.float16) == "float32"
    for wrong in (object(), int, "int8", jnp.int8, float):
        with pytest.raises(ftmesh.ArgumentError, match="the name of a floating dtype"):
            ftmesh.plan(TOPO, wire_dtype=wrong)
