"""Processes agree, tell each other, wait for each other, and name who does not."""

from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest

import ftmesh
from ftmesh import Topology
from ftmesh.distributed.consensus import agree_on_mesh, agreed_plan
from ftmesh.distributed.initialize import join
from ftmesh.distributed.kv_client import Board
from ftmesh.distributed.process_group import ALONE
from ftmesh.errors import ArgumentError, ClusterError
from tests.support.pods import at_once, pod


@dataclass(frozen=True)
class Device:
    """One of a host's, without coords."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def devices(hosts, per_host):
    return [Device(n, n // per_host) for n in range(hosts * per_host)]


@pytest.fixture(scope="module")
def four():
    with pod(4) as clusters:
        yield clusters


def test_what_is_the_same_is_agreed_on(four):
    assert at_once(lambda cluster: cluster.agree({"seed": 3, "rate": 0.1}), four) == [None] * 4


def test_a_difference_is_an_error_everywhere_that_names_who_has_what(four):
    facts = [{"seed": 3, "mesh": "4x4"}, {"seed": 3, "mesh": "4x4"}, {"seed": 3, "mesh": "8x2"}]
    facts.append({"seed": 3})
    errors = at_once(lambda cluster: cluster.agree(facts[cluster.process]), four)
    assert {type(error) for error in errors} == {ClusterError}
    assert {str(error) for error in errors} == {
        "the processes do not agree on mesh: processes 0 and 1 have 4x4; process 2 has 8x2; "
        "process 3 has nothing: all of them need the same"
    }


def test_a_difference_among_many_processes():
    with pod(48) as clusters:
        errors = at_once(
            lambda cluster: cluster.agree({"failed chips": "2x2@2,2" * (cluster.process == 31)}),
            clusters,
        )
    told = "processes 0, 1, 2, 3, 4, 5, 6, 7 and 39 more have ; process 31 has 2x2@2,2"
    assert [told in str(error) for error in errors] == [True] * 48


def test_the_speaker_tells_all(four):
    numbers = np.random.default_rng(0).bytes(5_000_000)  # more than a message usually may have
    told = at_once(lambda c: c.broadcast(numbers if c.speaks else b"", "numbers"), four)
    assert told == [numbers] * 4
    clusters = [replace(cluster, speaker=2) for cluster in four]
    told = at_once(lambda c: c.broadcast(0.1 + 0.2 if c.speaks else None, "a float"), clusters)
    assert told == [0.1 + 0.2] * 4


def test_all_hear_what_each_has(four):
    told = at_once(lambda c: c.gather([c.process, "a" * c.process], "letters"), four)
    assert told == [{0: [0, ""], 1: [1, "a"], 2: [2, "aa"], 3: [3, "aaa"]}] * 4
    again = at_once(lambda c: c.gather(-c.process, "letters"), four)
    assert again == [{0: 0, 1: -1, 2: -2, 3: -3}] * 4


def test_one_who_does_not_come_is_named(four):
    def meet(cluster):
        if cluster.process != 2:
            cluster.barrier("the next step", limit=4)

    errors = at_once(meet, four)
    for process in (0, 1, 3):
        assert str(errors[process]) == "process 2 did not come to the next step within 4 s"


def test_a_speaker_that_is_silent_is_named(four):
    def ask(cluster):
        if not cluster.speaks:
            cluster.broadcast(None, "the accuracy", limit=1)

    errors = at_once(ask, four)
    assert {str(error) for error in errors[1:]} == {
        "process 0 did not tell the accuracy within 1 s"
    }


def test_the_speaker_is_first_and_the_others_find_what_it_left(four):
    order = []

    def make(cluster):
        order.append(cluster.process)
        return cluster.process

    assert at_once(lambda c: c.first(lambda: make(c), "the index"), four) == [0, 1, 2, 3]
    assert order[0] == 0


def test_members_are_those_with_devices_in_the_program():
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="4x1@0,0;2x1@2,3")
    everyone = replace(ALONE, process=3, num_processes=4, members=(0, 1, 2, 3), board=Board(None))
    cluster = everyone.on(topology)
    assert (cluster.members, cluster.speaker, cluster.takes_part) == ((1, 2, 3), 1, True)
    assert [device.id for device in cluster.live_devices] == [12, 13]
    assert cluster.default_device.id == 12
    idle = cluster.on(topology, with_idle=True)
    assert (idle.members, idle.speaker) == ((0, 1, 2, 3), 1)
    first = replace(cluster, process=0).on(topology)
    assert (first.takes_part, first.speaks, first.default_device) == (False, False, None)


def test_those_without_devices_are_not_waited_for(four):
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="4x1@0,0")

    def together(cluster):
        cluster = cluster.on(topology)
        if cluster.takes_part:
            cluster.agree({"seed": 0})
            cluster.barrier("the end", limit=5)
            return cluster.broadcast(cluster.process, "who speaks")
        return None

    assert at_once(together, four) == [None, 1, 1, 1]


def test_one_process_plans_and_the_others_load(four, monkeypatch):
    planned = []
    real = ftmesh.planners.schedule
    monkeypatch.setattr(
        ftmesh.planners, "schedule", lambda *args: planned.append(args) or real(*args)
    )
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    plans = at_once(lambda c: agreed_plan(c.on(topology), topology, "ring"), four)
    assert len(planned) == 1
    expected = real(topology, "ring")
    for plan in plans:
        assert plan.schedule == expected
        assert plan.topology.devices == topology.devices
        assert plan.proof is not None


def test_a_plan_along_trees_is_cut_and_sharded_as_in_one_process(four):
    topology = Topology.grid("3x3", failed="1x1@0,0")
    alone = ftmesh.plan(topology, "tree", payload_bytes=10**6)
    options = {"payload_bytes": 10**6}
    for plan in at_once(lambda c: agreed_plan(c, topology, "tree", **options), four):
        assert plan.schedule == alone.schedule
        assert plan.for_payload(4).schedule == alone.for_payload(4).schedule != plan.schedule
        assert plan.with_reduce_scatter.schedule == alone.with_reduce_scatter.schedule


def test_who_plans_says_which_executor(four, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "ftmesh.planning.plan.kernel_is_faster", lambda *args: asked.append(args) or len(asked) == 1
    )
    every = [replace(each, platform="tpu", device_kind="TPU v6 lite") for each in devices(4, 4)]
    topology = Topology.from_devices(every, shape="4x4", failed="2x2@2,2")
    options = {"payload_bytes": 10**6, "executor": "auto"}
    for plan in at_once(lambda c: agreed_plan(c, topology, "ring", **options), four):
        assert plan.executor == "pallas"
    assert len(asked) == 1


def test_different_plans_are_refused_before_anything_runs(four):
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="2x2@2,2")
    names = ["ring", "row_pair", "ring", "ring"]
    errors = at_once(lambda c: agreed_plan(c, topology, names[c.process]), four)
    told = "the algorithm: processes 0, 2 and 3 have ring; process 1 has row_pair"
    assert [told in str(error) for error in errors] == [True] * 4


def test_different_damage_is_refused(four):
    failed = ["2x2@2,2", "2x2@2,2", "2x2@0,0", "2x2@2,2"]

    def on(cluster):
        topology = Topology.from_devices(devices(4, 4), shape="4x4", failed=failed[cluster.process])
        agree_on_mesh(cluster, topology)

    told = "failed chips: processes 0, 1 and 3 have 2x2@2,2; process 2 has 2x2@0,0"
    assert [told in str(error) for error in at_once(on, four)] == [True] * 4


def test_one_alone_agrees_with_itself():
    ALONE.agree({"seed": 1})
    ALONE.barrier("nothing")
    assert ALONE.broadcast(3, "three") == 3
    assert ALONE.first(lambda: 5, "five") == 5
    assert ALONE.gather("x", "letters") == {0: "x"}
    assert ALONE.speaks
    assert ALONE.takes_part
    with pytest.raises(ClusterError, match="the disk is full"):
        ALONE.abort("the disk is full")


def test_a_process_without_devices_that_agrees_is_told_so(four):
    topology = Topology.from_devices(devices(4, 4), shape="4x4", failed="4x1@0,0")
    with pytest.raises(ClusterError, match="process 0 has no device in the program"):
        four[0].on(topology).agree({"seed": 0})


def test_devices_of_processes_that_nobody_joined_are_refused():
    topology = Topology.from_devices(devices(4, 4), shape="4x4")
    cluster = ALONE.on(topology)
    assert cluster.members == (0,)
    assert [device.id for device in cluster.live_devices] == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), 1e10])
def test_limits_that_are_none(limit):
    with pytest.raises(ArgumentError, match=r"a limit of .* seconds: give more than 0"):
        join(limit=limit)


def test_what_is_half_given_is_refused(monkeypatch):
    with pytest.raises(ArgumentError, match="the number of processes is not given"):
        join("127.0.0.1:2000", process=1)
    for text in ("one", "٣", "-1", "9" * 5000):
        monkeypatch.setenv("FTMESH_PROCESS_ID", text)
        with pytest.raises(ArgumentError, match=f"FTMESH_PROCESS_ID is '{text:.39}.*not a number"):
            join()


def test_jax_that_was_used_before_joins_nobody():
    jax.devices()
    with pytest.raises(ClusterError, match="JAX has been used before join"):
        join("127.0.0.1:2000", 2, 1)
