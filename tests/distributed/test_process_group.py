"""Processes agree, exchange values, wait for each other, and name who is missing."""

import time
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

import ftmesh
from ftmesh import Topology
from ftmesh.cost.links import KernelModel
from ftmesh.distributed.consensus import agree_on_mesh, agreed_plan
from ftmesh.distributed.kv_store import KvClient
from ftmesh.distributed.process_group import SINGLE_PROCESS
from ftmesh.distributed.startup import initialize
from ftmesh.errors import ArgumentError, ClusterError
from tests.support.pods import process_groups, run_in_all
from tests.support.profiles import TRUE


@dataclass(frozen=True)
class Device:
    """A device without coords."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def devices(hosts, per_host):
    return [Device(n, n // per_host) for n in range(hosts * per_host)]


@pytest.fixture(scope="module")
def four():
    with process_groups(4) as groups:
        yield groups


def test_equal_facts(four):
    assert run_in_all(lambda group: group.agree({"seed": 3, "rate": 0.1}), four) == [None] * 4


def test_a_difference_is_an_error_in_all_processes(four):
    facts = [{"seed": 3, "mesh": "4x4"}, {"seed": 3, "mesh": "4x4"}, {"seed": 3, "mesh": "8x2"}]
    facts.append({"seed": 3})
    errors = run_in_all(lambda group: group.agree(facts[group.process]), four)
    assert {type(error) for error in errors} == {ClusterError}
    assert {str(error) for error in errors} == {
        "the processes do not agree on mesh: processes 0 and 1 have 4x4; process 2 has 8x2; "
        "process 3 has nothing; all need the same"
    }


def test_a_difference_among_many_processes():
    with process_groups(48) as groups:
        errors = run_in_all(
            lambda group: group.agree({"failed chips": "2x2@2,2" * (group.process == 31)}),
            groups,
        )
    expected = "processes 0, 1, 2, 3, 4, 5, 6, 7 and 39 more have ; process 31 has 2x2@2,2"
    assert [expected in str(error) for error in errors] == [True] * 48


def test_broadcast(four):
    numbers = np.random.default_rng(0).bytes(5_000_000)  # more than a message usually may have
    values = run_in_all(lambda c: c.broadcast(numbers if c.is_primary else b"", "numbers"), four)
    assert values == [numbers] * 4
    groups = [replace(group, primary=2) for group in four]
    values = run_in_all(
        lambda c: c.broadcast(0.1 + 0.2 if c.is_primary else None, "a float"), groups
    )
    assert values == [0.1 + 0.2] * 4


def test_gather(four):
    values = run_in_all(lambda c: c.gather([c.process, "a" * c.process], "letters"), four)
    assert values == [{0: [0, ""], 1: [1, "a"], 2: [2, "aa"], 3: [3, "aaa"]}] * 4
    again = run_in_all(lambda c: c.gather(-c.process, "letters"), four)
    assert again == [{0: 0, 1: -1, 2: -2, 3: -3}] * 4


def test_entries_that_all_have_read_are_deleted(four):
    """A run that gathers once a second must not fill the memory of the service."""

    def gather(group):
        for use in range(6):
            time.sleep(0.02 * ((group.process + use) % 4))  # others are ahead
            assert group.gather(use, "a pace") == dict.fromkeys(range(4), use)
            group.agree({"a pace": use})
            group.barrier("a pace")
        return group.kv._client.key_value_dir_get("ftmesh/gather/a pace")

    for entries in run_in_all(gather, four):
        assert {key.split("/")[-2] for key, _ in entries} <= {"5", "6"}


def test_a_missing_process_is_named(four):
    def meet(group):
        if group.process != 2:
            group.barrier("the next step", timeout=4)

    errors = run_in_all(meet, four)
    for process in (0, 1, 3):
        assert str(errors[process]) == "process 2 did not come to the next step within 4 s"


def test_a_primary_that_does_not_broadcast_is_named(four):
    def ask(group):
        if not group.is_primary:
            group.broadcast(None, "the accuracy", timeout=1)

    errors = run_in_all(ask, four)
    assert {str(error) for error in errors[1:]} == {
        "process 0 did not send the accuracy within 1 s"
    }


def test_primary_first(four):
    order = []

    def make(group):
        order.append(group.process)
        return group.process

    assert run_in_all(lambda c: c.primary_first(lambda: make(c), "the index"), four) == [0, 1, 2, 3]
    assert order[0] == 0


def test_members_have_devices_in_the_program():
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="4x1@0,0;2x1@2,3")
    all_processes = replace(
        SINGLE_PROCESS, process=3, num_processes=4, members=(0, 1, 2, 3), kv=KvClient(None)
    )
    group = all_processes.for_topology(topology)
    assert (group.members, group.primary, group.is_member) == ((1, 2, 3), 1, True)
    assert [device.id for device in group.live_devices] == [12, 13]
    assert group.default_device.id == 12
    idle = group.for_topology(topology, with_idle=True)
    assert (idle.members, idle.primary) == ((0, 1, 2, 3), 1)
    first = replace(group, process=0).for_topology(topology)
    assert (first.is_member, first.is_primary, first.default_device) == (False, False, None)


def test_processes_without_devices_are_not_waited_for(four):
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="4x1@0,0")

    def together(group):
        group = group.for_topology(topology)
        if group.is_member:
            group.agree({"seed": 0})
            group.barrier("the end", timeout=5)
            return group.broadcast(group.process, "the primary")
        return None

    assert run_in_all(together, four) == [None, 1, 1, 1]


def test_one_process_plans_and_the_others_load(four):
    calls = []

    def count(*args, **options):
        calls.append(args)
        return ftmesh.plan(*args, **options)

    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    plans = run_in_all(
        lambda c: agreed_plan(c.for_topology(topology), topology, "ring", planner=count), four
    )
    assert len(calls) == 1
    expected = ftmesh.plan(topology, "ring").schedule
    for plan in plans:
        assert plan.schedule == expected
        assert plan.topology.devices == topology.devices
        assert plan.proof is not None


def test_a_tree_plan_is_chunked_as_in_one_process(four):
    topology = Topology.grid("3x3", failed="1x1@0,0")
    alone = ftmesh.plan(topology, "tree", payload_bytes=10**6)
    options = {"payload_bytes": 10**6}
    for plan in run_in_all(lambda c: agreed_plan(c, topology, "tree", **options), four):
        assert plan.schedule == alone.schedule
        assert plan.for_payload(4).schedule == alone.for_payload(4).schedule != plan.schedule
        assert plan.with_reduce_scatter.schedule == alone.with_reduce_scatter.schedule


@pytest.mark.parametrize(
    ("link", "executor"), [("v6e", "xla"), ("50GB/s", "xla"), ("1GB/s", "ppermute")]
)
def test_the_primary_chooses_the_executor(four, link, executor):
    """And all plan for other payloads, or with a reduce-scatter, as one process does."""
    calls = []

    def count(*args, **options):
        calls.append(args)
        return ftmesh.plan(*args, **options)

    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    options = {"payload_bytes": 10**6, "link": link}
    alone = ftmesh.plan(topology, **options)
    assert (alone.executor, alone.chooses_executor) == (executor, True)
    plans = run_in_all(lambda c: agreed_plan(c, topology, planner=count, **options), four)
    assert len(calls) == 1
    for plan in plans:
        assert (plan.executor, plan.schedule) == (executor, alone.schedule)
        assert (plan.is_auto, plan.is_given, plan.chooses_executor) == (True, False, True)
        assert plan.topology.devices == topology.devices
        small, expected = plan.for_payload(4), alone.for_payload(4)
        assert (small.executor, small.schedule) == (expected.executor, expected.schedule)
        assert plan.with_reduce_scatter.schedule == alone.with_reduce_scatter.schedule


def test_a_kernel_that_the_primary_chose(four):
    """All know its costs, so that they choose alike for other payloads."""
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    quick = replace(TRUE, kernel=KernelModel(20e-6, 1.0, ("tree",)))
    options = {"payload_bytes": 16_000_000, "link": quick}
    alone = ftmesh.plan(topology, **options)
    assert alone.executor == "pallas"
    for plan in run_in_all(lambda c: agreed_plan(c, topology, **options), four):
        assert (plan.executor, plan.schedule, plan.network) == ("pallas", alone.schedule, quick)
        assert plan.for_payload(4).executor == alone.for_payload(4).executor == "xla"


def test_different_profiles_are_rejected(four):
    """Hosts that each have a file of that name, or not, would choose differently."""
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    links = [TRUE, TRUE, replace(TRUE, latency=1e-6), "none.json"]
    errors = run_in_all(lambda c: agreed_plan(c, topology, link=links[c.process]), four)
    assert all(isinstance(error, ClusterError) for error in errors)
    assert all("processes 0 and 1 have " in str(error) for error in errors)


def test_all_sum_by_xla_where_that_is_asked_for(four):
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    alone = ftmesh.plan(topology, executor="xla")
    for plan in run_in_all(lambda c: agreed_plan(c, topology, executor="xla"), four):
        assert (plan.executor, plan.schedule) == ("xla", alone.schedule)
        assert (plan.is_auto, plan.chooses_executor) == (False, False)
        assert plan.proof is not None


def test_different_plans_are_rejected(four):
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    names = ["ring", "row_pair", "ring", "ring"]
    errors = run_in_all(lambda c: agreed_plan(c, topology, names[c.process]), four)
    expected = "the algorithm: processes 0, 2 and 3 have ring; process 1 has row_pair"
    assert [expected in str(error) for error in errors] == [True] * 4


def test_different_damage_is_rejected(four):
    failed = ["2x2@2,2", "2x2@2,2", "2x2@0,0", "2x2@2,2"]

    def check(group):
        topology = Topology.from_devices(devices(4, 4), shape="4x4", failed=failed[group.process])
        agree_on_mesh(group, topology)

    expected = "failed chips: processes 0, 1 and 3 have 2x2@2,2; process 2 has 2x2@0,0"
    assert [expected in str(error) for error in run_in_all(check, four)] == [True] * 4


def test_a_single_process():
    SINGLE_PROCESS.agree({"seed": 1})
    SINGLE_PROCESS.barrier("nothing")
    assert SINGLE_PROCESS.broadcast(3, "three") == 3
    assert SINGLE_PROCESS.primary_first(lambda: 5, "five") == 5
    assert SINGLE_PROCESS.gather("x", "letters") == {0: "x"}
    assert SINGLE_PROCESS.is_primary
    assert SINGLE_PROCESS.is_member
    with pytest.raises(ClusterError, match="the disk is full"):
        SINGLE_PROCESS.abort("the disk is full")


def test_a_process_without_devices_cannot_agree(four):
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="4x1@0,0")
    with pytest.raises(ClusterError, match="process 0 has no device in the program"):
        four[0].for_topology(topology).agree({"seed": 0})


def test_devices_of_other_processes_without_initialize():
    topology = Topology.from_devices(devices(4, 4), shape="4x4")
    group = SINGLE_PROCESS.for_topology(topology)
    assert group.members == (0,)
    assert [device.id for device in group.live_devices] == [0, 1, 2, 3]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 1e10])
def test_invalid_timeouts(timeout):
    with pytest.raises(ArgumentError, match=r"a timeout of .* s: give more than 0"):
        initialize(timeout=timeout)


def test_incomplete_arguments_are_rejected(monkeypatch):
    with pytest.raises(ArgumentError, match="the number of processes is not given"):
        initialize("127.0.0.1:2000", process_id=1)
    for text in ("one", "٣", "-1", "9" * 5000):
        monkeypatch.setenv("FTMESH_PROCESS_ID", text)
        with pytest.raises(ArgumentError, match=f"FTMESH_PROCESS_ID is '{text:.39}.*not a number"):
            initialize()


def test_jax_was_used_before():
    jax.devices()
    with pytest.raises(ClusterError, match="JAX was used before initialize"):
        initialize("127.0.0.1:2000", 2, 1)
