"""The text form of faults, and faults at random."""

import pytest

from ftmesh.errors import ArgumentError
from ftmesh.testing.fault_spec import (
    ANY,
    HARMLESS,
    KINDS,
    WITHOUT_STEP,
    Fault,
    draw,
    draw_by_time,
    parse,
)


def test_the_short_form():
    assert parse("kill@2:30") == [Fault(kind="kill", process=2, step=30, moment="step")]
    assert parse("stop@0:12:collective; raise@1:0:start;") == [
        Fault(kind="stop", process=0, step=12, moment="collective"),
        Fault(kind="raise", process=1, moment="start"),
    ]
    assert parse("") == []


def test_seconds_and_steps():
    (fault,) = parse("slow@1:30,0.25,20")
    assert (fault.seconds, fault.num_steps, fault.moment) == (0.25, 20, "step")


def test_by_time_and_whichever_comes_first():
    (fault,) = parse("kill@*:t=120.5:commit")
    assert (fault.process, fault.after, fault.step, fault.moment) == (ANY, 120.5, 0, "commit")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_again(kind):
    for moment in KINDS[kind]:
        for when in ({"step": 3}, {"after": 2.5}):
            fault = Fault(kind=kind, process=1, moment=moment, **when)
            assert parse(str(fault)) == [fault]


NINES = "9" * 5000


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@2", "kill@-1:3", "kill@1:3:", "random:x", "a b", "kill@٢:3", "random:٧",
     f"kill@{NINES}:3", f"kill@1:{NINES}", f"slow@1:3,{NINES}", f"random:{NINES}",
     f"random:7:{NINES}"],
)  # fmt: skip
def test_another_form_is_refused_with_the_right_one(text):
    with pytest.raises(ArgumentError, match=r"KIND@PROCESS:STEP\[:MOMENT\].*kill@2:30"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("burn@1:3", "burn is no fault: give one of kill, stop"),
        ("kill@1:3:lunch", "cannot be at the moment 'lunch': give start or compile"),
        ("stuck@1:3:collective", "cannot be at the moment 'collective'"),
        ("torn@1:3:step", "cannot be at the moment 'step': give checkpoint"),
    ],
)
def test_kinds_and_moments_must_fit(text, says):
    with pytest.raises(ArgumentError, match=says):
        parse(text)


class TestAtRandom:
    def test_one_to_three_within_hosts_and_steps(self):
        drawn = [draw(seed, hosts=4, steps=30) for seed in range(300)]
        assert {len(faults) for faults in drawn} == {1, 2, 3}
        faults = [fault for each in drawn for fault in each]
        assert {fault.process for fault in faults} == {0, 1, 2, 3}
        assert {fault.kind for fault in faults} == {*HARMLESS}
        assert max(fault.step for fault in faults) == 30
        assert all((fault.step == 0) == (fault.moment in WITHOUT_STEP) for fault in faults)
        assert all(faults[0].moment != "recovery" for faults in drawn)

    def test_a_seed_draws_the_same_again(self):
        assert parse("random:7:2", hosts=4) == draw(7, 2, hosts=4) == parse("random:7:2", hosts=4)
        assert len(draw(7, 2, hosts=4)) == 2
        assert draw(7, 2, hosts=4) != draw(8, 2, hosts=4)

    def test_by_time(self):
        faults = draw_by_time(0, 120, 600)
        assert [fault.after for fault in faults] == [120, 240, 360, 480, 600]
        assert {fault.process for fault in faults} == {ANY}
