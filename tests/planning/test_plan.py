import inspect

import jax.numpy as jnp
import numpy as np
import pytest

import ftmesh
from ftmesh import Topology
from ftmesh.algorithms import registry

TOPO = Topology.grid("8x8", failed="2x2@2,2")


def test_a_plan_is_a_proven_schedule_for_a_payload():
    plan = ftmesh.plan(TOPO, algorithm="row_pair", payload_bytes=100_000_000)
    assert plan.algorithm == "row_pair"
    assert plan.topology == TOPO
    assert plan.proof == ftmesh.verify(plan.schedule)
    assert "46.9 MB" in str(plan)


@pytest.mark.parametrize(
    "payload", [-5, 0, "100MB", 1.5, True, 10**400, -(10**400)], ids=lambda given: repr(given)[:9]
)
def test_a_payload_is_a_positive_whole_number(payload):
    with pytest.raises(ftmesh.ArgumentError, match="positive whole number"):
        ftmesh.plan(TOPO, payload_bytes=payload)
    with pytest.raises(ftmesh.ArgumentError, match="positive whole number"):
        ftmesh.plan(TOPO, "tree", payload_bytes=payload)


@pytest.mark.parametrize(("payload", "says"), [(True, "not True"), (10**30, "up to 9,007")])
def test_a_payload_is_a_number_and_has_bounds(payload, says):
    with pytest.raises(ftmesh.ArgumentError, match=f"positive whole number,? {says}"):
        ftmesh.plan(TOPO, payload_bytes=payload)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda plan: ftmesh.plan("8x8"), r"for a topology, and not for '8x8': .*Topology\.grid"),
        (lambda plan: ftmesh.plan(None), "for a topology"),
        (lambda plan: ftmesh.save(plan, "a.npz"), r"not a Plan: for a plan, pass plan\.schedule"),
        (lambda plan: ftmesh.save(None, "a.npz"), "not a NoneType"),
        (lambda plan: ftmesh.save(plan.schedule, None), "takes a path, not None"),
        (lambda plan: ftmesh.plan(TOPO, link={}), "a link is a rate"),
        (lambda plan: ftmesh.plan(TOPO, ["ring"]), "algorithm must be a name"),
        (lambda plan: ftmesh.TiledTopology.from_topology("8x8", "2x2"), "cut from a topology"),
        (lambda plan: ftmesh.verify(plan), r"pass plan\.schedule"),
        (lambda plan: ftmesh.simulate(plan), r"pass plan\.schedule"),
        (lambda plan: ftmesh.load(None), "takes a path or bytes, not None"),
        (lambda plan: ftmesh.load(0), "takes a path or bytes, not 0"),
        (lambda plan: Topology.grid("4x4", failed=5), "or a list of coords, not 5"),
        (lambda plan: Topology.from_drawing(5), "a drawing is text"),
        (lambda plan: ftmesh.plan(TOPO, link="50Gb/s"), "reads as bits"),
        (lambda plan: ftmesh.plan(Topology.grid("200x200")), "would take about 179.2 GB"),
        (lambda plan: ftmesh.psum(1.0, "data", plan=plan.schedule), "not a SplitSchedule: give"),
        (lambda plan: ftmesh.psum(1.0, "data", plan=None), "not a NoneType: give plan="),
    ],
)
def test_what_is_of_the_wrong_kind_is_an_error_that_says_what_to_give(call, says):
    plan = ftmesh.plan(Topology.grid("2x2"))
    with pytest.raises(ftmesh.FtmeshError, match=says):
        call(plan)


def test_plan_has_few_parameters():
    assert len(inspect.signature(ftmesh.plan).parameters) <= 8


def test_a_schedule_that_was_planned_before():
    schedule = ftmesh.plan(TOPO, "ring").schedule
    plan = ftmesh.Plan.from_schedule(schedule)
    assert (plan.algorithm, plan.is_given, plan.is_auto) == ("ring", True, False)
    assert plan.proof == ftmesh.verify(schedule)
    with pytest.raises(ftmesh.ArgumentError, match=r"the schedule is for .*: plan it again"):
        ftmesh.Plan.from_schedule(schedule, Topology.grid("8x8"))
    with pytest.raises(ftmesh.ArgumentError, match="executor must be one of ppermute"):
        ftmesh.Plan.from_schedule(schedule, executor="auto")
    with pytest.raises(ftmesh.ArgumentError, match="topology must be a Topology, not '8x8'"):
        ftmesh.Plan.from_schedule(schedule, "8x8")
    with pytest.raises(ftmesh.ArgumentError, match=r"pass plan\.schedule"):
        ftmesh.Plan.from_schedule(plan)


def test_a_kernel_has_no_rounds_to_unroll():
    plan = ftmesh.plan(Topology.grid("4x4"), "tree", executor="pallas")
    assert plan.unrolled_variant is plan.with_reduce_scatter
    assert plan.unrolled_variant.executor == "pallas"


def test_a_kernel_scatters_too():
    """Where permutations are replaced by XLA's own ring, a kernel asked for stays one."""
    damaged = Topology.grid("4x4", failed="1x1@1,1")
    executors = {
        name: ftmesh.plan(damaged, executor=name, link="v6e").with_reduce_scatter.executor
        for name in ("ppermute", "pallas")
    }
    assert executors == {"ppermute": "xla", "pallas": "pallas"}


def test_a_wrong_schedule_is_not_a_plan():
    schedule = ftmesh.plan(TOPO, "ring").schedule
    short = ftmesh.Schedule(TOPO, "ring", schedule.num_chunks, schedule.phases[:1])
    with pytest.raises(ftmesh.VerificationError):
        ftmesh.Plan.from_schedule(short)


class TestTrees:
    """Plans whose algorithm splits payloads by their size, and has no reduce-scatter."""

    ODD = Topology.grid("3x5", failed="1x1@1,1")

    def test_each_size_has_its_own_chunks_and_the_same_is_made_once(self):
        plan = ftmesh.plan(self.ODD, "tree", payload_bytes=10**6)
        small = plan.for_payload(1000)
        assert small.schedule.num_chunks < plan.schedule.num_chunks
        assert plan.for_payload(1001) is small
        assert small.for_payload(10**6) is plan
        assert small.proof is not None

    def test_a_given_schedule_serves_every_payload(self):
        schedule = ftmesh.plan(self.ODD, "tree", payload_bytes=10**6).schedule
        plan = ftmesh.Plan.from_schedule(schedule, self.ODD)
        assert plan.for_payload(1000) is plan
        assert plan.with_reduce_scatter is plan

    def test_the_reduce_scatter_is_that_of_a_sibling(self):
        plan = ftmesh.plan(self.ODD, "tree")
        assert plan.with_reduce_scatter.algorithm == "flood"
        assert plan.with_reduce_scatter.with_reduce_scatter is plan.with_reduce_scatter
        assert plan.with_reduce_scatter.proof is not None
        whole = ftmesh.plan(Topology.grid("4x4"), "tree")
        assert whole.with_reduce_scatter.algorithm == "two_dim"


class TestOtherSizes:
    LARGE = Topology.grid("16x32", failed="4x2@6,14")
    SMALL = Topology.grid("4x4")  # trees, two_dim and trees again, as payloads grow

    def test_auto_takes_another_algorithm_where_that_is_cheaper(self):
        plan = ftmesh.plan(
            self.LARGE, payload_bytes=672_000_000, with_idle=True, executor="ppermute_unrolled"
        )
        small = plan.for_payload(8)
        assert (plan.algorithm, small.algorithm) == ("ring", "row_pair")
        assert small.proof == ftmesh.verify(small.schedule)
        assert (small.topology, small.with_idle, small.executor) == (
            plan.topology,
            True,
            "ppermute_unrolled",
        )
        assert plan.for_payload(672_000_000) is plan
        for other in (plan.for_payload(1), plan.for_payload(5000)):
            assert other.schedule is small.schedule, "one for each algorithm"
            assert other.proof is small.proof
        assert small.for_payload(672_000_000) is plan, "siblings know each other"

    def test_a_plan_stays_for_its_own_size(self):
        """Also where a power of two, a little larger, would make another choice."""
        sizes = [2**k + 1 for k in range(13, 27)]
        assert all(
            (plan := ftmesh.plan(self.SMALL, payload_bytes=n)).for_payload(n) is plan for n in sizes
        )

    def test_16_bit_payloads_cost_what_travels(self):
        plan = ftmesh.plan(self.SMALL, payload_bytes=100_000_000)
        for size in (2**k for k in range(10, 27)):
            anew = ftmesh.plan(self.SMALL, payload_bytes=size, wire_dtype="bfloat16")
            assert plan.for_payload(size, wire_dtype="bfloat16").algorithm == anew.algorithm

    def test_each_tells_of_the_size_and_dtype_that_it_was_asked_for(self):
        plan = ftmesh.plan(TOPO, payload_bytes=100_000_000, executor="ppermute_unrolled")
        narrow, wide = plan.for_payload(60, wire_dtype="bfloat16"), plan.for_payload(4000)
        assert (narrow.payload_bytes, narrow.wire_dtype) == (64, "bfloat16")
        assert (wide.payload_bytes, wide.wire_dtype) == (4096, "float32")
        assert narrow.program is wide.program, "one for each algorithm"
        assert plan.for_payload(33, wire_dtype="bfloat16") is narrow
        assert narrow.for_payload(4096, wire_dtype="float32") is wide
        assert wide.explain().payload_bytes == 4096

    def test_a_named_algorithm_stays(self):
        plan = ftmesh.plan(self.LARGE, "ring")
        assert plan.for_payload(8) is plan

    def test_topologies_have_siblings_of_their_own(self):
        one, other = (ftmesh.plan(topology) for topology in (TOPO, Topology.grid("8x8")))
        assert one.for_payload(8).topology == TOPO
        assert other.for_payload(8).topology == Topology.grid("8x8")


def test_a_plan_says_in_what_partial_sums_travel():
    deep, shallow = ftmesh.plan(TOPO, "ring"), ftmesh.plan(Topology.grid("2x2"), "two_dim")
    assert deep.partial_sum_dtype("bfloat16") == "float32"
    assert shallow.partial_sum_dtype(jnp.bfloat16) == "bfloat16"
    assert deep.partial_sum_dtype(np.float32) == "float32"
    assert str(deep).splitlines()[-2:] == [
        "  partial sums of bfloat16 travel as float32: 59 additions could be 23.0% off, 1% is the "
        "bound",
        "  partial sums of float16 travel as float32, which has the range for them",
    ]
    with pytest.raises(ftmesh.ArgumentError, match="must be a floating dtype"):
        deep.partial_sum_dtype("int8")


@pytest.mark.parametrize("size", ["1MB", 1e6, -5, None, True])
def test_a_payload_is_a_whole_number_of_bytes(size):
    with pytest.raises(ftmesh.ArgumentError, match="a whole number of bytes, not"):
        ftmesh.plan(TOPO).for_payload(size)
    with pytest.raises(ftmesh.ArgumentError, match="positive whole number up to 9,007"):
        ftmesh.plan(TOPO).for_payload(10**400)


def test_a_number_of_bytes_may_be_numpys():
    large = ftmesh.plan(TOPO, payload_bytes=np.int64(10**8))
    assert type(large.payload_bytes) is int
    assert large.for_payload(np.int64(1000)) is large.for_payload(1000)


def test_a_dtype_or_its_name():
    import jax.numpy as jnp

    assert ftmesh.plan(TOPO, wire_dtype=jnp.bfloat16).wire_dtype == "bfloat16"
    assert ftmesh.plan(TOPO).partial_sum_dtype(jnp.float16) == "float32"
    for wrong in (object(), int, "int8", jnp.int8, float):
        with pytest.raises(ftmesh.ArgumentError, match="must be a floating dtype"):
            ftmesh.plan(TOPO, wire_dtype=wrong)


@pytest.mark.parametrize("num_chunks", [4, None])
def test_what_was_planned_is_among_what_is_explained(num_chunks):
    topology = Topology.grid("4x4")
    name = "flood" if num_chunks is None else "tree"
    schedule = registry.build_schedule(topology, name, num_chunks)
    made = ftmesh.Plan.from_schedule(schedule, topology)
    (own,) = (one for one in made.explain().candidates if one.algorithm == name)
    assert own.rounds == schedule.num_rounds
    assert own.seconds == ftmesh.simulate(schedule).seconds


def test_trees_of_sixteen_bits_are_cut_for_what_travels():
    topology = Topology.grid("8x8", failed="2x2@2,2")
    narrow = ftmesh.plan(topology, "tree", payload_bytes=200_000, wire_dtype="bfloat16")
    wide = ftmesh.plan(topology, "tree", payload_bytes=400_000)
    assert narrow.schedule == wide.schedule
    assert narrow.for_payload(100_000).schedule == wide.for_payload(200_000).schedule


def test_shares_of_a_kernel_are_not_scattered():
    """The order of `flood`'s shares costs an optimizer more than its links save."""
    topology = Topology.grid("16x16", failed="2x2@2,2", wrap=True)
    options = {"payload_bytes": 1_300_000_000, "link": "v6e", "executor": "pallas"}
    plan = ftmesh.plan(topology, reduce_scatter=True, **options)
    assert plan.algorithm == "ring"
    assert ftmesh.plan(topology, "tree", **options).with_reduce_scatter.algorithm == "ring"
